"""States of the gated delta rule, passed from chunk to chunk: the two scans, which are serial within a document.

Symbols as in gated_delta_rule.py. A program of the forward scan holds columns of S in registers and computes of each
chunk, from the state S at its start,
    V' = M (β∘(V - e^G∘(K S)))        O = e^G∘(Q S) + P V'        S <- e^{G_C} S + Kᵀ(r∘V')
so that the products M (β∘V) and M (β e^G∘K) of the usual form never exist. It stores O, or, for the backward pass, S
and V'. The backward scan goes from the last chunk to the first:
    dV' = PᵀdO + r∘(K dS)        X = MᵀdV'        dS <- e^{G_C} dS + Qᵀ(e^G∘dO) - Kᵀ(β e^G∘X)
and stores X and each dS that reaches a chunk's end.
S is kept in fp32; operands of products are rounded to the dtype of qkv.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import triton.language as tl
from torch import Tensor

from ligermodels.kernels.launch import Launcher, cdiv, kernel
from ligermodels.kernels.linear_attention.delta_chunks import DeltaInputs, DeltaShape, load_norms
from ligermodels.kernels.linear_attention.document_chunks import (
    SPAN,
    document_slot,
    fills_device,
    has_wide_units,
    load_rows,
    tile_columns,
    tile_mask,
)


@dataclass(frozen=True)
class ScanTile:
    """How many columns of a state one program holds."""

    columns: int
    warps: int
    stages: int

    def constants(self, shape: DeltaShape) -> dict[str, int]:
        """Larger keys leave shared memory for one stage less."""
        stages = max(1, self.stages - (shape.key_size > 128))
        return {"COLUMNS": tile_columns(self.columns, shape.value_size), "STAGES": stages, "num_warps": self.warps}

    def programs(self, shape: DeltaShape) -> int:
        """Counts the programs of one document."""
        return shape.value_heads * cdiv(shape.value_size, tile_columns(self.columns, shape.value_size))


class ScanTiles(NamedTuple):
    """Narrower tiles make more programs, wider ones read keys less often: they are used where there are enough
    programs of the others to fill the device."""

    narrow: ScanTile
    wide: ScanTile


# By `has_wide_units` and element size in bytes. Measured with wide units in half precision; the others are to be.
HALF_TILES = ScanTiles(ScanTile(32, 4, 3), ScanTile(64, 4, 3))
NARROW_TILES, FP32_TILES = (ScanTiles(tile, tile) for tile in (ScanTile(32, 4, 1), ScanTile(16, 4, 1)))
DELTA_SCAN_TILES = {True: {2: HALF_TILES, 4: FP32_TILES}, False: {2: NARROW_TILES, 4: FP32_TILES}}


@kernel()
def _forward_scan_kernel(
    qkv_ptr, norms_ptr, decay_ptr, beta_ptr, inverse_ptr, pairs_ptr, cu_seqlens_ptr, initial_ptr, o_ptr, states_ptr,
    values_ptr, final_ptr, stride, scale,
    INITIAL: tl.constexpr, OUTPUT: tl.constexpr, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, KEY_TILE: tl.constexpr, COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """One program: COLUMNS columns of one value head's state in one document.

    Stores o and the state at the end if OUTPUT, otherwise the state at the start of each chunk, and V'.
    """
    TILES: tl.constexpr = (VALUE_SIZE + COLUMNS - 1) // COLUMNS
    tile, head = tl.program_id(0) % TILES, tl.program_id(0) // TILES % VALUE_HEADS
    document = tl.program_id(0) // (TILES * VALUE_HEADS)
    start, end, slot = document_slot(cu_seqlens_ptr, document, SPAN)
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    EXACT: tl.constexpr = VALUE_SIZE % COLUMNS == 0
    row, column, index = tl.arange(0, KEY_TILE), tile * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, SPAN)
    cell = row[:, None] * VALUE_SIZE + column[None, :]
    in_state = tile_mask(KEY_SIZE, row, column, VALUE_SIZE, EXACT)
    q_ptr = qkv_ptr + key_head * KEY_SIZE
    k_ptr = q_ptr + KEY_HEADS * KEY_SIZE
    v_ptr = qkv_ptr + 2 * KEY_HEADS * KEY_SIZE + head * VALUE_SIZE
    norms_ptr += key_head
    whole = (document.to(tl.int64) * VALUE_HEADS + head) * KEY_SIZE * VALUE_SIZE
    state = tl.zeros([KEY_TILE, COLUMNS], tl.float32)
    if INITIAL:
        state += tl.load(initial_ptr + whole + cell, in_state, other=0.0).to(tl.float32)
    for chunk in tl.range(0, tl.cdiv(end - start, SPAN).to(tl.int32), num_stages=STAGES):
        first = start + chunk * SPAN
        rows, here = (end - first).to(tl.int32), first * VALUE_HEADS + head
        inside = index < rows
        q_norm, k_norm = load_norms(norms_ptr + first * (2 * KEY_HEADS), rows, KEY_HEADS)
        k = load_rows(k_ptr + first * stride, rows, index, stride, row, KEY_SIZE, KEY_SIZE == KEY_TILE)
        v = load_rows(v_ptr + first * stride, rows, index, stride, column, VALUE_SIZE, EXACT).to(tl.float32)
        inverse = load_rows(inverse_ptr + here * SPAN, rows, index, VALUE_HEADS * SPAN, index, SPAN, True)
        decay = tl.load(decay_ptr + here + index * VALUE_HEADS, inside, other=0.0)
        beta = tl.load(beta_ptr + here + index * VALUE_HEADS, inside, other=0.0).to(tl.float32)
        last = tl.load(decay_ptr + here + (tl.minimum(rows, SPAN) - 1) * VALUE_HEADS)
        rounded = state.to(k.dtype)
        factor = (tl.exp(decay) * k_norm)[:, None]
        residual = beta[:, None] * (v - factor * tl.dot(k, rounded, input_precision="ieee"))
        value = tl.dot(inverse, residual.to(k.dtype), input_precision="ieee")
        in_values = tile_mask(rows, index, column, VALUE_SIZE, EXACT)
        at = index[:, None] * (VALUE_HEADS * VALUE_SIZE) + column[None, :]
        if OUTPUT:
            q = load_rows(q_ptr + first * stride, rows, index, stride, row, KEY_SIZE, KEY_SIZE == KEY_TILE)
            pairs = load_rows(pairs_ptr + here * SPAN, rows, index, VALUE_HEADS * SPAN, index, SPAN, True)
            o = (tl.exp(decay) * q_norm * scale)[:, None] * tl.dot(q, rounded, input_precision="ieee")
            o = tl.dot(pairs, value.to(k.dtype), o, input_precision="ieee")
            tl.store(o_ptr + here * VALUE_SIZE + at, o.to(o_ptr.dtype.element_ty), in_values)
        else:
            at_chunk = ((slot + chunk) * VALUE_HEADS + head) * (KEY_SIZE * VALUE_SIZE)
            tl.store(states_ptr + at_chunk + cell, rounded, in_state)
            tl.store(values_ptr + here * VALUE_SIZE + at, value.to(k.dtype), in_values)
        left = ((tl.exp(tl.where(inside, last - decay, 0.0)) * k_norm)[:, None] * value).to(k.dtype)
        state = tl.dot(tl.trans(k), left, tl.exp(last) * state, input_precision="ieee")
    if OUTPUT:
        tl.store(final_ptr + whole + cell, state, in_state)


@kernel()
def _backward_scan_kernel(
    do_ptr, dfinal_ptr, qkv_ptr, norms_ptr, decay_ptr, beta_ptr, inverse_ptr, pairs_ptr, cu_seqlens_ptr, dstates_ptr,
    x_ptr, dinitial_ptr, stride, scale,
    FINAL: tl.constexpr, INITIAL_GRAD: tl.constexpr, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, KEY_TILE: tl.constexpr, COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """One program: COLUMNS columns of the gradient of one value head's state in one document."""
    TILES: tl.constexpr = (VALUE_SIZE + COLUMNS - 1) // COLUMNS
    tile, head = tl.program_id(0) % TILES, tl.program_id(0) // TILES % VALUE_HEADS
    document = tl.program_id(0) // (TILES * VALUE_HEADS)
    start, end, slot = document_slot(cu_seqlens_ptr, document, SPAN)
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    EXACT: tl.constexpr = VALUE_SIZE % COLUMNS == 0
    row, column, index = tl.arange(0, KEY_TILE), tile * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, SPAN)
    cell = row[:, None] * VALUE_SIZE + column[None, :]
    in_state = tile_mask(KEY_SIZE, row, column, VALUE_SIZE, EXACT)
    q_ptr = qkv_ptr + key_head * KEY_SIZE
    k_ptr = q_ptr + KEY_HEADS * KEY_SIZE
    norms_ptr += key_head
    whole = (document.to(tl.int64) * VALUE_HEADS + head) * KEY_SIZE * VALUE_SIZE
    dstate = tl.zeros([KEY_TILE, COLUMNS], tl.float32)
    if FINAL:
        dstate += tl.load(dfinal_ptr + whole + cell, in_state, other=0.0).to(tl.float32)
    chunks = tl.cdiv(end - start, SPAN).to(tl.int32)
    for step in tl.range(0, chunks, num_stages=STAGES):
        chunk = tl.maximum(chunks - 1 - step, 0)  # loads that are pipelined run ahead of the last step
        first = start + chunk * SPAN
        rows, here = (end - first).to(tl.int32), first * VALUE_HEADS + head
        inside = index < rows
        q_norm, k_norm = load_norms(norms_ptr + first * (2 * KEY_HEADS), rows, KEY_HEADS)
        q = load_rows(q_ptr + first * stride, rows, index, stride, row, KEY_SIZE, KEY_SIZE == KEY_TILE)
        k = load_rows(k_ptr + first * stride, rows, index, stride, row, KEY_SIZE, KEY_SIZE == KEY_TILE)
        do = load_rows(
            do_ptr + here * VALUE_SIZE, rows, index, VALUE_HEADS * VALUE_SIZE, column, VALUE_SIZE, EXACT
        )  # fmt: skip
        inverse = load_rows(inverse_ptr + here * SPAN, rows, index, VALUE_HEADS * SPAN, index, SPAN, True)
        decay = tl.load(decay_ptr + here + index * VALUE_HEADS, inside, other=0.0)
        beta = tl.load(beta_ptr + here + index * VALUE_HEADS, inside, other=0.0).to(tl.float32)
        last = tl.load(decay_ptr + here + (tl.minimum(rows, SPAN) - 1) * VALUE_HEADS)
        rounded = dstate.to(k.dtype)
        at_chunk = ((slot + chunk) * VALUE_HEADS + head) * KEY_SIZE * VALUE_SIZE
        tl.store(dstates_ptr + at_chunk + cell, rounded, in_state)
        pairs = load_rows(pairs_ptr + here * SPAN, rows, index, VALUE_HEADS * SPAN, index, SPAN, True)
        left = (tl.exp(tl.where(inside, last - decay, 0.0)) * k_norm)[:, None]
        dvalue = left * tl.dot(k, rounded, input_precision="ieee")
        dvalue = tl.dot(tl.trans(pairs), do.to(k.dtype), dvalue, input_precision="ieee").to(k.dtype)
        x = tl.dot(tl.trans(inverse), dvalue, input_precision="ieee")
        at = index[:, None] * (VALUE_HEADS * VALUE_SIZE) + column[None, :]
        tl.store(x_ptr + here * VALUE_SIZE + at, x.to(k.dtype), tile_mask(rows, index, column, VALUE_SIZE, EXACT))
        decayed_do = ((tl.exp(decay) * q_norm * scale)[:, None] * do.to(tl.float32)).to(k.dtype)
        decayed_x = ((tl.exp(decay) * beta * k_norm)[:, None] * x).to(k.dtype)
        dstate = tl.dot(tl.trans(q), decayed_do, tl.exp(last) * dstate, input_precision="ieee")
        dstate -= tl.dot(tl.trans(k), decayed_x, input_precision="ieee")
    if INITIAL_GRAD:
        tl.store(dinitial_ptr + whole + cell, dstate, in_state)


def forward_scan(inputs: DeltaInputs, pairs: Tensor, initial_state: Tensor | None, o: Tensor, final: Tensor) -> None:
    """Writes o and final. pairs: of `compute_pairs`."""
    _scan_forward(inputs, pairs, initial_state, (o, inputs.qkv, inputs.qkv, final), True)


def recompute_states(inputs: DeltaInputs, initial_state: Tensor | None) -> tuple[Tensor, Tensor]:
    """(the state at each chunk's start [slots, Hv, hk, hv], V' [T, Hv, hv]), by the same scan."""
    states, values = inputs.empty_states()
    _scan_forward(inputs, inputs.inverse, initial_state, (inputs.qkv, states, values, inputs.decay), False)
    return states, values


def _scan_forward(
    inputs: DeltaInputs, pairs: Tensor, initial_state: Tensor | None, results: tuple[Tensor, ...], output: bool
) -> None:
    """Fills results: o and the final state if `output`, otherwise states and V'; any tensor may stand for the others.

    results: o, states, V', final state.
    """
    qkv, stride, beta, norms, decay, inverse, cu_seqlens, shape = inputs
    tile = _tile(inputs)
    launch = _forward_scan(shape, tile, initial_state is not None, output)
    launch(
        inputs.documents * tile.programs(shape),
        qkv, norms, decay, beta, inverse, pairs, cu_seqlens, decay if initial_state is None else initial_state,
        *results, stride, inputs.scale,
    )  # fmt: skip


def backward_scan(
    inputs: DeltaInputs, pairs: Tensor, do: Tensor, dfinal: Tensor | None, dinitial: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(gradient of the state at each chunk's end [slots, Hv, hk, hv], X [T, Hv, hv]); writes dinitial where given."""
    qkv, stride, beta, norms, decay, inverse, cu_seqlens, shape = inputs
    dstates, x = inputs.empty_states()
    tile = _tile(inputs)
    launch = _backward_scan(shape, tile, dfinal is not None, dinitial is not None)
    launch(
        inputs.documents * tile.programs(shape),
        do, decay if dfinal is None else dfinal, qkv, norms, decay, beta, inverse, pairs, cu_seqlens, dstates, x,
        decay if dinitial is None else dinitial, stride, inputs.scale,
    )  # fmt: skip
    return dstates, x


def _tile(inputs: DeltaInputs) -> ScanTile:
    device = inputs.qkv.device
    narrow, wide = DELTA_SCAN_TILES[has_wide_units(device)][inputs.qkv.itemsize]
    return wide if fills_device(inputs.documents * narrow.programs(inputs.shape), device) else narrow


@functools.cache
def _forward_scan(shape: DeltaShape, tile: ScanTile, initial: bool, output: bool) -> Launcher:
    return _forward_scan_kernel.bind(INITIAL=initial, OUTPUT=output, **shape.constants(), **tile.constants(shape))


@functools.cache
def _backward_scan(shape: DeltaShape, tile: ScanTile, final: bool, initial_grad: bool) -> Launcher:
    return _backward_scan_kernel.bind(
        FINAL=final, INITIAL_GRAD=initial_grad, **shape.constants(), **tile.constants(shape)
    )
