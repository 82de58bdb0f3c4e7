"""Puts LoRA into a model, for tests; without an import of what sets tests up, so that a worker process can use it."""

from itertools import accumulate, pairwise

from torch import nn

from ligermodels.layers.attention import Attention
from ligermodels.layers.lora import LoRALinear
from ligermodels.layers.mlp import GatedMLP

RANK, ALPHA = 4, 6.0


def packed(*sizes):
    """The columns of projections of these widths, side by side."""
    return tuple(pairwise(accumulate(sizes, initial=0)))


def adapt(model, dropout=0.0, dtype=None):
    """LoRA on every projection of every block, B drawn at random; all else frozen."""
    model.requires_grad_(False)
    query, key_value = model.config.query_size, model.config.key_value_size
    for module in model.modules():
        if isinstance(module, Attention):
            module.qkv_proj = lora(module.qkv_proj, dropout, dtype, packed(query, key_value, key_value))
            module.o_proj = lora(module.o_proj, dropout, dtype)
        if isinstance(module, GatedMLP):
            inner = module.down_proj.in_features
            module.gate_up_proj = lora(module.gate_up_proj, dropout, dtype, packed(inner, inner))
            module.down_proj = lora(module.down_proj, dropout, dtype)
    return model


def lora(base_layer, dropout=0.0, dtype=None, columns=None):
    layer = LoRALinear(base_layer, RANK, ALPHA, columns=columns, dropout=dropout)
    nn.init.normal_(layer.lora_B, std=0.02)
    layer.lora_A.data, layer.lora_B.data = layer.lora_A.to(dtype), layer.lora_B.to(dtype)
    return layer
