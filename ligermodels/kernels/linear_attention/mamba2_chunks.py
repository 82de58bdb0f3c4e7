"""Chunks of the Mamba-2 scan: their shape, decays and output, and the scans that pass the state from one to the next.

Symbols as in mamba2_scan.py. G is the cumulative sum of 64 numbers, which every kernel computes again. The two scans
are serial within a document. A program of the forward scan holds columns of S in registers and computes of each chunk,
from the state S at its start,
    Y = e^G∘(C S) + ((C Bᵀ)∘Γ) (δ∘X) + D X        S <- e^{G_end} S + Bᵀ(r∘δ∘X)
It stores Y, or S, from which `mamba2_outputs.py` computes Y for all chunks in parallel. The backward scan goes from the
last chunk to the first, and stores each dS that reaches a chunk's end:
    dS <- e^{G_end} dS + Cᵀ(e^G∘dY)
S is kept in fp32; operands of products are rounded to the dtype of xbc.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.launch import Launcher, as_rows_with_stride, cdiv, kernel
from ligermodels.kernels.linear_attention.document_chunks import (
    MAX_HEAD_SIZE,
    MIN_COLUMNS_OF_TILES,
    SPAN,
    document_slot,
    exact_cumsum,
    fills_device,
    has_wide_units,
    load_rows,
    number_of_slots,
    pair_decay,
    row_offsets,
    tile_columns,
    tile_mask,
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


# By `has_wide_units` and element size in bytes: columns of a state in one program, warps and prefetch stages. To be
# measured: narrower tiles make more programs, wider ones read B and C less often.
FP32_STATE_TILE = (16, 4, 1)
STATE_TILES = {True: {2: (32, 4, 2), 4: FP32_STATE_TILE}, False: {2: (32, 8, 1), 4: FP32_STATE_TILE}}
STATE_GRADIENT_TILES = {True: {2: (64, 4, 2), 4: FP32_STATE_TILE}, False: {2: (32, 4, 1), 4: FP32_STATE_TILE}}


@kernel()
def _forward_scan_kernel(
    xbc_ptr, delta_ptr, a_ptr, d_ptr, cu_seqlens_ptr, initial_ptr, y_ptr, states_ptr, final_ptr, stride,
    INITIAL: tl.constexpr, OUTPUT: tl.constexpr, STORE: tl.constexpr, FINAL: tl.constexpr, HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr, GROUPS: tl.constexpr, STATE_SIZE: tl.constexpr, STATE_TILE: tl.constexpr,
    COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program: COLUMNS columns of one head's state in one document.

    OUTPUT: stores y. STORE: stores the state at the start of each chunk. FINAL: stores the state at the end.
    """
    TILES: tl.constexpr = (HEAD_SIZE + COLUMNS - 1) // COLUMNS
    EXACT: tl.constexpr = HEAD_SIZE % COLUMNS == 0
    tile, head = tl.program_id(0) % TILES, tl.program_id(0) // TILES % HEADS
    document = tl.program_id(0) // (TILES * HEADS)
    start, end, slot = document_slot(cu_seqlens_ptr, document, SPAN)
    row, column, index = tl.arange(0, STATE_TILE), tile * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, SPAN)
    cell = row[:, None] * HEAD_SIZE + column[None, :]
    in_state = tile_mask(STATE_SIZE, row, column, HEAD_SIZE, EXACT)
    x_ptr = xbc_ptr + head * HEAD_SIZE
    b_ptr = xbc_ptr + HEADS * HEAD_SIZE + head // (HEADS // GROUPS) * STATE_SIZE
    c_ptr = b_ptr + GROUPS * STATE_SIZE
    skip = tl.load(d_ptr + head).to(tl.float32)
    whole = (document.to(tl.int64) * HEADS + head) * STATE_SIZE * HEAD_SIZE
    state = tl.zeros([STATE_TILE, COLUMNS], tl.float32)
    if INITIAL:
        state += tl.load(initial_ptr + whole + cell, in_state, other=0.0).to(tl.float32)
    for chunk in tl.range(0, tl.cdiv(end - start, SPAN).to(tl.int32), num_stages=STAGES):
        first = start + chunk * SPAN
        rows = (end - first).to(tl.int32)
        b = load_rows(b_ptr + first * stride, rows, index, stride, row, STATE_SIZE, STATE_SIZE == STATE_TILE)
        x = load_rows(x_ptr + first * stride, rows, index, stride, column, HEAD_SIZE, EXACT).to(tl.float32)
        delta, decay, low, left, last = load_gates(delta_ptr, a_ptr, first, rows, head, HEADS)
        if STORE:
            at_chunk = ((slot + chunk) * HEADS + head) * (STATE_SIZE * HEAD_SIZE)
            tl.store(states_ptr + at_chunk + cell, state.to(b.dtype), in_state)
        if OUTPUT:
            c = load_rows(c_ptr + first * stride, rows, index, stride, row, STATE_SIZE, STATE_SIZE == STATE_TILE)
            y = chunk_output(b, c, x, delta, decay, low, skip, state.to(b.dtype), rows)
            at = index[:, None] * (HEADS * HEAD_SIZE) + column[None, :]
            y_tile_ptr = y_ptr + (first * HEADS + head) * HEAD_SIZE + at
            tl.store(y_tile_ptr, y.to(y_ptr.dtype.element_ty), tile_mask(rows, index, column, HEAD_SIZE, EXACT))
        left_value = ((tl.exp(left) * delta)[:, None] * x).to(b.dtype)
        state = tl.dot(tl.trans(b), left_value, tl.exp(last) * state, input_precision="ieee")
    if FINAL:
        tl.store(final_ptr + whole + cell, state, in_state)


@kernel()
def _backward_scan_kernel(
    dy_ptr, dfinal_ptr, xbc_ptr, delta_ptr, a_ptr, cu_seqlens_ptr, dstates_ptr, dinitial_ptr, stride,
    FINAL: tl.constexpr, STORE: tl.constexpr, INITIAL_GRAD: tl.constexpr, HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr, GROUPS: tl.constexpr, STATE_SIZE: tl.constexpr, STATE_TILE: tl.constexpr,
    COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program: COLUMNS columns of the gradient of one head's state in one document."""
    TILES: tl.constexpr = (HEAD_SIZE + COLUMNS - 1) // COLUMNS
    EXACT: tl.constexpr = HEAD_SIZE % COLUMNS == 0
    tile, head = tl.program_id(0) % TILES, tl.program_id(0) // TILES % HEADS
    document = tl.program_id(0) // (TILES * HEADS)
    start, end, slot = document_slot(cu_seqlens_ptr, document, SPAN)
    row, column, index = tl.arange(0, STATE_TILE), tile * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, SPAN)
    cell = row[:, None] * HEAD_SIZE + column[None, :]
    in_state = tile_mask(STATE_SIZE, row, column, HEAD_SIZE, EXACT)
    c_ptr = xbc_ptr + HEADS * HEAD_SIZE + (GROUPS + head // (HEADS // GROUPS)) * STATE_SIZE
    whole = (document.to(tl.int64) * HEADS + head) * STATE_SIZE * HEAD_SIZE
    dstate = tl.zeros([STATE_TILE, COLUMNS], tl.float32)
    if FINAL:
        dstate += tl.load(dfinal_ptr + whole + cell, in_state, other=0.0).to(tl.float32)
    chunks = tl.cdiv(end - start, SPAN).to(tl.int32)
    for step in tl.range(0, chunks, num_stages=STAGES):
        chunk = tl.maximum(chunks - 1 - step, 0)  # loads that are pipelined run ahead of the last step
        first = start + chunk * SPAN
        rows = (end - first).to(tl.int32)
        c = load_rows(c_ptr + first * stride, rows, index, stride, row, STATE_SIZE, STATE_SIZE == STATE_TILE)
        dy_tile_ptr = dy_ptr + (first * HEADS + head) * HEAD_SIZE
        dy = load_rows(dy_tile_ptr, rows, index, HEADS * HEAD_SIZE, column, HEAD_SIZE, EXACT).to(tl.float32)
        _, decay, _, _, last = load_gates(delta_ptr, a_ptr, first, rows, head, HEADS)
        if STORE:
            at_chunk = ((slot + chunk) * HEADS + head) * (STATE_SIZE * HEAD_SIZE)
            tl.store(dstates_ptr + at_chunk + cell, dstate.to(c.dtype), in_state)
        decayed = (tl.exp(decay)[:, None] * dy).to(c.dtype)
        dstate = tl.dot(tl.trans(c), decayed, tl.exp(last) * dstate, input_precision="ieee")
    if INITIAL_GRAD:
        tl.store(dinitial_ptr + whole + cell, dstate, in_state)


def fuses_scan_output(inputs: ScanInputs) -> bool:
    """Whether the forward scan has enough programs to compute the outputs as well."""
    xbc, shape = inputs.xbc, inputs.shape
    columns = tile_columns(STATE_TILES[has_wide_units(xbc.device)][xbc.itemsize][0], shape.head_size)
    return fills_device(inputs.documents * shape.heads * cdiv(shape.head_size, columns), xbc.device)


def scan_states(
    inputs: ScanInputs, initial_state: Tensor | None, y: Tensor | None, final: Tensor | None, store: bool
) -> Tensor:
    """Writes y and final where given. With `store` returns the states [slots, H, N, P] at the chunks' starts."""
    xbc, stride, delta, a, d, cu_seqlens, shape = inputs
    states = inputs.empty_states() if store else xbc
    wide, initial = has_wide_units(xbc.device), initial_state is not None
    launch, tiles = _forward_scan(shape, xbc.itemsize, wide, initial, y is not None, store, final is not None)
    launch(
        inputs.documents * shape.heads * tiles,
        xbc, delta, a, d, cu_seqlens, delta if initial_state is None else initial_state, xbc if y is None else y,
        states, delta if final is None else final, stride,
    )  # fmt: skip
    return states


def scan_state_gradients(
    inputs: ScanInputs, dy: Tensor, dfinal: Tensor | None, dinitial: Tensor | None, store: bool
) -> Tensor:
    """Writes dinitial where given. With `store` returns the gradients of the states [slots, H, N, P] at the chunks'
    ends."""
    xbc, stride, delta, a, _, cu_seqlens, shape = inputs
    dstates = inputs.empty_states() if store else xbc
    wide = has_wide_units(xbc.device)
    launch, tiles = _backward_scan(shape, xbc.itemsize, wide, dfinal is not None, store, dinitial is not None)
    launch(
        inputs.documents * shape.heads * tiles,
        dy, delta if dfinal is None else dfinal, xbc, delta, a, cu_seqlens, dstates,
        delta if dinitial is None else dinitial, stride,
    )  # fmt: skip
    return dstates


@functools.cache
def _forward_scan(
    shape: ScanShape, itemsize: int, wide: bool, initial: bool, output: bool, store: bool, final: bool
) -> tuple[Launcher, int]:
    """The launcher, and how many programs share a state."""
    columns, warps, stages = STATE_TILES[wide][itemsize]
    columns = tile_columns(columns, shape.head_size)
    launch = _forward_scan_kernel.bind(
        INITIAL=initial, OUTPUT=output, STORE=store, FINAL=final, **shape.constants(), COLUMNS=columns, STAGES=stages,
        num_warps=warps,
    )  # fmt: skip
    return launch, cdiv(shape.head_size, columns)


@functools.cache
def _backward_scan(
    shape: ScanShape, itemsize: int, wide: bool, final: bool, store: bool, initial_grad: bool
) -> tuple[Launcher, int]:
    """The launcher, and how many programs share a state."""
    columns, warps, stages = STATE_GRADIENT_TILES[wide][itemsize]
    columns = tile_columns(columns, shape.head_size)
    launch = _backward_scan_kernel.bind(
        FINAL=final, STORE=store, INITIAL_GRAD=initial_grad, **shape.constants(), COLUMNS=columns, STAGES=stages,
        num_warps=warps,
    )  # fmt: skip
    return launch, cdiv(shape.head_size, columns)
