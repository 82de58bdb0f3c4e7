"""Mistral 3 in config.json: Mistral or Ministral 3 with images that Pixtral's tower encodes. Must not know layers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from ligermodels.configs.fields import check_choice
from ligermodels.configs.ministral import Ministral3Config
from ligermodels.configs.multimodal import LinearProjectorConfig
from ligermodels.configs.pixtral import Mistral3VisionConfig
from ligermodels.configs.rope import object_or_empty

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


@dataclass(kw_only=True)
class Mistral3Config(Ministral3Config, LinearProjectorConfig):
    Vision = Mistral3VisionConfig
    default_image_token = 10

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Self:
        """Reads text_config. Files of version 4 that do not name tie_word_embeddings store a head of their own."""
        text = object_or_empty("text_config", raw.get("text_config"))
        kind = text.get("model_type", "mistral")
        check_choice("text_config: model_type", kind, TEXT_DEFAULTS)
        config = super().from_dict({**raw, "text_config": {**TEXT_DEFAULTS[kind], "model_type": kind, **text}})
        config.raw = dict(raw)
        return config
