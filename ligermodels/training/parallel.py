"""One process or many: process group, FSDP2 sharding, sums over ranks, gradient norm.

Every function also works on a single process without torchrun, where there is nothing to shard or sum. Sharded weights
are fp32 masters computed with in the run's dtype, their gradients reduced in fp32; a single process keeps weights and
AdamW states in the run's dtype. The loss is divided by the global token count before backward, so gradients are summed
over ranks, never averaged. Knows of a model that its blocks are `model.model.layers` and the rest is the root's.
"""

import gc
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from ligermodels.errors import InputError


@dataclass(frozen=True)
class World:
    """This process among all of them. Without torchrun: rank 0 of 1."""

    device: torch.device
    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0


def start() -> World:
    """Joins the process group that torchrun describes, if it started us: NCCL on GPUs, gloo on CPUs."""
    device = (
        torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if torch.cuda.is_available() else torch.device("cpu")
    )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if "RANK" not in os.environ:
        return World(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo", device_id=device if device.type == "cuda" else None
    )
    return World(device, dist.get_rank(), dist.get_world_size())


def stop() -> None:
    """Leaves the process group. A sharded model that is garbage by now holds it still, in cycles, and with it gloo's
    threads, which must not live to see the interpreter shut down: they abort."""
    if dist.is_initialized():
        gc.collect()
        dist.destroy_process_group()


def wait_for_all() -> None:
    """At the end of a run: a rank that leaves early closes connections that others may still be using."""
    if dist.is_initialized():
        dist.barrier()


def total(x: Tensor) -> Tensor:
    """The sum of `x` over all ranks, on all ranks; a new tensor."""
    x = x.clone()
    if dist.is_initialized():
        dist.all_reduce(x)
    return x


def shard(model: nn.Module, world: World, dtype: torch.dtype) -> None:
    """Splits every parameter over the ranks, in place: a unit a block; embedding, final norm and head are the root's.

    model: fp32 parameters, on the meta device or with equal values on every rank. dtype: that of the computation.
    Raises InputError where one parameter is used in two units.
    """
    if world.size == 1:
        return
    refuse_ties_between_units(model)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    mesh = init_device_mesh(world.device.type, (world.size,))
    for block in blocks(model):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for unit in units(model):
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum


def blocks(model: nn.Module) -> list[nn.Module]:
    return list(model.get_submodule("model.layers").children())


def units(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def refuse_ties_between_units(model: nn.Module) -> None:
    """torch 2.11 shards such a parameter twice and silently trains two copies."""
    owner: dict[int, tuple[int | None, str]] = {}
    inside = {id(module): number for number, block in enumerate(blocks(model)) for module in block.modules()}
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            unit, full_name = inside.get(id(module)), f"{module_name}.{name}"
            other, other_name = owner.setdefault(id(parameter), (unit, full_name))
            if other != unit:
                raise InputError(
                    f"{full_name} is tied to {other_name}: sharding cannot tie weights across decoder blocks"
                )


def reduce_gradients(model: nn.Module, now: bool) -> None:
    """Whether the next backward sums gradients over ranks; with accumulation only the last one must."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(now)


def gradient_norm(model: nn.Module) -> Tensor:
    """The joint norm of all gradients, over all ranks: a device scalar, fp32."""
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).float()


def read_later(x: Tensor) -> Callable[[], list[float]]:
    """Starts to copy a device vector to the host; what it returns waits for that copy, not for work queued since."""
    if not x.is_cuda:
        return x.tolist
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def read() -> list[float]:
        copied.synchronize()
        return host.tolist()

    return read
