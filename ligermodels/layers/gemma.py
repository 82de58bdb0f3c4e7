"""The blocks of Gemma and of Gemma 2, which the text models of PaliGemma have too."""

from ligermodels.configs.text_models import Gemma2Config, GemmaConfig
from ligermodels.layers.attention import Attention
from ligermodels.layers.block import DecoderLayer, SandwichLayer
from ligermodels.layers.mlp import GatedMLP


def gemma_block(config: GemmaConfig) -> DecoderLayer:
    attention = Attention(config, qkv_bias=config.attention_bias, o_bias=config.attention_bias)
    return DecoderLayer(config, attention, GatedMLP(config))


def gemma2_block(config: Gemma2Config, index: int) -> SandwichLayer:
    """The block number `index`; every other one has a sliding window."""
    attention = Attention(
        config, qkv_bias=config.attention_bias, o_bias=config.attention_bias, window=config.window(index),
        scale=config.attention_scale, softcap=config.attn_logit_softcapping,
    )  # fmt: skip
    return SandwichLayer(config, attention, GatedMLP(config))
