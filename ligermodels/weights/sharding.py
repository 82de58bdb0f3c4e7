"""Parameters that may be sharded over ranks (DTensors): gather one in full, or copy a value into the local shard."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor


def reshard(model: nn.Module) -> None:
    """Makes FSDP2 free the parameters that it has gathered. After a forward pass without a backward pass some
    parameters are still gathered, and in the compute dtype."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def is_sharded(module: nn.Module) -> bool:
    """Whether FSDP2 gathers the module's own parameters for its forward."""
    return isinstance(module, FSDPModule)


def full_tensor(parameter: Any, device: torch.device | None = None) -> Tensor:
    """The full value of a parameter or of a quantised weight, on its device.

    device: where a quantised weight is dequantised, whose bytes may be in host memory; None for where they are.
    For a DTensor this is a collective: every rank must call it."""
    if not isinstance(parameter, Tensor):  # in few bits
        return parameter._replace(data=full_tensor(parameter.data).to(device)).dequantize()
    parameter = parameter.detach()
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


@torch.no_grad()
def copy_local_shard(parameter: Tensor, value: Tensor) -> None:
    """Copies `value` into a parameter; into the local shard if it is a DTensor. Every rank must pass the same full
    value. Nothing is communicated."""
    if isinstance(parameter, DTensor):
        value = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.copy_(value)
