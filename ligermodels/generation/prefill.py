"""Prefill: prompts, or pieces of them, as one packed row whose keys and values go to the paged cache.

A piece that does not begin its sequence attends to the earlier keys in the cache, and to its own. Attention is the one
of training, so that nothing grows with the square of the length. Knows the paged cache.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.generation.cache import LatentHeads
from ligermodels.generation.image_features import (
    CrossPrompt,
    EarlierImages,
    PromptImages,
    features_of_pieces,
    rope_of_pieces,
)
from ligermodels.generation.paged_cache import (
    PAGE_SIZE,
    PagedCache,
    PagedLayer,
    StateGroup,
    StatePool,
    Tables,
    slots_of,
)
from ligermodels.kernels.attention.attention import attention


@dataclass(frozen=True)
class PromptPiece:
    """Consecutive tokens of a sequence, from position `start`. length: of the whole sequence that is prefilled.

    tables: of the row that they are written for. images: those of the sequence, None without.
    """

    ids: Sequence[int]
    start: int
    length: int
    tables: Tables
    images: PromptImages | CrossPrompt | None = None

    @property
    def stop(self) -> int:
        return self.start + len(self.ids)


@dataclass(frozen=True)
class KeyPlan:
    """Where the keys and values of a packed row lie, in the layers of one group.

    slots: int64 [N], where those of the new tokens go. earlier: int64 [E], slots of what they attend to besides.
    order: int64 [E + N], which puts earlier and new ones in the order of the sequences. offsets: int32 [pieces + 1], of
    each piece's keys in that order; longest: the number of keys of the longest. The last three only with earlier ones.
    """

    slots: Tensor
    earlier: Tensor | None = None
    order: Tensor | None = None
    offsets: Tensor | None = None
    longest: int | None = None

    def with_earlier(self, pool: Tensor, new: Tensor) -> Tensor:
        """The keys or values of whole sequences, [1, E + N, Hkv, D]; new: [1, N, Hkv, D]."""
        if self.earlier is None:
            return new
        return torch.cat([pool[self.earlier], new[0]])[self.order][None]


class PrefillLayer:
    """A layer of the cache during a prefill: `attend` reads earlier keys before a ring of pages is overwritten."""

    slots = None

    def __init__(self, layer: PagedLayer, plan: KeyPlan, cu_seqlens: Tensor, max_seqlen: int) -> None:
        self.layer, self.plan = layer, plan
        self.attended: tuple[Tensor, ...] = ()  # keys and values that `attend_again` reads
        self.queries: dict[str, Any] = {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen}

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, position_ids: Tensor, *, is_read: bool = False, **options: Any
    ) -> Tensor:
        plan, (key_pool, value_pool) = self.plan, self.layer.pools(k, v)
        keys, values = plan.with_earlier(key_pool, k), plan.with_earlier(value_pool, v)
        if is_read:
            self.attended = keys, values
        key_pool[plan.slots], value_pool[plan.slots] = k[0], v[0]
        return self.attend_to(q, keys, values, **options)

    def attend_again(self, q: Tensor, position_ids: Tensor, **options: Any) -> Tensor:
        return self.attend_to(q, *self.attended, **options)

    def attend_to(self, q: Tensor, keys: Tensor, values: Tensor, **options: Any) -> Tensor:
        """Attention over the keys and values of whole sequences."""
        if self.plan.earlier is not None:
            options |= {"cu_seqlens_k": self.plan.offsets, "max_seqlen_k": self.plan.longest}
        return attention(q, keys, values, **self.queries, **options)

    def attend_latents(
        self, q: Tensor, latents: Tensor, position_ids: Tensor, heads: LatentHeads, *, scale: float
    ) -> Tensor:
        plan, (pool, _) = self.plan, self.layer.pools(latents, latents[..., :0])
        every = plan.with_earlier(pool, latents)
        pool[plan.slots] = latents[0]
        return self.attend_to(q, *heads.expand(every), scale=scale)


class PrefillStates:
    """The states of a layer during a prefill, of a sequence for each piece.

    pages: int64 [pieces]. continued: bool [pieces], whether a piece continues its sequence; None if none does.
    """

    def __init__(self, layer: StatePool, pages: Tensor, continued: Tensor | None, cu_seqlens: Tensor) -> None:
        self.layer, self.pages, self.continued, self.cu_seqlens = layer, pages, continued, cu_seqlens

    def begin(self, shape: tuple[int, int], padding: Tensor | None) -> "PrefillStates":
        return self

    def before(self, number: int) -> Tensor | None:
        if self.continued is None:
            return None
        states = self.layer.states[number][self.pages]
        return states.where(self.continued.view(-1, *[1] * (states.ndim - 1)), 0)

    def store(self, number: int, states: Tensor) -> None:
        self.layer.store(number, self.pages, states)

    def earlier_images(self) -> None:
        """A prefill is given all images of its prompts."""

    def keep_images(self, images: EarlierImages) -> None:
        for number, states in enumerate(images):
            self.layer.store(number, self.pages, states)

    def pass_images_by(self) -> None:
        if self.layer.states:  # the pages may have had images
            self.layer.store(2, self.pages, torch.zeros_like(self.pages))


class PrefillStep:
    """The cache as a model sees it in a prefill, and the other arguments of its forward.

    rope_offsets: None, because the call says all positions.

    input_ids, position_ids: int64 [1, N]. cu_seqlens: int32 [pieces + 1], their offsets; max_seqlen: the longest.
    last: int64 [pieces], the place of each piece's last token. image_inputs: features and
    rope_ids, if a prompt has images.
    """

    rope_offsets = None

    def __init__(self, cache: PagedCache, pieces: Sequence[PromptPiece], device: torch.device) -> None:
        lengths = torch.tensor([len(piece.ids) for piece in pieces])
        ends = lengths.cumsum(0)
        self.input_ids = torch.tensor([token for piece in pieces for token in piece.ids])[None].to(device)
        self.position_ids = torch.cat([torch.arange(piece.start, piece.stop) for piece in pieces])[None].to(device)
        self.sequence_lengths = (
            torch.tensor([piece.length for piece in pieces]).repeat_interleave(lengths)[None].to(device)
        )
        self.cu_seqlens = F.pad(ends, (1, 0)).int().to(device)
        self.max_seqlen = int(lengths.max())
        self.last = (ends - 1).to(device)
        views = [self.view_of_group(cache, group, pieces, device) for group in range(len(cache.groups))]
        self.layers = [views[group](layer) for layer, group in zip(cache.layers, cache.group_of, strict=True)]
        images, spans = [piece.images for piece in pieces], [(piece.start, piece.stop) for piece in pieces]
        self.image_inputs: dict[str, Any] = {}
        if any(images):
            self.image_inputs["features"] = features_of_pieces(images, spans, device)
            rope_ids = rope_of_pieces(images, spans)
            self.image_inputs |= {} if rope_ids is None else {"rope_ids": rope_ids.to(device)}

    def view_of_group(
        self, cache: PagedCache, index: int, pieces: Sequence[PromptPiece], device: torch.device
    ) -> Callable[[Any], PrefillLayer | PrefillStates]:
        """What makes a layer of a group into what the model sees."""
        group, offsets = cache.groups[index], self.cu_seqlens
        if isinstance(group, StateGroup):
            pages = torch.tensor([piece.tables[index][0] for piece in pieces]).to(device)
            begun = torch.tensor([piece.start > 0 for piece in pieces])
            continued = begun.to(device) if begun.any() else None
            return lambda layer: PrefillStates(layer, pages, continued, offsets)
        plan = key_plan(pieces, index, group.window, device)
        return lambda layer: PrefillLayer(layer, plan, offsets, self.max_seqlen)

    def next_positions(self, count: int) -> Tensor:
        return self.position_ids

    def advance(self, count: int | Tensor) -> None:
        pass


def key_plan(pieces: Sequence[PromptPiece], group: int, window: int | None, device: torch.device) -> KeyPlan:
    tables = [torch.tensor(piece.tables[group]) for piece in pieces]
    slots = torch.cat([written_slots(piece, pages) for piece, pages in zip(pieces, tables, strict=True)]).to(device)
    if not any(piece.start for piece in pieces):
        return KeyPlan(slots)
    first_seen = [0 if window is None else max(0, piece.start - window + 1) for piece in pieces]
    earlier = [
        slots_of(pages, torch.arange(first, piece.start))
        for piece, pages, first in zip(pieces, tables, first_seen, strict=True)
    ]
    lengths = torch.tensor([[len(slots) for slots in earlier], [len(piece.ids) for piece in pieces]])
    of_piece = torch.arange(len(pieces)).repeat(2).repeat_interleave(lengths.flatten())  # of earlier keys, of new ones
    counts = lengths.sum(0)
    offsets = F.pad(counts.cumsum(0), (1, 0)).int()
    order = of_piece.argsort(stable=True)
    return KeyPlan(slots, torch.cat(earlier).to(device), order.to(device), offsets.to(device), int(counts.max()))


def written_slots(piece: PromptPiece, pages: Tensor) -> Tensor:
    """The slots of a piece's tokens, int64 [n]; 0 for those that a ring of pages no longer holds at its end."""
    slots = slots_of(pages, torch.arange(piece.start, piece.stop))
    slots[: max(0, len(slots) - len(pages) * PAGE_SIZE)] = 0
    return slots
