"""Linears of the blocks that multiply in float8, by torchao. Weights, and what is saved of them, stay as they are.

Input, weight and output's gradient are each scaled by their largest element and rounded just before the product, which
is torchao's recipe "tensorwise"; results have the dtype of the computation. Embedding, head, routers and routed experts
are left alone, and so is a linear with a side that the products cannot have. Knows of a model that the linears meant
are those of its blocks whose names end in `_proj`.
"""

import torch
from torch import nn

from ligermodels.errors import InputError
from ligermodels.layers.lora_targets import BLOCKS
from ligermodels.training.packages import import_package

LEAST_CAPABILITY = (8, 9)
MULTIPLE = 16  # both sides of a weight are such


def convert(model: nn.Module, device: torch.device) -> int:
    """Replaces linears in place, and returns how many: after LoRA is in, before sharding. The model may be on the meta
    device.

    device: where it will train. Raises InputError where that cannot multiply in float8, torchao is missing or there is
    nothing to convert.
    """
    refuse_unable(device)  # first: where torchao's own kernels do not load, importing it writes lines of warnings
    torchao = needs("torchao.float8", "--float8")
    fit = [name for name, module in model.get_submodule(BLOCKS).named_modules() if fits(module, name)]
    if not fit:
        raise InputError(f"float8: no linear of the blocks has sides that are multiples of {MULTIPLE}; leave it out")
    torchao.convert_to_float8_training(
        model.get_submodule(BLOCKS),
        module_filter_fn=lambda _, name: name in fit,
        config=torchao.Float8LinearConfig.from_recipe_name("tensorwise"),
    )
    return len(fit)


def fits(module: nn.Module, name: str) -> bool:
    """Under LoRA, what is converted is the base: the factors are narrow."""
    if not isinstance(module, nn.Linear) or not name.removesuffix(".base_layer").endswith("_proj"):
        return False
    return module.in_features % MULTIPLE == 0 and module.out_features % MULTIPLE == 0


def refuse_unable(device: torch.device) -> None:
    found = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    if found is None or found < LEAST_CAPABILITY:
        has = f"a {device.type}" if found is None else f"compute capability {found[0]}.{found[1]}"
        raise InputError(f"float8 needs a GPU of compute capability 8.9 (Ada, Hopper) or later, not {has}")
