"""A text model with an image side in config.json: where its parts are."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ligermodels.configs.base import PLAIN_ACTIVATIONS, Config, kernel_activation
from ligermodels.configs.fields import check_choice, read_field
from ligermodels.configs.rope import object_or_empty
from ligermodels.configs.vision import VisionConfig


def text_fields(raw: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the fields in text_config, the fields at the top level of the file that count for the text model)."""
    text = dict(object_or_empty("text_config", raw.get("text_config")))
    return text, {key: raw[key] for key in ("tie_word_embeddings", "quantization_config") if key in raw}


class TextPartConfig(Config):
    """The text side of a file whose image side is kept, not computed. Its fields stand in text_config."""

    text_type: ClassVar[str]  # model_type of text_config
    tied_by_default: ClassVar[bool] = False

    @classmethod
    def fields_of(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        text, outer = text_fields(raw)
        check_choice("text_config: model_type", text.setdefault("model_type", cls.text_type), [cls.text_type])
        return super().fields_of(text | {"tie_word_embeddings": cls.tied_by_default} | outer)


@dataclass(kw_only=True)
class MultimodalConfig(Config):
    """The fields are those of the text model. They stand in text_config, or at the top level of the file."""

    Vision: ClassVar[type[VisionConfig]]
    default_image_token: ClassVar[int]
    default_video_token: ClassVar[int | None] = None
    text_may_tie: ClassVar[bool] = False  # whether tie_word_embeddings counts in text_config too

    @classmethod
    def fields_of(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        text, outer = text_fields(raw)
        if cls.text_may_tie and text.get("tie_word_embeddings"):
            outer["tie_word_embeddings"] = True
        return super().fields_of({"model_type": raw.get("model_type"), **text, **outer} if text else raw)

    @property
    def vision(self) -> VisionConfig:
        return self.Vision.of_model(self.raw)

    @property
    def image_token_id(self) -> int:
        """The token that stands for each feature of an image."""
        return self.token_id("image", self.default_image_token)

    @property
    def video_token_id(self) -> int | None:
        """The token that stands for each feature of a video; None if the family has no videos."""
        return None if self.default_video_token is None else self.token_id("video", self.default_video_token)

    def token_id(self, kind: str, default: int) -> int:
        found = next((key for key in (f"{kind}_token_id", f"{kind}_token_index") if key in self.raw), None)
        return default if found is None else read_field(found, self.raw[found], int)


@dataclass(kw_only=True)
class LinearProjectorConfig(MultimodalConfig):
    """A projector of two linears with an activation between them, whose fields stand at the top level of the file."""

    default_projector_bias: ClassVar[bool] = False

    @property
    def projector_activation(self) -> str:
        """The kernels' name of it."""
        name = "projector_hidden_act"
        return kernel_activation(name, read_field(name, self.raw.get(name, "gelu"), str), PLAIN_ACTIVATIONS)

    @property
    def projector_bias(self) -> bool:
        name = "multimodal_projector_bias"
        return read_field(name, self.raw.get(name, self.default_projector_bias), bool)
