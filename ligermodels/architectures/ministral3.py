"""Ministral 3, Devstral 2, and Mistral Small 3 as text: Mistral with YaRN and queries that grow with their position.

Mistral Small 3.1 and 3.2 have the text model of Mistral. The image side of a checkpoint is kept, not computed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from ligermodels.configs.base import preset, tiny
from ligermodels.configs.features import SlidingWindowConfig
from ligermodels.configs.rope import FULL_ATTENTION, QueryScale, Rope, object_or_empty
from ligermodels.errors import ConfigError
from ligermodels.layers.attention import Attention
from ligermodels.layers.block import DecoderLayer
from ligermodels.layers.decoder import CausalLM
from ligermodels.layers.mlp import GatedMLP
from ligermodels.weights.mapping import Rename, Rule, packed_projections

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


@dataclass(kw_only=True)
class Ministral3Config(SlidingWindowConfig):
    vocab_size: int = 131072
    intermediate_size: int = 14336
    num_hidden_layers: int = 34
    num_key_value_heads: int = 8
    head_dim: int = 128
    max_position_embeddings: int = 262144
    rms_norm_eps: float = 1e-5
    pad_token_id: int | None = 11

    @classmethod
    def read_ropes(cls, raw: Mapping[str, Any]) -> dict[str, Rope]:
        given = any(raw.get(key) is not None for key in ("rope_theta", "rope_scaling", "rope_parameters"))
        return super().read_ropes(raw if given else dict(raw) | {"rope_parameters": YARN})

    @property
    def query_scale(self) -> QueryScale | None:
        rope = self.ropes[FULL_ATTENTION]
        if not rope.llama_4_scaling_beta:
            return None
        return QueryScale(rope.llama_4_scaling_beta, rope.original_max_position_embeddings or 1)


# The defaults of a text_config, by its model_type.
TEXT_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "ministral3": {},
    "mistral": {
        "vocab_size": 32000,
        "num_hidden_layers": 32,
        "head_dim": None,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
        "rms_norm_eps": 1e-6,
        "pad_token_id": None,
        "rope_theta": 10000.0,
    },
}


class Mistral3Config(Ministral3Config):
    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Self:
        """Reads text_config. Files of version 4 that do not name tie_word_embeddings store a head of their own."""
        text = dict(object_or_empty("text_config", raw.get("text_config")))
        kind = text.get("model_type", "mistral")
        if kind not in list(TEXT_DEFAULTS):
            raise ConfigError(
                f"config.json: text_config: model_type {kind!r} is not supported, only {' and '.join(TEXT_DEFAULTS)}"
            )
        outer = {key: raw[key] for key in ("tie_word_embeddings", "quantization_config") if key in raw}
        config = super().from_dict({**TEXT_DEFAULTS[kind], "model_type": kind, **text, **outer})
        config.raw = dict(raw)
        return config


BASE = {"model_type": "ministral3", "rope_parameters": YARN}
HUB = BASE | {"bos_token_id": 1, "eos_token_id": 2}


class Ministral3(CausalLM):
    Config = Ministral3Config
    hub_class = "Ministral3ForCausalLM"
    SIZES: ClassVar = {
        "tiny": tiny(BASE)
        | {"head_dim": 32, "rope_parameters": YARN | {"factor": 4.0, "original_max_position_embeddings": 128}},
        "3b": preset(HUB, 3072, 9216, 26, 32, 8) | {"tie_word_embeddings": True},
        "8b": preset(HUB, 4096, 14336, 34, 32, 8),
        "14b": preset(HUB, 5120, 16384, 40, 32, 8),
    }

    def layer(self, config: Ministral3Config, index: int) -> DecoderLayer:
        return DecoderLayer(config, Attention(config, window=config.window(index)), GatedMLP(config))


class Mistral3(Ministral3):
    Config = Mistral3Config
    hub_class = "Mistral3ForConditionalGeneration"
    SIZES: ClassVar = {}

    def weight_rules(self) -> tuple[Rule, ...]:
        text = Rename("language_model.model", "model", packed_projections(self.config))
        return text, Rename("language_model.lm_head", "lm_head")

    def other_weight_rules(self) -> tuple[tuple[Rule, ...], ...]:
        """The names that transformers 5 has in memory."""
        return ((Rename("model.language_model", "model", packed_projections(self.config)),),)

    def kept_tensors(self) -> tuple[str, ...]:
        parts = ("vision_tower", "multi_modal_projector")
        return (*parts, *(f"model.{part}" for part in parts))
