"""Which weights of a model are quantised, and how: the linears and routed experts of its blocks, in a named format.

Embeddings, the head, norms, routers and biases stay as they are.
"""

import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import torch
from torch import nn

from ligermodels.adapters.lora_targets import expert_projections, linear_projections
from ligermodels.configs.quantisation import FORMATS, Fp8, read_scaled, scheme_of
from ligermodels.errors import InputError, suggest
from ligermodels.kernels.quant.fp8 import FP8_BLOCK, Float8
from ligermodels.kernels.quant.fp8_products import MultipliedFloat8
from ligermodels.kernels.quant.mxfp4 import Mxfp4Layout
from ligermodels.kernels.quant.nf4 import NF4_BLOCK, DensePart, Nf4, PartlyNf4
from ligermodels.kernels.quant.quantised_weight import WeightLayout
from ligermodels.layers.decoder import CausalLM
from ligermodels.layers.lora import lora_modules
from ligermodels.layers.moe import Experts, QuantisedExperts
from ligermodels.layers.packed import PackedLinear
from ligermodels.layers.quantised import FrozenWeights, QuantisedLinear
from ligermodels.weights.mapping import Piece, Rule, pieces_of


def quantise(
    model: CausalLM, scheme: str, only: Iterable[str] | None = None, rules: tuple[Rule, ...] | None = None,
    dense: Mapping[str, torch.dtype] = MappingProxyType({}),
) -> None:  # fmt: skip
    """Replaces linears and routed experts of the blocks by quantised ones, in place; loading sets their bytes.

    model: on the meta device, in the dtype in which weights are used. scheme: one of FORMATS.
    only: the names of the weights that are quantised, if a checkpoint says which; None for all of them.
    rules: of the layout whose tensors are quantised, each by itself; None for the Hub's own.
    dense: the tensors of weights in NF4 that a checkpoint does not quantise, and their dtypes there.
    All parameters are frozen. Raises InputError for another scheme, and for weights that it cannot hold.
    """
    if scheme not in FORMATS:
        raise InputError(f"quantize is {scheme!r}{suggest(scheme, FORMATS)}")
    if scheme == "mxfp4" and only is None:
        raise InputError("quantize mxfp4: keeps what a checkpoint has in MXFP4, and this one has nothing; give nf4")
    if any(lora_modules(model)):
        raise InputError("the model has LoRA already; quantise the base before LoRA is added to it")
    names = quantisable_weights(model)
    other = next((name for name in only or () if name not in names), None)
    if other is not None:
        raise InputError(
            f"{other}: is stored in few bits, which is supported for the linears and routed experts of the blocks alone"
        )
    rules = model.weight_rules() if rules is None else rules
    layouts: dict[str, dict[str, WeightLayout]] = {}  # by module
    for name in names if only is None else only:
        module, _, weight = name.rpartition(".")
        layouts.setdefault(module, {})[weight] = layout_of(model, name, scheme, rules, dense)
    model.requires_grad_(False)
    for name, of_module in layouts.items():
        model.set_submodule(name, quantised_module(name, model.get_submodule(name), of_module))


def multiply_in_fp8(model: CausalLM) -> None:
    """Makes the products of weights in FP8 ones of FP8, in place, before loading sets their bytes.

    model: on the meta device, quantised in FP8. Weights that its checkpoint does not store in FP8 get a scale for each
    row, with which products are fastest. Raises InputError if none is in sizes that FP8 products take.
    """
    stored = scheme_of(model.config.raw) == "fp8"
    frozen = [module for module in model.modules() if isinstance(module, FrozenWeights)]
    weights = [(module, name, x) for module in frozen for name, x in module.layouts.items() if isinstance(x, Float8)]
    layouts = [
        MultipliedFloat8(x.shape, x.parts, x.dtype, x.block if stored else (1, x.columns)) for _, _, x in weights
    ]
    if not any(layout.is_multiplied for layout in layouts):
        raise InputError(
            "float8: no weight in FP8 is used in bfloat16 and has sizes that are multiples of 16, or of 128 where its "
            "scales are of blocks; leave it out"
        )
    for (module, name, _), layout in zip(weights, layouts, strict=True):
        module.set_layout(name, layout, module.quantised(name).data.device)


def quantised_module(name: str, module: nn.Module, layouts: Mapping[str, WeightLayout]) -> nn.Module:
    """What stands for a module with weights of these layouts. Raises InputError."""
    if isinstance(module, Experts):
        if len(layouts) == 1:
            raise InputError(f"{name}: one projection of routed experts is in few bits, the other is not: unsupported")
        return QuantisedExperts(module, layouts)
    assert isinstance(module, nn.Linear | PackedLinear)
    if isinstance(module, PackedLinear):
        for part in module.rows:
            del module.parent._modules[part]
    return QuantisedLinear(layouts["weight"], module.bias, module.weight.device)


def quantisable_weights(model: CausalLM) -> list[str]:
    """The parameters that `quantise` takes, by name."""
    return [*(f"{name}.weight" for name in linear_projections(model, ())), *expert_projections(model)]


def quantisable(model: CausalLM) -> bool:
    """Whether `quantise` takes a model: the rows of its weights are whole blocks."""
    return all(model.get_parameter(name).shape[-1] % NF4_BLOCK == 0 for name in quantisable_weights(model))


def is_stored_in_nf4(model: CausalLM) -> bool:
    """Whether the model's checkpoint is in NF4, in which it stays when it is loaded."""
    return scheme_of(model.config.raw) == "nf4"


def layout_of(
    model: CausalLM, parameter: str, scheme: str, rules: tuple[Rule, ...], dense: Mapping[str, torch.dtype]
) -> WeightLayout:
    """The layout of a parameter. Each of the tensors in it is quantised by itself. dense: as that of `quantise`.

    Raises InputError.
    """
    weight = model.get_parameter(parameter)
    shape, dtype = tuple(weight.shape), weight.dtype
    if scheme == "nf4" and shape[-1] % NF4_BLOCK:
        raise InputError(
            f"quantize {scheme}: {parameter} has {shape[-1]} columns, which are no multiple of {NF4_BLOCK}; give "
            "fp8, or leave quantize out"
        )
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise InputError(f"quantize {scheme}: dtype is {dtype}; must be bfloat16, float16 or float32")
    pieces = list(pieces_of(parameter, shape, rules))
    if any(piece.tensor in dense for piece in pieces):
        return PartlyNf4(tuple(layout_of_part(piece, dtype, dense.get(piece.tensor)) for piece in pieces))
    parts = tuple(math.prod(piece.box_shape[:-1]) for piece in pieces)
    if scheme == "fp8":
        stored = read_scaled(model.config.raw)
        return Float8(shape, parts, dtype, stored.block or FP8_BLOCK if isinstance(stored, Fp8) else FP8_BLOCK)
    return Nf4(shape, parts, dtype) if scheme == "nf4" else Mxfp4Layout(shape, parts, dtype)


def layout_of_part(piece: Piece, dtype: torch.dtype, stored: torch.dtype | None) -> Nf4 | DensePart:
    """Returns the layout of one tensor of a weight. dtype is that in which it is used, stored that of a tensor which is
    not quantised."""
    rows = (piece.shape[0],)
    return Nf4(piece.shape, rows, dtype) if stored is None else DensePart(piece.shape, rows, dtype, stored)
