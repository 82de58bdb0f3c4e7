"""What memory allows: how many blocks keep their activations for backward, and whether they keep gathered weights.

Must not know the data.
"""

import bisect
import math
from typing import Protocol

import torch

from ligermodels.distributed import World, smallest
from ligermodels.layers.decoder import CausalLM
from ligermodels.memory import TrainingMemory

USABLE = 0.95  # of what is free: the estimate is within 3 %, and the allocator leaves gaps
USABLE_SHARDED = 0.81  # where FSDP2's streams each reserve memory: 14 to 19 % more than was allocated, on two GPUs
LIBRARIES = 2**30  # bytes that NCCL and cuBLAS take for themselves, once they are used


class Needs(Protocol):
    """`ligermodels.memory.training_memory` of a run, by whose keywords it is asked about others."""

    def __call__(
        self,
        *,
        batch_size: int = ...,
        sequence_length: int = ...,
        checkpointed_blocks: int = 0,
        keep_unsharded: bool = False,
    ) -> TrainingMemory: ...


def recompute(model: CausalLM, how: str, world: World, needs: Needs) -> int:
    """Has the first blocks of a model computed again in backward; returns how many, which is the same on every rank.

    how: "none", "full", or "auto", by which as few are as leave room for the step on the fullest GPU; on a CPU none.
    """
    blocks = model.config.num_hidden_layers
    match how:
        case "none":
            count = 0
        case "full":
            count = blocks
        case _:
            count = fewest(blocks, needs, usable_memory(world))
    model.checkpoint_activations(count)
    return count


def keeps_gathered(world: World, needs: Needs, recomputed: int) -> bool:
    """Whether there is room for blocks to keep their gathered weights until backward; the same on every rank.

    On a CPU they do not: room is not known there, and to gather once more is to copy.
    """
    room = usable_memory(world)
    return math.isfinite(room) and needs(checkpointed_blocks=recomputed, keep_unsharded=True).peak <= room


def fewest(blocks: int, needs: Needs, usable: float) -> int:
    """The fewest blocks with which a step fits; all of them where it never does."""
    return bisect.bisect_left(range(blocks), True, key=lambda count: needs(checkpointed_blocks=count).peak <= usable)


def usable_memory(world: World) -> float:
    """Bytes that a step may take on every rank, from before the model has any; infinite on a CPU, which can swap."""
    if world.device.type != "cuda":
        return float("inf")
    free, _ = torch.cuda.mem_get_info(world.device)
    cached = torch.cuda.memory_reserved(world.device) - torch.cuda.memory_allocated(world.device)
    least = smallest(torch.tensor(float(free + cached), dtype=torch.float64, device=world.device))
    return (USABLE if world.size == 1 else USABLE_SHARDED) * least.item() - LIBRARIES
