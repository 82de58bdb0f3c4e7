"""PaliGemma 1 and 2: Gemma or Gemma 2 with pictures that SigLIP encodes, and prompts that are seen as a whole."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from ligermodels.configs.base import preset, tiny
from ligermodels.configs.fields import check_choice
from ligermodels.configs.multimodal import MultimodalConfig
from ligermodels.configs.rope import object_or_empty
from ligermodels.configs.text_models import Gemma2Config, GemmaConfig
from ligermodels.configs.vision import SiglipConfig, vision_fields
from ligermodels.errors import ConfigError
from ligermodels.layers.block import DecoderLayer
from ligermodels.layers.gemma import gemma2_block, gemma_block
from ligermodels.vision.fixed_size import PICTURE_NAMES
from ligermodels.vision.multimodal import VisionLanguageModel
from ligermodels.vision.siglip import PatchProjector, PrefixPlacer, siglip_tower

DEFAULT_TEXT = {
    "model_type": "gemma", "hidden_size": 2048, "num_hidden_layers": 18, "intermediate_size": 16384,
    "num_attention_heads": 8, "num_key_value_heads": 1, "vocab_size": 257152,
}  # fmt: skip


def paligemma_text(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the text model. Raises ConfigError for another than Gemma and Gemma 2."""
    text = dict(object_or_empty("text_config", raw.get("text_config")) or DEFAULT_TEXT)
    check_choice("text_config: model_type", text.setdefault("model_type", "gemma"), ["gemma", "gemma2"])
    text["tie_word_embeddings"] = raw.get("tie_word_embeddings", True)
    text.pop("use_bidirectional_attention", None)  # of prompts: true, whatever the file says
    return text


@dataclass(kw_only=True)
class PaligemmaVisionConfig(SiglipConfig):
    """Every patch has a feature. projection_dim: the size of a feature, a field of the whole config.json."""

    projection_dim: int = 2048

    @classmethod
    def of_model(cls, raw: Mapping[str, Any]) -> Self:
        outer = {name: raw[name] for name in ("projection_dim",) if name in raw}
        vision = {name: value for name, value in vision_fields(raw).items() if name != "projection_dim"}
        config = cls.from_dict({**vision, **outer, "mm_tokens_per_image": 1})
        config.mm_tokens_per_image, config.spatial_merge_size = config.table_side**2, 1
        return config

    def check_features(self, hidden_size: int) -> None:
        if self.projection_dim != hidden_size:
            raise ConfigError(
                f"config.json: projection_dim {self.projection_dim} must be the hidden_size of the text model, "
                f"{hidden_size}"
            )


class PaligemmaTextConfig(MultimodalConfig):
    Vision = PaligemmaVisionConfig
    default_image_token = 256000

    @classmethod
    def fields_of(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        return super().fields_of(paligemma_text(raw))


class Paligemma2Config(Gemma2Config, PaligemmaTextConfig):
    @property
    def shortest_window(self) -> int | None:
        """The tokens that a layer with a sliding window sees; None if no layer has one."""
        windows = (self.window(layer) for layer in range(self.num_hidden_layers))
        return min((window for window in windows if window is not None), default=None)


class PaligemmaConfig(GemmaConfig, PaligemmaTextConfig):
    shortest_window = None

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Any:
        """A `Paligemma2Config` for a text_config of Gemma 2. Raises ConfigError for another text model."""
        is_gemma2 = paligemma_text(raw)["model_type"] == "gemma2"
        return Paligemma2Config.from_dict(raw) if is_gemma2 else super().from_dict(raw)


BASE = {"model_type": "paligemma", "image_token_index": 257152}
SIGLIP_PATCHES = {"model_type": "siglip_vision_model", "vision_use_head": False, "patch_size": 14}
TOWER = preset(SIGLIP_PATCHES, 1152, 4304, 27, 16, 16) | {"image_size": 224}
TEXT = {"model_type": "gemma", "vocab_size": 257216, "head_dim": 256}
TEXT2 = TEXT | {"model_type": "gemma2", "query_pre_attn_scalar": 256}


class Paligemma(VisionLanguageModel):
    Config = PaligemmaConfig
    Placer = PrefixPlacer
    Projector = PatchProjector
    tower = staticmethod(siglip_tower)
    names = PICTURE_NAMES
    hub_class = "PaliGemmaForConditionalGeneration"
    SIZES: ClassVar = {
        "tiny": BASE
        | {
            "image_token_index": 1023, "projection_dim": 128,
            "text_config": tiny({"model_type": "gemma"}) | {"num_key_value_heads": 1, "head_dim": 32},
            "vision_config": preset(SIGLIP_PATCHES, 64, 128, 2, 4, 4) | {"image_size": 56},
        },
        "3b": BASE | {"vision_config": TOWER, "text_config": preset(TEXT, 2048, 16384, 18, 8, 1)},
        "2-3b": BASE
        | {"projection_dim": 2304, "vision_config": TOWER, "text_config": preset(TEXT2, 2304, 9216, 26, 8, 4)},
    }  # fmt: skip

    def layer(self, config: PaligemmaConfig | Paligemma2Config, index: int) -> DecoderLayer:
        return gemma2_block(config, index) if isinstance(config, Paligemma2Config) else gemma_block(config)
