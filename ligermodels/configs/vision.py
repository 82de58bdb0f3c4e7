"""The vision_config of a multimodal config.json: a transformer over the patches of images."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isqrt, prod
from typing import Any, ClassVar, Self

from ligermodels.configs.base import PLAIN_ACTIVATIONS, Config
from ligermodels.configs.fields import check_choice, read_field
from ligermodels.configs.rope import FULL_ATTENTION, Rope, object_or_empty
from ligermodels.errors import ConfigError

# RoPE over the rows and columns of an image, each with frequencies of its own range or with every other one of a head.
AXIAL, AXIAL_SHARED = "axial", "axial_shared"


@dataclass(kw_only=True)
class VisionConfig(Config):
    """The blocks have the fields of any transformer here; those of a vocabulary have no meaning.

    spatial_merge_size: the side of the square of patches that becomes one feature of the text model.
    """

    model_type: str = "vision"
    in_channels: int = 3
    patch_size: int = 14
    temporal_patch_size: int = 1
    spatial_merge_size: int = 1

    alternative_names: ClassVar = {"num_hidden_layers": "depth", "num_attention_heads": "num_heads"}
    outer_fields: ClassVar[tuple[str, ...]] = ()  # fields of the whole config.json, which count

    @classmethod
    def of_model(cls, raw: Mapping[str, Any]) -> Self:
        """Reads the vision_config of `raw`, a whole config.json. Raises ConfigError."""
        return cls.from_dict({**vision_fields(raw), **{name: raw[name] for name in cls.outer_fields if name in raw}})

    def check_features(self, hidden_size: int) -> None:
        """Raises ConfigError if the features do not have the width of the text model."""

    @property
    def computed_blocks(self) -> int:
        """The blocks that features depend on."""
        return self.num_hidden_layers

    @property
    def pixels_per_patch(self) -> int:
        """Values of a patch."""
        return prod(self.patch_shape)

    @property
    def patch_shape(self) -> tuple[int, ...]:
        """Channels, rows and columns of a patch; between channels and rows the frames, if it has several."""
        return self.in_channels, self.patch_size, self.patch_size

    @property
    def patches_per_feature(self) -> int:
        return self.spatial_merge_size**2

    def rows_of(self, patches: int) -> int:
        """What the blocks read of so many patches of whole images: their rows, and those that belong to no patch."""
        return patches


@dataclass(kw_only=True)
class PictureConfig(VisionConfig):
    """A tower over pictures of one size, image_size pixels along each side: learned positions, no RoPE."""

    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    hidden_size: int = 768
    intermediate_size: int = 3072
    image_size: int = 224

    alternative_names: ClassVar = {"in_channels": "num_channels", "rms_norm_eps": "layer_norm_eps"}
    layer_norms = True
    norm_bias = True
    activations = PLAIN_ACTIVATIONS

    @classmethod
    def read_ropes(cls, raw: Mapping[str, Any]) -> dict[str, Rope]:
        return {}

    @property
    def table_side(self) -> int:
        """Patches along a side of a picture: each has a learned position. Pixels behind them are not read."""
        return self.image_size // self.patch_size

    @property
    def features_per_picture(self) -> int:
        return (self.table_side // self.spatial_merge_size) ** 2

    def validate(self) -> None:
        super().validate()
        if self.image_size < self.patch_size:
            sizes = f"image_size {self.image_size} must be at least patch_size {self.patch_size}"
            raise ConfigError(f"config.json: vision_config: {sizes}")


@dataclass(kw_only=True)
class SiglipConfig(PictureConfig):
    """SigLIP without a pooling head.

    mm_tokens_per_image: the features of a picture; the patches of each square become one.
    """

    hidden_act: str = "gelu_pytorch_tanh"
    patch_size: int = 16
    vision_use_head: bool = True
    mm_tokens_per_image: int = 256

    @classmethod
    def of_model(cls, raw: Mapping[str, Any]) -> Self:
        """mm_tokens_per_image is a field of the whole config.json."""
        outer = {name: raw[name] for name in ("mm_tokens_per_image",) if name in raw}
        return cls.from_dict({**outer, **vision_fields(raw)})

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Self:
        config = super().from_dict(raw)
        config.spatial_merge_size = config.table_side // config.feature_side
        return config

    @property
    def feature_side(self) -> int:
        return isqrt(self.mm_tokens_per_image)

    def validate(self) -> None:
        super().validate()
        if self.vision_use_head:
            raise ConfigError(
                "config.json: vision_config: vision_use_head must be false; a pooling head is not supported"
            )
        if self.feature_side**2 != self.mm_tokens_per_image or self.table_side % self.feature_side:
            raise ConfigError(
                f"config.json: mm_tokens_per_image {self.mm_tokens_per_image} must be the square of a number that "
                f"divides the {self.table_side} patches of a side"
            )


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
class FeatureLayerConfig(VisionConfig):
    """A tower whose features are the hidden states behind one of its blocks, or behind several, concatenated.

    vision_feature_layer: that block, from 1; counted from the end if negative. A list names several. A field of the
    whole config.json.
    """

    outer_fields: ClassVar[tuple[str, ...]] = ("vision_feature_layer",)

    vision_feature_layer: int | tuple[int, ...] = -1

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The blocks whose hidden states make up a feature, from 1."""
        given = self.vision_feature_layer
        layers = given if isinstance(given, tuple) else (given,)
        return tuple(layer if layer >= 0 else self.num_hidden_layers + 1 + layer for layer in layers)

    @property
    def joined_blocks(self) -> tuple[int, ...]:
        """Their indices, if there are several."""
        return tuple(layer - 1 for layer in self.feature_layers) if len(self.feature_layers) > 1 else ()

    @property
    def feature_width(self) -> int:
        return len(self.feature_layers) * self.hidden_size

    @property
    def computed_blocks(self) -> int:
        """A checkpoint has the others too."""
        return max(self.feature_layers)

    def validate(self) -> None:
        super().validate()
        if not self.feature_layers:
            raise ConfigError("config.json: vision_feature_layer is []; must name at least one block")
        if not all(1 <= layer <= self.num_hidden_layers for layer in self.feature_layers):
            raise ConfigError(
                f"config.json: vision_feature_layer {self.vision_feature_layer} must name one of the "
                f"{self.num_hidden_layers} blocks of vision_config"
            )


@dataclass(kw_only=True)
class ClipConfig(PictureConfig, FeatureLayerConfig):
    """CLIP: a class token before the patches.

    vision_feature_select_strategy: whether the text model reads it too, "full", or not, "default". A field of the whole
    config.json.
    """

    outer_fields = ("vision_feature_layer", "vision_feature_select_strategy")
    choices: ClassVar = {"vision_feature_select_strategy": ["default", "full"]}

    hidden_act: str = "quick_gelu"
    patch_size: int = 32
    rms_norm_eps: float = 1e-5
    vision_feature_layer: int | tuple[int, ...] = -2
    vision_feature_select_strategy: str = "default"

    @property
    def drops_class_token(self) -> bool:
        return self.vision_feature_select_strategy == "default"

    @property
    def features_per_picture(self) -> int:
        return super().features_per_picture + (not self.drops_class_token)

    def rows_of(self, patches: int) -> int:
        return patches + patches // self.table_side**2


@dataclass(kw_only=True)
class AxialVisionConfig(VisionConfig):
    """A tower with 2-D RoPE: half of a head turns with a patch's row, half with its column."""

    @classmethod
    def read_ropes(cls, raw: Mapping[str, Any]) -> dict[str, Rope]:
        given = object_or_empty("vision_config: rope_parameters", raw.get("rope_parameters"))
        check_choice("vision_config: rope_type", given.get("rope_type", AXIAL), [AXIAL])
        theta = read_field("rope_theta", given.get("rope_theta", cls.default_rope_theta), float)
        return {FULL_ATTENTION: Rope(rope_theta=theta, rope_type=AXIAL)}

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Self:
        config = super().from_dict(raw)
        half = (config.head_dim // 4,) * 2  # pairs of each axis
        config.ropes = {kind: replace(rope, mrope_section=half) for kind, rope in config.ropes.items()}
        return config

    def validate(self) -> None:
        super().validate()
        if self.head_dim % 4:
            raise ConfigError(
                f"config.json: vision_config: heads of size {self.head_dim} must be a multiple of 4: half of their"
                " pairs rotate with rows, half with columns"
            )


def vision_fields(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The vision_config of a whole config.json. Raises ConfigError if it has none."""
    vision = raw.get("vision_config")
    if not isinstance(vision, Mapping):
        raise ConfigError(f"config.json: vision_config is {vision!r}; must be an object")
    return vision


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
