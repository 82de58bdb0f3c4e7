"""Qwen3-VL: Qwen3 with interleaved three-axis positions; features of images at four depths of the tower."""

from dataclasses import dataclass
from typing import ClassVar

from ligermodels.configs.base import preset
from ligermodels.configs.qwen_vl import QWEN3_VL_TEXT, TINY_QWEN3_VL, VISION_TOKENS, Qwen3VLTextConfig
from ligermodels.layers.attention import QKNormAttention
from ligermodels.layers.block import DecoderLayer
from ligermodels.layers.mlp import GatedMLP
from ligermodels.vision.multimodal import VisionLanguageModel
from ligermodels.vision.qwen3_vl import QWEN3_NAMES, Qwen3Placer, qwen3_tower
from ligermodels.vision.tower import PatchMerger


@dataclass(kw_only=True)
class Qwen3VLConfig(Qwen3VLTextConfig):
    intermediate_size: int = 22016
    num_key_value_heads: int = 32
    head_dim: int = 128


BASE = {"model_type": "qwen3_vl"}
HUB = BASE | VISION_TOKENS | {"tie_word_embeddings": True}
TOWER = {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "deepstack_visual_indexes": [5, 11, 17]}
TEXT = QWEN3_VL_TEXT | {"tie_word_embeddings": True}


class Qwen3VL(VisionLanguageModel):
    Config = Qwen3VLConfig
    Placer = Qwen3Placer
    Projector = PatchMerger
    tower = staticmethod(qwen3_tower)
    names = QWEN3_NAMES
    hub_class = "Qwen3VLForConditionalGeneration"
    SIZES: ClassVar = {
        "tiny": BASE | TINY_QWEN3_VL,
        "2b": HUB
        | {"text_config": preset(TEXT, 2048, 6144, 28, 16, 8), "vision_config": TOWER | {"out_hidden_size": 2048}},
        "4b": HUB
        | {"text_config": preset(TEXT, 2560, 9728, 36, 32, 8), "vision_config": TOWER | {"out_hidden_size": 2560}},
    }

    def layer(self, config: Qwen3VLConfig, index: int) -> DecoderLayer:
        return DecoderLayer(config, QKNormAttention(config, **config.attention_biases), GatedMLP(config))
