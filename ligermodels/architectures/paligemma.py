"""PaliGemma 1 and 2: Gemma or Gemma 2 with pictures that SigLIP encodes, and prompts that are seen as a whole."""

from typing import ClassVar

from ligermodels.configs.base import preset, tiny
from ligermodels.configs.paligemma import Paligemma2Config, PaligemmaConfig
from ligermodels.layers.block import DecoderLayer
from ligermodels.layers.gemma import gemma2_block, gemma_block
from ligermodels.vision.fixed_size import PICTURE_NAMES
from ligermodels.vision.multimodal import VisionLanguageModel
from ligermodels.vision.prefix_lm import PrefixPlacer
from ligermodels.vision.siglip import PatchProjector, siglip_tower

BASE = {"model_type": "paligemma", "image_token_index": 257152}
SIGLIP_PATCHES = {"model_type": "siglip_vision_model", "vision_use_head": False, "patch_size": 14}
TOWER = preset(SIGLIP_PATCHES, 1152, 4304, 27, 16, 16) | {"image_size": 224}
TEXT = {"model_type": "gemma", "vocab_size": 257216, "head_dim": 256}
TEXT2 = TEXT | {"model_type": "gemma2", "query_pre_attn_scalar": 256}


class Paligemma(VisionLanguageModel):
    Config = PaligemmaConfig
    Placer = PrefixPlacer
    Projector = PatchProjector
    tower = staticmethod(siglip_tower)
    names = PICTURE_NAMES
    hub_class = "PaliGemmaForConditionalGeneration"
    SIZES: ClassVar = {
        "tiny": BASE
        | {
            "image_token_index": 1023, "projection_dim": 128,
            "text_config": tiny({"model_type": "gemma"}) | {"num_key_value_heads": 1, "head_dim": 32},
            "vision_config": preset(SIGLIP_PATCHES, 64, 128, 2, 4, 4) | {"image_size": 56},
        },
        "3b": BASE | {"vision_config": TOWER, "text_config": preset(TEXT, 2048, 16384, 18, 8, 1)},
        "2-3b": BASE
        | {"projection_dim": 2304, "vision_config": TOWER, "text_config": preset(TEXT2, 2304, 9216, 26, 8, 4)},
    }  # fmt: skip

    def layer(self, config: PaligemmaConfig | Paligemma2Config, index: int) -> DecoderLayer:
        return gemma2_block(config, index) if isinstance(config, Paligemma2Config) else gemma_block(config)
