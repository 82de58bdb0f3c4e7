"""The state of a run as named tensors, as a checkpoint stores them, and fingerprints of its frozen weights.

weights.<parameter>               a trained parameter; tied parameters once, under their first name
optimizer.<parameter>.<state>     a tensor of the optimizer state
optimizer.running_norm            with an optimizer step in the backward pass, what clips its gradients
objective.<name>                  a tensor of the objective, such as of a moving average of the weights
rank-<n>.random.<device>          the state of the random number generator of rank n
rank-<n>.objective.<name>         what the objective keeps on rank n, of any shape

Knows models, optimizers and ranks.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from ligermodels.distributed import rank
from ligermodels.training.optimizers.adamw import AdamW
from ligermodels.weights.loading import shard_and_offset

RUNNING_NORM = "optimizer.running_norm"
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # integer dtypes by their size in bytes


class Keeper(Protocol):
    """What a checkpoint knows of an objective: see `training.objectives.Objective`."""

    def tensors(self) -> dict[str, Tensor]: ...
    def state(self) -> dict[str, Tensor]: ...
    def restore(self, state: Mapping[str, Tensor]) -> None: ...


class NothingKept:
    """A `Keeper` without state."""

    def tensors(self) -> dict[str, Tensor]:
        return {}

    state = tensors

    def restore(self, state: Mapping[str, Tensor]) -> None:
        pass


def objective_tensors(objective: Keeper) -> dict[str, Tensor]:
    return {f"objective.{name}": tensor for name, tensor in objective.tensors().items()}


def own_prefix() -> str:
    """What the names of this rank's tensors of the objective begin with."""
    return f"rank-{rank()}.objective."


def trained_weights(model: nn.Module) -> dict[str, Tensor]:
    return {f"weights.{name}": p.detach() for name, p in model.named_parameters() if p.requires_grad}


def optimizer_state(model: nn.Module, optimizer: AdamW) -> dict[str, Tensor]:
    """Returns the state of every trained parameter; its initial state if it was never updated."""
    optimizer.create_states()
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    states = {names[parameter]: state.items() for parameter, state in optimizer.state.items()}
    running = {} if optimizer.running_norm is None else {RUNNING_NORM: optimizer.running_norm}
    return running | {f"optimizer.{name}.{key}": value for name, state in states.items() for key, value in state}


class HostCopies:
    """Copies of tensors in host memory, pinned for tensors on a GPU. The memory is allocated once and reused."""

    def __init__(self) -> None:
        self.memory: dict[str, Tensor] = {}

    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns copies of this rank's shards, after the copies are complete. Overwrites the previous copies."""
        copies: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            local, _ = shard_and_offset(tensor)
            known = self.memory.get(name)
            if known is None or (known.shape, known.dtype) != (local.shape, local.dtype):
                self.memory[name] = torch.empty(local.shape, dtype=local.dtype, pin_memory=local.is_cuda)
            copies[name] = self.memory[name].copy_(local, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return copies


def random_states(device: torch.device) -> dict[str, Tensor]:
    """Returns the state of this rank's random number generators."""
    states = {f"rank-{rank()}.random.cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states[f"rank-{rank()}.random.cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_states(states: Mapping[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[f"rank-{rank()}.random.cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[f"rank-{rank()}.random.cuda"], device)


def frozen_weights(model: nn.Module) -> dict[str, list[Any]]:
    """Returns the fingerprint of each frozen parameter. Every rank calls it."""
    return {name: fingerprint(p) for name, p in model.named_parameters() if not p.requires_grad}


@torch.no_grad()
def fingerprint(parameter: Tensor) -> list[Any]:
    """Returns [dtype, shape, one checksum per dimension].

    The checksum of a dimension is Σ bits (1 + index) modulo 2⁶⁴: equal values have equal checksums, however they are
    sharded.
    """
    local, offset = shard_and_offset(parameter)
    bits = local.view(INTEGERS[local.element_size()])
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
