"""Weights gathered and gradients reduced over NVLink by the GPUs' copy engines: for FSDP2 among the ranks of one host.

NCCL's kernels hold multiprocessors, and a matrix product whose programs fill all of them in whole waves needs one wave
more beside them. From memory that all ranks can read NCCL copies by engines that a GPU has for that (its zero-CTA
policy). Gathering is nothing but copies. To reduce, every rank is copied its part of all gradients, in the dtype that
they were computed in, and adds them up in fp32: half the bytes of bf16 gradients reduced in fp32, and the same sums.

Buffers are used in turn: FSDP2 writes to the next one while the last is still read. Knows nothing of models.
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

Size = Sequence[int | torch.SymInt]
SMALLEST = 16  # bytes: where all is frozen nothing is reduced, and no memory cannot be shared


class CopyEngineAllGather(AllGather):
    """[n] of each rank -> [ranks n]."""

    def __init__(self, buffers: "Buffers") -> None:
        self.outputs = buffers

    def allocate(self, size: Size, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.outputs.next(size, dtype)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """input_tensor: this rank's part of output_tensor, where it is already."""
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


class CopyEngineReduceScatter(ReduceScatter):
    """[ranks n] of each rank, in any dtype -> the sum of this rank's n, fp32."""

    def __init__(self, inputs: "Buffers", parts: "Buffers") -> None:
        self.inputs, self.parts = inputs, parts
        self.for_input = False

    def allocate(self, size: Size, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """FSDP2 asks for the input first, then for the output."""
        self.for_input = not self.for_input
        return (
            self.inputs.next(size, dtype) if self.for_input else torch.empty(*size, dtype=torch.float32, device=device)
        )

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        parts = self.parts.next(input_tensor.shape, input_tensor.dtype)
        dist.all_to_all_single(parts, input_tensor, group=group)
        torch.sum(parts.view(group.size(), -1), 0, dtype=torch.float32, out=output_tensor)


class Buffers:
    """Memory that all ranks of a group can read, in pieces that are used in turn."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, size: int, count: int) -> None:
        """size: bytes of each. All ranks of the group call it together."""
        self.memory = [readable_by_all(group, device, size) for _ in range(count)]
        self.turn = 0

    def next(self, size: Size, dtype: torch.dtype) -> Tensor:
        self.turn = (self.turn + 1) % len(self.memory)
        return self.memory[self.turn].view(dtype)[: int(size[0])]


def readable_by_all(group: dist.ProcessGroup, device: torch.device, size: int) -> Tensor:
    symmetric_memory.set_backend("NCCL")
    memory = symmetric_memory.empty(max(size, SMALLEST), dtype=torch.uint8, device=device)
    symmetric_memory.rendezvous(memory, group.group_name)
    return memory


def use(
    units: Sequence[nn.Module], group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype, *, ahead: int
) -> None:
    """Has units, which run one after the other, gather and reduce so. All ranks of the group call it together.

    dtype: what weights are gathered and gradients reduced in. ahead: buffers beside the one that is read.
    """
    gathered = max(elements(unit.parameters(), group.size()) for unit in units) * dtype.itemsize
    trained = ((p for p in unit.parameters() if p.requires_grad) for unit in units)
    reduced = max(elements(parameters, group.size()) for parameters in trained) * dtype.itemsize
    gather = CopyEngineAllGather(Buffers(group, device, gathered, 1 + ahead))
    reduce = CopyEngineReduceScatter(Buffers(group, device, reduced, 1 + ahead), Buffers(group, device, reduced, 1))
    for unit in cast(Sequence[FSDPModule], units):
        unit.set_custom_all_gather(gather)
        unit.set_custom_reduce_scatter(reduce)


def elements(parameters: Iterable[Tensor], ranks: int) -> int:
    """Of unsharded parameters, whose rows are filled up to a multiple of the ranks."""
    return sum(-(-p.shape[0] // ranks) * ranks * (p.numel() // p.shape[0]) for p in parameters)


def allow() -> None:
    """Has NCCL use the copy engines where it can; to be called before it is started."""
    os.environ.setdefault("NCCL_CTA_POLICY", "2")


def are_there(ranks: int, device: torch.device) -> bool:
    """Whether groups of so many ranks are GPUs of one host that can read each other's memory."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if device.type != "cuda" or ranks == 1 or local % ranks:
        return False
    peers = [index for index in range(local) if index != device.index]
    return all(torch.cuda.can_device_access_peer(device, peer) for peer in peers)
