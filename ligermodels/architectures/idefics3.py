"""Idefics 3 and SmolVLM: Llama with images in tiles that SigLIP encodes, m × m patches a feature."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ligermodels.configs.base import preset, tiny
from ligermodels.configs.fields import check_choice
from ligermodels.configs.multimodal import MultimodalConfig
from ligermodels.configs.rope import object_or_empty
from ligermodels.configs.vision import Idefics3VisionConfig
from ligermodels.layers.attention import Attention
from ligermodels.layers.block import DecoderLayer
from ligermodels.layers.mlp import GatedMLP
from ligermodels.vision.multimodal import VisionLanguageModel
from ligermodels.vision.siglip import siglip_tower
from ligermodels.vision.siglip_tiles import TILE_NAMES, SquareProjector, TilePlacer

WITHOUT_TEXT_CONFIG = {"rms_norm_eps": 1e-5}


@dataclass(kw_only=True)
class Idefics3Config(MultimodalConfig):
    Vision = Idefics3VisionConfig
    default_image_token = 128257

    @classmethod
    def fields_of(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Raises ConfigError for another text model. tie_word_embeddings counts at the top level alone."""
        text = object_or_empty("text_config", raw.get("text_config")) or WITHOUT_TEXT_CONFIG
        check_choice("text_config: model_type", text.get("model_type", "llama"), ["llama"])
        text = {"model_type": "llama", **text, "tie_word_embeddings": False}
        return super().fields_of({**raw, "text_config": text})


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
    names = TILE_NAMES
    hub_class = "Idefics3ForConditionalGeneration"
    SIZES: ClassVar = {"tiny": BASE | TINY}

    def layer(self, config: Idefics3Config, index: int) -> DecoderLayer:
        attention = Attention(config, **config.attention_biases)
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
