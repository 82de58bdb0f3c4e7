"""Granite 3 and Granite Code: Llama with multipliers on embeddings, attention scores, residual branches and logits."""

from typing import ClassVar

from ligermodels.configs.base import preset, tiny
from ligermodels.configs.features import MultiplierConfig
from ligermodels.layers.attention import Attention
from ligermodels.layers.block import ScaledLayer
from ligermodels.layers.decoder import CausalLM
from ligermodels.layers.mlp import GatedMLP

BASE = {"model_type": "granite", "rms_norm_eps": 1e-5}
MULTIPLIERS = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22}
HUB = BASE | MULTIPLIERS | {"rope_theta": 10000000.0, "max_position_embeddings": 131072, "tie_word_embeddings": True}


class Granite(CausalLM):
    Config = MultiplierConfig
    hub_class = "GraniteForCausalLM"
    SIZES: ClassVar = {
        "tiny": tiny(BASE | MULTIPLIERS) | {"attention_multiplier": 1 / 32, "logits_scaling": 4.0},
        "2b": preset(HUB, 2048, 8192, 40, 32, 8)
        | {"attention_multiplier": 1 / 64, "logits_scaling": 8.0, "vocab_size": 49155},
        "8b": preset(HUB, 4096, 12800, 40, 32, 8)
        | {"attention_multiplier": 1 / 128, "logits_scaling": 16.0, "vocab_size": 49155},
    }

    def layer(self, config: MultiplierConfig, index: int) -> ScaledLayer:
        attention = Attention(config, **config.attention_biases, scale=config.attention_multiplier)
        return ScaledLayer(config, attention, GatedMLP(config, bias=config.mlp_bias), config.residual_multiplier)
