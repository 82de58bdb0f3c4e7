"""Ranks and collectives: this process's rank, the process group, sums over ranks, and errors that all ranks raise.

Every function also works in a single process without torchrun.
"""

import gc
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.gpus import Gpu, parse_gpus

TIMEOUT = timedelta(minutes=10)  # of a collective: if one rank dies or hangs, the others end after this time
LAST_PORT = 65535
START = "start the processes by torchrun, which sets it"
Value = TypeVar("Value")


@dataclass(frozen=True)
class World:
    """This process's device and rank, and the number of ranks. Without torchrun: rank 0 of 1.

    context: how many neighbouring ranks share each row of tokens (context parallelism).
    planned_for: the GPU of every rank where a run is planned and not made; None for those of this machine.
    """

    device: torch.device
    rank: int = 0
    size: int = 1
    context: int = 1
    planned_for: Gpu | None = None

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        """Which of the `data_size` parts of a batch this rank computes, alone or with those that share its rows."""
        return self.rank // self.context

    @property
    def data_size(self) -> int:
        return self.size // self.context

    @property
    def context_rank(self) -> int:
        """Which of the `context` parts of a row this rank has."""
        return self.rank % self.context


def start(timeout: timedelta = TIMEOUT) -> World:
    """Joins the process group of torchrun, if torchrun started this process: NCCL on GPUs, gloo on CPUs.

    timeout: of a collective; a rank that waits longer ends with an error. An existing process group is kept.
    Raises InputError for environment variables that torchrun would not set: ranks would wait for each other in vain.
    """
    refuse_unfit_environment()
    device = torch.device("cuda", local_rank()) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if under_torchrun() and not dist.is_initialized():
        device_id = device if device.type == "cuda" else None
        dist.init_process_group(backend_of(device), timeout=timeout, device_id=device_id)
    return World(device, rank(), world_size())


def planned_world(gpus: str) -> World:
    """The first rank on GPUs that this machine need not have, such as "24GB" or "h100,4". Raises InputError."""
    gpu, number = parse_gpus(gpus)
    return World(torch.device("cuda"), size=number, planned_for=gpu)


def refuse_unfit_environment() -> None:
    """Raises InputError where the variables of torchrun do not say which rank this is, and where the others are."""
    if dist.is_initialized():
        return
    required = ("RANK", "WORLD_SIZE", "MASTER_PORT") if under_torchrun() else ()
    for name in (*required, "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        value = os.environ.get(name, "" if name in required else "0")
        if not re.fullmatch("[0-9]{1,9}", value):
            raise InputError(f"{name}: is {value!r}; must be a whole number, 0 or more: {START}")
    if ranks_of_host() == 0:
        raise InputError(f"LOCAL_WORLD_SIZE: is 0; must be at least 1: {START}")
    if required and rank() >= int(os.environ["WORLD_SIZE"]):
        raise InputError(
            f"RANK: is {rank()}, but WORLD_SIZE is {os.environ['WORLD_SIZE']}; ranks count from 0: {START}"
        )
    if required and int(os.environ["MASTER_PORT"]) > LAST_PORT:
        raise InputError(f"MASTER_PORT: is {os.environ['MASTER_PORT']}; must be at most {LAST_PORT}: {START}")
    if required and not os.environ.get("MASTER_ADDR", "").strip():
        raise InputError(f"MASTER_ADDR: is missing; must be the host of rank 0: {START}")


def start_alone(device: torch.device) -> None:
    """Makes a process group of this process alone, for what needs one. An existing process group is kept."""
    if not dist.is_initialized():
        dist.init_process_group(backend_of(device), store=dist.HashStore(), rank=0, world_size=1)


def stop() -> None:
    """Leaves the process group. Garbage is collected first: reference cycles of a sharded model that is no longer used
    keep the group alive, and gloo's threads abort the process if they still run when the interpreter shuts down."""
    if dist.is_initialized():
        gc.collect()
        dist.destroy_process_group()


def backend_of(device: torch.device) -> str:
    """The backend of a process group on this device."""
    return "nccl" if device.type == "cuda" else "gloo"


def under_torchrun() -> bool:
    """Whether torchrun, or a launcher with the same environment variables, started this process."""
    return "RANK" in os.environ


def rank() -> int:
    """This process's rank, also before it joins the process group."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))


def local_rank() -> int:
    """This process's rank among the processes of its host."""
    return int(os.environ.get("LOCAL_RANK", 0))


def ranks_of_host() -> int:
    """The number of ranks on this host."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def world_size() -> int:
    """Returns the number of ranks in the process group; 1 without one."""
    return dist.get_world_size() if dist.is_initialized() else 1


def is_first() -> bool:
    """Whether this is rank 0, or a single process."""
    return rank() == 0


def first_to_fail() -> bool:
    """Whether no other rank has called this function before; only that rank prints its error."""
    if not under_torchrun() or not dist.is_initialized():
        return is_first()
    return dist.distributed_c10d._get_default_store().add("failed", 1) == 1


def wait_for_all() -> None:
    """A barrier. Called at the end of a run, because a rank that leaves early closes connections that others use."""
    if dist.is_initialized():
        dist.barrier()


def reduced_over_ranks(x: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
    """A new tensor, the same on every rank."""
    x = x.clone()
    if dist.is_initialized():
        dist.all_reduce(x, op=operation)
    return x


def total(x: Tensor) -> Tensor:
    """The sum of `x` over all ranks, as a new tensor on every rank."""
    return reduced_over_ranks(x, dist.ReduceOp.SUM)


def largest(x: Tensor) -> Tensor:
    """The maximum of `x` over all ranks, as a new tensor on every rank."""
    return reduced_over_ranks(x, dist.ReduceOp.MAX)


def gather_objects(value: Value, group: dist.ProcessGroup | None = None) -> list[Value]:
    """The values of all ranks, in rank order, on every rank. Values are pickled."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def from_first(value: Value) -> Value:
    """The `value` of rank 0, on every rank. It is pickled."""
    values = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(values, src=0)
    return values[0]


def raise_on_all(error: Exception | None, group: dist.ProcessGroup | None = None) -> None:
    """Raises on every rank if at least one rank has an error. Every rank must call, with its error or None.

    A rank with an error raises it. The others raise the error of the lowest rank that has one, with the same text: of
    the same class if that is an InputError, else an InputError.
    """
    known = None if error is None else (type(error) if isinstance(error, InputError) else InputError, str(error))
    errors = gather_objects(known, group)
    if error is not None:
        raise error
    for found in filter(None, errors):
        kind, message = found
        raise kind(message)


def same_on_all(function: Callable[..., Value], *arguments: Any, group: dist.ProcessGroup | None = None) -> Value:
    """Calls `function` on every rank, and returns its result, which must be the same on all ranks. If it raises an
    InputError on one rank, every rank raises it. Raises InputError if the results differ."""
    result, error = None, None
    try:
        result = function(*arguments)
    except InputError as raised:
        error = raised
    raise_on_all(error, group)
    results = gather_objects(result, group)
    if any(other != results[0] for other in results):
        raise InputError(f"ranks have different results, on rank 0 {results[0]}; choose a folder that all hosts share")
    return results[0]  # type: ignore[return-value]


@contextmanager
def waiting_group(timeout: timedelta) -> Iterator[dist.ProcessGroup | None]:
    """A gloo process group of all ranks whose collectives have this timeout; None in a single process."""
    if not dist.is_initialized():
        yield None
        return
    group = dist.new_group(backend="gloo", timeout=timeout)
    try:
        yield group
    finally:
        dist.destroy_process_group(group)
