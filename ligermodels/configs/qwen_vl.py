"""The text side of Qwen2-VL and Qwen2.5-VL, and what their vision towers share."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

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
