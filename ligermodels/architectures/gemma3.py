"""Gemma 3: Gemma 2 with QK-norm instead of softcaps, five sliding-window layers to one full, and two kinds of RoPE."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ligermodels.configs.base import preset, tiny
from ligermodels.configs.features import SoftcapConfig
from ligermodels.configs.multimodal import MultimodalConfig
from ligermodels.configs.rope import Rope, object_or_empty, read_ropes_by_layer_type
from ligermodels.configs.vision import SiglipConfig
from ligermodels.layers.attention import QKNormAttention
from ligermodels.layers.block import SandwichLayer
from ligermodels.layers.decoder import CausalLM
from ligermodels.layers.mlp import GatedMLP
from ligermodels.vision.fixed_size import PICTURE_NAMES
from ligermodels.vision.multimodal import VisionLanguageModel
from ligermodels.vision.siglip import PooledPlacer, PooledProjector, siglip_tower


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
    unsupported = ("final_logit_softcapping",)  # the reference implementation applies none

    @classmethod
    def fields_of(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        text = {"model_type": "gemma3_text", "tie_word_embeddings": raw.get("tie_word_embeddings", True)}
        return super().fields_of(text | dict(object_or_empty("text_config", raw.get("text_config"))))


BASE = {"model_type": "gemma3_text"}
SMALL = {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 128, "sliding_window_pattern": 2}
SIGLIP = {"model_type": "siglip_vision_model", "vision_use_head": False, "patch_size": 14}
TOWER = preset(SIGLIP, 1152, 4304, 27, 16, 16) | {"image_size": 896}
HUB = BASE | {"vocab_size": 262144, "head_dim": 256, "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}
LONG = HUB | {
    "vocab_size": 262208, "sliding_window": 1024, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
}  # fmt: skip
MULTIMODAL = {
    "model_type": "gemma3", "boi_token_index": 255999, "eoi_token_index": 256000, "image_token_index": 262144,
    "mm_tokens_per_image": 256, "eos_token_id": [1, 106], "vision_config": TOWER,
}  # fmt: skip


class Gemma3Text(CausalLM):
    Config = Gemma3Config
    hub_class = "Gemma3ForCausalLM"
    SIZES: ClassVar = {
        "tiny": tiny(BASE) | SMALL,
        "1b": preset(HUB, 1152, 6912, 26, 4, 1) | {"max_position_embeddings": 32768, "sliding_window": 512},
    }

    def layer(self, config: Gemma3Config, index: int) -> SandwichLayer:
        rope = config.layer_type(index)
        attention = QKNormAttention(
            config, **config.attention_biases, window=config.window(index), scale=config.attention_scale, rope=rope
        )
        return SandwichLayer(config, attention, GatedMLP(config))


class Gemma3(VisionLanguageModel, Gemma3Text):
    Config = Gemma3MultimodalConfig
    Placer = PooledPlacer
    Projector = PooledProjector
    tower = staticmethod(siglip_tower)
    names = PICTURE_NAMES
    hub_class = "Gemma3ForConditionalGeneration"
    SIZES: ClassVar = {
        "tiny": {
            "model_type": "gemma3",
            "image_token_index": 1023,
            "mm_tokens_per_image": 16,
            "text_config": tiny(BASE) | SMALL,
            "vision_config": preset(SIGLIP, 64, 128, 2, 4, 4) | {"image_size": 112},
        },
        "4b": MULTIMODAL | {"text_config": preset(LONG, 2560, 10240, 34, 8, 4)},
        "27b": MULTIMODAL
        | {"text_config": preset(LONG, 5376, 21504, 62, 32, 16) | {"head_dim": 128, "query_pre_attn_scalar": 168}},
    }
