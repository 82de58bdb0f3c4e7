"""Which logits exist at a time in `linear_cross_entropy` and `linear_logprobs`: sizes of chunks, their projection,
and the gradients of hidden, weight and bias, summed over chunks in fp32 before the upstream gradient is known.

logits = hidden @ weightᵀ + bias; hidden [T, H], weight [V, H], bias [V] or None, of one dtype; logits in that dtype or
a wider one; dlogits [rows of a chunk, V].
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ligermodels.kernels.launch import cdiv

MAX_LOGITS_BYTES = 2**30  # of one chunk
MAX_PIECE_BYTES = 3 * 2**28  # of logits that are wider than their factors, projected at a time
MAX_ROUNDINGS = 16  # of a sum in half precision: its error is then that of about three roundings of the result
# Memory for logits and fp32 sums beyond the gradients, if chunks of PREFERRED_CHUNK_ROWS fit it.
EXTRA_BYTES = 6 * 2**30 // 5
LOW_MEMORY_BYTES = 2**26  # most logits at a time with low_memory; also at most an eighth of the weight
# Below the minimum, adding to dweight in fp32 takes longer than the GEMMs.
MIN_CHUNK_ROWS, MAX_CHUNK_ROWS = 1024, 8192
PREFERRED_CHUNK_ROWS = 3072  # not reduced to save memory: chunks of 2048 rows take 4 % more time
VOCABULARY_CHUNK_BYTES, MIN_CHUNK_CLASSES = 3 * 2**27, 4096  # of a part of the vocabulary
LOGITS_ALIGNMENT = 128  # a GEMM tile: rows of a chunk and the stride between rows of logits are multiples of it
TILE_COLUMNS, MULTIPROCESSORS = 256, 132  # of cuBLAS's largest tile, and of H100 and H200
GRADIENT_SCALE = 2.0**10  # of dlogits in the forward: keeps them out of fp16's subnormals; exact


def chunk_rows(rows: int, vocab: int, sums: int, dtype: torch.dtype) -> int:
    """Rows of one chunk of logits in `dtype`: the fewest chunks that fit the memory, of equal size.

    sums: elements of the fp32 gradients.
    """
    row_bytes = round_up_to_tile(vocab) * dtype.itemsize
    within_extra = (EXTRA_BYTES - sums * (torch.float32.itemsize - dtype.itemsize)) // row_bytes
    limit = min(MAX_LOGITS_BYTES // row_bytes, within_extra if within_extra >= PREFERRED_CHUNK_ROWS else MAX_CHUNK_ROWS)
    limit = min(max(limit, MIN_CHUNK_ROWS), MAX_CHUNK_ROWS) // LOGITS_ALIGNMENT * LOGITS_ALIGNMENT
    return equal_rows(rows, limit)


def piece_rows(rows: int, columns: int, vocab: int, dtype: torch.dtype) -> int:
    """Rows of logits in `dtype`, wider than their factors, that one product projects. They are the same in all passes
    over these rows, because the bits of a logit may depend on them."""
    limit = min(max(MAX_PIECE_BYTES // (round_up_to_tile(vocab) * dtype.itemsize), MIN_CHUNK_ROWS), MAX_CHUNK_ROWS)
    return equal_rows(rows, fill_waves(limit // LOGITS_ALIGNMENT * LOGITS_ALIGNMENT, columns))


def rows_of_pieces(piece: int, vocab: int, dtype: torch.dtype) -> int:
    """Rows of as many pieces as there is memory for, of one at least."""
    return max(1, MAX_LOGITS_BYTES // (piece * round_up_to_tile(vocab) * dtype.itemsize)) * piece


def equal_rows(rows: int, limit: int) -> int:
    """Rows of a chunk: the fewest chunks of at most `limit` rows, of equal size."""
    return round_up_to_tile(cdiv(max(rows, 1), max(1, cdiv(rows, limit))))


def fill_waves(limit: int, columns: int) -> int:
    """At most `limit` rows of logits whose product with the weight, [rows, V] @ [V, columns], leaves least of a GPU
    idle: it runs in waves of as many tiles as there are multiprocessors."""

    def busy(rows: int) -> tuple[float, int]:
        tiles = rows // LOGITS_ALIGNMENT * cdiv(columns, TILE_COLUMNS)
        return tiles / (cdiv(tiles, MULTIPROCESSORS) * MULTIPROCESSORS), rows

    return max(range(MIN_CHUNK_ROWS, limit + 1, LOGITS_ALIGNMENT), key=busy)


def keeps_logits(rows: int, columns: int, vocab: int, dtype: torch.dtype, hidden_grad: bool, weight_grad: bool) -> bool:
    """Whether to save all logits for backward: if they take no more memory than fp32 sums of the required gradients."""
    sums = columns * (rows * hidden_grad + vocab * weight_grad)
    # Not in fp16, where the gradient of a mean may underflow, nor if rows of logits are unaligned: GEMMs are then slow.
    return dtype != torch.float16 and vocab % 16 == 0 and rows * vocab * dtype.itemsize <= sums * 4


def round_up_to_tile(size: int) -> int:
    return cdiv(size, LOGITS_ALIGNMENT) * LOGITS_ALIGNMENT


def round_down_to_tile(size: int) -> int:
    """`size` rounded down to a multiple of LOGITS_ALIGNMENT; below that to a multiple of 16; below 16 max(size, 1)."""
    return size // LOGITS_ALIGNMENT * LOGITS_ALIGNMENT or size // 16 * 16 or max(size, 1)


def slice_rows(x: Tensor, rows: slice) -> Tensor:
    """x[rows]; x itself if that is all of it, because a view costs microseconds."""
    return x if rows.stop - rows.start == x.shape[0] else x[rows]


def project(hidden: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """hidden @ weightᵀ + bias, rounded once to the dtype of `out`. An `out` wider than the factors has no bias."""
    if out is not None and out.dtype != hidden.dtype:
        if out.is_cuda:
            return torch.mm(hidden, weight.T, out.dtype, out=out)
        return torch.mm(hidden.to(out.dtype), weight.T.to(out.dtype), out=out)
    return torch.mm(hidden, weight.T, out=out) if bias is None else torch.addmm(bias, hidden, weight.T, out=out)


def chunks_of_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, sums: int = 0, buffer: Tensor | None = None
) -> Iterator[tuple[slice, Tensor]]:
    """(rows, their logits) chunk by chunk, all in the same memory: that of `buffer` if it is given (1-D, large enough),
    in its dtype, otherwise in that of the factors.

    sums: elements of the fp32 gradients, as in `chunk_rows`.
    """
    rows, vocab = hidden.shape[0], weight.shape[0]
    if buffer is None:
        size = min(chunk_rows(rows, vocab, sums, hidden.dtype), rows)
        buffer = empty_logits(size, weight, hidden.dtype)
    else:
        width = round_up_to_tile(vocab)
        size = round_down_to_tile(buffer.numel() // width)
        buffer = buffer[: size * width].view(size, width)[:, :vocab]
    for chunk in slices(rows, size):
        logits = slice_rows(buffer, slice(0, chunk.stop - chunk.start))
        yield chunk, project(slice_rows(hidden, chunk), weight, bias, logits)


def chunks_of_pieces(
    hidden: Tensor, weight: Tensor, dtype: torch.dtype, multiply: bool = False
) -> Iterator[tuple[slice, Tensor]]:
    """(rows, their logits in `dtype`) chunk by chunk, all in the same memory. Logits have the same bits in every chunk.

    multiply: whether their gradient is multiplied with the weight; chunks have several pieces then, where they fit.
    """
    (rows, columns), vocab = hidden.shape, weight.shape[0]
    piece = piece_rows(rows, columns, vocab, dtype)
    size = min(rows_of_pieces(piece, vocab, dtype) if multiply else piece, rows)
    buffer = empty_logits(size, weight, dtype)
    for chunk in slices(rows, size):
        logits = slice_rows(buffer, slice(0, chunk.stop - chunk.start))
        project_pieces(slice_rows(hidden, chunk), weight, logits, piece)
        yield chunk, logits


class Sweep(NamedTuple):
    """A step over rows whose logits are projected once, into a ring; each field has consecutive rows.

    filled: those whose logits are projected. complete: those of units whose last row is among them by now.
    finished: the pieces that make room, because units that are not complete have no row in them.
    """

    filled: slice
    complete: slice
    finished: slice


class Ring(NamedTuple):
    """Memory for consecutive rows of logits, where the next ones overwrite the first. piece: rows that are projected at
    a time. rows: that there is memory for, whole pieces."""

    piece: int
    rows: int

    def sweeps(self, count: int, borders: Sequence[int] | None) -> Iterator[Sweep]:
        """Steps over `count` rows. borders: the ends of units, from 0 to `count`, which the ring holds as a whole; None
        where each row is one."""
        filled = known = first = 0
        while first < count:
            stop = min(first + self.rows, count)
            border = stop if borders is None else borders[bisect_right(borders, stop) - 1]
            last = stop if stop == count else border // self.piece * self.piece
            yield Sweep(slice(filled, stop), slice(known, border), slice(first, last))
            filled, known, first = stop, border, last

    def parts(self, rows: slice) -> Iterator[tuple[slice, slice]]:
        """Cuts rows where the ring begins anew: (rows, their places in it)."""
        start = rows.start
        while start < rows.stop:
            place = start % self.rows
            stop = min(rows.stop, start - place + self.rows)
            yield slice(start, stop), slice(place, place + stop - start)
            start = stop

    def sums_dtypes(self, count: int, dtype: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
        """Dtypes of dhidden and dweight, which are formed by `sweeps` over `count` rows in `dtype`."""
        wide = torch.promote_types(dtype, torch.float32)
        if dtype == torch.float16:  # of a narrow range, and the upstream gradient is not known yet
            return wide, wide
        return dtype, dtype if cdiv(count, self.rows) <= MAX_ROUNDINGS else wide


def ring_of(rows: int, columns: int, vocab: int, dtype: torch.dtype, borders: Sequence[int] | None) -> Ring | None:
    """The ring for logits in `dtype`: as large as a chunk that is multiplied, or as the longest unit needs. None where
    units would take more memory than fp32 sums of the gradients."""
    piece = piece_rows(rows, columns, vocab, dtype)
    if borders is None:
        return Ring(piece, rows_of_pieces(piece, vocab, dtype))
    spans = [(b - 1) // piece - a // piece + 1 for a, b in pairwise(borders) if a < b]
    return ring_of_units(max(spans, default=1), rows, columns, vocab, dtype)


def ring_of_units(pieces: int, rows: int, columns: int, vocab: int, dtype: torch.dtype) -> Ring | None:
    """The ring for units that have rows in at most so many pieces."""
    piece = piece_rows(rows, columns, vocab, dtype)
    ring = Ring(piece, max(pieces * piece, rows_of_pieces(piece, vocab, dtype)))
    taken = min(ring.rows, rows) * round_up_to_tile(vocab) * dtype.itemsize
    return ring if taken <= 4 * columns * (rows + vocab) else None


def project_pieces(hidden: Tensor, weight: Tensor, logits: Tensor, piece: int) -> None:
    """Fills logits [T, V], `piece` rows at a time."""
    for rows in slices(hidden.shape[0], piece):
        project(slice_rows(hidden, rows), weight, None, slice_rows(logits, rows))


def empty_logits(rows: int, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """[rows, V], uninitialised, each row on a boundary of a GEMM tile."""
    vocab = weight.shape[0]
    width = round_up_to_tile(vocab)
    logits = torch.empty(rows, width, dtype=dtype, device=weight.device)
    return logits if width == vocab else logits[:, :vocab]


def slices(rows: int, size: int) -> Iterator[slice]:
    """Consecutive slices of `size` rows; the last may have fewer."""
    for start in range(0, rows, max(size, 1)):
        yield slice(start, min(start + size, rows))


def all_logits(hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The logits of all rows [T, V], with the bits of `chunks_of_pieces`."""
    rows, columns = hidden.shape
    logits = empty_logits(rows, weight, dtype)
    project_pieces(hidden, weight, logits, piece_rows(rows, columns, weight.shape[0], dtype))
    return logits


def low_memory_buffer(hidden: Tensor, weight: Tensor, dtype: torch.dtype | None = None) -> tuple[int, bool]:
    """(elements of the buffer of logits, whether it holds all logits). It holds at least one row and 16 columns.

    dtype: of the logits; None for the factors' own.
    """
    rows, row = hidden.shape[0], round_up_to_tile(weight.shape[0])
    elements = max(min(LOW_MEMORY_BYTES // (dtype or hidden.dtype).itemsize, weight.numel() // 8), row, 16 * rows)
    return elements, rows <= round_down_to_tile(elements // row)


def vocabulary_buffer(rows: int, vocab: int, dtype: torch.dtype) -> int:
    """Elements of a buffer for `chunks_of_vocabulary`: chunks of equal size, of MIN_CHUNK_CLASSES or more."""
    limit = max(VOCABULARY_CHUNK_BYTES // (max(rows, 1) * dtype.itemsize), MIN_CHUNK_CLASSES)
    return rows * round_up_to_tile(cdiv(vocab, cdiv(vocab, limit)))


def chunks_of_vocabulary(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, buffer: Tensor
) -> Iterator[tuple[slice, Tensor]]:
    """(classes, their logits of all rows) chunk by chunk, all in the memory of `buffer`."""
    rows, vocab = hidden.shape[0], weight.shape[0]
    size = round_down_to_tile(buffer.numel() // rows)
    for classes in slices(vocab, size):
        columns = classes.stop - classes.start
        width = min(round_up_to_tile(columns), size)  # rows of logits that are not aligned make GEMMs slow
        logits = buffer[: rows * width].view(rows, width)
        logits = logits if width == columns else logits[:, :columns]
        yield classes, project(hidden, weight[classes], None if bias is None else bias[classes], logits)


def accumulate_(total: Tensor, a: Tensor, b: Tensor, beta: int) -> None:
    """total = beta * total + a @ b, accumulated in fp32 and rounded to total's dtype, for any dtype of a and b. With
    beta 0, total may be uninitialised."""
    if total.is_cuda:
        torch.addmm(total, a, b, total.dtype, beta=beta, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype), beta=beta)


def empty_gradients(
    hidden: Tensor, weight: Tensor, hidden_grad: bool, weight_grad: bool, bias_grad: bool,
    dtypes: tuple[torch.dtype, torch.dtype] = (torch.float32, torch.float32),
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Uninitialised dhidden and dweight, and zeros for dbias, in fp32 because the upstream gradient is not known yet. A
    gradient that is not required has no elements or is None. dtypes: other ones of dhidden and dweight."""
    dhidden = hidden.new_empty(*hidden.shape if hidden_grad else (0,), dtype=dtypes[0])
    make = weight.new_empty if hidden.shape[0] else weight.new_zeros
    dweight = make(*weight.shape if weight_grad else (0,), dtype=dtypes[1])
    return dhidden, dweight, weight.new_zeros(weight.shape[0], dtype=torch.float32) if bias_grad else None


def accumulate_gradients_(
    gradients: tuple[Tensor, Tensor, Tensor | None], dlogits: Tensor, hidden: Tensor, weight: Tensor, chunk: slice
) -> None:
    dhidden, dweight, dbias = gradients
    if dhidden.numel():
        accumulate_(slice_rows(dhidden, chunk), dlogits, weight, beta=0)
    if dweight.numel():
        accumulate_(dweight, dlogits.T, slice_rows(hidden, chunk), beta=int(chunk.start > 0))
    if dbias is not None:
        dbias += dlogits.sum(0, dtype=torch.float32)
