"""Qwen2-VL: Qwen2 with three-axis positions, and a vision tower with LayerNorms, 2-D RoPE and QuickGELU."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from ligermodels.configs.base import PLAIN_ACTIVATIONS, preset, tiny
from ligermodels.configs.fields import read_field
from ligermodels.configs.qwen_vl import HUB_MROPE, VISION_TOKENS, Qwen2VLTextConfig, QwenVisionConfig
from ligermodels.layers.attention import Attention
from ligermodels.layers.block import DecoderLayer
from ligermodels.layers.mlp import MLP, GatedMLP
from ligermodels.vision.hub_names import NamesBesideText
from ligermodels.vision.image_placer import GridPlacer
from ligermodels.vision.multimodal import VisionLanguageModel
from ligermodels.vision.qwen3_vl import QWEN_FILES, QWEN_IN_MEMORY, QWEN_TOWER
from ligermodels.vision.tower import PatchMerger, VisionTower, vision_blocks


@dataclass(kw_only=True)
class Qwen2VLVisionConfig(QwenVisionConfig):
    hidden_act: str = "quick_gelu"

    layer_norms = True
    norm_bias = True
    activations = PLAIN_ACTIVATIONS

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Self:
        """embed_dim is the tower's width there, hidden_size that of the features."""
        width = read_field("embed_dim", raw.get("embed_dim", 1280), int)
        sizes = {
            "hidden_size": width,
            "intermediate_size": width * read_field("mlp_ratio", raw.get("mlp_ratio", 4), int),
        }
        return super().from_dict({**raw, **sizes, "out_hidden_size": raw.get("hidden_size", 3584)})


class Qwen2VLConfig(Qwen2VLTextConfig):
    Vision = Qwen2VLVisionConfig


TOWER = {"depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16, "patch_size": 14}
BASE = {"model_type": "qwen2_vl", "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "rope_scaling": HUB_MROPE}
HUB = BASE | VISION_TOKENS | {"bos_token_id": 151643, "eos_token_id": 151645}
TINY = {
    "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]},
    "image_token_id": 1022,
    "video_token_id": 1023,
    "vision_config": TOWER | {"depth": 2, "embed_dim": 64, "num_heads": 4, "hidden_size": 128},
}


class Qwen2VL(VisionLanguageModel):
    Config = Qwen2VLConfig
    Placer = GridPlacer
    Projector = PatchMerger
    names = NamesBesideText(
        QWEN_TOWER
        | {
            "visual.blocks.{}.mlp.up_proj": "visual.blocks.{}.mlp.fc1",
            "visual.blocks.{}.mlp.down_proj": "visual.blocks.{}.mlp.fc2",
        },
        (QWEN_FILES, QWEN_IN_MEMORY),
    )
    hub_class = "Qwen2VLForConditionalGeneration"
    SIZES: ClassVar = {
        "tiny": tiny(BASE) | TINY,
        "2b": preset(HUB, 1536, 8960, 28, 12, 2)
        | {"vocab_size": 151936, "tie_word_embeddings": True, "vision_config": TOWER | {"hidden_size": 1536}},
        "7b": preset(HUB, 3584, 18944, 28, 28, 4) | {"vision_config": TOWER | {"hidden_size": 3584}},
    }

    def layer(self, config: Qwen2VLConfig, index: int) -> DecoderLayer:
        return DecoderLayer(config, Attention(config, qkv_bias=True, window=config.window(index)), GatedMLP(config))

    @staticmethod
    def tower(config: Qwen2VLVisionConfig) -> VisionTower:
        return VisionTower(config, vision_blocks(config, MLP, bias=True))
