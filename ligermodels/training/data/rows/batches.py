"""Batches: rows of tokens, collated for a model's `forward`, and the number of micro-batches of a step."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ligermodels.distributed import World
from ligermodels.errors import InputError
from ligermodels.layers.decoder import IGNORE_INDEX, next_tokens
from ligermodels.training.data.rows.image_documents import ImageDecoder, images_of
from ligermodels.training.data.rows.packing import Segment
from ligermodels.units import counted

ROWS_MULTIPLE = 128  # a GEMM tile: the head's products are slower with other numbers of rows


class Batch(NamedTuple):
    """B rows of T tokens, as `CausalLM.forward` takes them.

    With packing: input_ids, labels int64 [1, B * T], cu_seqlens int32 [documents + 1] for document masking, in which
    the padding of a row counts as a document, and max_seqlen = T. Without packing: input_ids, labels int64 [B, T], and
    None. labels: -100 for tokens that are not supervised. row_lengths: int64 [B], tokens without padding.
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
    row_lengths: Tensor
    rows: Tensor | None = None
    images: Mapping[str, Any] = {}  # never changed
    teacher_states: Tensor | None = None

    def to(self, device: torch.device) -> "Batch":
        """Copies the batch to a device; copies from pinned memory do not block the host."""
        copied = self.input_ids, self.labels, self.row_lengths
        input_ids, labels, lengths = (x.to(device, non_blocking=True) for x in copied)
        offsets, rows = (None if x is None else x.to(device, non_blocking=True) for x in (self.cu_seqlens, self.rows))
        images = {name: values.to(device, non_blocking=True) for name, values in self.images.items()}
        return Batch(input_ids, labels, offsets, self.max_seqlen, lengths, rows, images, self.teacher_states)

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments of `forward`."""
        fields = self._asdict()
        del fields["teacher_states"]
        return fields | fields.pop("images")


def count_supervised(batch: Batch) -> Tensor:
    """Returns the number of supervised tokens of whole rows: a scalar on the batch's device."""
    return (next_tokens(batch.labels, batch.cu_seqlens) != IGNORE_INDEX).sum()


def collate(
    rows: Sequence[Sequence[Segment]], length: int, packing: bool, world: World,
    decoder: ImageDecoder | None = None,
) -> Batch:  # fmt: skip
    """Returns a batch in host memory, pinned if the device is a GPU.

    rows: the segments of each row; an empty row is padding. decoder: decodes the images of documents; None if none has
    any. Raises InputError as `ImageDecoder.prepare` does.
    """
    pinned = world.device.type == "cuda"
    input_ids = torch.zeros(len(rows), length, dtype=torch.int64, pin_memory=pinned)
    labels = torch.full((len(rows), length), IGNORE_INDEX, dtype=torch.int64, pin_memory=pinned)
    lengths = torch.zeros(len(rows), dtype=torch.int64, pin_memory=pinned)
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
        lengths[number] = end
        if end < length:
            offsets.append((number + 1) * length)
    masked = any(store.supervised is not None for row in rows for store, _, _ in row)
    places = supervised_rows(labels, pinned, world.context_rank, world.context) if masked else None
    if not packing:
        images = decoder.arguments([*map(images_of, rows)], input_ids, labels, None, pinned) if decoder else {}
        return Batch(input_ids, labels, None, None, lengths, places, images)
    input_ids, labels = input_ids.view(1, -1), labels.view(1, -1)
    cu_seqlens = torch.tensor(offsets, dtype=torch.int32, pin_memory=pinned)
    images = (
        decoder.arguments([images_of(itertools.chain(*rows))], input_ids, labels, cu_seqlens, pinned) if decoder else {}
    )
    return Batch(input_ids, labels, cu_seqlens, length, lengths, places, images)


def supervised_rows(labels: Tensor, pinned: bool, part: int = 0, parts: int = 1) -> Tensor | None:
    """Returns the places of labels [B, T] whose next token is supervised: int64 [N], N a multiple of ROWS_MULTIPLE.

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


def is_supervised(labels: Tensor) -> np.ndarray:
    """Returns whether the next token of each place of flattened labels is supervised. A row's first label never is."""
    return np.append(labels.numpy().reshape(-1)[1:], IGNORE_INDEX) != IGNORE_INDEX


def split_global_batch(batch_size: int, micro_batch_size: int | None, world: World) -> tuple[int, int]:
    """Returns (gradient accumulation steps, micro-batch size) of each rank, for a global batch of `batch_size` rows.

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
