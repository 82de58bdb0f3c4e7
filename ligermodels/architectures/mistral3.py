"""The language model of Mistral Small 3, Devstral Small 2 and Ministral 3 with an image side: Mistral or Ministral 3.

The image side of a checkpoint is kept, not computed.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from ligermodels.configs.fields import check_choice
from ligermodels.configs.ministral import Ministral3Config
from ligermodels.configs.rope import object_or_empty
from ligermodels.layers.attention import Attention
from ligermodels.layers.block import DecoderLayer
from ligermodels.layers.decoder import CausalLM
from ligermodels.layers.mlp import GatedMLP
from ligermodels.weights.mapping import Rename, Rule, packed_projections

# The defaults of a text_config, by its model_type.
TEXT_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "ministral3": {},
    "mistral": {
        "vocab_size": 32000,
        "num_hidden_layers": 32,
        "head_dim": None,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
        "rms_norm_eps": 1e-6,
        "pad_token_id": None,
        "rope_theta": 10000.0,
    },
}


class Mistral3Config(Ministral3Config):
    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Self:
        """Reads text_config. Files of version 4 that do not name tie_word_embeddings store a head of their own."""
        text = dict(object_or_empty("text_config", raw.get("text_config")))
        kind = text.get("model_type", "mistral")
        check_choice("text_config: model_type", kind, TEXT_DEFAULTS)
        outer = {key: raw[key] for key in ("tie_word_embeddings", "quantization_config") if key in raw}
        config = super().from_dict({**TEXT_DEFAULTS[kind], "model_type": kind, **text, **outer})
        config.raw = dict(raw)
        return config


class Mistral3(CausalLM):
    Config = Mistral3Config
    hub_class = "Mistral3ForConditionalGeneration"
    SIZES: ClassVar = {}

    def layer(self, config: Mistral3Config, index: int) -> DecoderLayer:
        return DecoderLayer(config, Attention(config, window=config.window(index)), GatedMLP(config))

    def weight_rules(self) -> tuple[Rule, ...]:
        text = Rename("language_model.model", "model", packed_projections(self.config))
        return text, Rename("language_model.lm_head", "lm_head")

    def other_weight_rules(self) -> tuple[tuple[Rule, ...], ...]:
        """The names that transformers 5 has in memory."""
        return ((Rename("model.language_model", "model", packed_projections(self.config)),),)

    def kept_tensors(self) -> tuple[str, ...]:
        parts = ("vision_tower", "multi_modal_projector")
        return (*parts, *(f"model.{part}" for part in parts))
