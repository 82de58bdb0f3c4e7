"""Which logits exist at a time in `linear_cross_entropy` and `linear_logprobs`: sizes of chunks, and their projection.

logits = hidden @ weightᵀ + bias; hidden [T, H], weight [V, H], bias [V] or None, of one dtype; logits in that dtype or
a wider one. Must not know the loss.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from ligermodels.kernels.launch import cdiv

MAX_LOGITS_BYTES = 2**30  # of one chunk
# Memory for logits and fp32 sums beyond the gradients, if chunks of PREFERRED_CHUNK_ROWS fit it.
EXTRA_BYTES = 6 * 2**30 // 5
LOW_MEMORY_BYTES = 2**26  # most logits at a time with low_memory; also at most an eighth of the weight
# Below the minimum, adding to dweight in fp32 takes longer than the GEMMs.
MIN_CHUNK_ROWS, MAX_CHUNK_ROWS = 1024, 8192
PREFERRED_CHUNK_ROWS = 3072  # not reduced to save memory: chunks of 2048 rows take 4 % more time
LOGITS_ALIGNMENT = 128  # a GEMM tile: rows of a chunk and the stride between rows of logits are multiples of it
TILE_COLUMNS, MULTIPROCESSORS = 256, 132  # of cuBLAS's largest tile, and of H100 and H200


def chunk_rows(rows: int, columns: int, vocab: int, sums: int, dtype: torch.dtype) -> int:
    """Rows of one chunk of logits in `dtype`: the fewest chunks that fit the memory, of equal size.

    columns: of hidden. sums: elements of the fp32 gradients.
    """
    row_bytes = round_up_to_tile(vocab) * dtype.itemsize
    within_extra = (EXTRA_BYTES - sums * (torch.float32.itemsize - dtype.itemsize)) // row_bytes
    limit = min(MAX_LOGITS_BYTES // row_bytes, within_extra if within_extra >= PREFERRED_CHUNK_ROWS else MAX_CHUNK_ROWS)
    limit = min(max(limit, MIN_CHUNK_ROWS), MAX_CHUNK_ROWS) // LOGITS_ALIGNMENT * LOGITS_ALIGNMENT
    if dtype.itemsize >= torch.float32.itemsize:  # chunks are small beside a GPU
        limit = fill_waves(limit, columns)
    chunks = max(1, cdiv(rows, limit))
    return round_up_to_tile(cdiv(rows, chunks))


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
    hidden: Tensor, weight: Tensor, bias: Tensor | None, sums: int = 0, buffer: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Iterator[tuple[slice, Tensor]]:  # fmt: skip
    """(rows, their logits) chunk by chunk, all in the same memory: that of `buffer` if it is given (1-D, large enough).

    sums: elements of the fp32 gradients, as in `chunk_rows`. dtype: of the logits without a buffer; None for the
    factors' own.
    """
    rows, vocab, dtype = hidden.shape[0], weight.shape[0], dtype or hidden.dtype
    width = round_up_to_tile(vocab)
    if buffer is None:
        size = min(chunk_rows(rows, hidden.shape[1], vocab, sums, dtype), rows)
        buffer = torch.empty(size, width, dtype=dtype, device=hidden.device)
    else:
        size = round_down_to_tile(buffer.numel() // width)
        buffer = buffer[: size * width].view(size, width)
    buffer = buffer if width == vocab else buffer[:, :vocab]
    for chunk in slices(rows, size):
        logits = slice_rows(buffer, slice(0, chunk.stop - chunk.start))
        yield chunk, project(slice_rows(hidden, chunk), weight, bias, logits)


def slices(rows: int, size: int) -> Iterator[slice]:
    """Consecutive slices of `size` rows; the last may have fewer."""
    for start in range(0, rows, max(size, 1)):
        yield slice(start, min(start + size, rows))


def all_logits(hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, list[slice]]:
    """The logits of all rows [T, V], and the chunks in which they were projected: those of `chunks_of_logits`, so that
    they have the same bits."""
    rows, vocab = hidden.shape[0], weight.shape[0]
    logits = torch.empty(rows, round_up_to_tile(vocab), dtype=dtype, device=hidden.device)[:, :vocab]
    chunks = list(slices(rows, chunk_rows(rows, hidden.shape[1], vocab, 0, dtype)))
    for chunk in chunks:
        project(slice_rows(hidden, chunk), weight, None, slice_rows(logits, chunk))
    return logits, chunks


def low_memory_buffer(hidden: Tensor, weight: Tensor, dtype: torch.dtype | None = None) -> tuple[int, bool]:
    """(elements of the buffer of logits, whether it holds all logits). It holds at least one row and 16 columns.

    dtype: of the logits; None for the factors' own.
    """
    rows, row = hidden.shape[0], round_up_to_tile(weight.shape[0])
    elements = max(min(LOW_MEMORY_BYTES // (dtype or hidden.dtype).itemsize, weight.numel() // 8), row, 16 * rows)
    return elements, rows <= round_down_to_tile(elements // row)


def chunks_of_vocabulary(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, buffer: Tensor
) -> Iterator[tuple[slice, Tensor]]:
    """(classes, their logits of all rows) chunk by chunk, all in the memory of `buffer`."""
    rows, vocab = hidden.shape[0], weight.shape[0]
    size = round_down_to_tile(buffer.numel() // rows)
    for start in range(0, vocab, size):
        classes = slice(start, min(start + size, vocab))
        logits = buffer[: rows * (classes.stop - start)].view(rows, -1)
        yield classes, project(hidden, weight[classes], None if bias is None else bias[classes], logits)
