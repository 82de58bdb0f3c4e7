"""The metadata of a model's configuration: the inverse of `config.py`, which it uses to check that nothing is lost."""

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ligermodels.configs.base import Config
from ligermodels.configs.features import SlidingWindowConfig
from ligermodels.configs.rope import FULL_ATTENTION, SLIDING_ATTENTION, Rope
from ligermodels.errors import InputError
from ligermodels.weights.gguf.config import hub_config
from ligermodels.weights.gguf.fields import COMMON, FURTHER
from ligermodels.weights.gguf.header import GgufHeader
from ligermodels.weights.gguf.names import MISTRAL, MIXTRAL, STORED, Stored
from ligermodels.weights.gguf.rope import rope_metadata
from ligermodels.weights.gguf.tokenizer import Vocabulary

# Fields that do not change what a model computes, and those of windows, of which the result is compared.
WITHOUT_EFFECT = {
    *("raw", "model_type", "initializer_range", "attention_dropout", "pad_token_id", "router_aux_loss_coef"),
    *("output_router_logits", "sliding_window", "layer_types", "use_sliding_window", "max_window_layers"),
    *("sliding_window_pattern", "no_rope_layers", "no_rope_layer_interval", "rope_local_base_freq", "hidden_act"),
}


def architecture_of(config: Config) -> tuple[str, Stored]:
    """The value of general.architecture for a family, and how it is stored. Raises InputError if it has none."""
    stored = {form.model_type: (name, form) for name, form in STORED.items()}
    stored |= {form.model_type: ("llama", form) for form in (MIXTRAL, MISTRAL)}
    if config.model_type not in stored:
        raise InputError(
            f"config.json: model_type {config.model_type!r} is not written as GGUF; supported: "
            f"{', '.join(sorted(stored))}; export a folder, and convert that with llama.cpp's script"
        )
    return stored[config.model_type]


def config_metadata(config: Config) -> dict[str, Any]:
    """The metadata of a configuration, by its keys. Raises InputError if the family is not written as GGUF."""
    architecture, _ = architecture_of(config)
    rope = config.ropes[FULL_ATTENTION]
    values = dict(vars(config))
    if SLIDING_ATTENTION in config.ropes:
        values["rope_local_base_freq"] = config.ropes[SLIDING_ATTENTION].rope_theta
    fields = {field.key: (field, values[field.hub]) for field in (*COMMON, *FURTHER.get(config.model_type, ()))}
    found = {key: field.kind(value or 0) for key, (field, value) in fields.items()}
    found |= {
        "vocab_size": config.vocab_size, "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim, "attention.value_length": config.head_dim,
        "rope.dimension_count": rope.rotary_dim(config.head_dim), "rope.freq_base": float(rope.rope_theta),
        **rope_metadata(rope, config.max_position_embeddings),
    }  # fmt: skip
    return {f"{architecture}.{key}": value for key, value in found.items()}


def refuse_lost_settings(config: Config, header: GgufHeader, factors: Mapping[str, np.ndarray]) -> None:
    """Raises InputError if a reader of the file would get another model than this configuration's.

    header: of the file to be written. factors: the values of the tensors of RoPE's scaling.
    """
    raw = hub_config(header, Vocabulary(header), lambda name: factors[name].astype(np.float64))
    read = type(config).from_dict(raw | {"model_type": config.model_type})
    fields = {name for name in vars(config) if name not in WITHOUT_EFFECT and name != "ropes"}
    lost = [name for name in sorted(fields) if (getattr(read, name) or None) != (getattr(config, name) or None)]
    lost += [] if ropes_in_effect(read) == ropes_in_effect(config) else ["rope_scaling or rope_parameters"]
    lost += [] if windows(read) == windows(config) else ["sliding_window or layer_types"]
    if config.model_type == "mistral" and (window := windows(config)[0][0]) is not None:
        warnings.warn(
            f"{header.file}: llama.cpp does not apply Mistral's sliding window of {window} tokens", stacklevel=2
        )
    lost += [] if read.activation == config.activation else ["hidden_act"]
    if lost:
        raise InputError(
            f"config.json: {', '.join(lost)}: GGUF cannot say it for {config.model_type}, and llama.cpp would compute "
            "something else: export a folder instead"
        )


def ropes_in_effect(config: Config) -> dict[str, Rope]:
    """The rotary embeddings, without a trained length that has no effect."""
    return {
        kind: replace(rope, original_max_position_embeddings=None) if rope.rope_type == "default" else rope
        for kind, rope in config.ropes.items()
    }


def windows(config: Config) -> list[tuple[int | None, bool]]:
    """The window of each layer, and whether it has RoPE."""
    has_rope = getattr(config, "has_rope", lambda layer: True)
    layers = range(config.num_hidden_layers)
    if not isinstance(config, SlidingWindowConfig):
        return [(None, has_rope(layer)) for layer in layers]
    return [(config.window(layer), has_rope(layer)) for layer in layers]
