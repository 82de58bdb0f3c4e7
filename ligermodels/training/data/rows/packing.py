"""Sequence packing: documents as rows of at most T tokens each.

A row is one training sequence of fixed length T (--sequence-length): one or more segments of documents, then padding.
A document longer than a row is cut into segments that overlap by one token. The first token of a segment is context
and never a target, nor is padding; every other token of every document is a target exactly once. With packing, best-fit
decreasing bin packing puts whole segments into rows: the longest first, each into the row with the least room that is
enough. Without packing, each segment has a row of its own.

A row stores only where its segments are in the token store; no token is read or copied here. One rank plans the rows
once; all ranks map them from the user's cache: 12 bytes a segment and 8 a row on disk. Planning needs about 60 bytes of
memory a segment. This module knows nothing about batches or models.
"""

import bisect
import functools
import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ligermodels.training.data.rows.cache import cached_folders
from ligermodels.training.data.rows.split import Selection
from ligermodels.training.data.rows.store import TokenStore, map_file

ROW_ARRAYS = {"starts": np.int64, "lengths": np.int32, "ends": np.int64}  # the arrays of `Rows`, each in a file


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


class ConcatenatedRows:
    """The rows of several stores, as one sequence."""

    def __init__(self, parts: Sequence[Rows]) -> None:
        self.parts, self.length = parts, parts[0].length
        self.ends = list(itertools.accumulate(map(len, parts)))
        self.tokens = sum(part.tokens for part in parts)  # without padding

    def __len__(self) -> int:
        return self.ends[-1]

    def segments(self, row: int) -> list[Segment]:
        part = bisect.bisect_right(self.ends, row)
        return self.parts[part].segments(row - self.ends[part] + len(self.parts[part]))


def pack_documents(parts: Sequence[Selection], length: int, packing: bool) -> ConcatenatedRows:
    """The rows of documents. packing: segments share rows; otherwise each has its own row, in document order.

    Every rank must call this.
    """
    keys = [{"rows": part.fingerprint, "length": length, "packing": packing} for part in parts]
    writers = [functools.partial(write_rows, part, length, packing) for part in parts]
    folders = cached_folders(list(zip(keys, writers, strict=True)))
    rows = [open_rows(part.store, length, folder) for part, folder in zip(parts, folders, strict=True)]
    return ConcatenatedRows(rows)


def open_rows(store: TokenStore, length: int, folder: Path) -> Rows:
    """The rows that `write_rows` wrote to a folder, memory-mapped."""
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
    """The arrays starts, lengths and ends of `Rows`."""
    starts, lengths = cut_documents(documents.begins, documents.ends, length)
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
    counts = np.maximum(-(-(ends - begins - 1) // step), 0)
    document = np.repeat(np.arange(len(begins)), counts)
    number = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = begins[document] + number * step
    return starts, np.minimum(ends[document] - starts, length).astype(np.int32)


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
