"""GLM-4 9B: Llama with biases on q, k, v, interleaved RoPE on half of each head, and an MLP stored packed."""

from dataclasses import dataclass
from typing import ClassVar

from ligermodels.layers.attention import Attention
from ligermodels.layers.block import DecoderLayer
from ligermodels.layers.config import Config, preset, tiny
from ligermodels.layers.decoder import CausalLM
from ligermodels.layers.mlp import GatedMLP
from ligermodels.weights.mapping import Rule, packed_qkv


@dataclass(kw_only=True)
class GlmConfig(Config):
    vocab_size: int = 151552
    intermediate_size: int = 13696
    num_hidden_layers: int = 40
    num_key_value_heads: int = 2
    head_dim: int = 128
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1.5625e-07
    pad_token_id: int | None = 151329
    attention_bias: bool = True

    default_partial_rotary_factor = 0.5
    partial_rotary = True


BASE = {"model_type": "glm", "rms_norm_eps": 1.5625e-07}


class Glm(CausalLM):
    Config = GlmConfig
    hub_class = "GlmForCausalLM"
    SIZES: ClassVar = {
        "tiny": tiny(BASE) | {"head_dim": 32, "pad_token_id": None},
        "9b": preset(BASE, 4096, 13696, 40, 32, 2) | {"head_dim": 128, "vocab_size": 151552},
    }

    def layer(self, config: GlmConfig, index: int) -> DecoderLayer:
        attention = Attention(config, qkv_bias=config.attention_bias, interleaved=True)
        return DecoderLayer(config, attention, GatedMLP(config))

    def weight_rules(self) -> tuple[Rule, ...]:
        return (packed_qkv(self.config),)
