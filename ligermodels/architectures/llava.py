"""LLaVA 1.5: Llama, the hidden states of a CLIP tower before its last block, a projector of two linears.

Pixtral has the same model_type: Mistral and a tower that takes images of any size, with a feature for each patch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from ligermodels.configs.base import preset, tiny
from ligermodels.configs.fields import check_choice
from ligermodels.configs.multimodal import LinearProjectorConfig
from ligermodels.configs.rope import object_or_empty
from ligermodels.configs.text_models import MistralConfig
from ligermodels.configs.vision import PIXTRAL, ClipConfig, PixtralVisionConfig, VisionConfig
from ligermodels.layers.attention import Attention
from ligermodels.layers.block import DecoderLayer
from ligermodels.layers.decoder import CausalLM
from ligermodels.layers.mlp import MLP, GatedMLP
from ligermodels.vision.fixed_size import PICTURE_NAMES, ClipPlacer
from ligermodels.vision.multimodal import VisionLanguageModel
from ligermodels.vision.pixtral import PIXTRAL_NAMES, PixtralPlacer, pixtral_tower
from ligermodels.vision.tower import LinearProjector, VisionTower, vision_blocks


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


BASE = {"model_type": "llava", "image_token_index": 32000, "vision_feature_layer": -2}
PATCHES = {"model_type": "clip_vision_model", "patch_size": 14, "projection_dim": 768}
TOWER = preset(PATCHES, 1024, 4096, 24, 16, 16) | {"image_size": 336}
TEXT = {"model_type": "llama", "vocab_size": 32064, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5}
HUB = BASE | {"pad_token_id": 32001, "vision_config": TOWER}


class Pixtral(VisionLanguageModel):
    Config = PixtralConfig
    Placer = PixtralPlacer
    tower = staticmethod(pixtral_tower)
    names = PIXTRAL_NAMES
    hub_class = "LlavaForConditionalGeneration"
    SIZES: ClassVar = {}

    def layer(self, config: PixtralConfig, index: int) -> DecoderLayer:
        return DecoderLayer(config, Attention(config, window=config.window(index)), GatedMLP(config))

    def merger(self, config: PixtralVisionConfig) -> LinearProjector:
        text = self.config
        activation, bias = text.projector_activation, text.projector_bias
        return LinearProjector(config.feature_width, text.hidden_size, activation, bias=bias)


class Llava(VisionLanguageModel):
    Config = LlavaConfig
    Placer = ClipPlacer
    names = replace(PICTURE_NAMES, kept=("post_layernorm",))
    hub_class = "LlavaForConditionalGeneration"
    SIZES: ClassVar = {
        "tiny": BASE
        | {
            "image_token_index": 1023,
            "text_config": tiny({"model_type": "llama"}),
            "vision_config": preset(PATCHES, 64, 128, 3, 4, 4) | {"image_size": 56},
        },
        "7b": HUB | {"text_config": preset(TEXT, 4096, 11008, 32, 32, 32)},
        "13b": HUB | {"text_config": preset(TEXT, 5120, 13824, 40, 40, 40)},
    }

    @classmethod
    def of_config(cls, raw: Mapping[str, Any]) -> type[CausalLM]:
        tower = object_or_empty("vision_config", raw.get("vision_config"))
        return Pixtral if tower.get("model_type") == PIXTRAL else cls

    def layer(self, config: LlavaConfig, index: int) -> DecoderLayer:
        attention = Attention(config, **config.attention_biases)
        return DecoderLayer(config, attention, GatedMLP(config, bias=config.mlp_bias))

    @staticmethod
    def tower(config: ClipConfig) -> VisionTower:
        blocks, joined = vision_blocks(config, MLP, bias=True, rope=None), config.joined_blocks
        return VisionTower(
            config, blocks, table=config.table_side**2 + 1, first_norm=True, class_token=True, joined=joined
        )

    def merger(self, config: ClipConfig) -> LinearProjector:
        text, rows = self.config, config.table_side**2 + 1 if config.drops_class_token else None
        activation, bias = text.projector_activation, text.projector_bias
        return LinearProjector(config.feature_width, text.hidden_size, activation, bias=bias, rows_per_image=rows)
