"""What the Qwen-VL families share in config.json: their text sides, their vision towers."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ligermodels.configs.base import PLAIN_ACTIVATIONS, tiny
from ligermodels.configs.features import SwitchedWindowConfig
from ligermodels.configs.fields import check_choice
from ligermodels.configs.multimodal import MultimodalConfig
from ligermodels.configs.rope import FULL_ATTENTION, MULTIMODAL_ROPE_TYPES, Rope, read_rope
from ligermodels.configs.vision import AxialVisionConfig
from ligermodels.errors import ConfigError

POSITION_AXES = ("time", "height", "width")
VISION_TOKENS = {
    "vision_start_token_id": 151652, "vision_end_token_id": 151653, "image_token_id": 151655, "video_token_id": 151656,
}  # fmt: skip
HUB_MROPE = {"type": "mrope", "mrope_section": [16, 24, 24]}


@dataclass(kw_only=True)
class QwenVisionConfig(AxialVisionConfig):
    """out_hidden_size: the width of the features, which is that of the text model."""

    num_hidden_layers: int = 32
    num_attention_heads: int = 16
    hidden_size: int = 1280
    temporal_patch_size: int = 2
    spatial_merge_size: int = 2
    out_hidden_size: int = 3584

    @property
    def patch_shape(self) -> tuple[int, ...]:
        return self.in_channels, self.temporal_patch_size, self.patch_size, self.patch_size

    def check_features(self, hidden_size: int) -> None:
        if self.out_hidden_size != hidden_size:
            raise ConfigError(
                f"config.json: vision_config: the features are {self.out_hidden_size} wide; must be {hidden_size}, "
                "hidden_size of the text model"
            )


@dataclass(kw_only=True)
class MRopeConfig(MultimodalConfig):
    """Positions of text tokens with three axes (M-RoPE). mrope_section: how many rotated pairs turn with each."""

    default_rope_theta = 1_000_000.0
    default_mrope_section: ClassVar[tuple[int, int, int]] = (16, 24, 24)
    mrope_interleaved: ClassVar[bool] = False

    @classmethod
    def read_ropes(cls, raw: Mapping[str, Any]) -> dict[str, Rope]:
        rope = read_rope(raw, cls.default_rope_theta, old_names=MULTIMODAL_ROPE_TYPES)
        section = rope.mrope_section or cls.default_mrope_section
        return {FULL_ATTENTION: replace(rope, mrope_section=section, mrope_interleaved=cls.mrope_interleaved)}

    def validate_rope(self, rope: Rope, head_dim: int) -> None:
        super().validate_rope(rope, head_dim)
        check_choice("rope_scaling: type", rope.rope_type, ["default", "linear", "yarn", "llama3"])
        section = rope.mrope_section
        if len(section) != len(POSITION_AXES) or sum(section) != self.head_dim // 2:
            raise ConfigError(
                f"config.json: mrope_section {list(section)} must be three numbers with the sum {self.head_dim // 2}, "
                "half of head_dim"
            )


@dataclass(kw_only=True)
class Qwen2VLTextConfig(MRopeConfig, SwitchedWindowConfig):
    vocab_size: int = 152064
    hidden_size: int = 8192
    intermediate_size: int = 29568
    num_hidden_layers: int = 80
    num_attention_heads: int = 64
    num_key_value_heads: int = 8
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-5
    max_window_layers: int = 80

    default_image_token = 151655
    default_video_token = 151656
    text_may_tie = True


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
