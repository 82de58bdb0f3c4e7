"""Optimizer states in pinned host memory: those of a few parameters at a time are on the device.

While a parameter is updated, the states of the next ones come to the device on one stream, and those of the parameters
before go back on another. They pass through a ring of device memory, whose parts are reused in turn. The order of the
parameters is that of their last updates. The update itself does not change. The step counts stay on the device.

The states of an embedding and a head stay on the device too: they are several times larger than those of other
parameters, so that their copies would take longer than the computation beside them, and hold up all others.

On a CPU the states are copied to the ring and back too, without streams.
"""

import heapq
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ligermodels.layers.checkpointing.host_memory import event_on, pinned_memory

STATE_ALIGNMENT = 256  # bytes, of the states in the host's memory and in the ring
AHEAD = 2  # parameters whose states are copied to the device before their update
STAYS_ON_DEVICE = "step"  # the state that is not moved: of one element

TensorState = dict[str, Tensor]


def packed_bytes(state: Mapping[str, Tensor]) -> int:
    """Bytes of a parameter's states that are moved, one behind the other."""
    return sum(padded_bytes(tensor.nbytes) for name, tensor in state.items() if name != STAYS_ON_DEVICE)


def ring_bytes(groups: Sequence[Sequence[int]], staying: Collection[tuple[int, int]] = ()) -> int:
    """Bytes of the ring for the packed bytes of parameters, by group.

    It has room for three neighbours, as one arrives, one is updated and one leaves; and for the largest twice: else it
    could not arrive before the like of it has left. staying: as `find_staying` returns them.
    """
    moved = [
        [size for place, size in enumerate(group) if (number, place) not in staying]
        for number, group in enumerate(groups)
    ]
    neighbours = (sum(sizes[first : first + 3]) for sizes in moved for first in range(len(sizes)))
    return max(max(neighbours, default=0), 2 * max(map(max, filter(None, moved)), default=0))


def find_staying(groups: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Which parameters' states stay on the device: their groups and places there.

    Those of the two largest that would not fit into a ring for all others. groups: packed bytes.
    """
    sizes = {(number, place): size for number, group in enumerate(groups) for place, size in enumerate(group)}
    largest = heapq.nlargest(2, sizes, key=sizes.__getitem__)
    room = ring_bytes(groups, largest)
    return [key for key in largest if sizes[key] > room > 0]


def bytes_where_offloaded(optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    """Bytes on the device and in host memory of an optimizer's states, which may be on the meta device."""
    states = [[optimizer.state[p] for p in group["params"]] for group in optimizer.param_groups]
    sizes = [[packed_bytes(state) for state in group] for group in states]
    staying = find_staying(sizes)
    on_device = sum(sizes[number][place] for number, place in staying)
    steps = sum(state[STAYS_ON_DEVICE].nbytes for group in states for state in group if STAYS_ON_DEVICE in state)
    return on_device + ring_bytes(sizes, staying) + steps, sum(map(sum, sizes)) - on_device


def padded_bytes(nbytes: int) -> int:
    return -(-nbytes // STATE_ALIGNMENT) * STATE_ALIGNMENT


@dataclass(eq=False)
class RingPart:
    """The states of a parameter in the ring. copied: the event behind the last copy. needed: until they are back."""

    start: int
    stop: int
    copied: Any = None
    needed: bool = True


class OffloadedStates:
    """The states of an optimizer in host memory; `on_device` brings those of one parameter to its device.

    states: by parameter, plain tensors, where they are between updates. packed: those in host memory, one behind the
    other.
    """

    def __init__(
        self, groups: Sequence[Sequence[nn.Parameter]], new_state: Callable[[nn.Parameter], TensorState]
    ) -> None:
        """groups: parameters on one device, whole. new_state: the initial state of one, zeros."""
        params = [p for group in groups for p in group]
        self.device = params[0].device
        on_meta = {p: moved_to_meta(new_state(p)) for p in params}
        sizes = [[packed_bytes(on_meta[p]) for p in group] for group in groups]
        staying = find_staying(sizes)
        moved = [p for p in params if p not in {groups[number][place] for number, place in staying}]
        room = [packed_bytes(on_meta[p]) for p in moved]
        self.memory = pinned_memory(sum(room), self.device)
        self.packed = dict(zip(moved, self.memory.split(room), strict=True))
        self.states = {
            p: unpacked(self.packed[p], state) if p in self.packed else new_state(p) for p, state in on_meta.items()
        }

        self.module = torch.get_device_module(self.device)  # the streams and events of torch.cpu do nothing
        self.inward, self.outward = self.module.Stream(self.device), self.module.Stream(self.device)
        self.ring = torch.empty(ring_bytes(sizes, staying), dtype=torch.uint8, device=self.device)
        self.end = 0  # of the newest part
        self.parts: list[RingPart] = []
        self.fetched: dict[nn.Parameter, RingPart] = {}
        self.returned: dict[nn.Parameter, Any] = {}  # the event behind each parameter's last copy to the host
        self.following: dict[nn.Parameter, nn.Parameter] = {}
        self.last: nn.Parameter | None = None

    @contextmanager
    def on_device(self, p: nn.Parameter) -> Iterator[TensorState]:
        """The states of a parameter on its device, which are copied back behind the block."""
        if p not in self.packed:
            yield self.states[p]
            return
        part = self.fetched.pop(p, None) or self.fetch(p)
        self.fetch_following(p)
        packed, current = self.ring[part.start : part.stop], self.module.current_stream(self.device)
        current.wait_event(part.copied)
        yield unpacked(packed, self.states[p])
        self.outward.wait_stream(current)
        with self.module.stream(self.outward):
            self.packed[p].copy_(packed, non_blocking=True)
        part.copied = self.returned[p] = event_on(self.outward, self.module)
        part.needed = False

    def synchronize(self) -> None:
        """Waits until the states in host memory are complete. They may be changed until the next update."""
        self.module.synchronize(self.device)
        self.fetched, self.parts = {}, []

    def reset(self) -> None:
        """Gives all states their initial values."""
        self.synchronize()
        self.memory.zero_()
        for p, state in self.states.items():
            for name, tensor in state.items():
                if p not in self.packed or name == STAYS_ON_DEVICE:
                    tensor.zero_()

    def fetch_following(self, p: nn.Parameter) -> None:
        """Fetches the parameters that were updated behind `p`, as far as the ring has room."""
        if self.last is not None:
            self.following[self.last] = p
        self.last = next_one = p
        for _ in range(AHEAD):
            next_one = self.following.get(next_one, p)
            if next_one is p or (next_one not in self.fetched and not self.has_room(next_one)):
                return
            if next_one not in self.fetched:
                self.fetched[next_one] = self.fetch(next_one)

    def has_room(self, p: nn.Parameter) -> bool:
        return not any(old.needed for old in self.overlapping(self.next_part(p)))

    def fetch(self, p: nn.Parameter) -> RingPart:
        """Starts to copy the states of a parameter into the ring. What was fetched there is given up."""
        part = self.next_part(p)
        replaced = self.overlapping(part)
        for event in (*(old.copied for old in replaced), self.returned.get(p)):
            if event is not None:
                self.inward.wait_event(event)
        with self.module.stream(self.inward):
            self.ring[part.start : part.stop].copy_(self.packed[p], non_blocking=True)
        part.copied = event_on(self.inward, self.module)
        self.fetched = {q: old for q, old in self.fetched.items() if old not in replaced}
        self.parts = [*(old for old in self.parts if old not in replaced), part]
        self.end = part.stop
        return part

    def next_part(self, p: nn.Parameter) -> RingPart:
        """Behind the newest part, or at the beginning of the ring."""
        size = len(self.packed[p])
        start = self.end if self.end + size <= len(self.ring) else 0
        return RingPart(start, start + size)

    def overlapping(self, part: RingPart) -> list[RingPart]:
        return [old for old in self.parts if old.start < part.stop and part.start < old.stop]


def moved_to_meta(state: TensorState) -> TensorState:
    """The state, with the tensors that are moved on the meta device; of DTensors their local part."""
    own = {name: x.to_local() if isinstance(x, DTensor) else x for name, x in state.items()}
    return {name: x if name == STAYS_ON_DEVICE else x.to("meta") for name, x in own.items()}


def unpacked(packed: Tensor, state: Mapping[str, Tensor]) -> TensorState:
    """The states packed in uint8 memory, in the dtypes and shapes of `state`; what is not moved is that of `state`."""
    result, start = {}, 0
    for name, tensor in state.items():
        if name == STAYS_ON_DEVICE:
            result[name] = tensor
        else:
            result[name] = packed[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            start += padded_bytes(tensor.nbytes)
    return result
