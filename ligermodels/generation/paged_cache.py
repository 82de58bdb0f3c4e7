"""The paged cache of the generation engine: pools of pages that rows of different lengths share.

Every layer has a pool of pages of PAGE_SIZE slots, [slots, Hkv, D] for keys and for values. A row has a table of pages
in each group of layers with equal windows: position p lies in page table[p // PAGE_SIZE % len(table)]. The table of a
windowed group has just the pages of a window, and is used as a ring. Layers with states are a group too: a row has one
page there, its states. Page 0 belongs to nobody: what has no place of its own is written there. Knows tensors and
attention.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ligermodels.generation.cache import Kept, PerToken

PAGE_SIZE = 64  # tokens; one tile of keys in the decode kernel


def pages_for(tokens: int) -> int:
    """The number of pages that hold so many tokens."""
    return -(-tokens // PAGE_SIZE)


class PagedLayer:
    """stored: keys and values of one layer, [slots, Hkv, D] each. Allocated on first use.

    Of latent attention the keys are the latents, and the values have no columns.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.stored: tuple[Tensor, ...] = ()

    def pools(self, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """The keys and values of all slots. k, v: [..., Hkv, D], what will be written to them."""
        if not self.stored:
            self.stored = tuple(x.new_zeros(self.slots, *x.shape[-2:]) for x in (k, v))
        return self.stored

    def copy_pages(self, sources: Tensor, targets: Tensor) -> None:
        """Copies whole pages, int64 [n] each."""
        for pool in self.stored:
            pages = pool.unflatten(0, (-1, PAGE_SIZE))
            pages[targets] = pages[sources]


class StatePool:
    """States of one layer, [slots, ...] each: a row's are at its only page. Allocated on first use."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.states: dict[int, Tensor] = {}

    def store(self, number: int, pages: Tensor, states: Tensor) -> None:
        """Writes state `number` of rows, [n, ...], at their pages, int64 [n]. Where states differ in length, their
        first dimension, the pool is as long as the longest."""
        pool = self.states.get(number)
        if pool is None:
            pool = states.new_zeros(self.slots, *states.shape[1:])
        elif states.ndim > 1 and states.shape[1] > pool.shape[1]:
            longer = states.new_zeros(self.slots, *states.shape[1:])
            longer[:, : pool.shape[1]] = pool
            pool = longer
        self.states[number] = pool
        part = pool if states.ndim == 1 else pool[:, : states.shape[1]]
        part[pages] = states

    def copy_pages(self, sources: Tensor, targets: Tensor) -> None:
        """Copies the states of rows, int64 [n] each."""
        for states in self.states.values():
            states[targets] = states[sources]


class PagePool:
    """The pages of a group of layers: which are free, and how many rows hold each of the others."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.release_all()

    def release_all(self) -> None:
        """Takes back the pages of all rows."""
        self.free = list(range(self.count, 0, -1))  # page 0 is never given out
        self.holders = [0] * (self.count + 1)

    def take(self, count: int) -> list[int]:
        """Pages for one row. The caller has checked that there are enough."""
        pages = [self.free.pop() for _ in range(count)]
        self.share(pages)
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """Gives pages that are held already to one more row."""
        for page in pages:
            self.holders[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Takes a row's pages back; those that no other row holds become free."""
        for page in pages:
            self.holders[page] -= 1
            if not self.holders[page]:
                self.free.append(page)


@dataclass(frozen=True)
class LayerGroup:
    """Layers with one window, None for full attention, whose rows have the same tables.

    width: pages in a table, for the longest row. pages: of all rows together.
    """

    window: int | None
    layers: tuple[int, ...]
    width: int
    pages: int

    @property
    def slots(self) -> int:
        """Returns the slots of a layer, with those of page 0."""
        return (self.pages + 1) * PAGE_SIZE

    def pages_of(self, length: int) -> int:
        """How many pages a row of `length` tokens needs."""
        return min(self.width, pages_for(length))

    def shared_pages(self, prompt_length: int, length: int) -> int:
        """How many pages of a prompt its samples, rows of `length` tokens, can share: those that none writes to."""
        is_ring = pages_for(length) > self.width
        return 0 if is_ring else prompt_length // PAGE_SIZE

    @property
    def longest(self) -> int | None:
        """The most tokens of a row; None for no limit."""
        return self.width * PAGE_SIZE if self.window is None else None


@dataclass(frozen=True)
class StateGroup:
    """Layers with states, whose rows have one page each. pages: of all rows together."""

    layers: tuple[int, ...]
    pages: int
    width = 1
    longest = None

    @property
    def slots(self) -> int:
        """Returns the slots of a layer, with page 0."""
        return self.pages + 1

    def pages_of(self, length: int) -> int:
        """How many pages a row of `length` tokens needs."""
        return 1

    def shared_pages(self, prompt_length: int, length: int) -> int:
        """None: every token changes the states of its row."""
        return 0


Tables = list[list[int]]  # the pages of a row in each group


class PagedCache:
    """The pools and groups of a model.

    kept: what each layer keeps. max_tokens: tokens that all rows together may hold. max_length: those of one row.
    max_rows: rows at a time.
    """

    def __init__(self, kept: Sequence[Kept], max_tokens: int, max_length: int, max_rows: int) -> None:
        self.groups = layer_groups(kept, max_tokens, max_length, max_rows)
        self.pools = [PagePool(group.pages) for group in self.groups]
        self.group_of = [next(i for i, group in enumerate(self.groups) if n in group.layers) for n in range(len(kept))]
        groups = (self.groups[index] for index in self.group_of)
        self.layers = [(PagedLayer if isinstance(group, LayerGroup) else StatePool)(group.slots) for group in groups]

    def pages_needed(self, prompt_length: int, length: int, samples: int) -> list[int]:
        """How many pages of each group a request needs: `samples` rows of at most `length` tokens with one prompt."""
        needed = []
        for group in self.groups:
            shared = group.shared_pages(prompt_length, length)
            needed.append(shared + samples * (group.pages_of(length) - shared))
        return needed

    def has_free(self, needed: Sequence[int]) -> bool:
        """Whether so many pages of each group are free."""
        return all(count <= len(pool.free) for count, pool in zip(needed, self.pools, strict=True))

    def take(self, prompt_length: int, length: int, samples: int) -> list[Tables]:
        """The tables of a request's rows; whole pages of the prompt are the same in all of them."""
        rows: list[Tables] = [[] for _ in range(samples)]
        for group, pool in zip(self.groups, self.pools, strict=True):
            first = pool.take(group.pages_of(length))
            shared = first[: group.shared_pages(prompt_length, length)]
            rows[0].append(first)
            for row in rows[1:]:
                pool.share(shared)
                row.append([*shared, *pool.take(len(first) - len(shared))])
        return rows

    def release(self, tables: Tables) -> None:
        """Takes back the pages of a row."""
        for pool, pages in zip(self.pools, tables, strict=True):
            pool.release(pages)

    def release_all(self) -> None:
        """Takes back the pages of all rows."""
        for pool in self.pools:
            pool.release_all()

    def copy_prompt(self, prompt_length: int, length: int, rows: Sequence[Tables], device: torch.device) -> None:
        """Copies what the first row has of a prompt to the pages that others do not share."""
        for index, group in enumerate(self.groups):
            used = range(group.shared_pages(prompt_length, length), group.pages_of(prompt_length))
            sources = [rows[0][index][page] for _ in rows[1:] for page in used]
            targets = [row[index][page] for row in rows[1:] for page in used]
            if sources:
                pages = torch.tensor([sources, targets]).to(device)
                for layer in group.layers:
                    self.layers[layer].copy_pages(pages[0], pages[1])


def layer_groups(
    kept: Sequence[Kept], max_tokens: int, max_length: int, max_rows: int
) -> list[LayerGroup | StateGroup]:
    """A group for each window, full attention first, then that of the layers with states; arguments as those of
    `PagedCache`."""
    groups: list[LayerGroup | StateGroup] = []
    windows = {index: each.window for index, each in enumerate(kept) if isinstance(each, PerToken)}
    for window in sorted(set(windows.values()), key=lambda window: window or 0):
        layers = tuple(index for index, other in windows.items() if other == window)
        width, pages = pages_for(max_length), pages_for(max_tokens)
        if window is not None:
            # A query sees window - 1 earlier positions and its own.
            width = min(width, pages_for(window - 1) + 1)
            pages = min(pages, max_rows * width)
        groups.append(LayerGroup(window, layers, width, pages))
    with_states = tuple(index for index in range(len(kept)) if index not in windows)
    if with_states:
        groups.append(StateGroup(with_states, max_rows))
    return groups


def slots_of(pages: Tensor, positions: Tensor) -> Tensor:
    """The slots of a row's positions, int64 [n]. pages: its table, int64, on the same device."""
    return pages[positions // PAGE_SIZE % len(pages)] * PAGE_SIZE + positions % PAGE_SIZE
