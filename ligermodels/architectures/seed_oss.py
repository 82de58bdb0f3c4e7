"""Seed-OSS 36B: Llama with biases on q, k and v, its own head_dim, and dropout of both branches in training."""

from dataclasses import dataclass
from typing import ClassVar

from ligermodels.configs.base import Config, preset, tiny
from ligermodels.layers.attention import Attention
from ligermodels.layers.block import DropoutLayer
from ligermodels.layers.decoder import CausalLM
from ligermodels.layers.mlp import GatedMLP


@dataclass(kw_only=True)
class SeedOssConfig(Config):
    vocab_size: int = 155136
    intermediate_size: int = 27648
    num_hidden_layers: int = 64
    num_attention_heads: int = 80
    num_key_value_heads: int = 8
    head_dim: int = 128
    max_position_embeddings: int = 524288
    pad_token_id: int | None = 1
    attention_bias: bool = True
    attention_out_bias: bool = False
    attention_dropout: float = 0.1
    residual_dropout: float = 0.1


BASE = {"model_type": "seed_oss", "rms_norm_eps": 1e-6, "attention_dropout": 0.0, "residual_dropout": 0.0}
HUB = BASE | {"rope_theta": 10000000.0, "max_position_embeddings": 524288, "bos_token_id": 0, "eos_token_id": 2}


class SeedOss(CausalLM):
    Config = SeedOssConfig
    hub_class = "SeedOssForCausalLM"
    SIZES: ClassVar = {
        "tiny": tiny(BASE) | {"head_dim": 32, "pad_token_id": None},
        "36b": preset(HUB, 5120, 27648, 64, 80, 8) | {"vocab_size": 155136},
    }

    def layer(self, config: SeedOssConfig, index: int) -> DropoutLayer:
        attention = Attention(config, qkv_bias=config.attention_bias, o_bias=config.attention_out_bias)
        return DropoutLayer(config, attention, GatedMLP(config, bias=config.mlp_bias), config.residual_dropout)
