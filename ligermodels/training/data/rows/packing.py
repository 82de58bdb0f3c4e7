"""The validation split and sequence packing: which documents a run trains on, as rows of at most T tokens each.

The split depends only on the documents and the fraction, not on the seed, the number of ranks or the sequence length.

A row is one training sequence of fixed length T (--sequence-length): one or more segments of documents, then padding.
A document longer than a row is cut into segments that overlap by one token. The first token of a segment is context
and never a target, nor is padding; every other token of every document is a target exactly once. A segment without a
supervised token, such as a part of a long prompt, is left out. With packing, best-fit
decreasing bin packing puts whole segments into rows: the longest first, each into the row with the least room that is
enough. Without packing, each segment has a row of its own.

A row stores only where its segments are in the token store; no token is read or copied here. One rank plans the rows
once; all ranks map them from the user's cache: 12 bytes a segment and 8 a row on disk. Planning needs about 60 bytes of
memory a segment.

Units of unequal length, such as groups of completions, are dealt to ranks longest first, each to the rank with the
fewest tokens; a rank packs its own into rows by best fit. Every rank computes the whole deal, and so knows how many
rows the others have. The deal changes the results of a step by rounding alone.
"""

import bisect
import functools
import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from ligermodels.training.data.rows.store import TokenStore, cached_folders, document_hashes, map_file

DEFAULT_FRACTION, SMALL_DATA_FRACTION = 0.01, 0.05
DEFAULT_MIN_TOKENS, DEFAULT_MAX_TOKENS = 2**14, 2**17
MAX_OVERSHOOT = 10  # whole documents may have up to this many times the given fraction of all tokens
ROW_ARRAYS = {"starts": np.int64, "lengths": np.int32, "ends": np.int64}  # the arrays of `Rows`, each in a file


@dataclass(frozen=True)
class Selection:
    """D documents of a store, at tokens[begin:end]. begins, ends: [D] int64. hashes: [D] uint64, of the contents."""

    store: TokenStore
    begins: np.ndarray
    ends: np.ndarray
    hashes: np.ndarray

    def __len__(self) -> int:
        return len(self.hashes)

    def select(self, mask: np.ndarray) -> "Selection":
        """Returns the documents for which `mask` [D] bool is True."""
        return Selection(self.store, self.begins[mask], self.ends[mask], self.hashes[mask])

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash of the documents' contents and positions."""
        digest = hashlib.sha256()
        for array in (self.begins, self.ends, self.hashes):
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    @property
    def tokens(self) -> int:
        return int((self.ends - self.begins).sum())

    @property
    def supervised(self) -> int:
        """The number of supervised tokens; the first token of a document is never supervised."""
        if self.store.supervised is None:
            return int(np.maximum(self.ends - self.begins - 1, 0).sum())
        bounds = zip(self.begins.tolist(), self.ends.tolist(), strict=True)
        return sum(int(np.count_nonzero(self.store.supervised[begin + 1 : end])) for begin, end in bounds)


def default_fraction(tokens: int) -> float:
    """Returns the validation fraction of so many tokens if none is given.

    It is larger for small data, whose validation loss would otherwise be that of a few documents, and smaller for large
    data, so that each validation stays short.
    """
    fraction = max(DEFAULT_FRACTION, min(SMALL_DATA_FRACTION, DEFAULT_MIN_TOKENS / tokens))
    return min(fraction, DEFAULT_MAX_TOKENS / tokens)


def all_documents(store: TokenStore) -> Selection:
    return Selection(store, store.offsets[:-1], store.offsets[1:], store.hashes)


def split_documents(store: TokenStore, fraction: float) -> tuple[Selection, Selection]:
    """Returns (training, validation).

    Validation has the documents with the smallest hashes: `fraction` of them, at least one. Copies of a document have
    the same hash and so are on the same side.

    If these documents have far more than `fraction` of the tokens, as in a store of a few long documents, validation
    has the end of the store instead, and the document at the boundary is cut in two. Documents with a mask or images
    stay whole: a prompt without its answer has no supervised token. Of those with a mask, validation then has the
    shortest. Validation has nothing where all documents are copies of one that stays whole.
    """
    documents = all_documents(store)
    masked, hashes = store.supervised is not None, documents.hashes
    if (masked or len(store) > 1) and (hashes == hashes[0]).all():
        nothing = np.zeros(len(store), bool)
        return documents, documents.select(nothing)
    count = max(1, round(len(store) * fraction))
    bound = np.partition(hashes, count - 1)[count - 1]
    chosen = hashes <= bound if bound < hashes.max() else hashes < bound  # something is left to train on
    validation = documents.select(chosen)
    is_whole = store.images is not None or validation.tokens <= MAX_OVERSHOOT * fraction * documents.tokens
    if masked and not is_whole:
        chosen = is_shortest(documents)
    elif len(store) == 1 or not is_whole:
        return split_at_token(documents, documents.tokens - max(2, round(documents.tokens * fraction)))
    return documents.select(~chosen), documents.select(chosen)


def is_shortest(documents: Selection) -> np.ndarray:
    """Returns whether each document is a copy of the one whose copies have the fewest tokens together: [D] bool."""
    _, kinds = np.unique(documents.hashes, return_inverse=True)
    return kinds == np.bincount(kinds, weights=documents.ends - documents.begins).argmin()


def split_at_token(documents: Selection, place: int) -> tuple[Selection, Selection]:
    """Returns the parts before and after tokens[place].

    The token is the last target of the first part and context in the second.
    """
    place = max(place, 0)
    document = int(np.searchsorted(documents.ends, place, side="right"))
    before = with_boundary(documents, slice(document + 1), None, place + 1)
    return before, with_boundary(documents, slice(document, None), place, None)


def with_boundary(documents: Selection, part: slice, begin: int | None, end: int | None) -> Selection:
    """Returns a part of the documents, with a new begin for its first one, or a new end for its last one."""
    begins, ends, hashes = (x[part].copy() for x in (documents.begins, documents.ends, documents.hashes))
    changed = 0 if end is None else -1
    begins[changed] = begins[changed] if begin is None else begin
    ends[changed] = ends[changed] if end is None else end
    offsets = (x[changed] - documents.begins[part][changed] for x in (begins, ends))
    content = np.array([hashes[changed], *offsets], np.uint64)
    digest = next(document_hashes([(content.view("<u4"), [len(content) * 2])]))
    hashes[changed] = np.frombuffer(digest, "<u8")[0]
    return Selection(documents.store, begins, ends, hashes)


def exclude_validation(training: Sequence[Any], validation: Sequence[Any]) -> list[Any]:
    """Returns the training documents without those that are also validation documents; groups, by their prompts."""
    held_out = np.unique(np.concatenate([part.hashes for part in validation]))
    masks = [is_member(part.hashes, held_out) for part in training]
    return [part.select(~mask) if mask.any() else part for part, mask in zip(training, masks, strict=True)]


def is_member(hashes: np.ndarray, ascending: np.ndarray) -> np.ndarray:
    """Returns whether each hash is in the `ascending` array, which is small. np.isin would sort all hashes."""
    if not len(ascending):
        return np.zeros(len(hashes), bool)
    place = np.minimum(np.searchsorted(ascending, hashes), len(ascending) - 1)
    return ascending[place] == hashes


class Segment(NamedTuple):
    """A part of a document: store.tokens[start : start + size]."""

    store: TokenStore
    start: int
    size: int


@dataclass(frozen=True)
class Rows:
    """R rows of at most `length` tokens each, made of S segments of one store.

    starts [S] int64, lengths [S] int32: the segments, row by row. ends [R + 1] int64: row r has the segments from
    ends[r] up to ends[r + 1]. fingerprint: a hash of the documents and of the segments of each row.
    """

    store: TokenStore
    length: int
    starts: np.ndarray
    lengths: np.ndarray
    ends: np.ndarray
    fingerprint: str

    def __len__(self) -> int:
        return len(self.ends) - 1

    @property
    def tokens(self) -> int:
        """The number of tokens in all rows, without padding."""
        return int(self.lengths.sum(dtype=np.int64))

    @property
    def image_tokens(self) -> np.ndarray:
        """The number of image tokens of each row, int64 [R]."""
        images = self.store.images
        if images is None:
            return np.zeros(len(self), np.int64)
        before = np.concatenate([[0], np.cumsum(images.features)])
        first, last = (np.searchsorted(images.starts, at) for at in (self.starts, self.starts + self.lengths))
        of_segments = np.concatenate([[0], np.cumsum(before[last] - before[first])])
        return np.diff(of_segments[self.ends])

    def segments(self, row: int) -> list[Segment]:
        span = slice(self.ends[row], self.ends[row + 1])
        sizes = zip(self.starts[span].tolist(), self.lengths[span].tolist(), strict=True)
        return [Segment(self.store, start, size) for start, size in sizes]

    def places(self, row: int) -> list[str]:
        return [self.store.place(segment.start) for segment in self.segments(row)]


class RowPart(Protocol):
    """The rows of one store. places: returns where the documents of a row were read."""

    def __len__(self) -> int: ...

    @property
    def fingerprint(self) -> str: ...

    def places(self, row: int) -> list[str]: ...


AnyPart = TypeVar("AnyPart", bound=RowPart)


class Concatenated(Generic[AnyPart]):
    """The rows of several stores, as one sequence."""

    def __init__(self, parts: Sequence[AnyPart]) -> None:
        self.parts = list(parts)
        self.ends = list(itertools.accumulate(map(len, parts)))

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def locate(self, number: int) -> tuple[AnyPart, int]:
        """Returns the part that has row number `number`, and the number of the row there."""
        part = bisect.bisect_right(self.ends, number)
        return self.parts[part], number - self.ends[part] + len(self.parts[part])

    def places(self, number: int) -> list[str]:
        """Returns where the documents of a row were read."""
        part, row = self.locate(number)
        return part.places(row)

    @property
    def fingerprint(self) -> str:
        """A hash of all rows and of their order."""
        return hashlib.sha256("".join(part.fingerprint for part in self.parts).encode()).hexdigest()


class ConcatenatedRows(Concatenated[Rows]):
    def __init__(self, parts: Sequence[Rows]) -> None:
        super().__init__(parts)
        self.length = parts[0].length
        self.tokens = sum(part.tokens for part in parts)  # without padding

    def segments(self, row: int) -> list[Segment]:
        part, index = self.locate(row)
        return part.segments(index)


def pack_documents(parts: Sequence[Selection], length: int, packing: bool) -> ConcatenatedRows:
    """Returns the rows of documents. packing: segments share rows; otherwise each has its own row, in document order.

    Every rank must call this.
    """
    keys = [{"rows": part.fingerprint, "length": length, "packing": packing} for part in parts]
    writers = [functools.partial(write_rows, part, length, packing) for part in parts]
    folders = cached_folders(list(zip(keys, writers, strict=True)))
    rows = [open_rows(part.store, length, folder) for part, folder in zip(parts, folders, strict=True)]
    return ConcatenatedRows(rows)


def open_rows(store: TokenStore, length: int, folder: Path) -> Rows:
    """Returns the rows that `write_rows` wrote to a folder, memory-mapped."""
    arrays = {name: map_file(folder / name, dtype) for name, dtype in ROW_ARRAYS.items()}
    return Rows(store, length, **arrays, fingerprint=(folder / "fingerprint").read_text())


def write_rows(documents: Selection, length: int, packing: bool, folder: Path) -> None:
    digest = hashlib.sha256(documents.fingerprint.encode())
    for name, array in zip(ROW_ARRAYS, plan_rows(documents, length, packing), strict=True):
        content = array.astype(ROW_ARRAYS[name], copy=False).data
        (folder / name).write_bytes(content)
        digest.update(content)
    (folder / "fingerprint").write_text(digest.hexdigest())


def plan_rows(documents: Selection, length: int, packing: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the arrays starts, lengths and ends of `Rows`."""
    starts, lengths = cut_documents(documents.begins, documents.ends, length)
    if documents.store.supervised is not None:
        supervised = has_supervised(documents.store.supervised, starts, lengths)
        starts, lengths = starts[supervised], lengths[supervised]
    if not packing:
        return starts, lengths, np.arange(len(starts) + 1)
    dtype = np.uint16 if length < 2**16 else np.int32  # numpy sorts 16-bit integers in linear time
    longest_first = np.argsort((length - lengths).astype(dtype), kind="stable")
    starts, lengths = starts[longest_first], lengths[longest_first]
    row_of, count = best_fit(lengths, length)
    order = np.argsort(row_of, kind="stable")
    segments = np.bincount(row_of, minlength=count)
    return starts[order], lengths[order], np.concatenate([[0], np.cumsum(segments)])


def cut_documents(begins: np.ndarray, ends: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """starts and lengths [S] of segments of at most `length` tokens.

    Each segment but the first of a document begins with the last token of the segment before it. A document of one
    token has no target, and so no segment.
    """
    step = length - 1
    counts = count_segments(begins, ends, length)
    document = np.repeat(np.arange(len(begins)), counts)
    number = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = begins[document] + number * step
    return starts, np.minimum(ends[document] - starts, length).astype(np.int32)


def count_segments(begins: np.ndarray, ends: np.ndarray, length: int) -> np.ndarray:
    """Returns the number of segments of each document [D], with those that have no supervised token."""
    return np.maximum(-(-(ends - begins - 1) // (length - 1)), 0)


def has_supervised(supervised: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Returns whether each segment has a supervised token behind its first token, which is context: [S] bool.

    supervised: the mask of the store. starts: ascending.
    """
    bounds = np.stack([starts + 1, starts + lengths], axis=1).ravel()
    if len(bounds) and bounds[-1] == len(supervised):  # the end of the array, which is no index of it
        bounds = bounds[:-1]
    return np.logical_or.reduceat(supervised, bounds)[::2]


def best_fit(lengths: np.ndarray, row_length: int) -> tuple[np.ndarray, int]:
    """Best-fit decreasing bin packing of segments, whose lengths [S] must be sorted in descending order.

    Returns the row [S] of each segment, and the number of rows. All segments of one length are placed together: of the
    rows with enough room, those with the least room take as many as fit, because a row with one more segment has even
    less room. The time therefore depends on the number of different lengths, not of segments.
    """
    row_of = np.empty(len(lengths), np.int32)
    unfilled = OpenRows(shortest=int(lengths[-1]) if len(lengths) else 0)
    count = 0
    stops = np.append(np.flatnonzero(np.diff(lengths)), len(lengths) - 1) + 1
    place = 0
    for stop in stops.tolist() if len(lengths) else []:
        size = int(lengths[place])
        while place < stop:
            room, rows = unfilled.take(size)
            if rows is None:
                room = row_length
                rows = np.arange(count, count - (place - stop) // (row_length // size), dtype=np.int32)
                count += len(rows)
            fit = room // size
            placed = min(stop - place, fit * len(rows))
            row_of[place : place + placed] = np.repeat(rows, fit)[:placed]
            full, rest = divmod(placed, fit)
            unfilled.put(room - fit * size, rows[:full])
            unfilled.put(room - rest * size, rows[full : full + 1])
            unfilled.put(room, rows[full + 1 :])
            place += placed
    return row_of, count


class OpenRows:
    """Rows grouped by the room left in them, if it is enough for the shortest segment."""

    def __init__(self, shortest: int) -> None:
        self.shortest = shortest
        self.rows: dict[int, list[np.ndarray]] = {}
        self.rooms: list[int] = []  # the keys of `rows`, ascending

    def put(self, room: int, rows: np.ndarray) -> None:
        if room < self.shortest or not len(rows):
            return
        if room not in self.rows:
            self.rows[room] = []
            bisect.insort(self.rooms, room)
        self.rows[room].append(rows)

    def take(self, size: int) -> tuple[int, np.ndarray | None]:
        """Removes and returns the least room of at least `size`, and all rows that have it; None if there are none."""
        index = bisect.bisect_left(self.rooms, size)
        if index == len(self.rooms):
            return 0, None
        room = self.rooms.pop(index)
        return room, np.concatenate(self.rows.pop(room))


def deal_units(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Returns the numbers of the units of each rank, ascending. sizes: tokens of each unit."""
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for unit in np.argsort(-np.asarray(sizes, np.int64), kind="stable").tolist():
        rank = loads.index(min(loads))
        dealt[rank].append(unit)
        loads[rank] += sizes[unit]
    return [sorted(units) for units in dealt]


def pack_units(sizes: Sequence[int], length: int) -> list[list[int]]:
    """Returns the numbers of the units of each row, ascending.

    A row has at most `length` tokens; a longer unit has its own row.
    """
    order = np.argsort(-np.asarray(sizes, np.int64), kind="stable")
    capped = np.minimum(np.asarray(sizes, np.int64)[order], length)
    row_of, count = best_fit(capped, length)
    rows: list[list[int]] = [[] for _ in range(count)]
    for unit, row in zip(order.tolist(), row_of.tolist(), strict=True):
        rows[row].append(unit)
    return [sorted(units) for units in rows]
