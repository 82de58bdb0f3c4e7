"""Batches: rows of tokens, collated for a model's `forward` and divided into micro-batches over ranks.

The rows of a step, over all ranks and micro-batches, depend only on the cursor, the number of rows taken before the
step. This module knows models only by the arguments of their `forward`.
"""

import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ligermodels.distributed import World
from ligermodels.errors import InputError
from ligermodels.layers.decoder import IGNORE_INDEX, next_tokens
from ligermodels.training.data.image_documents import ImageDecoder, images_of
from ligermodels.training.data.mixture import Mixture
from ligermodels.training.data.packing import ConcatenatedRows, Segment
from ligermodels.training.data.prefetching import Prefetcher
from ligermodels.training.data.stored_states import StoredStates, is_supervised
from ligermodels.units import counted

ROWS_MULTIPLE = 128  # a GEMM tile: the head's products are slower with other numbers of rows
PROMPT_TOKENS = 16  # of a text, as the prompt of a sample


class Batch(NamedTuple):
    """B rows of T tokens, as `CausalLM.forward` takes them.

    With packing: input_ids, labels int64 [1, B * T], cu_seqlens int32 [documents + 1] for document masking, in which
    the padding of a row counts as a document, and max_seqlen = T. Without packing: input_ids, labels int64 [B, T], and
    None. labels: -100 for tokens that are not supervised.
    rows: int64 [N], the places in the flattened batch whose next token is supervised, and padding: see
    `supervised_rows`. None where documents have no mask. Where ranks share rows, each has those of its part alone.
    images: those of the rows, in order, under the names of arguments of `forward`; empty if there are none. Each has a
    method `to`, as tensors have.
    teacher_states: what a teacher has stored for the rows (`StoredStates.of_rows`); they stay in host memory.
    """

    input_ids: Tensor
    labels: Tensor
    cu_seqlens: Tensor | None
    max_seqlen: int | None
    rows: Tensor | None = None
    images: Mapping[str, Any] = {}  # never changed
    teacher_states: Tensor | None = None

    def to(self, device: torch.device) -> "Batch":
        """Copies the batch to a device; copies from pinned memory do not block the host."""
        input_ids, labels = (x.to(device, non_blocking=True) for x in (self.input_ids, self.labels))
        offsets, rows = (None if x is None else x.to(device, non_blocking=True) for x in (self.cu_seqlens, self.rows))
        images = {name: values.to(device, non_blocking=True) for name, values in self.images.items()}
        return Batch(input_ids, labels, offsets, self.max_seqlen, rows, images, self.teacher_states)

    def arguments(self) -> dict[str, Any]:
        """The arguments of `forward`."""
        fields = self._asdict()
        del fields["teacher_states"]
        return fields | fields.pop("images")


def count_supervised(batch: Batch) -> Tensor:
    """The number of supervised tokens of whole rows: a scalar on the batch's device."""
    return (next_tokens(batch.labels, batch.cu_seqlens) != IGNORE_INDEX).sum()


def collate(
    rows: Sequence[Sequence[Segment]], length: int, packing: bool, world: World,
    decoder: ImageDecoder | None = None,
) -> Batch:  # fmt: skip
    """A batch in host memory, pinned if the device is a GPU. rows: the segments of each row; an empty row is padding.

    decoder: of the images of documents; None if no document has any. Raises InputError as `ImageDecoder.prepare` does.
    """
    pinned = world.device.type == "cuda"
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
    masked = any(store.supervised is not None for row in rows for store, _, _ in row)
    places = supervised_rows(labels, pinned, world.context_rank, world.context) if masked else None
    if not packing:
        images = decoder.arguments([*map(images_of, rows)], input_ids, labels, None, pinned) if decoder else {}
        return Batch(input_ids, labels, None, None, places, images)
    input_ids, labels = input_ids.view(1, -1), labels.view(1, -1)
    cu_seqlens = torch.tensor(offsets, dtype=torch.int32, pin_memory=pinned)
    images = (
        decoder.arguments([images_of(itertools.chain(*rows))], input_ids, labels, cu_seqlens, pinned) if decoder else {}
    )
    return Batch(input_ids, labels, cu_seqlens, length, places, images)


def supervised_rows(labels: Tensor, pinned: bool, part: int = 0, parts: int = 1) -> Tensor | None:
    """The places of labels [B, T] whose next token is supervised: int64 [N], N a multiple of ROWS_MULTIPLE.

    Of the batch in equal parts, the places in number `part`. The padding is the last place whose next token is not
    supervised. None where N would not be smaller than the part. The head then computes these rows alone, and the host
    does not have to ask the device where they are. A document's first label is IGNORE_INDEX, so that no place is
    supervised by the next row or document.
    """
    supervised = np.split(is_supervised(labels), parts)[part]
    places = np.flatnonzero(supervised)
    count = max(1, -(-len(places) // ROWS_MULTIPLE)) * ROWS_MULTIPLE
    if count >= len(supervised):
        return None
    rows = torch.full((count,), np.flatnonzero(~supervised)[-1], dtype=torch.int64, pin_memory=pinned)
    rows.numpy()[: len(places)] = places
    return rows


def with_states(batch: Batch, stored: StoredStates, numbers: Sequence[int | None], world: World) -> Batch:
    """The batch with what a teacher has stored for its rows, of these numbers."""
    states = stored.of_rows(numbers, batch.labels, batch.rows, world.device.type == "cuda")
    return batch._replace(teacher_states=states)


def split_global_batch(batch_size: int, micro_batch_size: int | None, world: World) -> tuple[int, int]:
    """(gradient accumulation steps, micro-batch size) of each rank, for a global batch of `batch_size` rows.

    micro_batch_size: None for a single micro-batch per rank and step. Raises InputError if the global batch cannot be
    divided equally.
    """
    size = micro_batch_size or max(1, batch_size // world.data_size)
    accumulation_steps, remainder = divmod(batch_size, world.data_size * size)
    if remainder or not accumulation_steps:
        given = "" if micro_batch_size is None else f" x --micro-batch-size {size}"
        ranks = counted(world.size, "rank") + ("" if world.context == 1 else f" / --context-parallel {world.context}")
        raise InputError(f"--batch-size {batch_size} is not a multiple of {ranks}{given}: change one of them")
    return accumulation_steps, size


class BatchRequest(NamedTuple):
    """The arguments of `TrainingRows.micro_batches`."""

    cursor: int
    batch_size: int
    micro_batch_size: int | None
    world: World


class TrainingRows:
    """The rows that a run trains on, in the endless order of a mixture of sources.

    stored: what a teacher has stored for them, None without.
    """

    stored: StoredStates | None = None

    def __init__(
        self, sources: Sequence[ConcatenatedRows], weights: Sequence[float], seed: int, packing: bool,
        decoder: ImageDecoder | None = None,
    ) -> None:  # fmt: skip
        self.sources, self.packing, self.decoder = sources, packing, decoder
        self.mixture = Mixture([len(rows) for rows in sources], weights, seed)
        self.prefetcher = Prefetcher(self.collate, "batches", reads_files=decoder is not None)

    def __len__(self) -> int:
        """The number of rows of all sources."""
        return sum(map(len, self.sources))

    @property
    def tokens(self) -> int:
        """The number of tokens of all sources, without padding."""
        return sum(rows.tokens for rows in self.sources)

    @property
    def image_tokens(self) -> np.ndarray:
        """The number of image tokens of each row of all sources, int64 [rows]."""
        return np.concatenate([part.image_tokens for rows in self.sources for part in rows.parts])

    @property
    def length(self) -> int:
        """The number of tokens of a row, with padding."""
        return self.sources[0].length

    @property
    def completion_only(self) -> bool:
        """Whether any document has a mask, as chats and prompts with completions do."""
        return any(part.store.supervised is not None for rows in self.sources for part in rows.parts)

    @property
    def fingerprint(self) -> str:
        """A hash of all rows: a cursor has the same meaning only for rows with the same fingerprint."""
        parts = [part.fingerprint for rows in self.sources for part in rows.parts]
        return hashlib.sha256("".join(parts).encode()).hexdigest()

    def micro_batches(self, cursor: int, batch_size: int, micro_batch_size: int | None, world: World) -> list[Batch]:
        """This rank's micro-batches, on its device, of the step that takes `batch_size` rows starting at `cursor`.

        Prefetches the next step: it is collated in a thread while this one is computed. Raises InputError as
        `split_global_batch` does.
        """
        request = BatchRequest(cursor, batch_size, micro_batch_size, world)
        batches = self.prefetcher.take(request, request._replace(cursor=cursor + batch_size))
        return [batch.to(world.device) for batch in batches]

    def collate(self, request: BatchRequest) -> list[Batch]:
        cursor, batch_size, micro_batch_size, world = request
        accumulation_steps, size = split_global_batch(batch_size, micro_batch_size, world)
        entries = self.mixture.entries(cursor, batch_size)
        starts = [(number * world.data_size + world.data_rank) * size for number in range(accumulation_steps)]
        batches = [self.rows(entries[start : start + size]) for start in starts]
        collated = [collate(rows, self.length, self.packing, world, self.decoder) for rows in batches]
        if self.stored is None:
            return collated
        firsts = list(itertools.accumulate(map(len, self.sources), initial=0))
        numbers = [firsts[source] + row for source, row in entries]
        return [
            with_states(batch, self.stored, numbers[start : start + size], world)
            for start, batch in zip(starts, collated, strict=True)
        ]

    def rows(self, entries: Sequence[tuple[int, int]]) -> list[list[Segment]]:
        return [self.sources[source].segments(row) for source, row in entries]

    def places(self, cursor: int, batch_size: int) -> list[str]:
        """Where the documents of a step's rows were read."""
        rows = self.rows(self.mixture.entries(cursor, batch_size))
        return [segment.store.place(segment.start) for row in rows for segment in row]


def prompt(segment: Segment) -> list[int]:
    """The tokens before the first supervised one, at least one; of a text without a mask, its first few tokens."""
    store, start, size = segment
    if store.supervised is None:
        size = min(size, PROMPT_TOKENS)
    else:
        size = 1 + int(np.argmax(store.supervised[start + 1 : start + size]))
    return store.tokens[start : start + size].tolist()


class ValidationRequest(NamedTuple):
    """A batch of all ranks: the number of its first row, and the arguments of `ValidationRows.batches`."""

    start: int
    micro_batch_size: int
    world: World


class ValidationRows:
    """The rows of the validation split.

    stored: what a teacher has stored, None without; first: the number that the first row has there.
    """

    stored: StoredStates | None = None
    first = 0

    def __init__(self, rows: ConcatenatedRows, packing: bool, decoder: ImageDecoder | None = None) -> None:
        self.rows, self.packing, self.decoder = rows, packing, decoder
        self.prefetcher = Prefetcher(self.collate, "validation", reads_files=decoder is not None)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def completion_only(self) -> bool:
        """Whether the first document has a mask, as chats and prompts with completions do."""
        return self.rows.segments(0)[0].store.supervised is not None

    def sample_prompt(self) -> list[int]:
        """A prompt to generate a sample from: that of the first segment whose prompt has more than one token."""
        return prompt(self.sample_segment())

    def sample_images(self) -> Mapping[str, Tensor]:
        """The images in that prompt, under the names of arguments of `forward`; empty if it has none."""
        store, start, _ = self.sample_segment()
        ids = self.sample_prompt()
        images = images_of([Segment(store, start, len(ids))])
        return self.decoder.pixel_inputs([images], torch.tensor([ids])) if self.decoder else {}

    def sample_segment(self) -> Segment:
        segments = (segment for row in range(len(self)) for segment in self.rows.segments(row))
        return next((segment for segment in segments if len(prompt(segment)) > 1), self.rows.segments(0)[0])

    def batches(self, micro_batch_size: int, world: World) -> Iterator[Batch]:
        """Every row once over all ranks, in the same number of batches on each rank; the last are padded with rows.

        Prefetches the next batch, as training does.
        """
        starts = range(0, len(self), world.data_size * micro_batch_size)
        requests = [ValidationRequest(start, micro_batch_size, world) for start in starts]
        return (batch.to(world.device) for batch in self.prefetcher.take_all(requests))

    def collate(self, request: ValidationRequest) -> Batch:
        start, micro_batch_size, world = request
        first = start + world.data_rank * micro_batch_size
        numbers = range(first, first + micro_batch_size)
        rows = [self.rows.segments(row) if row < len(self) else [] for row in numbers]
        batch = collate(rows, self.rows.length, self.packing, world, self.decoder)
        if self.stored is None:
            return batch
        known = [self.first + row if row < len(self) else None for row in numbers]
        return with_states(batch, self.stored, known, world)
