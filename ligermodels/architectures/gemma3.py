"""Gemma 3: Gemma 2 with QK-norm instead of softcaps, five sliding-window layers to one full, and two kinds of RoPE."""

from typing import ClassVar

from ligermodels.configs.base import preset, tiny
from ligermodels.configs.gemma3 import Gemma3Config, Gemma3MultimodalConfig
from ligermodels.layers.attention import QKNormAttention
from ligermodels.layers.block import SandwichLayer
from ligermodels.layers.decoder import CausalLM
from ligermodels.layers.mlp import GatedMLP
from ligermodels.vision.fixed_size import PICTURE_NAMES
from ligermodels.vision.multimodal import VisionLanguageModel
from ligermodels.vision.siglip import PooledPlacer, PooledProjector, siglip_tower

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
        bias, rope = config.attention_bias, config.layer_type(index)
        attention = QKNormAttention(
            config, qkv_bias=bias, o_bias=bias, window=config.window(index), scale=config.attention_scale, rope=rope
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
