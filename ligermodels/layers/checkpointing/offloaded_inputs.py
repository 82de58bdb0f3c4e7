"""Inputs of checkpointed blocks in pinned host memory, from the forward pass until their recomputation.

An input is copied to the host on one stream while its block computes, and back on another while the block behind it is
recomputed and runs backward. At most two of them are on the device: one that leaves or arrives, and that of the block
that computes. On a CPU they are copied too, without streams.
"""

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ligermodels.layers.checkpointing.host_memory import event_on, pinned_memory


def blocks_between(inputs: Sequence[int], budget: float) -> int:
    """The smallest k with which the inputs of every k-th block, from the first one on, fit into the host memory.

    inputs: bytes of each block's. budget: bytes of host memory. 0 where not even one fits.
    """
    return next((k for k in range(1, len(inputs) + 1) if sum(inputs[::k]) <= budget), 0)


class HostInput:
    """An input in host memory: memory uint8 [bytes or more], `copied` the event behind its copy there.

    on_device: the tensor, and the event behind its last copy, while it is on the device. before: the input that was
    copied before this one, and is needed behind it.
    """

    def __init__(self, x: Tensor, memory: Tensor, before: "weakref.ref[HostInput] | None") -> None:
        self.shape, self.dtype = x.shape, x.dtype
        self.values = memory[: x.nbytes].view(x.dtype).view(x.shape)
        self.before, self.used = before, False
        self.copied: Any = None
        self.on_device: tuple[Tensor, Any] | None = None


class OffloadedInputs:
    """Copies the inputs of a model's blocks between one device and the host."""

    def __init__(self) -> None:
        self.free: list[Tensor] = []  # host memory without an input
        self.newest: HostInput | None = None  # its tensor stays on the device until the next input leaves
        self.device = torch.device("cpu")  # that of the first input
        self.streams: tuple[Any, Any] | None = None

    def around_checkpoint(self, x: Tensor) -> AbstractContextManager:
        """A context in which a block is checkpointed, whose input x is what it saves in host memory."""
        shape = x.shape  # not x, which the graph would keep: it keeps the functions
        return saved_tensors_hooks(lambda saved: self.pack(saved) if saved.shape == shape else saved, self.unpack)

    def pack(self, x: Tensor) -> HostInput:
        """Starts to copy an input to the host."""
        module, current, inward, outward = self.streams_of(x.device)
        before, self.newest = self.newest, None
        if before is not None and before.on_device is not None:
            current.wait_event(before.on_device[1])  # its memory is free for what comes on this stream
            before.on_device = None
        memory = self.take_memory(x)
        packed = self.newest = HostInput(x, memory, None if before is None else weakref.ref(before))
        weakref.finalize(packed, self.free.append, memory).atexit = False
        outward.wait_stream(current)
        outward.wait_stream(inward)  # which may still read this memory
        with module.stream(outward):
            packed.values.copy_(x, non_blocking=True)
        packed.copied = event_on(outward, module)
        packed.on_device = x.detach(), packed.copied
        return packed

    def unpack(self, packed: HostInput | Tensor) -> Tensor:
        """The input on its device; the one before it is on its way then."""
        if isinstance(packed, Tensor):
            return packed
        if packed.on_device is None:
            self.fetch(packed)
        assert packed.on_device is not None
        (x, event), packed.on_device, packed.used = packed.on_device, None, True
        if self.newest is packed:
            self.newest = None
        before = None if packed.before is None else packed.before()
        if before is not None and before.on_device is None and not before.used:
            self.fetch(before)
        self.streams_of(x.device)[1].wait_event(event)
        return x

    def fetch(self, packed: HostInput) -> None:
        """Starts to copy an input to the device."""
        module, current, inward, _ = self.streams_of(self.device)
        x = torch.empty(packed.shape, dtype=packed.dtype, device=self.device)
        inward.wait_stream(current)  # which has used the memory of x before
        inward.wait_event(packed.copied)
        with module.stream(inward):
            x.copy_(packed.values, non_blocking=True)
        packed.on_device = x, event_on(inward, module)

    def streams_of(self, device: torch.device) -> tuple[Any, Any, Any, Any]:
        """The device's module, its current stream, and the streams of copies to it and from it."""
        module = torch.get_device_module(device)  # the streams and events of torch.cpu do nothing
        if self.streams is None:
            self.device, self.streams = device, (module.Stream(device), module.Stream(device))
        return module, module.current_stream(device), *self.streams

    def take_memory(self, x: Tensor) -> Tensor:
        """Host memory for x: the smallest that is free and large enough, or new memory in place of the largest."""
        self.free.sort(key=len)
        for index, memory in enumerate(self.free):
            if len(memory) >= x.nbytes:
                return self.free.pop(index)
        if self.free:
            torch.get_device_module(x.device).synchronize(x.device)  # a copy may still read what is freed
            self.free.pop()
        return pinned_memory(x.nbytes, x.device)
