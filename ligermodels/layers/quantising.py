"""Which weights of a model are quantised, and how: the linears of its blocks, in a named format.

Embeddings, the head, norms, routers and biases stay as they are. Must not know files or any architecture.
"""

import math
from collections.abc import Iterable

import torch
from torch import nn

from ligermodels.errors import InputError, suggest
from ligermodels.kernels.nf4 import NF4_BLOCK, Nf4
from ligermodels.kernels.quantised_weight import WeightLayout
from ligermodels.layers.decoder import CausalLM
from ligermodels.layers.lora import lora_modules
from ligermodels.layers.lora_targets import linear_projections
from ligermodels.layers.packed import PackedLinear
from ligermodels.layers.quantised import QuantisedLinear
from ligermodels.weights.mapping import pieces_of

FORMATS = ("nf4",)


def quantise(model: CausalLM, scheme: str, only: Iterable[str] | None = None) -> None:
    """Replaces the linears of the blocks by quantised ones, in place; their bytes are still to be set, by loading.

    model: on the meta device, in the dtype in which weights are used. scheme: one of FORMATS.
    only: the names of the weights that are quantised, if a checkpoint says which; None for all of them.
    All parameters are frozen. Raises InputError for another scheme, and for weights that it cannot hold.
    """
    if scheme not in FORMATS:
        raise InputError(f"quantize is {scheme!r}{suggest(scheme, FORMATS)}; must be one of {', '.join(FORMATS)}")
    if any(lora_modules(model)):
        raise InputError("the model has LoRA already; quantise the base before LoRA is added to it")
    names = [f"{name}.weight" for name in linear_projections(model, ())]
    other = next((name for name in only or () if name not in names), None)
    if other is not None:
        raise InputError(f"{other}: is stored in few bits, which is supported for the linears of the blocks alone")
    layouts = {name: layout_of(model, name, scheme) for name in (names if only is None else only)}
    model.requires_grad_(False)
    for parameter, layout in layouts.items():
        name = parameter.removesuffix(".weight")
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear | PackedLinear)
        if isinstance(linear, PackedLinear):
            for part in linear.rows:
                del linear.parent._modules[part]
        model.set_submodule(name, QuantisedLinear(layout, linear.bias, linear.weight.device))


def quantisable(model: CausalLM) -> bool:
    """Whether `quantise` takes the linears of a model: their inputs are whole blocks."""
    return all(packed.in_features % NF4_BLOCK == 0 for packed in linear_projections(model, ()).values())


def layout_of(model: CausalLM, parameter: str, scheme: str) -> WeightLayout:
    """The layout of a parameter. Each of the Hub's tensors in it is quantised by itself. Raises InputError."""
    weight = model.get_parameter(parameter)
    shape, dtype = tuple(weight.shape), weight.dtype
    if shape[-1] % NF4_BLOCK:
        raise InputError(
            f"quantize {scheme}: {parameter} has {shape[-1]} columns, which are no multiple of {NF4_BLOCK}: this model "
            "cannot be quantised in blocks; leave quantize out"
        )
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise InputError(f"quantize {scheme}: dtype is {dtype}; must be bfloat16, float16 or float32")
    pieces = pieces_of(parameter, shape, model.weight_rules())
    return Nf4(shape, tuple(math.prod(piece.box_shape[:-1]) for piece in pieces), dtype)
