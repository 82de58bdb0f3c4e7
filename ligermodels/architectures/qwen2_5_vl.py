"""Qwen2.5-VL: Qwen2-VL with RMSNorms, SwiGLU and windowed attention in the tower, and times of videos in seconds."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ligermodels.configs.base import preset, tiny
from ligermodels.configs.qwen_vl import HUB_MROPE, VISION_TOKENS, Qwen2VLTextConfig, QwenVisionConfig
from ligermodels.layers.attention import Attention
from ligermodels.layers.block import DecoderLayer
from ligermodels.layers.mlp import GatedMLP
from ligermodels.vision.hub_names import NamesBesideText
from ligermodels.vision.image_placer import GridPlacer
from ligermodels.vision.multimodal import VisionLanguageModel
from ligermodels.vision.patch_positions import Grid, PatchLayout, patch_layout
from ligermodels.vision.qwen3_vl import QWEN_FILES, QWEN_IN_MEMORY, QWEN_TOWER
from ligermodels.vision.tower import PatchMerger, VisionTower, vision_blocks


@dataclass(kw_only=True)
class Qwen25VLVisionConfig(QwenVisionConfig):
    hidden_size: int = 3584
    intermediate_size: int = 3420
    window_size: int = 112  # pixels
    fullatt_block_indexes: tuple[int, ...] = (7, 15, 23, 31)
    tokens_per_second: int = 4


class Qwen25VLConfig(Qwen2VLTextConfig):
    Vision = Qwen25VLVisionConfig


TOWER = {"hidden_size": 1280, "intermediate_size": 3420, "tokens_per_second": 2}
BASE = {"model_type": "qwen2_5_vl", "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "rope_scaling": HUB_MROPE}
HUB = BASE | VISION_TOKENS | {"bos_token_id": 151643, "eos_token_id": 151645, "max_position_embeddings": 128000}
TINY = {
    "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]},
    "image_token_id": 1022,
    "video_token_id": 1023,
    "vision_config": {
        "depth": 2, "hidden_size": 64, "intermediate_size": 160, "num_heads": 4, "out_hidden_size": 128,
        "fullatt_block_indexes": [1],
    },
}  # fmt: skip


class Qwen25Placer(GridPlacer):
    def layout(self, grids: Sequence[Grid]) -> tuple[PatchLayout, Tensor | None]:
        vision, side = self.config.vision, self.config.vision.spatial_merge_size
        return patch_layout(grids, side, vision.window_size // side // vision.patch_size)

    def frame_interval(self, seconds: float) -> float:
        return self.config.vision.tokens_per_second * seconds


class Qwen25VL(VisionLanguageModel):
    Config = Qwen25VLConfig
    Placer = Qwen25Placer
    Projector = PatchMerger
    names = NamesBesideText(
        QWEN_TOWER
        | {
            "visual.blocks.{}.mlp.gate_up_proj": ("visual.blocks.{}.mlp.gate_proj", "visual.blocks.{}.mlp.up_proj"),
            "visual.blocks.{}.mlp.down_proj": "visual.blocks.{}.mlp.down_proj",
        },
        (QWEN_FILES, QWEN_IN_MEMORY),
    )
    hub_class = "Qwen2_5_VLForConditionalGeneration"
    SIZES: ClassVar = {
        "tiny": tiny(BASE) | TINY,
        "3b": preset(HUB, 2048, 11008, 36, 16, 2)
        | {"vocab_size": 151936, "tie_word_embeddings": True, "vision_config": TOWER | {"out_hidden_size": 2048}},
        "7b": preset(HUB, 3584, 18944, 28, 28, 4) | {"vision_config": TOWER | {"out_hidden_size": 3584}},
    }

    def layer(self, config: Qwen25VLConfig, index: int) -> DecoderLayer:
        return DecoderLayer(config, Attention(config, qkv_bias=True, window=config.window(index)), GatedMLP(config))

    @staticmethod
    def tower(config: Qwen25VLVisionConfig) -> VisionTower:
        windowed = set(range(config.num_hidden_layers)) - set(config.fullatt_block_indexes)
        return VisionTower(config, vision_blocks(config, GatedMLP, bias=True), windowed=windowed)
