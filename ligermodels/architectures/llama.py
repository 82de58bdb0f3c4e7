"""Llama 2, 3, 3.1, 3.2, SmolLM2, DeepSeek-R1-Distill-Llama: pre-norm, grouped-query attention, RoPE, SwiGLU."""

from dataclasses import dataclass

from ligermodels.layers.attention import Attention
from ligermodels.layers.config import Config
from ligermodels.layers.decoder import CausalLM, DecoderLayer
from ligermodels.layers.mlp import GatedMLP
from ligermodels.weights.mapping import Rule, packed_gate_up, packed_qkv


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(Config):
    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    max_position_embeddings: int = 2048
    attention_bias: bool = False
    mlp_bias: bool = False


class Llama(CausalLM):
    Config = LlamaConfig

    def layer(self, config: LlamaConfig, index: int) -> DecoderLayer:
        attention = Attention(config, qkv_bias=config.attention_bias, o_bias=config.attention_bias)
        return DecoderLayer(config, attention, GatedMLP(config, bias=config.mlp_bias))
