"""Decisions that depend on GPU memory: activation checkpointing, whether the bytes of quantised weights are replicated,
and whether FSDP2 reshards weights after forward.
"""

import bisect
import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from ligermodels.distributed import World, gather_objects
from ligermodels.layers.checkpointing.kept_tensors import choose_kept
from ligermodels.layers.decoder import CausalLM
from ligermodels.memory.model import TrainingMemory

USABLE_MEMORY = 0.95  # of the free memory: the estimate is within 3 %, and the allocator leaves gaps
# With FSDP2 each of its streams reserves memory: 14 to 19 % more than was allocated, measured on two GPUs.
USABLE_MEMORY_SHARDED = 0.81
# FSDP2 of earlier releases makes parameters that require gradients, which integers cannot.
SHARDS_INTEGERS = torch.__version__ >= "2.13"  # compared as versions
LIBRARY_BYTES = 2**30  # allocated by NCCL and cuBLAS at their first use

# `ligermodels.memory.model.training_memory` with the settings of a run. Keyword arguments replace a setting.
MemoryEstimator = Callable[..., TrainingMemory]


class Checkpointing(NamedTuple):
    blocks: int  # how many, from the first one on, have activation checkpointing
    kept_tensors: int  # how many results these keep beside their inputs

    @property
    def options(self) -> dict[str, int]:
        """The keyword arguments of a MemoryEstimator."""
        return {"checkpointed_blocks": self.blocks, "kept_tensors": self.kept_tensors}


def checkpointing_of(model: CausalLM, mode: str, estimate: MemoryEstimator, usable: float) -> Checkpointing:
    """What a mode of --activation-checkpointing is for a model.

    mode: "none"; "selective" for all blocks, which keep attention and the products of their mixers; "full" for all
    blocks, which keep only their inputs; "auto" for as little of it as needed for the step to fit into `usable` bytes.
    """
    blocks = len(model.blocks)
    match mode:
        case "none":
            return Checkpointing(0, 0)
        case "selective":
            return Checkpointing(blocks, keepable_in(model, blocks))
        case "full":
            return Checkpointing(blocks, 0)
    return least_checkpointing(model, estimate, usable)


def least_checkpointing(model: CausalLM, estimate: MemoryEstimator, usable: float) -> Checkpointing:
    """What recomputes least and fits: as few blocks as possible; if it must be all, they keep as much as possible."""
    blocks = len(model.blocks)

    def fits(checkpointed: int, kept_tensors: int | None) -> bool:
        return estimate(checkpointed_blocks=checkpointed, kept_tensors=kept_tensors).peak <= usable

    if fits(0, 0):
        return Checkpointing(0, 0)
    if not fits(blocks, 0):
        return Checkpointing(blocks, 0)
    count = bisect.bisect_left(range(blocks), True, key=lambda checkpointed: fits(checkpointed, None))
    most = keepable_in(model, count)
    if count < blocks:
        return Checkpointing(count, most)
    left_out = bisect.bisect_left(range(most), True, key=lambda left_out: fits(blocks, most - left_out))
    return Checkpointing(blocks, most - left_out)


def keepable_in(model: CausalLM, blocks: int) -> int:
    """How many results the first blocks could keep."""
    return sum(map(len, choose_kept(model.blocks[:blocks], None, 1)))


def replicates_quantised(usable: float, estimate: MemoryEstimator, checkpointing: Checkpointing) -> bool:
    """Whether every rank has the bytes of all quantised weights, because they fit or take no more memory than shards.

    usable: bytes; infinite on a CPU, whose free memory is unknown: there they are sharded unless that takes more.
    """
    if not SHARDS_INTEGERS:
        return True
    sharded, replicated = (estimate(**checkpointing.options, replicate_quantised=each).peak for each in (False, True))
    return replicated <= sharded or replicated <= usable < math.inf


def must_reshard_after_forward(
    usable: float, estimate: MemoryEstimator, checkpointing: Checkpointing, *, replicate_quantised: bool
) -> bool:
    """Whether FSDP2 must reshard a block's weights after forward, because not all blocks fit unsharded into memory.

    usable: bytes; infinite on a CPU, where it is True: the free memory is unknown, and a second all-gather is only a
    copy.
    """
    if math.isinf(usable):
        return True
    unsharded = estimate(**checkpointing.options, replicate_quantised=replicate_quantised, keep_unsharded=True)
    return unsharded.peak > usable


def usable_memory(world: World) -> float:
    """Returns the bytes that a step can use on every rank, measured before the model is allocated.

    Infinite on a CPU, which can swap.
    """
    if world.device.type != "cuda":
        return float("inf")
    if world.planned_for is not None:
        return usable_share(world.planned_for.memory, world)
    free, _ = torch.cuda.mem_get_info(world.device)
    cached = torch.cuda.memory_reserved(world.device) - torch.cuda.memory_allocated(world.device)
    return usable_share(min(free + cached, device_memory(world)), world)


def device_memory(world: World) -> int:
    """Bytes of a GPU's memory that this process may allocate: all, or `set_per_process_memory_fraction`'s part."""
    if world.planned_for is not None:
        return world.planned_for.memory
    total = torch.cuda.get_device_properties(world.device).total_memory
    return round(total * torch.cuda.get_per_process_memory_fraction(world.device))


def device_name(world: World) -> str:
    """The name of a rank's GPU by its driver; "CPU process" for a CPU."""
    if world.planned_for is not None:
        return world.planned_for.name
    return torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "CPU process"


def usable_share(memory: int, world: World) -> float:
    """Returns the bytes that a step can use on every rank. memory: bytes of this rank's GPU."""
    share = USABLE_MEMORY if world.size == 1 else USABLE_MEMORY_SHARDED
    return share * min(gather_objects(memory)) - LIBRARY_BYTES
