"""ERNIE 4.5, dense models: Llama with interleaved RoPE and one switch for all biases."""

from dataclasses import dataclass
from typing import ClassVar

from ligermodels.configs.base import Config, preset, tiny
from ligermodels.layers.attention import Attention
from ligermodels.layers.block import DecoderLayer
from ligermodels.layers.decoder import CausalLM
from ligermodels.layers.mlp import GatedMLP


@dataclass(kw_only=True)
class Ernie4_5Config(Config):
    vocab_size: int = 103424
    hidden_size: int = 1024
    intermediate_size: int = 3072
    num_hidden_layers: int = 18
    num_attention_heads: int = 16
    num_key_value_heads: int = 2
    head_dim: int = 128
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    pad_token_id: int | None = 0
    use_bias: bool = False

    default_rope_theta = 500_000.0


BASE = {"model_type": "ernie4_5"}


class Ernie4_5(CausalLM):
    Config = Ernie4_5Config
    hub_class = "Ernie4_5ForCausalLM"
    SIZES: ClassVar = {
        "tiny": tiny(BASE) | {"head_dim": 32, "pad_token_id": None},
        "0.3b": preset(BASE, 1024, 3072, 18, 16, 2),
    }

    def layer(self, config: Ernie4_5Config, index: int) -> DecoderLayer:
        attention = Attention(config, qkv_bias=config.use_bias, o_bias=config.use_bias, interleaved=True)
        return DecoderLayer(config, attention, GatedMLP(config, bias=config.use_bias))
