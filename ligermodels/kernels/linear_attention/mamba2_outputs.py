"""Outputs and gradients of the Mamba-2 scan that depend on one chunk alone: all chunks in parallel.

Symbols as in mamba2_scan.py. With S the state at a chunk's start and dS the gradient of the state at its end, both from
mamba2_chunks.py, V = δ∘X and P = (C Bᵀ)∘Γ:
    Y = e^G∘(C S) + P V + D X
    dP = dY Vᵀ        W = Σ_h dP∘Γ, over the heads of a group
    dC = Σ_h (e^G∘dY) Sᵀ + W B        dB = Σ_h (r∘V) dSᵀ + WᵀC
    dV = PᵀdY + r∘(B dS)        dX = δ∘dV + D dY        dD = Σ dY∘X
    dg_t = e^{G_end} <S, dS> + Σ_{i>=t} e^{G_i} dY_i·(C S)_i + Σ_{i<t} r_i V_i·(B dS)_i + Σ_{i>=t>j} dP_ij P_ij
    dδ = Σ X∘dV + a dg        da = Σ δ dg
One kernel has a program for each head; another one for each group, because dB and dC are sums over its heads, and
computes dP again.
"""

import functools

import torch
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.launch import Launcher, cdiv, kernel
from ligermodels.kernels.linear_attention.document_chunks import (
    SPAN,
    has_wide_units,
    load_rows,
    locate_slot,
    log_decay_gradient,
    tile_columns,
    tile_mask,
)
from ligermodels.kernels.linear_attention.mamba2_chunks import (
    ScanInputs,
    ScanShape,
    chunk_output,
    chunk_pairs,
    load_gates,
)
from ligermodels.kernels.norms.partial_sums import sum_partials

# By `has_wide_units` and element size in bytes: columns of X at a time, and warps. To be measured.
SCAN_OUTPUT_TILES = {True: {2: (64, 4), 4: (32, 4)}, False: {2: (64, 8), 4: (32, 4)}}
HEAD_GRADIENT_TILES = {True: {2: (32, 8), 4: (16, 4)}, False: {2: (32, 8), 4: (16, 4)}}
GROUP_GRADIENT_TILES = {True: {2: (64, 8), 4: (16, 8)}, False: {2: (32, 8), 4: (16, 8)}}


@kernel(do_not_specialize=["documents"])
def _output_kernel(
    xbc_ptr, delta_ptr, a_ptr, d_ptr, cu_seqlens_ptr, states_ptr, y_ptr, stride, documents,
    HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, GROUPS: tl.constexpr, STATE_SIZE: tl.constexpr,
    STATE_TILE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program: COLUMNS columns of the output of one chunk and head."""
    TILES: tl.constexpr = (HEAD_SIZE + COLUMNS - 1) // COLUMNS
    EXACT: tl.constexpr = HEAD_SIZE % COLUMNS == 0
    tile, head = tl.program_id(0) % TILES, tl.program_id(0) // TILES % HEADS
    slot = (tl.program_id(0) // (TILES * HEADS)).to(tl.int64)
    first, rows = locate_slot(cu_seqlens_ptr, slot, documents, SPAN)
    if rows <= 0:
        return
    index, row, column = tl.arange(0, SPAN), tl.arange(0, STATE_TILE), tile * COLUMNS + tl.arange(0, COLUMNS)
    xbc_ptr += first * stride
    b_ptr = xbc_ptr + HEADS * HEAD_SIZE + head // (HEADS // GROUPS) * STATE_SIZE
    b = load_rows(b_ptr, rows, index, stride, row, STATE_SIZE, STATE_SIZE == STATE_TILE)
    c = load_rows(b_ptr + GROUPS * STATE_SIZE, rows, index, stride, row, STATE_SIZE, STATE_SIZE == STATE_TILE)
    x = load_rows(xbc_ptr + head * HEAD_SIZE, rows, index, stride, column, HEAD_SIZE, EXACT).to(tl.float32)
    delta, decay, low, _, _ = load_gates(delta_ptr, a_ptr, first, rows, head, HEADS)
    states_ptr += (slot * HEADS + head) * (STATE_SIZE * HEAD_SIZE)
    state = load_rows(states_ptr, STATE_SIZE, row, HEAD_SIZE, column, HEAD_SIZE, EXACT)
    y = chunk_output(b, c, x, delta, decay, low, tl.load(d_ptr + head).to(tl.float32), state, rows)
    at = (first * HEADS + head) * HEAD_SIZE + index[:, None] * (HEADS * HEAD_SIZE) + column[None, :]
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), tile_mask(rows, index, column, HEAD_SIZE, EXACT))


@kernel(do_not_specialize=["documents"])
def _head_gradient_kernel(
    dy_ptr, xbc_ptr, delta_ptr, a_ptr, d_ptr, cu_seqlens_ptr, states_ptr, dstates_ptr, dxbc_ptr, ddelta_ptr,
    da_ptr, dd_ptr, stride, documents,
    X_GRAD: tl.constexpr, DELTA_GRAD: tl.constexpr, A_GRAD: tl.constexpr, D_GRAD: tl.constexpr, HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr, GROUPS: tl.constexpr, STATE_SIZE: tl.constexpr, STATE_TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program: dx, dδ, da and dD of one chunk and head.

    da_ptr, dd_ptr: partial sums [slots, H], zero for idle slots.
    """
    EXACT: tl.constexpr = HEAD_SIZE % COLUMNS == 0
    GATES: tl.constexpr = DELTA_GRAD or A_GRAD
    VALUES: tl.constexpr = X_GRAD or DELTA_GRAD
    XBC_COLUMNS: tl.constexpr = HEADS * HEAD_SIZE + 2 * GROUPS * STATE_SIZE
    head = tl.program_id(0) % HEADS
    slot = (tl.program_id(0) // HEADS).to(tl.int64)
    first, rows = locate_slot(cu_seqlens_ptr, slot, documents, SPAN)
    rows = tl.maximum(rows, 0)
    index, row = tl.arange(0, SPAN), tl.arange(0, STATE_TILE)
    inside = index < rows
    xbc_ptr += first * stride
    at_chunk = (slot * HEADS + head) * (STATE_SIZE * HEAD_SIZE)
    if VALUES or GATES:
        delta, decay, low, left, last = load_gates(delta_ptr, a_ptr, first, rows, head, HEADS)
        pair, left = chunk_pairs(decay, low, rows), tl.exp(left)
        b_ptr = xbc_ptr + HEADS * HEAD_SIZE + head // (HEADS // GROUPS) * STATE_SIZE
        b = load_rows(b_ptr, rows, index, stride, row, STATE_SIZE, STATE_SIZE == STATE_TILE)
        c = load_rows(b_ptr + GROUPS * STATE_SIZE, rows, index, stride, row, STATE_SIZE, STATE_SIZE == STATE_TILE)
        pair *= tl.dot(c, tl.trans(b), input_precision="ieee")  # P
    dpairs, dskip = tl.zeros([SPAN, SPAN], tl.float32), tl.zeros([SPAN], tl.float32)
    from_value, from_output, moved = dskip, dskip, dskip  # Σ X∘dV, Σ dY∘(C S), Σ X∘(B dS)
    overlap = tl.zeros([STATE_TILE], tl.float32)  # <S, dS> by rows
    for tile in range((HEAD_SIZE + COLUMNS - 1) // COLUMNS):
        column = tile * COLUMNS + tl.arange(0, COLUMNS)
        dy_ptr_here = dy_ptr + (first * HEADS + head) * HEAD_SIZE
        dy = load_rows(dy_ptr_here, rows, index, HEADS * HEAD_SIZE, column, HEAD_SIZE, EXACT).to(
            xbc_ptr.dtype.element_ty
        )
        x = load_rows(xbc_ptr + head * HEAD_SIZE, rows, index, stride, column, HEAD_SIZE, EXACT)
        if D_GRAD:
            dskip += tl.sum(dy.to(tl.float32) * x.to(tl.float32), 1)
        if VALUES or GATES:
            dstate = load_rows(dstates_ptr + at_chunk, STATE_SIZE, row, HEAD_SIZE, column, HEAD_SIZE, EXACT)
            dvalue = tl.dot(b, dstate, input_precision="ieee")
        if GATES:
            moved += tl.sum(x.to(tl.float32) * dvalue, 1)
            state = load_rows(states_ptr + at_chunk, STATE_SIZE, row, HEAD_SIZE, column, HEAD_SIZE, EXACT)
            overlap += tl.sum(state.to(tl.float32) * dstate.to(tl.float32), 1)
            from_output += tl.sum(dy.to(tl.float32) * tl.dot(c, state, input_precision="ieee"), 1)
            value = (delta[:, None] * x.to(tl.float32)).to(x.dtype)
            dpairs = tl.dot(dy, tl.trans(value), dpairs, input_precision="ieee")
        if VALUES:
            dvalue = tl.dot(tl.trans(pair.to(x.dtype)), dy, left[:, None] * dvalue, input_precision="ieee")
            from_value += tl.sum(x.to(tl.float32) * dvalue, 1)
        if X_GRAD:
            dx = delta[:, None] * dvalue + tl.load(d_ptr + head).to(tl.float32) * dy.to(tl.float32)
            at = first * XBC_COLUMNS + head * HEAD_SIZE + index[:, None] * XBC_COLUMNS + column[None, :]
            tl.store(dxbc_ptr + at, dx.to(x.dtype), tile_mask(rows, index, column, HEAD_SIZE, EXACT))
    if D_GRAD:
        tl.store(dd_ptr + slot * HEADS + head, tl.sum(dskip, 0))
    if GATES:
        to_start, to_end = tl.exp(decay) * from_output, left * delta * moved
        whole = tl.exp(last) * tl.sum(overlap, 0)
        dlog_decay = tl.where(inside, log_decay_gradient(to_start, to_end, dpairs * pair, whole), 0.0)
    if DELTA_GRAD:
        ddelta = from_value + tl.load(a_ptr + head).to(tl.float32) * dlog_decay
        at = (first * HEADS + head) + index * HEADS
        tl.store(ddelta_ptr + at, ddelta.to(ddelta_ptr.dtype.element_ty), inside)
    if A_GRAD:
        tl.store(da_ptr + slot * HEADS + head, tl.sum(delta * dlog_decay, 0))


@kernel(do_not_specialize=["documents"])
def _group_gradient_kernel(
    dy_ptr, xbc_ptr, delta_ptr, a_ptr, cu_seqlens_ptr, states_ptr, dstates_ptr, dxbc_ptr, stride, documents,
    HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, GROUPS: tl.constexpr, STATE_SIZE: tl.constexpr,
    STATE_TILE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program: dB and dC of one chunk and group, as sums over its heads in registers."""
    EXACT: tl.constexpr = HEAD_SIZE % COLUMNS == 0
    XBC_COLUMNS: tl.constexpr = HEADS * HEAD_SIZE + 2 * GROUPS * STATE_SIZE
    group = tl.program_id(0) % GROUPS
    slot = (tl.program_id(0) // GROUPS).to(tl.int64)
    first, rows = locate_slot(cu_seqlens_ptr, slot, documents, SPAN)
    if rows <= 0:
        return
    index, row = tl.arange(0, SPAN), tl.arange(0, STATE_TILE)
    xbc_ptr += first * stride
    db, dc = tl.zeros([SPAN, STATE_TILE], tl.float32), tl.zeros([SPAN, STATE_TILE], tl.float32)
    dproducts = tl.zeros([SPAN, SPAN], tl.float32)
    for member in range(HEADS // GROUPS):
        head = group * (HEADS // GROUPS) + member
        delta, decay, low, left, _ = load_gates(delta_ptr, a_ptr, first, rows, head, HEADS)
        at_chunk = (slot * HEADS + head) * (STATE_SIZE * HEAD_SIZE)
        dpairs = tl.zeros([SPAN, SPAN], tl.float32)
        for tile in range((HEAD_SIZE + COLUMNS - 1) // COLUMNS):
            column = tile * COLUMNS + tl.arange(0, COLUMNS)
            dy_ptr_here = dy_ptr + (first * HEADS + head) * HEAD_SIZE
            dy = load_rows(dy_ptr_here, rows, index, HEADS * HEAD_SIZE, column, HEAD_SIZE, EXACT).to(
                xbc_ptr.dtype.element_ty
            )
            x = load_rows(xbc_ptr + head * HEAD_SIZE, rows, index, stride, column, HEAD_SIZE, EXACT)
            value = delta[:, None] * x.to(tl.float32)
            dpairs = tl.dot(dy, tl.trans(value.to(x.dtype)), dpairs, input_precision="ieee")
            state = load_rows(states_ptr + at_chunk, STATE_SIZE, row, HEAD_SIZE, column, HEAD_SIZE, EXACT)
            decayed = (tl.exp(decay)[:, None] * dy.to(tl.float32)).to(x.dtype)
            dc = tl.dot(decayed, tl.trans(state), dc, input_precision="ieee")
            dstate = load_rows(dstates_ptr + at_chunk, STATE_SIZE, row, HEAD_SIZE, column, HEAD_SIZE, EXACT)
            left_value = (tl.exp(left)[:, None] * value).to(x.dtype)
            db = tl.dot(left_value, tl.trans(dstate), db, input_precision="ieee")
        dproducts += dpairs * chunk_pairs(decay, low, rows)
    b_ptr = xbc_ptr + HEADS * HEAD_SIZE + group * STATE_SIZE
    b = load_rows(b_ptr, rows, index, stride, row, STATE_SIZE, STATE_SIZE == STATE_TILE)
    dc = tl.dot(dproducts.to(b.dtype), b, dc, input_precision="ieee")
    c = load_rows(b_ptr + GROUPS * STATE_SIZE, rows, index, stride, row, STATE_SIZE, STATE_SIZE == STATE_TILE)
    db = tl.dot(tl.trans(dproducts.to(b.dtype)), c, db, input_precision="ieee")
    at = first * XBC_COLUMNS + HEADS * HEAD_SIZE + group * STATE_SIZE + index[:, None] * XBC_COLUMNS + row[None, :]
    in_rows = tile_mask(rows, index, row, STATE_SIZE, STATE_SIZE == STATE_TILE)
    tl.store(dxbc_ptr + at, db.to(b.dtype), in_rows)
    tl.store(dxbc_ptr + at + GROUPS * STATE_SIZE, dc.to(b.dtype), in_rows)


def compute_scan_outputs(inputs: ScanInputs, states: Tensor, y: Tensor) -> None:
    """Writes y, given the states of the forward scan."""
    xbc, stride, delta, a, d, cu_seqlens, shape = inputs
    launch, tiles = _outputs(shape, xbc.itemsize, has_wide_units(xbc.device))
    programs = inputs.slots * shape.heads * tiles
    launch(programs, xbc, delta, a, d, cu_seqlens, states, y, stride, inputs.documents)


def compute_scan_gradients(
    inputs: ScanInputs, dy: Tensor, scanned: tuple[Tensor, Tensor],
    dxbc: Tensor | None, ddelta: Tensor | None, da: Tensor | None, dd: Tensor | None,
) -> None:  # fmt: skip
    """Writes the gradients that are given. scanned: states and their gradients, from the two scans."""
    xbc, stride, delta, a, d, cu_seqlens, shape = inputs
    heads, groups = _gradients(
        shape, xbc.itemsize, has_wide_units(xbc.device), *(x is not None for x in (dxbc, ddelta, da, dd))
    )
    slots, documents = inputs.slots, inputs.documents
    partials = [delta if x is None else x.new_empty(slots, shape.heads, dtype=torch.float32) for x in (da, dd)]
    heads(
        slots * shape.heads,
        dy, xbc, delta, a, d, cu_seqlens, *scanned, xbc if dxbc is None else dxbc, delta if ddelta is None else ddelta,
        *partials, stride, documents,
    )  # fmt: skip
    if dxbc is not None:
        groups(slots * shape.groups, dy, xbc, delta, a, cu_seqlens, *scanned, dxbc, stride, documents)
    for partial, gradient in zip(partials, (da, dd), strict=True):
        if gradient is not None:
            sum_partials(partial, gradient)


@functools.cache
def _outputs(shape: ScanShape, itemsize: int, wide: bool) -> tuple[Launcher, int]:
    """The launcher, and how many programs share a chunk of a head."""
    columns, warps = SCAN_OUTPUT_TILES[wide][itemsize]
    columns = tile_columns(columns, shape.head_size)
    return _output_kernel.bind(**shape.constants(), COLUMNS=columns, num_warps=warps), cdiv(shape.head_size, columns)


@functools.cache
def _gradients(
    shape: ScanShape, itemsize: int, wide: bool, x_grad: bool, delta_grad: bool, a_grad: bool, d_grad: bool
) -> tuple[Launcher, Launcher]:
    columns, warps = HEAD_GRADIENT_TILES[wide][itemsize]
    heads = _head_gradient_kernel.bind(
        X_GRAD=x_grad, DELTA_GRAD=delta_grad, A_GRAD=a_grad, D_GRAD=d_grad, **shape.constants(),
        COLUMNS=tile_columns(columns, shape.head_size), num_warps=warps, num_stages=1,
    )  # fmt: skip
    columns, warps = GROUP_GRADIENT_TILES[wide][itemsize]
    columns = tile_columns(columns, shape.head_size)
    groups = _group_gradient_kernel.bind(**shape.constants(), COLUMNS=columns, num_warps=warps, num_stages=1)
    return heads, groups
