"""float8 matrix products for the linears of the blocks, through torchao. Weights and saved files are unchanged.

Input, weight and output gradient are each scaled by their largest absolute value and rounded to float8 just before the
product (torchao's recipe "tensorwise"). Results have the compute dtype. Embedding, head, routers and routed experts are
not converted, nor is a linear whose sizes float8 products do not support. A base in FP8 needs no torchao: see
kernels/quant/fp8_products.py. All this module knows of a model is that the
linears to convert are in its blocks and have names that end in `_proj`.
"""

from typing import Any

import torch
from torch import nn

from ligermodels.adapters.lora_targets import BLOCKS
from ligermodels.errors import InputError
from ligermodels.kernels.quant.fp8_products import FP8_SIZES
from ligermodels.layers.packed import PackedLinear, PackedPart
from ligermodels.lazy_imports import import_package

MIN_CAPABILITY = (8, 9)


def convert(model: nn.Module, device: torch.device) -> int:
    """Replaces linears in place, and returns their number. Call it after LoRA is added and before sharding.

    model: may be on the meta device. device: the device it will train on. Raises InputError if the device does not
    support float8 products, torchao is missing, or no linear can be converted.
    """
    torchao = import_torchao(device)
    blocks = model.get_submodule(BLOCKS)
    names = {name for name, module in blocks.named_modules() if is_convertible(module, name)}
    for name in names:
        if isinstance(packed := blocks.get_submodule(name), PackedLinear):
            blocks.set_submodule(name, packed.as_linear())
    if not names:
        raise InputError(f"float8: no linear of the blocks has sizes that are multiples of {FP8_SIZES}; omit it")
    torchao.convert_to_float8_training(
        blocks,
        module_filter_fn=lambda _, name: name in names,
        config=torchao.Float8LinearConfig.from_recipe_name("tensorwise"),
    )
    return len(names)


def is_convertible(module: nn.Module, name: str) -> bool:
    """Whether a module is a linear to convert. With LoRA this is the base layer; the factors are too small."""
    if not isinstance(module, nn.Linear | PackedLinear) or not name.removesuffix(".base_layer").endswith("_proj"):
        return False
    if isinstance(module, PackedPart) or module.weight is None:
        return False  # either the packed linear is converted, or its parts are
    return module.in_features % FP8_SIZES == 0 and module.out_features % FP8_SIZES == 0


def import_torchao(device: torch.device) -> Any:
    """torchao.float8. Raises InputError where it is missing, or the device does not support float8 products."""
    check_float8_support(device)  # first, because importing torchao prints warnings if its kernels do not load
    return import_package("torchao.float8", "--float8")


def check_float8_support(device: torch.device) -> None:
    """Raises InputError if the device does not support float8 products."""
    found = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    if found is None or found < MIN_CAPABILITY:
        has = f"a {device.type}" if found is None else f"compute capability {found[0]}.{found[1]}"
        raise InputError(f"float8 needs a GPU of compute capability 8.9 (Ada, Hopper) or later, not {has}")
