"""Chunks of the gated delta rule: their normalized queries and keys, and the inverse of each.

`_prepare_kernel` computes of each chunk and value head, with G the cumulative sum of g inside the chunk:
    norms [T, 2, Hk] fp32       rsqrt(Σ x² + eps) of each query and key
    decay [T, Hv] fp32          G
    inverse [T, Hv, SPAN]       M = (1 + A)^-1, A = strict_lower(β_i (k_i·k_j) exp(G_i - G_j)); row i of M at token i
and `_pairs_kernel`, for the forward pass and again for the backward pass,
    pairs [T, Hv, SPAN]         P = (Q Kᵀ)∘exp(G_i - G_j), i >= j
Diagonal blocks of INVERSE_BLOCK rows are inverted by substitution. With D these inverses and E = D (A without blocks),
whose power SPAN / INVERSE_BLOCK = 4 is zero, M = (1 - E + E² - E³) D.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.launch import as_rows_with_stride, kernel
from ligermodels.kernels.linear_attention.document_chunks import (
    MAX_HEAD_SIZE,
    MIN_DOT,
    SPAN,
    has_wide_units,
    load_rows,
    locate_slot,
    number_of_slots,
    pair_decay,
    row_offsets,
)

INVERSE_BLOCK = tl.constexpr(16)  # rows that are inverted by substitution
# Warps of `_prepare_kernel` and `_pairs_kernel`, with the matrix units of Hopper and newer GPUs and with others.
PREPARE_WARPS = {True: 4, False: 8}
L2_EPS = 1e-6  # of the norms of queries and keys


@dataclass(frozen=True)
class DeltaShape:
    """Heads and their sizes, as the columns of a packed qkv: queries, keys, then values, head by head."""

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int

    @property
    def key_columns(self) -> int:
        return self.key_heads * self.key_size

    @property
    def columns(self) -> int:
        return 2 * self.key_columns + self.value_heads * self.value_size

    def constants(self) -> dict[str, int]:
        """The constants that every kernel of the rule is bound with."""
        return {
            "KEY_HEADS": self.key_heads, "VALUE_HEADS": self.value_heads, "KEY_SIZE": self.key_size,
            "VALUE_SIZE": self.value_size, "KEY_TILE": max(MIN_DOT, triton.next_power_of_2(self.key_size)),
        }  # fmt: skip


def delta_shape(qkv: Tensor, g: Tensor, key_heads: int, key_size: int, op: str = "gated_delta_rule") -> DeltaShape:
    """The heads of a packed qkv [..., columns] with g [..., Hv].

    Raises ValueError if they do not divide its columns, or are larger than the kernels support.
    """
    value_heads, columns = g.shape[-1], qkv.shape[-1] - 2 * key_heads * key_size
    if columns <= 0 or columns % value_heads or value_heads % key_heads:
        raise ValueError(
            f"{op}: qkv has {qkv.shape[-1]} columns, with {key_heads} key heads of {key_size} and"
            f" {value_heads} value heads; needed 2 Hk hk + Hv hv, Hv a multiple of Hk"
        )
    shape = DeltaShape(key_heads, value_heads, key_size, columns // value_heads)
    if key_size > MAX_HEAD_SIZE:
        raise ValueError(f"{op}: keys have {key_size} elements; the kernels support at most {MAX_HEAD_SIZE}")
    return shape


@triton.jit
def load_norms(norms_ptr, rows, KEY_HEADS: tl.constexpr):
    """Reciprocal norms of a chunk's queries and keys. They scale the rows of products, instead of the operands, which
    go from memory to the matrix units unchanged."""
    row = tl.arange(0, SPAN)
    norms_ptr += row * (2 * KEY_HEADS)
    return tl.load(norms_ptr, row < rows, other=0.0), tl.load(norms_ptr + KEY_HEADS, row < rows, other=0.0)


@triton.jit
def _reciprocal_norms(x, eps):
    wide = x.to(tl.float32)
    return tl.rsqrt(tl.sum(wide * wide, 1) + eps)


@triton.jit
def _invert(a, PRECISION: tl.constexpr):
    """(1 + a)^-1 of a strictly lower triangular [SPAN, SPAN] in fp32."""
    BLOCKS: tl.constexpr = SPAN // INVERSE_BLOCK
    block, row = tl.arange(0, BLOCKS), tl.arange(0, INVERSE_BLOCK)
    same = (block[:, None, None, None] == block[None, None, :, None]) & (row >= 0)[None, :, None, None]
    tiles = tl.reshape(a, [BLOCKS, INVERSE_BLOCK, BLOCKS, INVERSE_BLOCK])
    inverse = -tl.sum(tl.where(same, tiles, 0.0), 2)  # the diagonal blocks: [block, row, column]
    for index in tl.static_range(1, INVERSE_BLOCK):
        here = (row == index)[None, :, None]
        factors = tl.sum(tl.where(here, inverse, 0.0), 1)
        inverse = tl.where(here, (factors + tl.sum(factors[:, :, None] * inverse, 1))[:, None, :], inverse)
    inverse += (row[:, None] == row[None, :]).to(tl.float32)[None, :, :]
    diagonal = tl.reshape(tl.where(same, inverse[:, :, None, :], 0.0), [SPAN, SPAN])
    below = tl.reshape(tl.where(same, 0.0, tiles), [SPAN, SPAN])
    e = tl.dot(diagonal, below, input_precision=PRECISION)
    square = tl.dot(e, e, input_precision=PRECISION)
    index = tl.arange(0, SPAN)
    series = (index[:, None] == index[None, :]).to(tl.float32) - e + square
    series -= tl.dot(e, square, input_precision=PRECISION)
    return tl.dot(series, diagonal, input_precision=PRECISION)


@kernel(do_not_specialize=["documents"])
def _prepare_kernel(
    qkv_ptr, g_ptr, beta_ptr, cu_seqlens_ptr, norms_ptr, decay_ptr, inverse_ptr, stride, documents, eps,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr,
    KEY_TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: one chunk of one value head. The first value head of a key head stores the norms."""
    GROUP: tl.constexpr = VALUE_HEADS // KEY_HEADS
    head = tl.program_id(0) % VALUE_HEADS
    first, rows = locate_slot(cu_seqlens_ptr, tl.program_id(0) // VALUE_HEADS, documents, SPAN)
    if rows <= 0:
        return
    row, column = tl.arange(0, SPAN), tl.arange(0, KEY_TILE)
    inside, key_head = row < rows, head // GROUP
    q_ptr = qkv_ptr + first * stride + key_head * KEY_SIZE
    k = load_rows(q_ptr + KEY_HEADS * KEY_SIZE, rows, row, stride, column, KEY_SIZE, KEY_SIZE == KEY_TILE)
    k_norm = _reciprocal_norms(k, eps)
    norms_ptr += first * (2 * KEY_HEADS) + key_head + row * (2 * KEY_HEADS)
    if head % GROUP == 0:
        q = load_rows(q_ptr, rows, row, stride, column, KEY_SIZE, KEY_SIZE == KEY_TILE)
        tl.store(norms_ptr, _reciprocal_norms(q, eps), inside)
        tl.store(norms_ptr + KEY_HEADS, k_norm, inside)
    here, place = first * VALUE_HEADS + head, row * VALUE_HEADS
    decay = tl.cumsum(tl.load(g_ptr + here + place, inside, other=0.0).to(tl.float32), 0)
    tl.store(decay_ptr + here + place, decay, inside)
    beta = tl.load(beta_ptr + here + place, inside, other=0.0).to(tl.float32)
    a = tl.dot(k, tl.trans(k), input_precision="ieee") * pair_decay(decay[:, None] - decay[None, :], rows, True)
    a *= (beta * k_norm)[:, None] * k_norm[None, :]
    inverse = _invert(a, PRECISION).to(inverse_ptr.dtype.element_ty)
    tl.store(inverse_ptr + here * SPAN + place[:, None] * SPAN + row[None, :], inverse, inside[:, None])


@kernel(do_not_specialize=["documents"])
def _pairs_kernel(
    qkv_ptr, norms_ptr, decay_ptr, cu_seqlens_ptr, pairs_ptr, stride, documents, scale,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr,
    KEY_TILE: tl.constexpr,
):  # fmt: skip
    """One program: P of one chunk, for all value heads of one key head."""
    GROUP: tl.constexpr = VALUE_HEADS // KEY_HEADS
    key_head = tl.program_id(0) % KEY_HEADS
    first, rows = locate_slot(cu_seqlens_ptr, tl.program_id(0) // KEY_HEADS, documents, SPAN)
    if rows <= 0:
        return
    row, column = tl.arange(0, SPAN), tl.arange(0, KEY_TILE)
    q_ptr = qkv_ptr + first * stride + key_head * KEY_SIZE
    q = load_rows(q_ptr, rows, row, stride, column, KEY_SIZE, KEY_SIZE == KEY_TILE)
    k = load_rows(q_ptr + KEY_HEADS * KEY_SIZE, rows, row, stride, column, KEY_SIZE, KEY_SIZE == KEY_TILE)
    q_norm, k_norm = load_norms(norms_ptr + first * (2 * KEY_HEADS) + key_head, rows, KEY_HEADS)
    products = tl.dot(q, tl.trans(k), input_precision="ieee") * (q_norm * scale)[:, None] * k_norm[None, :]
    for member in range(GROUP):
        here = first * VALUE_HEADS + key_head * GROUP + member
        decay = tl.load(decay_ptr + here + row * VALUE_HEADS, row < rows, other=0.0)
        pairs = (products * pair_decay(decay[:, None] - decay[None, :], rows, False)).to(pairs_ptr.dtype.element_ty)
        at = (row * (VALUE_HEADS * SPAN))[:, None] + row[None, :]
        tl.store(pairs_ptr + here * SPAN + at, pairs, (row < rows)[:, None])


class DeltaInputs(NamedTuple):
    """What the kernels of the rule read, forward and backward."""

    qkv: Tensor
    stride: int  # between the rows of qkv; all other tensors are contiguous
    beta: Tensor
    norms: Tensor  # these three of `prepare_chunks`
    decay: Tensor
    inverse: Tensor
    cu_seqlens: Tensor
    shape: DeltaShape

    @classmethod
    def of(
        cls, qkv: Tensor, beta: Tensor, chunks: tuple[Tensor, Tensor, Tensor], key_heads: int, key_size: int,
        cu_seqlens: Tensor | None,
    ) -> "DeltaInputs":  # fmt: skip
        """Each row is a document where there are no cu_seqlens. chunks: norms, decay, inverse."""
        shape = delta_shape(qkv, beta, key_heads, key_size)
        offsets = row_offsets(beta) if cu_seqlens is None else cu_seqlens
        return cls(*as_rows_with_stride(qkv, shape.columns), beta.contiguous(), *chunks, offsets, shape)

    @property
    def scale(self) -> float:
        return self.shape.key_size**-0.5

    @property
    def documents(self) -> int:
        return self.cu_seqlens.shape[0] - 1

    @property
    def tokens(self) -> int:
        return self.beta.numel() // self.shape.value_heads

    @property
    def slots(self) -> int:
        return number_of_slots(self.tokens, self.cu_seqlens)

    def empty_states(self) -> tuple[Tensor, Tensor]:
        """Uninitialised states of all chunks [slots, Hv, hk, hv], and values of all tokens [T, Hv, hv]."""
        shape = self.shape
        states = self.qkv.new_empty(self.slots, shape.value_heads, shape.key_size, shape.value_size)
        return states, self.qkv.new_empty(self.tokens, shape.value_heads, shape.value_size)


def prepare_chunks(inputs: DeltaInputs, g: Tensor, eps: float) -> None:
    """Writes norms, decay and inverse."""
    qkv, shape = inputs.qkv, inputs.shape
    half = qkv.itemsize == 2 and not torch.version.hip
    launch = _prepare_kernel.bind(
        PRECISION="tf32x3" if half else "ieee", num_warps=PREPARE_WARPS[has_wide_units(qkv.device)], **shape.constants()
    )
    launch(
        inputs.slots * shape.value_heads,
        qkv, g, inputs.beta, inputs.cu_seqlens, inputs.norms, inputs.decay, inputs.inverse, inputs.stride,
        inputs.documents, eps,
    )  # fmt: skip


def compute_pairs(inputs: DeltaInputs) -> Tensor:
    """P of all chunks [T, Hv, SPAN]."""
    qkv, stride, _, norms, decay, _, cu_seqlens, shape = inputs
    pairs = qkv.new_empty(inputs.tokens, shape.value_heads, SPAN.value)
    launch = _pairs_kernel.bind(num_warps=PREPARE_WARPS[has_wide_units(qkv.device)], **shape.constants())
    programs = inputs.slots * shape.key_heads
    launch(programs, qkv, norms, decay, cu_seqlens, pairs, stride, inputs.documents, inputs.scale)
    return pairs
