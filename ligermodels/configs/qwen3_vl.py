"""What Qwen3-VL and its mixture of experts have in common in config.json."""

import math
from dataclasses import dataclass
from typing import ClassVar

from ligermodels.configs.base import PLAIN_ACTIVATIONS, tiny
from ligermodels.configs.qwen_vl import VISION_TOKENS, MRopeConfig, QwenVisionConfig
from ligermodels.errors import ConfigError

QWEN3_VL_TEXT = {"head_dim": 128, "rope_theta": 5000000, "max_position_embeddings": 262144, "eos_token_id": 151645}
TINY_TEXT = tiny({}) | {"head_dim": 32, "rope_scaling": {"rope_type": "default", "mrope_section": [6, 5, 5]}}
TINY_QWEN3_VL = VISION_TOKENS | {
    "image_token_id": 1022,
    "video_token_id": 1023,
    "text_config": TINY_TEXT,
    "vision_config": {
        "depth": 3, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "out_hidden_size": 128,
        "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1],
    },
}  # fmt: skip


@dataclass(kw_only=True)
class Qwen3VisionConfig(QwenVisionConfig):
    """num_position_embeddings: of the learned positions, a square table. deepstack_visual_indexes: the blocks of the
    tower whose hidden states are added to those of the text model, behind its first blocks."""

    num_hidden_layers: int = 27
    hidden_size: int = 1152
    intermediate_size: int = 4304
    hidden_act: str = "gelu_pytorch_tanh"
    patch_size: int = 16
    num_position_embeddings: int = 2304
    deepstack_visual_indexes: tuple[int, ...] = (8, 16, 24)

    layer_norms = True
    norm_bias = True
    activations = PLAIN_ACTIVATIONS

    @property
    def table_side(self) -> int:
        return math.isqrt(self.num_position_embeddings)

    def validate(self) -> None:
        super().validate()
        if self.table_side**2 != self.num_position_embeddings:
            raise ConfigError(
                f"config.json: num_position_embeddings {self.num_position_embeddings} must be a square number"
            )
        if sorted(set(self.deepstack_visual_indexes)) != list(self.deepstack_visual_indexes) or not all(
            index < self.num_hidden_layers for index in self.deepstack_visual_indexes
        ):
            raise ConfigError(
                f"config.json: deepstack_visual_indexes {list(self.deepstack_visual_indexes)} must be ascending and "
                f"below depth {self.num_hidden_layers}"
            )


@dataclass(kw_only=True)
class Qwen3VLTextConfig(MRopeConfig):
    vocab_size: int = 151936
    max_position_embeddings: int = 128000

    Vision = Qwen3VisionConfig
    default_rope_theta = 500_000.0
    default_mrope_section: ClassVar = (24, 20, 20)
    mrope_interleaved = True
    default_image_token = 151655
    default_video_token = 151656
