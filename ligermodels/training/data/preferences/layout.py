"""Rows of groups: the layout of groups in a packed row, in which completions share one copy of their prompt; batches.

    [prompt without its last token] [last prompt token, completion 1] [last prompt token, completion 2] …

Each bracket is a packed document. A completion's document has the first one as its prefix: its positions go on from
there, and it reads the keys of the prefix before its own (`SharedKeys`). The last prompt token is repeated, so that
each completion's first token is predicted within its own document. Results equal those of separate sequences, a prompt
with a completion each. A group with one completion, or with nothing to share, is laid out as separate sequences; so is
one whose prompt ends with an image, of which the last token would be repeated.
"""

import dataclasses
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ligermodels.distributed import World
from ligermodels.kernels.attention.shared_keys import SharedKeys
from ligermodels.layers.context_parallel import ContextGroup
from ligermodels.layers.decoder import IGNORE_INDEX
from ligermodels.training.data.preferences.formats import GroupKind
from ligermodels.training.data.preferences.store import Group, GroupImage, unshared
from ligermodels.training.data.rows.image_documents import ImageDecoder
from ligermodels.training.data.rows.packing import pack_units

ROW_MULTIPLE = 128  # of tokens in a row, and of rows that meet the head: a tile of a matrix product


class GroupPiece(NamedTuple):
    """The completions of a group that one row has, from side number `first` on. unit: the group's number in the step.

    number: of its first completion among all of the data; -1 for completions that are not from the data.
    """

    group: Group
    unit: int
    first: int = 0
    number: int = -1

    def tokens(self, share: bool) -> int:
        """Returns the number of tokens in a row."""
        prompt, lengths = len(self.group.prompt), self.group.lengths
        if shares(self.group, share):
            return prompt - 1 + sum(lengths) + len(lengths)
        return prompt * len(lengths) + sum(lengths)


class RowDocument(NamedTuple):
    """A document of a row.

    position: that of its first token. prefix: the document whose keys it reads before its own. context: how many tokens
    come before the completion; all, if the document is a prefix. images: are in the order of their tokens.
    """

    ids: np.ndarray
    position: int
    prefix: int | None
    context: int
    supervised: np.ndarray | None
    images: tuple[GroupImage, ...] = ()


class RowLayout(NamedTuple):
    """A row of T tokens with D documents, of which S have a completion; arrays as in `PreferenceBatch`.

    offsets [T + 1] and places [K] are those of `SharedKeys`, cu_seqlens_k [D + 1] its cu_seqlens. prefixes: the number
    of each document's prefix. images: of all documents, in the order of their tokens.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    position_ids: np.ndarray
    cu_seqlens: np.ndarray
    rows: np.ndarray
    completions: np.ndarray
    last_tokens: np.ndarray
    offsets: np.ndarray
    places: np.ndarray
    cu_seqlens_k: np.ndarray
    shares: bool
    prefixes: list[int | None]
    images: list[GroupImage]


def shares(group: Group, share: bool) -> bool:
    ends_with_image = any(image.stop == len(group.prompt) for image in group.images_of(0))
    return share and len(group.completions) > 1 and len(group.prompt) > 1 and not ends_with_image


def split_group(piece: GroupPiece, length: int, share: bool) -> list[GroupPiece]:
    """Returns a group as pieces of at most `length` tokens, with a prompt each; a longer completion has its own.

    Losses that read each completion alone, such as those of sampled completions, allow this.
    """
    if piece.tokens(share) <= length:
        return [piece]
    pieces: list[GroupPiece] = []
    begin = 0
    for end in range(1, len(piece.group.completions) + 1):
        if end - begin > 1 and part(piece, begin, end).tokens(share) > length:
            pieces.append(part(piece, begin, end - 1))
            begin = end - 1
    return [*pieces, part(piece, begin, len(piece.group.completions))]


def part(piece: GroupPiece, begin: int, end: int) -> GroupPiece:
    number = piece.number if piece.number < 0 else piece.number + begin
    return GroupPiece(piece.group.select(begin, end), piece.unit, piece.first + begin, number)


def lay_out(pieces: Sequence[GroupPiece], share: bool, multiple: int) -> RowLayout:
    """Returns the row of some pieces, padded to a multiple of tokens; the padding is a document of its own."""
    documents = row_documents(pieces, share)
    padding = -sum(len(document.ids) for document in documents) % multiple
    if padding or not documents:
        documents.append(RowDocument(np.zeros(padding or multiple, np.int64), 0, None, padding or multiple, None))
    sizes = [len(document.ids) for document in documents]
    ends = np.cumsum(sizes)
    begins = ends - sizes
    ids = np.concatenate([document.ids for document in documents]).astype(np.int64)
    positions = np.concatenate([np.arange(d.position, d.position + len(d.ids)) for d in documents])

    labels = np.full(len(ids), IGNORE_INDEX, np.int64)
    rows, counts, last_tokens = [], [], []
    for document, begin, end in zip(documents, begins.tolist(), ends.tolist(), strict=True):
        if document.context < len(document.ids):
            places = np.arange(begin + document.context, end)
            places = places if document.supervised is None else places[document.supervised]
            labels[places] = ids[places]
            rows.append(places - 1)
            counts.append(len(places))
            last_tokens.append(end - 1)

    prefixes = [
        np.arange(begins[d.prefix], ends[d.prefix]) if d.prefix is not None else np.arange(0) for d in documents
    ]
    own = [np.arange(begin, end) for begin, end in zip(begins, ends, strict=True)]
    keys = np.concatenate([part for pair in zip(prefixes, own, strict=True) for part in pair])  # token of each key
    key_sizes = [len(prefix) + size for prefix, size in zip(prefixes, sizes, strict=True)]
    return RowLayout(
        ids, labels, positions, cumulated(sizes), np.concatenate([*rows, np.arange(0)]), cumulated(counts),
        np.array(last_tokens, np.int64), cumulated(np.bincount(keys, minlength=len(ids))),
        np.argsort(keys, kind="stable").astype(np.int32), cumulated(key_sizes), any(map(len, prefixes)),
        [document.prefix for document in documents], [image for document in documents for image in document.images],
    )  # fmt: skip


def row_documents(pieces: Sequence[GroupPiece], share: bool) -> list[RowDocument]:
    documents: list[RowDocument] = []
    for piece in pieces:
        documents += group_documents(piece.group, shares(piece.group, share), len(documents))
    return documents


def group_documents(group: Group, share: bool, number: int) -> Iterator[RowDocument]:
    """Makes the documents of a group. number: how many documents the row has before this group."""
    prompt = group.prompt
    before, position, prefix, images = prompt, 0, None, group.images_of(0)
    if share:
        yield RowDocument(prompt[:-1], 0, None, len(prompt) - 1, None, images)
        before, position, prefix, images = prompt[-1:], len(prompt) - 1, number, ()
    for part, (completion, mask) in enumerate(zip(group.completions, group.supervised, strict=True), 1):
        ids = np.concatenate([before, completion])
        yield RowDocument(ids, position, prefix, len(before), mask, (*images, *group.images_of(part)))


def cumulated(sizes: Sequence[int] | np.ndarray) -> np.ndarray:
    """Returns offsets: int32, beginning with 0."""
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)


@dataclass(frozen=True)
class PreferenceBatch:
    """A packed row of T tokens with D documents, S completions and M supervised tokens: one micro-batch of a rank.

    For the model:
    input_ids, labels, position_ids: int64 [1, T]. labels: aligned with input_ids, -100 where not supervised; never of a
    prompt. cu_seqlens: int32 [D + 1], offsets of the documents; the padding is the last one. max_seqlen: length of the
    longest. shared_keys: what documents read where prompts are shared; None where none is.
    rows: int64 [N], the places whose next token is supervised, by completion, in order; N is a multiple of 128, and
    what is beyond M is padding, the last place, whose next token is not supervised. Values of N tokens, such as
    log-probabilities, are in this order. Where ranks share the row, those in this rank's part, with padding likewise.
    images: those of the row, in order, under the names of arguments of `forward`; empty if there are none. An image of
    a prompt that is shared is there once.

    For the losses:
    completions: int32 [S + 1], offsets of the completions in the first M of N values: `cu_seqlens` of the losses. Of
    pairs, chosen and rejected alternate. last_tokens: int64 [S], the place of each completion's last token, which a
    reward model reads. units: int64 [S], the number of each completion's unit in the step, from 0; sides: int64 [S],
    its number in its group: of pairs 0 for chosen and 1 for rejected.
    margins: fp32 [S / 2] of pairs, 0 for a pair without one; None where no pair of the row has one. desirable: bool [S]
    of judged completions; else None.
    teacher_ids int64 [N, k], teacher_logprobs fp32 [N, k]: zeros in the padding; None where no completion of the row
    has a teacher.

    On the host:
    offsets: int32 [S + 1], `completions`. numbers: int64 [S], of the completions among all of the data, to find what
    was precomputed for them; -1 for those that were sampled. supervised: M. parts: how many of these are in the part of
    each rank that shares the row. tokens: of the row without padding. tokens_unshared: what they would be with a prompt
    for each completion.
    """

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    shared_keys: SharedKeys | None
    rows: Tensor
    completions: Tensor
    last_tokens: Tensor
    units: Tensor
    sides: Tensor
    margins: Tensor | None
    desirable: Tensor | None
    teacher_ids: Tensor | None
    teacher_logprobs: Tensor | None
    offsets: np.ndarray
    numbers: np.ndarray
    supervised: int
    parts: tuple[int, ...]
    tokens: int
    tokens_unshared: int
    images: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def model_inputs(self) -> dict[str, Any]:
        """The arguments of `CausalLM.logprobs`, or of `forward`."""
        names = ("input_ids", "labels", "position_ids", "cu_seqlens", "max_seqlen", "shared_keys", "rows")
        return {name: getattr(self, name) for name in names} | dict(self.images)

    @property
    def row_lengths(self) -> Tensor:
        """The tokens of the row without padding, for `forward`: int64 [1]."""
        return self.rows.new_full((1,), self.tokens)

    def borders(self, size: int) -> list[int]:
        """Where groups of `size` completions end among the N rows, from 0 on; the last one has the padding too."""
        return [0, *self.offsets[size:-1:size].tolist(), padded(self.supervised)]

    def completions_in(self, rows: slice, size: int) -> tuple[slice, Tensor]:
        """The completions that some of the N rows have, which are whole groups of `size`, and their offsets in them."""
        borders = self.borders(size)
        first, last = bisect_left(borders, rows.start), bisect_right(borders, rows.stop) - 1
        found = slice(size * first, size * last)
        return found, self.completions[found.start : found.stop + 1] - rows.start

    def of_all_rows(self, values: Tensor, context: ContextGroup | None) -> Tensor:
        """Values of this rank's `rows` -> those of all N rows, with zeros in the padding, where ranks share the row.

        context: these ranks; None for one. Each gradient is the sum of those on all ranks.
        """
        if context is None:
            return values
        found = context.gather(values[: self.parts[context.rank]], self.parts)
        return F.pad(found, (0, padded(len(found)) - len(found)))

    def to(self, device: torch.device) -> "PreferenceBatch":
        """Copies the batch to a device; copies from pinned memory do not block the host."""
        return self.map_tensors(lambda x: x.to(device, non_blocking=True))

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> "PreferenceBatch":
        changed: dict[str, Any] = {"images": tree_map_only(Tensor, function, dict(self.images))}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                changed[field.name] = function(value)
            elif isinstance(value, SharedKeys):
                changed[field.name] = value.map_tensors(function)
        return dataclasses.replace(self, **changed)


def collate_groups(
    groups: Sequence[Group],
    units: Sequence[int],
    length: int,
    *,
    share_prompts: bool = True,
    world: World | None = None,
) -> list[PreferenceBatch]:
    """Returns the rows of completions that were sampled: groups of any size, in rows of at most `length` tokens.

    units: the number of each group in the step. A group that is longer than a row is split, with a prompt in each row.
    `units` and `sides` of a batch say which group and which of its completions each one is. Ranks may get different
    numbers of rows; `empty_batch` fills up.
    """
    whole = [GroupPiece(group, unit) for group, unit in zip(groups, units, strict=True)]
    pieces = [part for piece in whole for part in split_group(piece, length, share_prompts)]
    rows = pack_units([piece.tokens(share_prompts) for piece in pieces], length)
    return [collate_row([pieces[number] for number in row], share_prompts, world=world) for row in rows]


def empty_batch(world: World | None = None) -> PreferenceBatch:
    """Returns a row of padding, for a rank with fewer rows than others; nothing is supervised."""
    return collate_row([], False, world=world)


def collate_row(
    pieces: Sequence[GroupPiece], share: bool, *, values: Sequence[float] = (), kind: GroupKind | None = None,
    decoder: ImageDecoder | None = None, world: World | None = None,
) -> PreferenceBatch:  # fmt: skip
    """Returns a row in host memory, pinned if the rank of `world` has a GPU.

    values: of each piece, its margin or label, as `kind` says; NaN for no margin. decoder: of the images; None if no
    group has any. world: says which part of the row is the rank's; None for all of it.
    Raises InputError as `ImageDecoder.prepare` does.
    """
    world = world or World(torch.device("cpu"))
    layout = lay_out(pieces, share, math.lcm(ROW_MULTIPLE, world.context))
    groups = [piece.group for piece in pieces]
    supervised = len(layout.rows)
    counts = [len(group.completions) for group in groups]
    sides = [piece.first + side for piece, count in zip(pieces, counts, strict=True) for side in range(count)]
    value = torch.tensor(values, dtype=torch.float32)
    teacher_ids, teacher_logprobs = teachers(groups, padded(supervised))
    rows, parts = own_rows(layout, world)
    batch = PreferenceBatch(
        **{name: torch.from_numpy(getattr(layout, name))[None] for name in ("input_ids", "labels", "position_ids")},
        cu_seqlens=torch.from_numpy(layout.cu_seqlens), max_seqlen=int(np.diff(layout.cu_seqlens).max()),
        shared_keys=shared_keys(layout), rows=rows,
        completions=torch.from_numpy(layout.completions), last_tokens=torch.from_numpy(layout.last_tokens),
        units=torch.tensor(np.repeat([piece.unit for piece in pieces], counts), dtype=torch.int64),
        sides=torch.tensor(sides, dtype=torch.int64),
        margins=value.nan_to_num(0.0) if kind == "pairs" and not value.isnan().all() else None,
        desirable=value == 1 if kind == "judged" else None,
        teacher_ids=teacher_ids, teacher_logprobs=teacher_logprobs,
        offsets=layout.completions, numbers=completion_numbers(pieces), supervised=supervised, parts=parts,
        tokens=sum(piece.tokens(share) for piece in pieces), tokens_unshared=unshared(groups),
        images=image_arguments(layout, decoder) if decoder else {},
    )  # fmt: skip
    return batch.map_tensors(Tensor.pin_memory) if world.device.type == "cuda" else batch


def image_arguments(layout: RowLayout, decoder: ImageDecoder) -> dict[str, Any]:
    """Returns the arguments of `forward` for the images of a row."""
    images = [(image.store, image.number) for image in layout.images]
    ids, cu_seqlens = torch.from_numpy(layout.input_ids)[None], torch.from_numpy(layout.cu_seqlens)
    arguments = decoder.arguments([images], ids, None, cu_seqlens, pinned=False)
    if layout.shares and "images" in arguments:
        arguments["images"] = arguments["images"].continuing(layout.cu_seqlens.tolist(), layout.prefixes)
    return arguments


def padded(count: int) -> int:
    return max(1, -(-count // ROW_MULTIPLE)) * ROW_MULTIPLE


def own_rows(layout: RowLayout, world: World) -> tuple[Tensor, tuple[int, ...]]:
    """Returns `rows` and `parts` of a batch."""
    size = len(layout.input_ids) // world.context
    edges = np.searchsorted(layout.rows, size * np.arange(world.context + 1))
    own = layout.rows[edges[world.context_rank] : edges[world.context_rank + 1]] - size * world.context_rank
    rows = torch.full((padded(len(own)),), size - 1, dtype=torch.int64)
    rows[: len(own)] = torch.from_numpy(own)
    return rows, tuple(np.diff(edges).tolist())


def shared_keys(layout: RowLayout) -> SharedKeys | None:
    if not layout.shares:
        return None
    offsets, places, cu_seqlens = (torch.from_numpy(x) for x in (layout.offsets, layout.places, layout.cu_seqlens_k))
    return SharedKeys(offsets, places, cu_seqlens, int(np.diff(layout.cu_seqlens_k).max()))


def completion_numbers(pieces: Sequence[GroupPiece]) -> np.ndarray:
    numbers = [
        np.full(len(piece.group.completions), -1) if piece.number < 0
        else piece.number + np.arange(len(piece.group.completions))
        for piece in pieces
    ]  # fmt: skip
    return np.concatenate([*numbers, np.arange(0)]).astype(np.int64)


def teachers(groups: Sequence[Group], count: int) -> tuple[Tensor | None, Tensor | None]:
    """Returns the rows of all teachers, with zeros up to `count` rows; None where no group has a teacher."""
    found = [teacher for group in groups for teacher in group.teacher or ()]
    if not found:
        return None, None
    ids = torch.zeros(count, found[0].ids.shape[1], dtype=torch.int64)
    logprobs = torch.zeros(ids.shape)
    ids_of, logprobs_of = (np.concatenate([getattr(teacher, name) for teacher in found]) for name in found[0]._fields)
    ids[: len(ids_of)], logprobs[: len(ids_of)] = torch.from_numpy(ids_of), torch.from_numpy(logprobs_of)
    return ids, logprobs
