"""Chunks of the Mamba-2 scan: their shape, their decays, and their output, which two kernels compute.

Symbols as in mamba2_scan.py. G is the cumulative sum of 64 numbers, which every kernel computes again.
"""

from dataclasses import dataclass
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.launch import as_rows_with_stride
from ligermodels.kernels.linear_attention.document_chunks import (
    MAX_HEAD_SIZE,
    MIN_COLUMNS_OF_TILES,
    SPAN,
    exact_cumsum,
    number_of_slots,
    pair_decay,
    row_offsets,
)


@dataclass(frozen=True)
class ScanShape:
    """Heads, groups and their sizes, as the columns of a packed xbc: X head by head, then B, then C group by group."""

    heads: int
    head_size: int
    groups: int
    state_size: int

    @property
    def values(self) -> int:
        """Columns of X."""
        return self.heads * self.head_size

    @property
    def columns(self) -> int:
        return self.values + 2 * self.groups * self.state_size

    def constants(self) -> dict[str, int]:
        """The constants that every kernel of the scan is bound with."""
        return {
            "HEADS": self.heads, "HEAD_SIZE": self.head_size, "GROUPS": self.groups, "STATE_SIZE": self.state_size,
            "STATE_TILE": max(MIN_COLUMNS_OF_TILES, triton.next_power_of_2(self.state_size)),
        }  # fmt: skip


def scan_shape(xbc: Tensor, delta: Tensor, groups: int, state_size: int, op: str = "mamba2_scan") -> ScanShape:
    """The heads of a packed xbc [..., columns] with delta [..., H].

    Raises ValueError if they do not divide its columns, or if states are larger than the kernels support.
    """
    heads, columns = delta.shape[-1], xbc.shape[-1] - 2 * groups * state_size
    if columns <= 0 or columns % heads or heads % groups:
        raise ValueError(
            f"{op}: xbc has {xbc.shape[-1]} columns, with {heads} heads and {groups} groups of {state_size};"
            " needed H P + 2 G N, H a multiple of G"
        )
    if state_size > MAX_HEAD_SIZE:
        raise ValueError(f"{op}: state_size is {state_size}; the kernels support at most {MAX_HEAD_SIZE}")
    return ScanShape(heads, columns // heads, groups, state_size)


class ScanInputs(NamedTuple):
    """What the kernels of the scan read, forward and backward."""

    xbc: Tensor
    stride: int  # between the rows of xbc; all other tensors are contiguous
    delta: Tensor
    a: Tensor
    d: Tensor
    cu_seqlens: Tensor
    shape: ScanShape

    @classmethod
    def of(
        cls, xbc: Tensor, delta: Tensor, a: Tensor, d: Tensor, groups: int, state_size: int, cu_seqlens: Tensor | None
    ) -> "ScanInputs":
        """Each row is a document where there are no cu_seqlens."""
        shape = scan_shape(xbc, delta, groups, state_size)
        offsets = row_offsets(delta) if cu_seqlens is None else cu_seqlens
        delta, a, d = delta.contiguous(), a.contiguous(), d.contiguous()
        return cls(*as_rows_with_stride(xbc, shape.columns), delta, a, d, offsets, shape)

    @property
    def documents(self) -> int:
        return self.cu_seqlens.shape[0] - 1

    @property
    def slots(self) -> int:
        return number_of_slots(self.delta.numel() // self.shape.heads, self.cu_seqlens)

    def empty_states(self) -> Tensor:
        """Uninitialised states of all chunks [slots, H, N, P]."""
        shape = self.shape
        return self.xbc.new_empty(self.slots, shape.heads, shape.state_size, shape.head_size)


@triton.jit
def _last(x):
    """The last element of x [SPAN]."""
    return tl.sum(tl.where(tl.arange(0, SPAN) == SPAN - 1, x, 0.0), 0)


@triton.jit
def load_gates(delta_ptr, a_ptr, first, rows, head, HEADS: tl.constexpr):
    """(δ, G, what rounding left of G, log r, G at the chunk's end) of one chunk of a head.

    Missing tokens have δ = 0 and do not change G.
    """
    index = tl.arange(0, SPAN)
    delta = tl.load(delta_ptr + first * HEADS + head + index * HEADS, index < rows, other=0.0).to(tl.float32)
    high, low = exact_cumsum(delta * tl.load(a_ptr + head).to(tl.float32))
    last, last_low = _last(high), _last(low)
    return delta, high, low, last - high + (last_low - low), last


@triton.jit
def chunk_pairs(decay, low, rows):
    """Γ of one chunk [SPAN, SPAN], of G and what rounding left of it."""
    return pair_decay(decay[:, None] - decay[None, :] + (low[:, None] - low[None, :]), rows, False)


@triton.jit
def chunk_output(b, c, x, delta, decay, low, skip, state, rows):
    """Y of one chunk [SPAN, columns] fp32. low: what rounding left of G. x fp32; state in the dtype of b and c."""
    pairs = tl.dot(c, tl.trans(b), input_precision="ieee") * chunk_pairs(decay, low, rows)
    y = skip * x + tl.exp(decay)[:, None] * tl.dot(c, state, input_precision="ieee")
    return tl.dot(pairs.to(c.dtype), (delta[:, None] * x).to(c.dtype), y, input_precision="ieee")
