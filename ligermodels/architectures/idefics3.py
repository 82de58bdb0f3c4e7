"""Idefics 3 and SmolVLM: Llama with images in tiles that SigLIP encodes, m × m patches a feature."""

from typing import ClassVar

from ligermodels.configs.base import preset, tiny
from ligermodels.configs.idefics3 import Idefics3Config
from ligermodels.layers.attention import Attention
from ligermodels.layers.block import DecoderLayer
from ligermodels.layers.mlp import GatedMLP
from ligermodels.vision.multimodal import VisionLanguageModel
from ligermodels.vision.siglip import siglip_tower
from ligermodels.vision.siglip_tiles import SquareProjector, TileNames, TilePlacer

BASE = {"model_type": "idefics3", "image_token_id": 1023, "scale_factor": 2}
IDEFICS_PATCHES = {"model_type": "idefics3_vision", "patch_size": 14}
TINY = {
    "text_config": tiny({"model_type": "llama"}),
    "vision_config": preset(IDEFICS_PATCHES, 64, 128, 2, 4, 4) | {"image_size": 56},
}
SMOLVLM_PATCHES = {"model_type": "smolvlm_vision", "patch_size": 16}
SMOLVLM_TEXT = {
    "model_type": "llama", "vocab_size": 49280, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
    "rope_theta": 100000, "pad_token_id": 2,
}  # fmt: skip


class Idefics3(VisionLanguageModel):
    Config = Idefics3Config
    Placer = TilePlacer
    Projector = SquareProjector
    tower = staticmethod(siglip_tower)
    names = TileNames()
    hub_class = "Idefics3ForConditionalGeneration"
    SIZES: ClassVar = {"tiny": BASE | TINY}

    def layer(self, config: Idefics3Config, index: int) -> DecoderLayer:
        attention = Attention(config, qkv_bias=config.attention_bias, o_bias=config.attention_bias)
        return DecoderLayer(config, attention, GatedMLP(config, bias=config.mlp_bias))


class SmolVLMPlacer(TilePlacer):
    image_processor_type = "SmolVLMImageProcessor"


class SmolVLM(Idefics3):
    """SmolVLM 2: the same under another name."""

    Placer = SmolVLMPlacer
    hub_class = "SmolVLMForConditionalGeneration"
    SIZES: ClassVar = {
        "tiny": BASE | TINY | {"model_type": "smolvlm"},
        "500m": {
            "model_type": "smolvlm", "image_token_id": 49190, "scale_factor": 4, "pad_token_id": 128002,
            "text_config": preset(SMOLVLM_TEXT, 960, 2560, 32, 15, 5) | {"head_dim": 64},
            "vision_config": preset(SMOLVLM_PATCHES, 768, 3072, 12, 12, 12) | {"image_size": 512},
        },
    }  # fmt: skip
