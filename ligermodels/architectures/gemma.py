"""Gemma 2B and 7B: Llama with GeGLU, RMSNorm with weight + 1, and tied embeddings scaled by sqrt(hidden_size)."""

from dataclasses import dataclass
from typing import ClassVar

from ligermodels.configs.base import KERNEL_ACTIVATIONS, preset, tiny
from ligermodels.configs.features import UnitOffsetConfig
from ligermodels.layers.attention import Attention
from ligermodels.layers.block import DecoderLayer
from ligermodels.layers.decoder import CausalLM
from ligermodels.layers.mlp import GatedMLP


@dataclass(kw_only=True)
class GemmaConfig(UnitOffsetConfig):
    vocab_size: int = 256000
    hidden_size: int = 3072
    intermediate_size: int = 24576
    num_hidden_layers: int = 28
    num_attention_heads: int = 16
    num_key_value_heads: int = 16
    max_position_embeddings: int = 8192
    hidden_act: str = "gelu_pytorch_tanh"

    @property
    def activation(self) -> str:
        """In Gemma's files "gelu" means the tanh approximation."""
        return "gelu_tanh" if self.hidden_act == "gelu" else KERNEL_ACTIVATIONS[self.hidden_act]


BASE = {"model_type": "gemma", "hidden_act": "gelu", "head_dim": 256}
HUB = BASE | {"vocab_size": 256000, "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}


class Gemma(CausalLM):
    Config = GemmaConfig
    hub_class = "GemmaForCausalLM"
    SIZES: ClassVar = {
        "tiny": tiny(BASE) | {"num_key_value_heads": 1, "head_dim": 32},
        "2b": preset(HUB, 2048, 16384, 18, 8, 1),
        "7b": preset(HUB, 3072, 24576, 28, 16, 16),
    }

    def layer(self, config: GemmaConfig, index: int) -> DecoderLayer:
        attention = Attention(config, qkv_bias=config.attention_bias, o_bias=config.attention_bias)
        return DecoderLayer(config, attention, GatedMLP(config))
