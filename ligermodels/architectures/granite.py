"""Granite 3 and Granite Code: Llama with multipliers on the embeddings, the scores, both branches and the logits."""

from dataclasses import dataclass
from typing import ClassVar

from ligermodels.layers.attention import Attention
from ligermodels.layers.block import ScaledLayer
from ligermodels.layers.config import MultiplierConfig, preset
from ligermodels.layers.decoder import CausalLM
from ligermodels.layers.mlp import GatedMLP
from ligermodels.weights.mapping import Rule, packed_projections


@dataclass(kw_only=True)
class GraniteConfig(MultiplierConfig):
    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    max_position_embeddings: int = 2048
    mlp_bias: bool = False


BASE = {"model_type": "granite", "architectures": ["GraniteForCausalLM"], "hidden_act": "silu", "rms_norm_eps": 1e-5}
MULTIPLIERS = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22}
HUB = BASE | MULTIPLIERS | {"rope_theta": 10000000.0, "max_position_embeddings": 131072, "tie_word_embeddings": True}


class Granite(CausalLM):
    Config = GraniteConfig
    hub_class = "GraniteForCausalLM"
    SIZES: ClassVar = {
        "tiny": preset(BASE | MULTIPLIERS, 128, 384, 4, 4, 2)
        | {"attention_multiplier": 1 / 32, "logits_scaling": 4.0, "vocab_size": 1024, "max_position_embeddings": 512},
        "2b": preset(HUB, 2048, 8192, 40, 32, 8)
        | {"attention_multiplier": 1 / 64, "logits_scaling": 8.0, "vocab_size": 49155},
        "8b": preset(HUB, 4096, 12800, 40, 32, 8)
        | {"attention_multiplier": 1 / 128, "logits_scaling": 16.0, "vocab_size": 49155},
    }

    def layer(self, config: GraniteConfig, index: int) -> ScaledLayer:
        bias = config.attention_bias
        attention = Attention(config, qkv_bias=bias, o_bias=bias, scale=config.attention_multiplier)
        return ScaledLayer(config, attention, GatedMLP(config, bias=config.mlp_bias), config.residual_multiplier)

    def weight_rules(self) -> tuple[Rule, ...]:
        return packed_projections(self.config)
