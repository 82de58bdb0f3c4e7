"""Gemma 3 in config.json: the text model, and its wrapper with pictures. Must not know layers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from ligermodels.configs.features import SoftcapConfig
from ligermodels.configs.multimodal import MultimodalConfig
from ligermodels.configs.rope import Rope, object_or_empty, read_ropes_by_layer_type
from ligermodels.configs.vision import SiglipConfig


@dataclass(kw_only=True)
class Gemma3Config(SoftcapConfig):
    vocab_size: int = 262208
    hidden_size: int = 2304
    intermediate_size: int = 9216
    num_hidden_layers: int = 26
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    max_position_embeddings: int = 131072
    sliding_window_pattern: int = 6
    rope_local_base_freq: float | None = field(default=10_000.0, compare=False)  # `ropes` has it, from either spelling

    def is_sliding(self, layer: int) -> bool:
        return (layer + 1) % self.sliding_window_pattern != 0

    @classmethod
    def read_ropes(cls, raw: Mapping[str, Any]) -> dict[str, Rope]:
        return read_ropes_by_layer_type(raw, 1_000_000.0, raw.get("rope_local_base_freq") or 10_000.0)


class Gemma3MultimodalConfig(Gemma3Config, MultimodalConfig):
    Vision = SiglipConfig
    default_image_token = 262144

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Self:
        """Reads text_config. The reference implementation applies no logit softcap, so the field must not be set."""
        text = {"model_type": "gemma3_text", "tie_word_embeddings": raw.get("tie_word_embeddings", True)}
        config = super().from_dict(text | dict(object_or_empty("text_config", raw.get("text_config"))))
        config.reject_if_set("final_logit_softcapping")
        config.raw = dict(raw)
        return config
