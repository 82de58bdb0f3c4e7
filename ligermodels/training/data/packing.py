"""Documents as rows of T tokens.

A document longer than a row is cut into pieces that overlap by one token. Pieces go whole into rows, the longest first,
each where it fits best; or each gets a row of its own. A piece's first token is context and never predicted, nor is
padding: every other token of every document is a target exactly once. A row is known by where its pieces lie in the
store; no token is read or copied here. Must not know batches or models.
"""

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ligermodels.training.data.split import Selection
from ligermodels.training.data.store import TokenStore


class Piece(NamedTuple):
    """store.tokens[start : start + size]"""

    store: TokenStore
    start: int
    size: int


@dataclass(frozen=True)
class Rows:
    """R rows of at most `length` tokens each, in pieces of one store.

    starts [P] int64, lengths [P] int32: the pieces, row by row. ends [R + 1] int64: the pieces of row r are those from
    ends[r] to ends[r + 1].
    """

    store: TokenStore
    length: int
    starts: np.ndarray
    lengths: np.ndarray
    ends: np.ndarray

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


def rows_of(documents: Selection, length: int, packing: bool) -> Rows:
    """packing: several pieces share a row; else each has one of its own, in the documents' order."""
    store = documents.store
    starts, lengths = cut(documents.begins, documents.ends, length)
    if not packing:
        return Rows(store, length, starts, lengths, np.arange(len(starts) + 1))
    longest_first = np.argsort(-lengths, kind="stable")
    starts, lengths = starts[longest_first], lengths[longest_first]
    row_of, count = best_fit(lengths.tolist(), length)
    order = np.argsort(row_of, kind="stable")
    pieces = np.bincount(row_of, minlength=count)
    return Rows(store, length, starts[order], lengths[order], np.concatenate([[0], np.cumsum(pieces)]))


def cut(begins: np.ndarray, ends: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """starts and lengths [P] of pieces of at most `length` tokens, each but a document's first beginning with the token
    that ended the one before. A document of one token has nothing to predict, and no piece."""
    step = length - 1
    pieces = np.maximum(-(-(ends - begins - 1) // step), 0)
    document = np.repeat(np.arange(len(begins)), pieces)
    number = np.arange(len(document)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    starts = begins[document] + number * step
    return starts, np.minimum(ends[document] - starts, length).astype(np.int32)


def best_fit(lengths: list[int], room: int) -> tuple[np.ndarray, int]:
    """lengths: of pieces, the longest first. Returns the row [P] of each, and how many rows there are."""
    row_of = np.empty(len(lengths), np.int64)
    rows_with: list[list[int]] = [[] for _ in range(room)]  # the rows that have so much room left
    rooms: list[int] = []  # for which there are any, ascending
    count, shortest = 0, lengths[-1] if lengths else 0
    for piece, size in enumerate(lengths):
        fit = bisect.bisect_left(rooms, size)
        if fit == len(rooms):
            row, left = count, room
            count += 1
        else:
            left = rooms[fit]
            row = rows_with[left].pop()
            if not rows_with[left]:
                del rooms[fit]
        left -= size
        if left >= shortest:
            if not rows_with[left]:
                bisect.insort(rooms, left)
            rows_with[left].append(row)
        row_of[piece] = row
    return row_of, count
