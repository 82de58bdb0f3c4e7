"""Parameters that may be split over ranks: all of one, and the part that a rank keeps. Knows no file and no layer."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor


def reshard(model: Any) -> None:
    """Has FSDP2 let go of what it has gathered: after a forward alone some parameters are still whole, and in the dtype
    of computation. model: a torch.nn.Module."""
    for _, module in model.named_modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def full_tensor(parameter: Tensor) -> Tensor:
    """All of a parameter, on its device. Of a DTensor every rank asks for it, and gets it."""
    parameter = parameter.detach()
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


@torch.no_grad()
def copy_local_shard(parameter: Tensor, value: Tensor) -> None:
    """Copies into a parameter its part of a value that every rank has whole; nothing is communicated."""
    if isinstance(parameter, DTensor):
        value = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.copy_(value)
