"""The tower of Pixtral in config.json: images of any size."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ligermodels.configs.fields import check_choice, read_field
from ligermodels.configs.rope import FULL_ATTENTION, Rope, object_or_empty
from ligermodels.configs.vision import AXIAL, AXIAL_SHARED, AxialVisionConfig, FeatureLayerConfig
from ligermodels.errors import ConfigError

PIXTRAL = "pixtral"  # model_type of the tower


@dataclass(kw_only=True)
class PixtralVisionConfig(AxialVisionConfig, FeatureLayerConfig):
    """image_size: the longest side to which a processor resizes, in pixels."""

    model_type: str = PIXTRAL
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    hidden_size: int = 1024
    intermediate_size: int = 4096
    image_size: int = 1024
    patch_size: int = 16
    hidden_act: str = "gelu"

    alternative_names: ClassVar = {"in_channels": "num_channels"}

    @classmethod
    def read_ropes(cls, raw: Mapping[str, Any]) -> dict[str, Rope]:
        """In files "default" is another name of this family's one type. rope_theta may stand beside rope_parameters."""
        given = object_or_empty("vision_config: rope_parameters", raw.get("rope_parameters"))
        check_choice("vision_config: rope_type", given.get("rope_type", AXIAL), [AXIAL, "default"])
        theta = given.get("rope_theta", raw.get("rope_theta", cls.default_rope_theta))
        return {FULL_ATTENTION: Rope(rope_theta=read_field("rope_theta", theta, float), rope_type=AXIAL_SHARED)}

    @property
    def feature_side(self) -> int:
        """Pixels along a side of what becomes one feature."""
        return self.patch_size * self.spatial_merge_size

    @property
    def norm_eps(self) -> float:
        """The files have no field for it."""
        return 1e-5

    def validate(self) -> None:
        check_choice("vision_config: model_type", self.model_type, [PIXTRAL])
        super().validate()
        if self.head_dim * self.num_attention_heads != self.hidden_size:
            raise ConfigError(
                f"config.json: vision_config: {self.num_attention_heads} heads of size {self.head_dim} must make up "
                f"hidden_size {self.hidden_size}"
            )


@dataclass(kw_only=True)
class Mistral3VisionConfig(PixtralVisionConfig):
    """Squares of patches become one feature each. spatial_merge_size is a field of the whole config.json."""

    outer_fields = ("vision_feature_layer", "spatial_merge_size")

    spatial_merge_size: int = 2
    vision_feature_layer: int = -1
