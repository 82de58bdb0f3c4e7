"""LoRA for the tests. Does not import tests.conftest, so that a worker process can import this file."""

from torch import nn

from ligermodels.adapters.lora_targets import add_lora
from ligermodels.layers.lora import LoRALinear, lora_modules

RANK, ALPHA = 4, 6.0


def adapt(model, **settings):
    """Adds LoRA with random B to every projection of every block and freezes the rest."""
    add_lora(model, **({"rank": RANK, "alpha": ALPHA} | settings))
    for layer in lora_modules(model):
        nn.init.normal_(layer.lora_B, std=0.02)
    return model


def lora(base_layer, dropout=0.0, columns=None):
    """A LoRALinear with random B."""
    layer = LoRALinear(base_layer, RANK, ALPHA, columns=columns, dropout=dropout)
    nn.init.normal_(layer.lora_B, std=0.02)
    return layer
