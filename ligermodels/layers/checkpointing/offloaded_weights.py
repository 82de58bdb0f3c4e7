"""Frozen quantised weights in pinned host memory; those of two blocks are on the device.

While a block computes, the bytes of the next one are copied on a stream of their own, into the buffer of the block
before: forward in the order of the blocks, in backward, which recomputes one block after another, in reverse. On a CPU
they are copied too, without streams.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ligermodels.kernels.quant.quantised_weight import WeightLayout, starts_of
from ligermodels.layers.checkpointing.host_memory import event_on, pinned_memory
from ligermodels.layers.quantised import FrozenWeights

BLOCKS_ON_DEVICE = 2  # for the block that computes, and its neighbour that was or will be computed


def offloaded_bytes(blocks: Sequence[nn.Module]) -> tuple[int, int]:
    """Bytes on the device and in host memory of the quantised weights of these blocks, where they are offloaded."""
    sizes = [[*starts_of(layout.nbytes for *_, layout in weights_of(block))][-1] for block in blocks]
    return BLOCKS_ON_DEVICE * max(sizes), sum(sizes)


def weights_of(block: nn.Module) -> list[tuple[FrozenWeights, str, WeightLayout]]:
    """The quantised weights of a block: their owners, and their names and layouts there."""
    owners = (module for module in block.modules() if isinstance(module, FrozenWeights))
    return [(owner, *item) for owner in owners for item in owner.layouts.items()]


class OffloadedWeights:
    """Brings the quantised weights of a model's blocks to their device, one block ahead.

    Graphs read the buffers: a pass with gradients must recompute each block (activation checkpointing).
    """

    def __init__(self, blocks: Sequence[nn.Module], device: torch.device) -> None:
        """Gives the weights of the blocks, in the order of the forward pass, host memory that is not set."""
        self.module, self.device = torch.get_device_module(device), device  # those of torch.cpu do nothing
        self.inward = self.module.Stream(device)
        on_device, _ = offloaded_bytes(blocks)
        self.buffers = torch.empty(BLOCKS_ON_DEVICE, on_device // BLOCKS_ON_DEVICE, dtype=torch.uint8, device=device)
        self.owners: list[set[FrozenWeights]] = []  # of each block's weights
        self.on_host: list[Tensor] = []  # the bytes of each block
        for index, block in enumerate(blocks):
            weights, buffer = weights_of(block), self.buffers[index % BLOCKS_ON_DEVICE]
            *starts, end = starts_of(layout.nbytes for *_, layout in weights)
            memory = pinned_memory(end, device)
            for start, (owner, name, layout) in zip(starts, weights, strict=True):
                place = slice(start, start + layout.nbytes)
                owner.offload(name, memory[place], buffer[place])
            self.owners.append({owner for owner, *_ in weights})
            self.on_host.append(memory)
        self.held: list[int | None] = [None] * BLOCKS_ON_DEVICE  # the block whose weights each buffer has, or will have
        self.copied: list[Any] = [None] * BLOCKS_ON_DEVICE  # the event behind the last copy to each
        self.last = 0  # the block that was brought last

    def bring(self, index: int) -> None:
        """Lets a block compute: its weights are on the device then, and those of the next one on their way."""
        self.fetch(index)
        self.module.current_stream(self.device).wait_event(self.copied[index % BLOCKS_ON_DEVICE])
        for owner in self.owners[index]:
            owner.is_on_device = True
        following = index + 1 if index > self.last or index == 0 else index - 1
        self.last = index
        if following < len(self.on_host):
            self.fetch(following)

    def fetch(self, index: int) -> None:
        """Starts to copy the weights of a block to the device, in the place of those that its buffer has."""
        slot = index % BLOCKS_ON_DEVICE
        if self.held[slot] == index:
            return
        if (before := self.held[slot]) is not None:
            for owner in self.owners[before]:
                owner.is_on_device = False
        self.inward.wait_stream(self.module.current_stream(self.device))  # which may still read the buffer
        with self.module.stream(self.inward):
            self.buffers[slot, : len(self.on_host[index])].copy_(self.on_host[index], non_blocking=True)
        self.held[slot], self.copied[slot] = index, event_on(self.inward, self.module)
