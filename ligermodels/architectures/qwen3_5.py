"""Qwen3.5 and Qwen3.6, dense: three layers with the gated delta rule to one of attention with an output gate.

The image side and the layers that predict further tokens are kept, not computed.
"""

from dataclasses import dataclass
from typing import ClassVar

from ligermodels.configs.base import preset, tiny
from ligermodels.configs.hybrid import SMALL_HEADS, GatedDeltaConfig
from ligermodels.configs.multimodal import TextPartConfig
from ligermodels.layers.block import DecoderLayer
from ligermodels.layers.gated_delta import delta_or_attention
from ligermodels.layers.mlp import GatedMLP
from ligermodels.vision.hub_names import TextPartModel
from ligermodels.weights.mapping import KeptLayers, Rule, further_token_layers, packed_delta_projections


@dataclass(kw_only=True)
class Qwen3_5Config(GatedDeltaConfig):
    vocab_size: int = 248320
    intermediate_size: int = 12288
    num_attention_heads: int = 16
    num_key_value_heads: int = 4


class Qwen3_5MultimodalConfig(TextPartConfig, Qwen3_5Config):
    text_type = "qwen3_5_text"


BASE = {"model_type": "qwen3_5_text", "mtp_num_hidden_layers": 0}
HUB = BASE | {"max_position_embeddings": 262144, "rope_theta": 10000000.0, "eos_token_id": 248044}


class Qwen3_5Text(TextPartModel):
    config: Qwen3_5Config
    Config = Qwen3_5Config
    hub_class = "Qwen3_5ForCausalLM"
    SIZES: ClassVar = {
        "tiny": tiny(BASE) | SMALL_HEADS,
        "0.8b": preset(HUB, 1024, 3584, 24, 8, 2) | {"linear_num_value_heads": 16, "tie_word_embeddings": True},
        "4b": preset(HUB, 2560, 9216, 32, 16, 4) | {"tie_word_embeddings": True},
        "9b": preset(HUB, 4096, 12288, 32, 16, 4),
        "27b": preset(HUB, 5120, 17408, 64, 24, 4) | {"linear_num_value_heads": 48},
    }

    def layer(self, config: Qwen3_5Config, index: int) -> DecoderLayer:
        return DecoderLayer(config, delta_or_attention(config, index), GatedMLP(config))

    def text_layouts(self) -> tuple[tuple[Rule, ...], ...]:
        return (packed_delta_projections(self.config),)

    def kept_layers(self) -> KeptLayers:
        return further_token_layers(self.config)

    def kept_tensors(self) -> tuple[str, ...]:
        return "mtp", "model.visual"


class Qwen3_5(Qwen3_5Text):
    Config = Qwen3_5MultimodalConfig
    hub_class = "Qwen3_5ForConditionalGeneration"
    SIZES: ClassVar = {}
    is_part = True
