"""Weights gathered and gradients reduced by the GPUs' copy engines, in place of NCCL's kernels: for FSDP2, on one host.

NCCL's kernels hold multiprocessors, and a matrix product whose programs fill all of them in whole waves needs one wave
more beside them. Here each rank writes its part to memory that the others can read, all meet in a barrier on the
device, and each copies what it needs over NVLink, for which a GPU has engines of its own. What is left for the
multiprocessors is the sum of the gradients, in fp32 and in the order of the ranks.

Buffers are used in turn. One may be written again as soon as no other rank reads it: when this rank has seen the next
barrier, before which each of them has finished its copies. Knows nothing of models.
"""

import os
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

GATHERING, REDUCING = 3, 2  # buffers: FSDP2 begins to write one when it has seen the end of the last but one; the last


class Buffers:
    """Memory that all ranks of a group can read, in pieces that are used in turn."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, size: int, count: int) -> None:
        """size: bytes of each. All ranks of the group call it together."""
        self.memory = [symmetric_memory.empty(size, dtype=torch.uint8, device=device) for _ in range(count)]
        self.handles = [symmetric_memory.rendezvous(memory, group.group_name) for memory in self.memory]
        self.turn = 0

    def next(self, size: Sequence[int | torch.SymInt], dtype: torch.dtype) -> Tensor:
        self.turn = (self.turn + 1) % len(self.memory)
        return self.memory[self.turn].view(dtype)[: int(size[0])]

    def handle_of(self, x: Tensor) -> Any:
        return next(h for m, h in zip(self.memory, self.handles, strict=True) if m.data_ptr() == x.data_ptr())


class CopyEngineAllGather(AllGather):
    """[n] of each rank -> [ranks n]."""

    def __init__(self, buffers: Buffers) -> None:
        self.buffers = buffers

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.buffers.next(size, dtype)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """input_tensor: this rank's part of output_tensor, where it is already."""
        handle, parts = self.buffers.handle_of(output_tensor), output_tensor.chunk(group.size())
        handle.barrier()
        for rank in others(group):
            offset = rank * input_tensor.numel()
            parts[rank].copy_(handle.get_buffer(rank, input_tensor.shape, input_tensor.dtype, offset))


class CopyEngineReduceScatter(ReduceScatter):
    """[ranks n] of each rank -> the sum of this rank's n."""

    def __init__(self, buffers: Buffers) -> None:
        self.buffers = buffers
        self.for_input = False

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """FSDP2 asks for the input first, then for the output."""
        self.for_input = not self.for_input
        return self.buffers.next(size, dtype) if self.for_input else torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        handle, here = self.buffers.handle_of(input_tensor), group.rank()
        parts = list(output_tensor.new_empty(group.size() - 1, output_tensor.numel()))
        handle.barrier()
        for part, rank in zip(parts, others(group), strict=True):
            part.copy_(handle.get_buffer(rank, part.shape, part.dtype, here * part.numel()))
        # In the order of the ranks: rank here + 1, here + 2, … came first.
        first = group.size() - 1 - here
        ordered = [*parts[first:], input_tensor.chunk(group.size())[here], *parts[:first]]
        torch.add(ordered[0], ordered[1], out=output_tensor)
        for part in ordered[2:]:
            output_tensor.add_(part)


def others(group: dist.ProcessGroup) -> list[int]:
    """The other ranks, from the next one on, so that no two read from the same."""
    return [(group.rank() + step) % group.size() for step in range(1, group.size())]


def use(units: Sequence[nn.Module], group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype) -> None:
    """Has units gather and reduce so, which run one after the other. dtype: what weights are gathered in; gradients are
    reduced in fp32. All ranks of the group call it together."""
    gathered = max(elements(unit.parameters(), group.size()) for unit in units) * dtype.itemsize
    trained = ((p for p in unit.parameters() if p.requires_grad) for unit in units)
    reduced = max(elements(parameters, group.size()) for parameters in trained) * torch.float32.itemsize
    gather = CopyEngineAllGather(Buffers(group, device, gathered, GATHERING))
    reduce = CopyEngineReduceScatter(Buffers(group, device, reduced, REDUCING))
    for unit in cast(Sequence[FSDPModule], units):
        unit.set_custom_all_gather(gather)
        unit.set_custom_reduce_scatter(reduce)


def elements(parameters: Iterable[Tensor], ranks: int) -> int:
    """Of unsharded parameters, whose rows are filled up to a multiple of the ranks."""
    return sum(-(-p.shape[0] // ranks) * ranks * (p.numel() // p.shape[0]) for p in parameters)


def are_there(world_size: int, device: torch.device) -> bool:
    """Whether all ranks of a group are GPUs of this host that can read each other's memory."""
    if device.type != "cuda" or not 1 < world_size <= int(os.environ.get("LOCAL_WORLD_SIZE", 1)):
        return False
    peers = [index for index in range(torch.cuda.device_count()) if index != device.index]
    return all(torch.cuda.can_device_access_peer(device, peer) for peer in peers)
