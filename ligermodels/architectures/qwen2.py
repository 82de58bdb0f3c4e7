"""Qwen1.5, Qwen2, Qwen2.5, DeepSeek-R1-Distill-Qwen: Llama's block with biases on q, k, v, and windowed upper layers."""

from dataclasses import dataclass

from ligermodels.layers.attention import Attention
from ligermodels.layers.config import Config
from ligermodels.layers.decoder import CausalLM, DecoderLayer
from ligermodels.layers.mlp import GatedMLP
from ligermodels.weights.mapping import Rule, packed_gate_up, packed_qkv


@dataclass(frozen=True, kw_only=True)
class Qwen2Config(Config):
    vocab_size: int = 151936
    hidden_size: int = 4096
    intermediate_size: int = 22016
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 32
    max_position_embeddings: int = 32768
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    max_window_layers: int = 28
    layer_types: tuple[str, ...] | None = None

    def window(self, layer: int) -> int | None:
        if not self.use_sliding_window:
            return None
        sliding = layer >= self.max_window_layers
        if self.layer_types is not None:
            sliding = self.layer_types[layer] == "sliding_attention"
        return self.sliding_window if sliding else None


class Qwen2(CausalLM):
    Config = Qwen2Config

    def layer(self, config: Qwen2Config, index: int) -> DecoderLayer:
        attention = Attention(config, qkv_bias=True, o_bias=False, window=config.window(index))
        return DecoderLayer(config, attention, GatedMLP(config))
