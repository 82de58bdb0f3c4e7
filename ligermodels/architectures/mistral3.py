"""Mistral Small 3, Devstral Small 2, Ministral 3: Mistral or Ministral 3 with images of any size, in merged patches."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ligermodels.configs.base import preset, tiny
from ligermodels.configs.fields import check_choice
from ligermodels.configs.multimodal import LinearProjectorConfig
from ligermodels.configs.rope import object_or_empty
from ligermodels.configs.text_models import Ministral3Config
from ligermodels.configs.vision import Mistral3VisionConfig, PixtralVisionConfig
from ligermodels.layers.attention import Attention
from ligermodels.layers.block import DecoderLayer
from ligermodels.layers.mlp import GatedMLP
from ligermodels.vision.multimodal import VisionLanguageModel
from ligermodels.vision.pixtral import PIXTRAL_NAMES, MergingProjector, PixtralPlacer, pixtral_tower
from ligermodels.weights.mapping import Rename

# The defaults of a text_config, by its model_type.
TEXT_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "ministral3": {},
    "mistral": {
        "vocab_size": 32000, "num_hidden_layers": 32, "head_dim": None, "max_position_embeddings": 131072,
        "sliding_window": 4096, "rms_norm_eps": 1e-6, "pad_token_id": None, "rope_theta": 10000.0,
    },
}  # fmt: skip


@dataclass(kw_only=True)
class Mistral3Config(Ministral3Config, LinearProjectorConfig):
    Vision = Mistral3VisionConfig
    default_image_token = 10

    @classmethod
    def fields_of(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Reads text_config. Files of version 4 that do not name tie_word_embeddings store a head of their own."""
        text = object_or_empty("text_config", raw.get("text_config"))
        kind = text.get("model_type", "mistral")
        check_choice("text_config: model_type", kind, TEXT_DEFAULTS)
        return super().fields_of({**raw, "text_config": {**TEXT_DEFAULTS[kind], "model_type": kind, **text}})


BASE = {"model_type": "mistral3", "tie_word_embeddings": False}
PIXTRAL_PATCHES = {"model_type": "pixtral", "patch_size": 14, "hidden_act": "silu"}
TOWER = preset(PIXTRAL_PATCHES, 1024, 4096, 24, 16, 16) | {"image_size": 1540}
TEXT = {
    "model_type": "mistral", "vocab_size": 131072, "head_dim": 128, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "rope_theta": 1000000000.0, "sliding_window": None,
}  # fmt: skip


class Mistral3(VisionLanguageModel):
    Config = Mistral3Config
    Placer = PixtralPlacer
    tower = staticmethod(pixtral_tower)
    names = replace(
        PIXTRAL_NAMES, projector_rules=(Rename("projector.patch_merger.merging_layer", "projector.patch_merger"),)
    )
    hub_class = "Mistral3ForConditionalGeneration"
    SIZES: ClassVar = {
        "tiny": BASE
        | {
            "image_token_index": 1023,
            "text_config": tiny({"model_type": "mistral"}),
            "vision_config": preset(PIXTRAL_PATCHES, 64, 128, 2, 4, 4) | {"image_size": 112},
        },
        "24b": BASE
        | {"image_token_index": 10, "text_config": preset(TEXT, 5120, 32768, 40, 32, 8), "vision_config": TOWER},
    }

    def layer(self, config: Mistral3Config, index: int) -> DecoderLayer:
        return DecoderLayer(config, Attention(config, window=config.window(index)), GatedMLP(config))

    def merger(self, config: PixtralVisionConfig) -> MergingProjector:
        text = self.config
        return MergingProjector(
            config, text.hidden_size, text.projector_activation, bias=text.projector_bias, eps=text.rms_norm_eps
        )
