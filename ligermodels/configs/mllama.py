"""The config.json of Llama 3.2 Vision: text layers with cross-attention, tiles of images."""

from dataclasses import dataclass
from typing import ClassVar

from ligermodels.configs.base import PLAIN_ACTIVATIONS
from ligermodels.configs.fields import read_field
from ligermodels.configs.multimodal import MultimodalConfig
from ligermodels.configs.vision import VisionConfig
from ligermodels.errors import ConfigError

UNPREDICTED_TOKENS = 8  # that have an embedding, but no row of the head: the image token is one of them
ASPECT_RATIOS = 8  # grids of at most four tiles


@dataclass(kw_only=True)
class MllamaVisionConfig(VisionConfig):
    """An image is up to max_num_tiles squares of image_size pixels. num_global_layers: of the gated blocks behind the
    others. intermediate_layers_indices: the blocks whose hidden states join the features."""

    hidden_size: int = 1280
    intermediate_size: int = 5120
    num_hidden_layers: int = 32
    num_global_layers: int = 8
    num_attention_heads: int = 16
    hidden_act: str = "gelu"
    rms_norm_eps: float = 1e-5
    image_size: int = 448
    max_num_tiles: int = 4
    vision_output_dim: int = 7680
    intermediate_layers_indices: tuple[int, ...] = (3, 7, 15, 23, 30)

    layer_norms = True
    norm_bias = True
    activations = PLAIN_ACTIVATIONS
    alternative_names: ClassVar = {
        "num_attention_heads": "attention_heads", "rms_norm_eps": "norm_eps", "in_channels": "num_channels",
    }  # fmt: skip

    @property
    def patches_per_tile(self) -> int:
        return (self.image_size // self.patch_size) ** 2

    @property
    def tokens_per_tile(self) -> int:
        """Patches of a tile, and the class token before them."""
        return self.patches_per_tile + 1

    @property
    def rows_per_tile(self) -> int:
        """Rounds the rows up to a multiple of 8, as the tower was trained."""
        return -(-self.tokens_per_tile // 8) * 8

    def rows_of(self, patches: int) -> int:
        """Counts the rows of whole images, which have rows for the most tiles."""
        return patches // self.patches_per_tile * self.rows_per_tile

    def states_of(self, patches: int) -> int:
        """What the tower makes of so many patches of whole tiles."""
        return patches // self.patches_per_tile * self.tokens_per_tile

    def validate(self) -> None:
        super().validate()
        width = self.hidden_size * (1 + len(self.intermediate_layers_indices))
        if self.vision_output_dim != width:
            raise ConfigError(
                f"config.json: vision_config: vision_output_dim is {self.vision_output_dim}; must be {width}, "
                "hidden_size for the last hidden states and for each of intermediate_layers_indices"
            )
        ratios = read_field("supported_aspect_ratios", self.raw.get("supported_aspect_ratios") or [], list)
        if self.max_num_tiles != 4 or len(ratios) not in (0, ASPECT_RATIOS):
            raise ConfigError(
                "config.json: vision_config: max_num_tiles must be 4, with the eight supported_aspect_ratios of at "
                "most four tiles"
            )


@dataclass(kw_only=True)
class MllamaConfig(MultimodalConfig):
    """cross_attention_layers: the indices of the blocks that attend to images instead of to the text."""

    vocab_size: int = 128256
    hidden_size: int = 4096
    intermediate_size: int = 14336
    num_hidden_layers: int = 40
    num_key_value_heads: int = 8
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    pad_token_id: int | None = 128004
    cross_attention_layers: tuple[int, ...] = (3, 8, 13, 18, 23, 28, 33, 38)

    Vision = MllamaVisionConfig
    default_rope_theta = 500_000.0
    default_image_token = 128256
    alternative_names: ClassVar = {"attention_dropout": "dropout"}

    @property
    def vision(self) -> MllamaVisionConfig:
        return MllamaVisionConfig.of_model(self.raw)

    @property
    def embedded_tokens(self) -> int:
        return self.vocab_size + UNPREDICTED_TOKENS

    @property
    def states_per_image(self) -> int:
        """The most that cross-attention reads of an image."""
        return self.vision.max_num_tiles * self.vision.tokens_per_tile

    def validate(self) -> None:
        super().validate()
        if self.tie_word_embeddings:
            raise ConfigError(
                "config.json: tie_word_embeddings must be false: the embedding has rows of tokens that the head lacks"
            )
        if not all(0 <= index < self.num_hidden_layers for index in self.cross_attention_layers):
            raise ConfigError(
                f"config.json: cross_attention_layers {list(self.cross_attention_layers)} must be indices of the "
                f"{self.num_hidden_layers} layers"
            )
