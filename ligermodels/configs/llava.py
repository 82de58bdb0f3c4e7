"""LLaVA in config.json: Llama with pictures that CLIP encodes, or Pixtral: Mistral with a tower of its own.

Must not know layers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from ligermodels.configs.fields import check_choice
from ligermodels.configs.mistral import MistralConfig
from ligermodels.configs.multimodal import LinearProjectorConfig
from ligermodels.configs.pixtral import PIXTRAL, PixtralVisionConfig
from ligermodels.configs.rope import object_or_empty
from ligermodels.configs.vision import ClipConfig, VisionConfig


@dataclass(kw_only=True)
class LlavaConfig(LinearProjectorConfig):
    """text_type, tower_type: model_type of the text model and of the tower."""

    Vision: ClassVar[type[VisionConfig]] = ClipConfig
    text_type: ClassVar[str] = "llama"
    tower_type: ClassVar[str] = "clip_vision_model"
    default_image_token = 32000
    default_projector_bias = True
    text_may_tie = True

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Self:
        """Raises ConfigError for another text model or another tower."""
        text, vision = (object_or_empty(name, raw.get(name)) for name in ("text_config", "vision_config"))
        check_choice("text_config: model_type", text.get("model_type", "llama"), [cls.text_type])
        check_choice("vision_config: model_type", vision.get("model_type", "clip_vision_model"), [cls.tower_type])
        return super().from_dict({**raw, "text_config": {"model_type": cls.text_type, **text}})


@dataclass(kw_only=True)
class PixtralConfig(MistralConfig, LlavaConfig):
    Vision = PixtralVisionConfig
    text_type = "mistral"
    tower_type = PIXTRAL

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Self:
        """Raises ConfigError if features are left out, as if there were a class token."""
        name = "vision_feature_select_strategy"
        check_choice(name, raw.get(name, "default"), ["full"])
        return super().from_dict(raw)


def has_pixtral_tower(raw: Mapping[str, Any]) -> bool:
    """Whether this config.json of LLaVA's is Pixtral's."""
    return object_or_empty("vision_config", raw.get("vision_config")).get("model_type") == PIXTRAL
