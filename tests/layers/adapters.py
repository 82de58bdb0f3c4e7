"""Puts LoRA into a model, for tests; without an import of what sets tests up, so that a worker process can use it."""

from torch import nn

from ligermodels.layers.lora import LoRALinear, lora_modules
from ligermodels.layers.lora_targets import add_lora

RANK, ALPHA = 4, 6.0


def adapt(model, **settings):
    """LoRA on every projection of every block, B drawn at random; all else frozen."""
    add_lora(model, **({"rank": RANK, "alpha": ALPHA} | settings))
    for layer in lora_modules(model):
        nn.init.normal_(layer.lora_B, std=0.02)
    return model


def lora(base_layer, dropout=0.0, columns=None):
    layer = LoRALinear(base_layer, RANK, ALPHA, columns=columns, dropout=dropout)
    nn.init.normal_(layer.lora_B, std=0.02)
    return layer
