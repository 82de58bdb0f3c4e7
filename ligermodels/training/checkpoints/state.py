"""What a run needs to go on exactly where it was, as tensors by name, and what tells its frozen weights apart.

weights.<parameter>               a trained parameter; tied ones once, under their first name
optimizer.<parameter>.<state>     a tensor of the optimizer's state
rank-<n>.random.<device>          the random numbers of rank n

Knows models, optimizers and ranks; no file.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from ligermodels.distributed import rank
from ligermodels.training.optimizers.adamw import AdamW
from ligermodels.weights.loading import local_shard

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # integers, by their bytes


def trained_weights(model: nn.Module) -> dict[str, Tensor]:
    return {f"weights.{name}": p.detach() for name, p in model.named_parameters() if p.requires_grad}


def optimizer_state(model: nn.Module, optimizer: AdamW) -> dict[str, Tensor]:
    """Of every trained parameter: zeros, as its first update would find them, where there was none."""
    optimizer.create_states()
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    states = {names[parameter]: state.items() for parameter, state in optimizer.state.items()}
    return {f"optimizer.{name}.{key}": value for name, state in states.items() for key, value in state}


class HostCopies:
    """Tensors' values in host memory, pinned for those on a GPU, which is taken once and used again."""

    def __init__(self) -> None:
        self.memory: dict[tuple[str, torch.Size, torch.dtype], Tensor] = {}

    def of(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's part of each, complete when it returns. Overwrites what it returned before."""
        copies: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            local, _ = local_shard(tensor)
            key = name, local.shape, local.dtype
            if key not in self.memory:
                self.memory[key] = torch.empty(local.shape, dtype=local.dtype, pin_memory=local.is_cuda)
            copies[name] = self.memory[key].copy_(local, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return copies


def random_numbers(device: torch.device) -> dict[str, Tensor]:
    """The state of this rank's generators."""
    states = {f"rank-{rank()}.random.cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states[f"rank-{rank()}.random.cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_numbers(states: Mapping[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[f"rank-{rank()}.random.cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[f"rank-{rank()}.random.cuda"], device)


def frozen_weights(model: nn.Module) -> dict[str, list[Any]]:
    """What each frozen parameter is known by: dtype, shape, and sums of its bits. Every rank calls."""
    return {name: fingerprint(p) for name, p in model.named_parameters() if not p.requires_grad}


@torch.no_grad()
def fingerprint(parameter: Tensor) -> list[Any]:
    """Equal for equal values, however they are sharded: for each dimension Σ bits (1 + index), modulo 2⁶⁴."""
    local, offset = local_shard(parameter)
    bits = local.view(BITS[local.element_size()])
    sums = torch.zeros(max(1, bits.dim()), dtype=torch.int64, device=local.device)
    for dim, start in enumerate(offset):
        others = [other for other in range(bits.dim()) if other != dim]
        by_index = bits.sum(others, dtype=torch.int64) if others else bits.long()
        sums[dim] = (by_index * torch.arange(start + 1, start + 1 + len(by_index), device=local.device)).sum()
    if not offset:
        sums[0] = bits
    if isinstance(parameter, DTensor):
        shares = [p if isinstance(p, Replicate) else Partial() for p in parameter.placements]
        sums = DTensor.from_local(sums, parameter.device_mesh, shares).full_tensor()
    return [str(parameter.dtype).removeprefix("torch."), list(parameter.shape), sums.tolist()]
