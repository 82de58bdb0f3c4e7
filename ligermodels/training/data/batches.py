"""Rows as batches on a device: which of a step's rows a rank computes, and what a model is given of them.

A step's rows, over all ranks and micro-batches, depend on a cursor alone, the number of rows taken before it. Must not
know models but by what their `forward` takes.
"""

import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ligermodels.distributed import World
from ligermodels.errors import InputError
from ligermodels.layers.decoder import IGNORE_INDEX, next_tokens
from ligermodels.training.data.mixture import Mixture
from ligermodels.training.data.packing import JoinedRows, Piece
from ligermodels.units import counted

PROMPT = 16  # tokens


class Batch(NamedTuple):
    """B rows of T tokens, as `CausalLM.forward` takes them.

    input_ids, labels: int64 [1, B * T] where documents are packed, with cu_seqlens int32 [documents + 1], in which a
    row's padding is a document too, and max_seqlen = T; else [B, T] and None. labels: -100 where none is due.
    """

    input_ids: Tensor
    labels: Tensor
    cu_seqlens: Tensor | None
    max_seqlen: int | None

    def to(self, device: torch.device) -> "Batch":
        """The host waits for no copy from pinned memory."""
        offsets = None if self.cu_seqlens is None else self.cu_seqlens.to(device, non_blocking=True)
        input_ids, labels = (x.to(device, non_blocking=True) for x in (self.input_ids, self.labels))
        return Batch(input_ids, labels, offsets, self.max_seqlen)


def supervised(batch: Batch) -> Tensor:
    """How many tokens are predicted: a scalar on the batch's device."""
    return (next_tokens(batch.labels, batch.cu_seqlens) != IGNORE_INDEX).sum()


def collate(rows: Sequence[Sequence[Piece]], length: int, packing: bool, device: torch.device) -> Batch:
    """In host memory; pinned, for a GPU to copy from. rows: each the pieces in it; none for a row of padding."""
    pinned = device.type == "cuda"
    input_ids = torch.zeros(len(rows), length, dtype=torch.int64, pin_memory=pinned)
    labels = torch.full((len(rows), length), IGNORE_INDEX, dtype=torch.int64, pin_memory=pinned)
    ids, targets, offsets = input_ids.numpy(), labels.numpy(), [0]
    for number, row in enumerate(rows):
        end = 0
        for store, start, size in row:
            begin, end = end, end + size
            ids[number, begin:end] = store.tokens[start : start + size]
            targets[number, begin + 1 : end] = ids[number, begin + 1 : end]
            if store.supervised is not None:
                targets[number, begin:end][~store.supervised[start : start + size]] = IGNORE_INDEX
            offsets.append(number * length + end)
        if end < length:
            offsets.append((number + 1) * length)
    if not packing:
        return Batch(input_ids, labels, None, None)
    cu_seqlens = torch.tensor(offsets, dtype=torch.int32, pin_memory=pinned)
    return Batch(input_ids.view(1, -1), labels.view(1, -1), cu_seqlens, length)


def rows_a_rank(batch_size: int, micro_batch_size: int | None, world: World) -> tuple[int, int]:
    """(micro-batches a step, rows in each) of a rank, which all together are `batch_size` rows.

    micro_batch_size: None for as many rows as a step has for a rank. Raises InputError where that does not come out.
    """
    micro = micro_batch_size or max(1, batch_size // world.size)
    accumulate, rest = divmod(batch_size, world.size * micro)
    if rest or not accumulate:
        given = "" if micro_batch_size is None else f" x --micro-batch-size {micro}"
        raise InputError(
            f"--batch-size {batch_size} is no multiple of {counted(world.size, 'rank')}{given}: change one of them"
        )
    return accumulate, micro


class Step(NamedTuple):
    """What a rank computes of a step."""

    cursor: int
    batch_size: int
    micro_batch_size: int | None
    world: World


class Training:
    """The rows that a run trains on, in the endless order of a mixture of sources."""

    def __init__(self, sources: Sequence[JoinedRows], weights: Sequence[float], seed: int, packing: bool) -> None:
        self.sources, self.packing = sources, packing
        self.mixture = Mixture([len(rows) for rows in sources], weights, seed)
        self.thread = ThreadPoolExecutor(1, "batches")
        self.prepared: tuple[Step, Future[list[Batch]]] | None = None

    def __len__(self) -> int:
        """Rows in one pass over all sources."""
        return sum(map(len, self.sources))

    @property
    def tokens(self) -> int:
        """In one pass, without padding."""
        return sum(rows.tokens for rows in self.sources)

    @property
    def fingerprint(self) -> str:
        """Of all rows: what tells whether a cursor means what it did."""
        parts = [part.fingerprint for rows in self.sources for part in rows.parts]
        return hashlib.sha256("".join(parts).encode()).hexdigest()

    def micro_batches(self, cursor: int, batch_size: int, micro_batch_size: int | None, world: World) -> list[Batch]:
        """This rank's batches of the step that takes `batch_size` rows from `cursor` on, on its device.

        The step after it is collated while this one is computed. Raises InputError as `rows_a_rank` does.
        """
        step = Step(cursor, batch_size, micro_batch_size, world)
        prepared, self.prepared = self.prepared, None
        batches = prepared[1].result() if prepared and prepared[0] == step else self.collate(step)
        following = step._replace(cursor=cursor + batch_size)
        self.prepared = following, self.thread.submit(self.collate, following)
        return [batch.to(world.device) for batch in batches]

    def collate(self, step: Step) -> list[Batch]:
        accumulate, micro = rows_a_rank(step.batch_size, step.micro_batch_size, step.world)
        entries = self.mixture.entries(step.cursor, step.batch_size)
        first = [(number * step.world.size + step.world.rank) * micro for number in range(accumulate)]
        batches = [self.rows(entries[start : start + micro]) for start in first]
        length = self.sources[0].length
        return [collate(rows, length, self.packing, step.world.device) for rows in batches]

    def rows(self, entries: Sequence[tuple[int, int]]) -> list[list[Piece]]:
        return [self.sources[source].pieces(row) for source, row in entries]

    def places(self, cursor: int, batch_size: int) -> list[str]:
        """Where the documents of a step's rows were read."""
        rows = self.rows(self.mixture.entries(cursor, batch_size))
        return [piece.store.place(piece.start) for row in rows for piece in row]


def prompt(piece: Piece) -> list[int]:
    """What stands before the tokens that are to be predicted; at least one."""
    store, start, size = piece
    if store.supervised is None:
        size = min(size, PROMPT)
    else:
        size = 1 + int(np.argmax(store.supervised[start + 1 : start + size]))
    return store.tokens[start : start + size].tolist()


class Validation:
    """The rows that a run validates with."""

    def __init__(self, rows: JoinedRows, packing: bool) -> None:
        self.rows, self.packing = rows, packing

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def of_answers(self) -> bool:
        """Whether of the first document a part alone is to be predicted, as of chats and prompts with completions."""
        return self.rows.pieces(0)[0].store.supervised is not None

    def beginning(self) -> list[int]:
        """Of the first piece that has one: up to its first answer, or a few tokens where all are predicted."""
        prompts = (prompt(piece) for row in range(len(self)) for piece in self.rows.pieces(row))
        return next((tokens for tokens in prompts if len(tokens) > 1), prompt(self.rows.pieces(0)[0]))

    def batches(self, micro_batch_size: int, world: World) -> Iterator[Batch]:
        """Every row once over all ranks, equally many batches on each: the last are filled up with rows of padding."""
        for start in range(0, len(self), world.size * micro_batch_size):
            first = start + world.rank * micro_batch_size
            mine = range(first, first + micro_batch_size)
            rows = [self.rows.pieces(row) if row < len(self) else [] for row in mine]
            yield collate(rows, self.rows.length, self.packing, world.device).to(world.device)
