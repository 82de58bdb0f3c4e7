"""Gemma 2: Gemma with RMSNorm before and after each branch, softcaps on attention scores and logits, and a sliding
window in every other layer.
"""

from dataclasses import dataclass
from typing import ClassVar

from ligermodels.configs.base import preset, tiny
from ligermodels.configs.features import SoftcapConfig
from ligermodels.layers.attention import Attention
from ligermodels.layers.block import SandwichLayer
from ligermodels.layers.decoder import CausalLM
from ligermodels.layers.mlp import GatedMLP


@dataclass(kw_only=True)
class Gemma2Config(SoftcapConfig):
    vocab_size: int = 256000
    hidden_size: int = 2304
    intermediate_size: int = 9216
    num_hidden_layers: int = 26
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    max_position_embeddings: int = 8192
    attn_logit_softcapping: float | None = 50.0
    final_logit_softcapping: float | None = 30.0

    def is_sliding(self, layer: int) -> bool:
        return layer % 2 == 0


BASE = {"model_type": "gemma2"}
HUB = BASE | {"vocab_size": 256000, "head_dim": 256, "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}


class Gemma2(CausalLM):
    Config = Gemma2Config
    hub_class = "Gemma2ForCausalLM"
    SIZES: ClassVar = {
        "tiny": tiny(BASE) | {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 128},
        "2b": preset(HUB, 2304, 9216, 26, 8, 4),
        "9b": preset(HUB, 3584, 14336, 42, 16, 8),
    }

    def layer(self, config: Gemma2Config, index: int) -> SandwichLayer:
        attention = Attention(
            config, qkv_bias=config.attention_bias, o_bias=config.attention_bias, window=config.window(index),
            scale=config.attention_scale, softcap=config.attn_logit_softcapping,
        )  # fmt: skip
        return SandwichLayer(config, attention, GatedMLP(config))
