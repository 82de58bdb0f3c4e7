"""What a run needs to go on exactly where it was, as tensors by name, and what tells its frozen weights apart.

weights.<parameter>               a trained parameter; tied ones once, under their first name
optimizer.<parameter>.<state>     a tensor of the optimizer's state
rank-<n>.<…>                      what is rank n's own: its random numbers, the blocks of an 8-bit state of its shards

Knows models, optimizers and ranks; no file.
"""

from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ligermodels.errors import CheckpointError
from ligermodels.weights.loading import local_part

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # integers, by their bytes


def rank() -> int:
    return distributed.get_rank() if distributed.is_initialized() else 0


def ranks() -> int:
    return distributed.get_world_size() if distributed.is_initialized() else 1


def reshard(model: nn.Module) -> None:
    """After a forward alone the root's parameters are still whole, and in the dtype of computation."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def trained_weights(model: nn.Module) -> dict[str, Tensor]:
    return {f"weights.{name}": p.detach() for name, p in model.named_parameters() if p.requires_grad}


def parts(optimizer: Any) -> list[torch.optim.Optimizer]:
    """The optimizers that one is made of."""
    return getattr(optimizer, "optimizers", [optimizer])


def kind(optimizer: Any) -> list[str]:
    return [type(part).__name__ for part in parts(optimizer)]


def states_by_parameter(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Mapping[str, Any]]:
    """A parameter has none before its first update."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {names[parameter]: optimizer.state[parameter] for parameter in parameters if parameter in optimizer.state}


def updated(model: nn.Module, optimizer: Any) -> list[str]:
    """The parameters of which the optimizer has a state."""
    return [name for part in parts(optimizer) for name in states_by_parameter(model, part)]


@torch.no_grad()
def optimizer_state(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """What there is so far. Raises CheckpointError for what is no tensor."""
    tensors: dict[str, Tensor] = {}
    for part in parts(optimizer):
        by_parameter = states_by_parameter(model, part).items()
        states = {f"optimizer.{name}.{key}": value for name, state in by_parameter for key, value in state.items()}
        tensors |= rank_owned(states) if any(map(is_quantized, states.values())) else states
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(f"{name} is {value!r}, not a tensor, and cannot be kept; choose another --optimizer")
    return tensors


def is_quantized(value: Any) -> bool:
    """Whether a state, or the shard of it, is made of several tensors, such as torchao's codes and scales."""
    return is_traceable_wrapper_subclass(value._local_tensor if isinstance(value, DTensor) else value)


def rank_owned(states: Mapping[str, Any]) -> dict[str, Tensor]:
    """States as plain tensors of this rank: blocks are cut from a rank's shard, and no other number of ranks has them.

    Steps are the same on all ranks, and stay everybody's.
    """
    tensors: dict[str, Tensor] = {}
    for name, value in states.items():
        local = value.to_local() if isinstance(value, DTensor) else value
        if is_quantized(local):
            inner, _ = local.__tensor_flatten__()  # type: ignore[union-attr]
            tensors |= {f"rank-{rank()}.{name}.{field}": getattr(local, field) for field in inner}
        elif isinstance(value, DTensor):
            tensors[f"rank-{rank()}.{name}"] = local
        else:
            tensors[name] = value
    return tensors


def make_optimizer_state(model: nn.Module, optimizer: Any, names: Container[str]) -> None:
    """Gives a new optimizer the state it has after a step, of the parameters of these names.

    Gradients are gone after it, and parameters may have other values: all of this is to be loaded.
    """
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    with torch.compiler.set_stance("force_eager"):  # one step is not worth compiling for
        for part in parts(optimizer):
            part.step()
    for name, parameter in model.named_parameters():
        parameter.grad = None
        if name not in names:
            for part in parts(optimizer):
                part.state.pop(parameter, None)


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
    local, offset = local_part(parameter)
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
