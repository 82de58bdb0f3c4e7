"""LLaVA in config.json: Llama with pictures that CLIP encodes. Must not know layers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from ligermodels.configs.base import PLAIN_ACTIVATIONS, kernel_activation
from ligermodels.configs.fields import check_choice, read_field
from ligermodels.configs.multimodal import MultimodalConfig
from ligermodels.configs.rope import object_or_empty
from ligermodels.configs.vision import ClipConfig


@dataclass(kw_only=True)
class LlavaConfig(MultimodalConfig):
    Vision = ClipConfig
    default_image_token = 32000
    text_may_tie = True

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Self:
        """Raises ConfigError for another text model or another tower."""
        text, vision = (object_or_empty(name, raw.get(name)) for name in ("text_config", "vision_config"))
        check_choice("text_config: model_type", text.get("model_type", "llama"), ["llama"])
        check_choice("vision_config: model_type", vision.get("model_type", "clip_vision_model"), ["clip_vision_model"])
        return super().from_dict({**raw, "text_config": {"model_type": "llama", **text}})

    @property
    def projector_activation(self) -> str:
        """The kernels' name of it."""
        name = "projector_hidden_act"
        return kernel_activation(name, read_field(name, self.raw.get(name, "gelu"), str), PLAIN_ACTIVATIONS)

    @property
    def projector_bias(self) -> bool:
        return read_field("multimodal_projector_bias", self.raw.get("multimodal_projector_bias", True), bool)
