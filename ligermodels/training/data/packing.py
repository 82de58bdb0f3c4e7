"""Documents as rows of T tokens.

A document longer than a row is cut into pieces that overlap by one token. Pieces go whole into rows, the longest first,
each where it fits best; or each gets a row of its own. A piece's first token is context and never predicted, nor is
padding: every other token of every document is a target exactly once. A row is known by where its pieces lie in the
store; no token is read or copied here. Rows are planned once, by one rank, and mapped by all from the user's cache: 12
bytes a piece and 8 a row on the disk; planning takes some 60 bytes a piece of memory. Must not know batches or models.
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

from ligermodels.training.data.cache import all_cached
from ligermodels.training.data.split import Selection
from ligermodels.training.data.store import TokenStore, mapped

ARRAYS = {"starts": np.int64, "lengths": np.int32, "ends": np.int64}  # of rows, each a file of that name


class Piece(NamedTuple):
    """store.tokens[start : start + size]"""

    store: TokenStore
    start: int
    size: int


@dataclass(frozen=True)
class Rows:
    """R rows of at most `length` tokens each, in pieces of one store.

    starts [P] int64, lengths [P] int32: the pieces, row by row. ends [R + 1] int64: the pieces of row r are those from
    ends[r] to ends[r + 1]. fingerprint: of the documents and of which pieces of them each row has.
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
        """In all rows, without padding."""
        return int(self.lengths.sum(dtype=np.int64))

    def pieces(self, row: int) -> list[Piece]:
        mine = slice(self.ends[row], self.ends[row + 1])
        sizes = zip(self.starts[mine].tolist(), self.lengths[mine].tolist(), strict=True)
        return [Piece(self.store, start, size) for start, size in sizes]


class JoinedRows:
    """The rows of several stores as one list."""

    def __init__(self, parts: Sequence[Rows]) -> None:
        self.parts, self.length = parts, parts[0].length
        self.ends = list(itertools.accumulate(map(len, parts)))
        self.tokens = sum(part.tokens for part in parts)  # without padding

    def __len__(self) -> int:
        return self.ends[-1]

    def pieces(self, row: int) -> list[Piece]:
        part = bisect.bisect_right(self.ends, row)
        return self.parts[part].pieces(row - self.ends[part] + len(self.parts[part]))


def rows_of(parts: Sequence[Selection], length: int, packing: bool) -> JoinedRows:
    """packing: several pieces share a row; else each has one of its own, in the documents' order. Every rank calls."""
    keys = [{"rows": part.fingerprint, "length": length, "packing": packing} for part in parts]
    fills = [functools.partial(write_rows, part, length, packing) for part in parts]
    folders = all_cached(list(zip(keys, fills, strict=True)))
    return JoinedRows([open_rows(part.store, length, folder) for part, folder in zip(parts, folders, strict=True)])


def open_rows(store: TokenStore, length: int, folder: Path) -> Rows:
    """The rows that `write_rows` left there, mapped."""
    arrays = {name: mapped(folder / name, dtype) for name, dtype in ARRAYS.items()}
    return Rows(store, length, **arrays, fingerprint=(folder / "fingerprint").read_text())


def write_rows(documents: Selection, length: int, packing: bool, folder: Path) -> None:
    known = hashlib.sha256(documents.fingerprint.encode())
    for name, array in zip(ARRAYS, planned(documents, length, packing), strict=True):
        content = array.astype(ARRAYS[name], copy=False).data
        (folder / name).write_bytes(content)
        known.update(content)
    (folder / "fingerprint").write_text(known.hexdigest())


def planned(documents: Selection, length: int, packing: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The arrays of `Rows`."""
    starts, lengths = cut(documents.begins, documents.ends, length)
    if not packing:
        return starts, lengths, np.arange(len(starts) + 1)
    narrow = np.uint16 if length < 2**16 else np.int32  # of which numpy sorts the former in linear time
    longest_first = np.argsort((length - lengths).astype(narrow), kind="stable")
    starts, lengths = starts[longest_first], lengths[longest_first]
    row_of, count = best_fit(lengths, length)
    order = np.argsort(row_of, kind="stable")
    pieces = np.bincount(row_of, minlength=count)
    return starts[order], lengths[order], np.concatenate([[0], np.cumsum(pieces)])


def cut(begins: np.ndarray, ends: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """starts and lengths [P] of pieces of at most `length` tokens, each but a document's first beginning with the token
    that ended the one before. A document of one token has nothing to predict, and no piece."""
    step = length - 1
    pieces = np.maximum(-(-(ends - begins - 1) // step), 0)
    document = np.repeat(np.arange(len(begins)), pieces)
    number = np.arange(len(document)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    starts = begins[document] + number * step
    return starts, np.minimum(ends[document] - starts, length).astype(np.int32)


def best_fit(lengths: np.ndarray, room: int) -> tuple[np.ndarray, int]:
    """lengths [P]: of pieces, the longest first. Returns the row [P] of each, and how many rows there are.

    Pieces of one length are placed together. The rows with the least room that is enough are the best for as many of
    them as fit: a row with a piece more in it has less room still. So the time depends on how many lengths there are.
    """
    row_of = np.empty(len(lengths), np.int32)
    free = Free(shortest=int(lengths[-1]) if len(lengths) else 0)
    count = 0
    lasts = np.append(np.flatnonzero(np.diff(lengths)), len(lengths) - 1) + 1
    place = 0
    for stop in lasts.tolist() if len(lengths) else []:
        size = int(lengths[place])
        while place < stop:
            left, rows = free.take(size)
            if rows is None:
                left = room
                rows = np.arange(count, count - (place - stop) // (room // size), dtype=np.int32)
                count += len(rows)
            fit = left // size
            placed = min(stop - place, fit * len(rows))
            row_of[place : place + placed] = np.repeat(rows, fit)[:placed]
            full, rest = divmod(placed, fit)
            free.put(left - fit * size, rows[:full])
            free.put(left - rest * size, rows[full : full + 1])
            free.put(left, rows[full + 1 :])
            place += placed
    return row_of, count


class Free:
    """Rows by the room that is left in them, where it is enough for the shortest piece."""

    def __init__(self, shortest: int) -> None:
        self.shortest = shortest
        self.rows: dict[int, list[np.ndarray]] = {}
        self.rooms: list[int] = []  # for which there are any, ascending

    def put(self, room: int, rows: np.ndarray) -> None:
        if room < self.shortest or not len(rows):
            return
        if room not in self.rows:
            self.rows[room] = []
            bisect.insort(self.rooms, room)
        self.rows[room].append(rows)

    def take(self, size: int) -> tuple[int, np.ndarray | None]:
        """The least room that is enough, and all rows that have it; None where there are none."""
        fit = bisect.bisect_left(self.rooms, size)
        if fit == len(self.rooms):
            return 0, None
        room = self.rooms.pop(fit)
        return room, np.concatenate(self.rows.pop(room))
