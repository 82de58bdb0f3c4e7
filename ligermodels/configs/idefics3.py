"""Idefics 3 and SmolVLM in config.json: Llama with square tiles of images that SigLIP encodes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from ligermodels.configs.fields import check_choice, read_field
from ligermodels.configs.multimodal import MultimodalConfig
from ligermodels.configs.rope import object_or_empty
from ligermodels.configs.vision import PictureConfig, vision_fields
from ligermodels.errors import ConfigError

WITHOUT_TEXT_CONFIG = {"rms_norm_eps": 1e-5}


@dataclass(kw_only=True)
class Idefics3VisionConfig(PictureConfig):
    """scale_factor: the side of the square of patches that becomes one feature, a field of the whole config.json."""

    hidden_size: int = 1152
    num_attention_heads: int = 16
    patch_size: int = 32
    hidden_act: str = "gelu_pytorch_tanh"

    @classmethod
    def of_model(cls, raw: Mapping[str, Any]) -> Self:
        scale = read_field("scale_factor", raw.get("scale_factor", 2), int)
        return cls.from_dict({**vision_fields(raw), "spatial_merge_size": scale})

    def validate(self) -> None:
        super().validate()
        if self.table_side % self.spatial_merge_size:
            raise ConfigError(
                f"config.json: scale_factor {self.spatial_merge_size} must divide the {self.table_side} patches along "
                "a side of a tile"
            )


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
