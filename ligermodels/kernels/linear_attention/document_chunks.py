"""Packed documents in chunks of SPAN tokens, for linear attention: where chunks lie, their tiles, their decays.

The last chunk of a document may be shorter. Chunk c of document n has the slot start_n // SPAN + n + c, where start_n
is the document's first token. No two chunks share a slot, and all slots are less than T // SPAN + documents: a size
that the host knows, so that nothing waits for the device. Some slots are idle.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.dispatch import INDICES, INT32, check_one_of, check_shape, shape_of
from ligermodels.kernels.launch import multiprocessors, shared_memory

SPAN = tl.constexpr(64)  # tokens of a chunk
DOCUMENTS_TILE = tl.constexpr(128)  # documents that a search reads at a time
LARGE_SHARED_MEMORY = 200 * 1024  # bytes
MIN_DOT = 16  # rows and columns of a matrix product in Triton, at least
# With 16, products in half precision by Triton 3.6 on Hopper read beyond their shared memory (compute-sanitizer).
MIN_COLUMNS_OF_TILES = 32
MAX_HEAD_SIZE = 256  # rows of a state
FULL_DEVICE_PROGRAMS = 1.0  # of a scan, for each multiprocessor: with more it fills the device


@triton.jit
def document_slot(cu_seqlens_ptr, document, TOKENS: tl.constexpr):
    """(first token, end token, slot of the first chunk) of a document in chunks of TOKENS."""
    start = tl.load(cu_seqlens_ptr + document).to(tl.int64)
    return start, tl.load(cu_seqlens_ptr + document + 1).to(tl.int64), start // TOKENS + document


@triton.jit
def locate_in_document(cu_seqlens_ptr, slot, documents, TOKENS: tl.constexpr):
    """(first token, first token of the document, number of tokens, document) of the chunk in a slot.

    The number is at most 0 if the slot is idle, and more than TOKENS if other chunks of the document follow.
    """
    before = tl.zeros([DOCUMENTS_TILE], tl.int32)
    for first in range(0, documents, DOCUMENTS_TILE):
        document = first + tl.arange(0, DOCUMENTS_TILE)
        start = tl.load(cu_seqlens_ptr + document, document < documents, other=0)
        before += ((start // TOKENS + document <= slot) & (document < documents)).to(tl.int32)
    document = tl.sum(before, 0) - 1
    start, end, first_slot = document_slot(cu_seqlens_ptr, document, TOKENS)
    first = start + (slot - first_slot) * TOKENS
    return first, start, (end - first).to(tl.int32), document


@triton.jit
def locate_slot(cu_seqlens_ptr, slot, documents, TOKENS: tl.constexpr):
    """(first token, number of tokens) of the chunk in a slot, as in `locate_in_document`."""
    first, _, rows, _ = locate_in_document(cu_seqlens_ptr, slot, documents, TOKENS)
    return first, rows


@triton.jit
def tile_mask(rows, row, column, size, EXACT: tl.constexpr):
    """Which elements of a tile exist: rows below `rows`, columns below `size`. EXACT: all columns do."""
    inside = (row < rows)[:, None]
    return inside if EXACT else inside & (column < size)[None, :]


@triton.jit
def load_rows(x_ptr, rows, row, stride, column, size, EXACT: tl.constexpr):
    """A tile of rows `stride` apart, zero where nothing is. Offsets in a tile are 32 bits: they take half as many
    registers, and stay the same from chunk to chunk."""
    offset = row[:, None] * stride + column[None, :]
    return tl.load(x_ptr + offset, tile_mask(rows, row, column, size, EXACT), other=0.0)


@triton.jit
def pair_decay(between, rows, STRICT: tl.constexpr):
    """exp(G_i - G_j) of existing rows for i >= j, or i > j if STRICT, else 0: elsewhere exp would overflow.

    between [SPAN, SPAN]: G_i - G_j.
    """
    i, j = tl.arange(0, SPAN)[:, None], tl.arange(0, SPAN)[None, :]
    lower = ((i > j) if STRICT else (i >= j)) & (i < rows)
    return tl.where(lower, tl.exp(tl.where(lower, between, 0.0)), 0.0)


@triton.jit
def _add_exactly(high, low, other_high, other_low):
    """The sum of two numbers, each in two parts: rounded, and what rounding left."""
    total = high + other_high
    part = total - high
    return total, (high - (total - part)) + (other_high - part) + low + other_low


@triton.jit
def exact_cumsum(x):
    """(G, what rounding left of G) with G the cumulative sum of x [SPAN]: differences of sums are as exact as each."""
    return tl.associative_scan((x, tl.zeros_like(x)), 0, _add_exactly)


@triton.jit
def log_decay_gradient(to_start, to_end, pairs, whole):
    """The gradient of g [SPAN], of which G is the cumulative sum, from those of what a chunk multiplies by decays.

    Each argument is the sum of values times their gradients. to_start [SPAN]: of values with the factor exp(G_i);
    to_end [SPAN]: exp(G_end - G_i); pairs [SPAN, SPAN]: exp(G_i - G_j), i >= j; whole: exp(G_end). g_t is in exp(G_i)
    if i >= t, in exp(G_end - G_i) if i < t, in exp(G_i - G_j) if i >= t > j. The terms are added once each: a gradient
    of G, summed from the end, would subtract most of them again and leave their rounding errors in every token.
    """
    t, j = tl.arange(0, SPAN)[:, None], tl.arange(0, SPAN)[None, :]
    across = tl.sum(tl.where(j < t, tl.cumsum(pairs, 0, reverse=True), 0.0), 1)
    return whole + tl.cumsum(to_start, 0, reverse=True) + (tl.cumsum(to_end, 0) - to_end) + across


def tile_columns(columns: int, size: int) -> int:
    """At most `columns`, and not many more than `size`."""
    return min(columns, max(MIN_COLUMNS_OF_TILES, triton.next_power_of_2(size)))


def has_wide_units(device: torch.device) -> bool:
    """Whether products read their operands from a shared memory of Hopper's size, which leaves registers for tiles."""
    return triton.knobs.runtime.interpret or shared_memory(device) > LARGE_SHARED_MEMORY


def fills_device(programs: int, device: torch.device) -> bool:
    """Whether so many programs of a scan, which is serial, leave no multiprocessor idle."""
    return programs > FULL_DEVICE_PROGRAMS * multiprocessors(device)


def number_of_slots(tokens: int, cu_seqlens: Tensor) -> int:
    return tokens // SPAN.value + cu_seqlens.shape[0] - 1


def count_documents(op: str, batch: int, cu_seqlens: Tensor | None) -> int:
    """How many documents a batch of rows holds. Raises ValueError for offsets of several rows, or that are none."""
    if cu_seqlens is None:
        return batch
    if batch != 1:
        raise ValueError(f"{op}: cu_seqlens needs a batch of one row, but there are {batch} rows")
    check_one_of(op, INT32, cu_seqlens=cu_seqlens)
    return shape_of(op, "cu_seqlens", cu_seqlens, "N + 1")[0] - 1


def check_pool(op: str, pool: Tensor, row: Tensor, rows: int, dtype: torch.dtype, *state: int) -> None:
    """Raises ValueError unless a pool holds states of this dtype and shape, and each of the rows says which is its."""
    check_shape(op, "row", row, rows)
    check_one_of(op, INDICES, row=row)
    if pool.shape[1:] != state or pool.dtype != dtype or not pool.is_contiguous():
        needed = f"{dtype} [R, {', '.join(map(str, state))}]"
        raise ValueError(f"{op}: pool is {pool.dtype} {list(pool.shape)}; needed contiguous {needed}")


def row_offsets(x: Tensor) -> Tensor:
    """cu_seqlens of the rows of a batch [B, T, ...], each of which is one document."""
    batch, length = x.shape[:2]
    return torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=x.device)


def each_document(
    function: Callable[..., tuple[Tensor, Tensor]], tokens: tuple[Tensor, ...], initial_state: Tensor | None,
    cu_seqlens: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(outputs, final states) of packed documents, each alone: `function(*its tokens, its initial state)`.

    tokens: tensors [1, T, ...]. Reads `cu_seqlens` on the host.
    """
    lengths = cu_seqlens.diff().tolist()
    states = [None] * len(lengths) if initial_state is None else initial_state.split(1)
    rows = zip(*(x.split(lengths, 1) for x in tokens), states, strict=True)
    outputs, finals = zip(*(function(*each) for each in rows), strict=True)
    return torch.cat(outputs, 1), torch.cat(finals)
