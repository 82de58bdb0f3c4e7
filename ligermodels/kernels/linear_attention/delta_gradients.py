"""Gradients of the gated delta rule that depend on one chunk alone: all chunks in parallel.

Symbols as in gated_delta_rule.py. With S the state at a chunk's start, V' its corrected values, dS the gradient of the
state at its end and X = MᵀdV', all from delta_states.py:
    dP = dO V'ᵀ        dA = -strict_lower(X V'ᵀ)        N = β∘dA∘Γ
    dQ = (e^G∘dO) Sᵀ + (dP∘Γ) K
    dK = (dP∘Γ)ᵀQ + (r∘V') dSᵀ - (β e^G∘X) Sᵀ + (N + Nᵀ) K
    dV = β∘X        y = -Σ (e^G∘X)∘(K S)        dβ = Σ X∘V + y + rowsum(dA∘Γ∘K Kᵀ)
dg is the sum of what passes over its token, by `log_decay_gradient`: Σ (e^G∘dO)∘(Q S) + β∘y from the chunk's start to
later tokens, Σ (r∘V')∘(K dS) from earlier tokens to its end, dP∘P + dA∘A between two tokens, e^{G_C} <S, dS> over all.
dQ and dK are sums over the value heads that share a key head; then follow the scale and the gradient of the norm.
dQ and dK do not fit in registers beside dP and dA. One kernel computes dβ and dg with thin products of its own, and
leaves dP∘Γ and N to the other, which accumulates dQ and dK.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.launch import Launcher, kernel
from ligermodels.kernels.linear_attention.delta_chunks import DeltaInputs, DeltaShape, load_norms
from ligermodels.kernels.linear_attention.document_chunks import (
    SPAN,
    has_wide_units,
    load_rows,
    locate_slot,
    log_decay_gradient,
    pair_decay,
    tile_columns,
    tile_mask,
)

# By `has_wide_units` and element size in bytes: columns of values at a time, and warps. Those of gradients with wide
# units in half precision are measured; the others are to be.
GATE_GRADIENT_TILES = {True: {2: (64, 4), 4: (16, 4)}, False: {2: (16, 8), 4: (16, 4)}}
QKV_GRADIENT_TILES = {True: {2: (64, 4), 4: (16, 8)}, False: {2: (16, 8), 4: (16, 8)}}


@triton.jit
def _store_norm_gradient(
    x_ptr, dx_ptr, norms_ptr, dx, rows, stride, dx_stride, scale,
    HEADS: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Stores the gradient of x, given that of x̂ = scale x ρ: ρ (dx̂ - x̂ (x̂·dx̂))."""
    row, column = tl.arange(0, SPAN), tl.arange(0, TILE)
    norm = tl.load(norms_ptr + row * (2 * HEADS), row < rows, other=0.0)[:, None]
    unit = load_rows(x_ptr, rows, row, stride, column, SIZE, SIZE == TILE).to(tl.float32) * norm
    dx = norm * scale * (dx - unit * tl.sum(unit * dx, 1, keep_dims=True))
    offset = row[:, None] * dx_stride + column[None, :]
    tl.store(dx_ptr + offset, dx.to(dx_ptr.dtype.element_ty), tile_mask(rows, row, column, SIZE, SIZE == TILE))


@kernel(do_not_specialize=["documents"])
def _gate_gradient_kernel(
    do_ptr, qkv_ptr, norms_ptr, decay_ptr, beta_ptr, pairs_ptr, cu_seqlens_ptr, states_ptr, values_ptr, dstates_ptr,
    x_ptr, dpairs_ptr, dlower_ptr, dg_ptr, dbeta_ptr, stride, documents, scale,
    QKV_GRAD: tl.constexpr, G_GRAD: tl.constexpr, BETA_GRAD: tl.constexpr, KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr, KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, KEY_TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program: dg and dbeta of one chunk and value head, and dP∘Γ and N, of which dq and dk are made."""
    head = tl.program_id(0) % VALUE_HEADS
    slot = (tl.program_id(0) // VALUE_HEADS).to(tl.int64)
    first, rows = locate_slot(cu_seqlens_ptr, slot, documents, SPAN)
    if rows <= 0:
        return
    EXACT: tl.constexpr = VALUE_SIZE % COLUMNS == 0
    TOKEN_STRIDE: tl.constexpr = VALUE_HEADS * VALUE_SIZE
    index, row = tl.arange(0, SPAN), tl.arange(0, KEY_TILE)
    inside, end = index < rows, tl.minimum(rows, SPAN) - 1
    key_head, here = head // (VALUE_HEADS // KEY_HEADS), first * VALUE_HEADS + head
    q_ptr = qkv_ptr + first * stride + key_head * KEY_SIZE
    v_ptr = qkv_ptr + first * stride + 2 * KEY_HEADS * KEY_SIZE + head * VALUE_SIZE
    q = load_rows(q_ptr, rows, index, stride, row, KEY_SIZE, KEY_SIZE == KEY_TILE)
    k = load_rows(q_ptr + KEY_HEADS * KEY_SIZE, rows, index, stride, row, KEY_SIZE, KEY_SIZE == KEY_TILE)
    q_norm, k_norm = load_norms(norms_ptr + first * (2 * KEY_HEADS) + key_head, rows, KEY_HEADS)
    decay = tl.load(decay_ptr + here + index * VALUE_HEADS, inside, other=0.0)
    beta = tl.load(beta_ptr + here + index * VALUE_HEADS, inside, other=0.0).to(tl.float32)
    last = tl.load(decay_ptr + here + end * VALUE_HEADS)
    at_chunk = (slot * VALUE_HEADS + head) * (KEY_SIZE * VALUE_SIZE)
    dpairs, dlower = tl.zeros([SPAN, SPAN], tl.float32), tl.zeros([SPAN, SPAN], tl.float32)
    dbeta, from_state = tl.zeros([SPAN], tl.float32), tl.zeros([SPAN], tl.float32)
    from_output, moved = tl.zeros([SPAN], tl.float32), tl.zeros([SPAN], tl.float32)
    overlap = tl.zeros([KEY_TILE], tl.float32)  # <S, dS>, by rows
    for tile in range((VALUE_SIZE + COLUMNS - 1) // COLUMNS):
        column = tile * COLUMNS + tl.arange(0, COLUMNS)
        do = load_rows(do_ptr + here * VALUE_SIZE, rows, index, TOKEN_STRIDE, column, VALUE_SIZE, EXACT).to(k.dtype)
        value = load_rows(values_ptr + here * VALUE_SIZE, rows, index, TOKEN_STRIDE, column, VALUE_SIZE, EXACT)
        x = load_rows(x_ptr + here * VALUE_SIZE, rows, index, TOKEN_STRIDE, column, VALUE_SIZE, EXACT)
        dpairs = tl.dot(do, tl.trans(value), dpairs, input_precision="ieee")
        dlower = tl.dot(x, tl.trans(value), dlower, input_precision="ieee")
        if G_GRAD or BETA_GRAD:
            state = load_rows(states_ptr + at_chunk, KEY_SIZE, row, VALUE_SIZE, column, VALUE_SIZE, EXACT)
            v = load_rows(v_ptr, rows, index, stride, column, VALUE_SIZE, EXACT)
            from_state += tl.sum(x.to(tl.float32) * tl.dot(k, state, input_precision="ieee"), 1)
            dbeta += tl.sum(x.to(tl.float32) * v.to(tl.float32), 1)
        if G_GRAD:
            dstate = load_rows(dstates_ptr + at_chunk, KEY_SIZE, row, VALUE_SIZE, column, VALUE_SIZE, EXACT)
            from_output += tl.sum(do.to(tl.float32) * tl.dot(q, state, input_precision="ieee"), 1)
            moved += tl.sum(value.to(tl.float32) * tl.dot(k, dstate, input_precision="ieee"), 1)
            overlap += tl.sum(state.to(tl.float32) * dstate.to(tl.float32), 1)
    if G_GRAD:
        pairs = load_rows(pairs_ptr + here * SPAN, rows, index, VALUE_HEADS * SPAN, index, SPAN, True)
        overlaps = dpairs * pairs.to(tl.float32)
    at = index[:, None] * (VALUE_HEADS * SPAN) + index[None, :]
    if QKV_GRAD:
        dpairs *= pair_decay(decay[:, None] - decay[None, :], rows, False)
        tl.store(dpairs_ptr + here * SPAN + at, dpairs.to(dpairs_ptr.dtype.element_ty), inside[:, None])
    dlower *= -pair_decay(decay[:, None] - decay[None, :], rows, True)
    if QKV_GRAD:
        lower = (beta[:, None] * dlower).to(dlower_ptr.dtype.element_ty)
        tl.store(dlower_ptr + here * SPAN + at, lower, inside[:, None])
    if G_GRAD or BETA_GRAD:
        dlower *= tl.dot(k, tl.trans(k), input_precision="ieee") * k_norm[:, None] * k_norm[None, :]
        from_state *= -tl.exp(decay) * k_norm
        place = here + index * VALUE_HEADS
    if BETA_GRAD:
        dbeta += from_state + tl.sum(dlower, 1)
        tl.store(dbeta_ptr + place, dbeta.to(dbeta_ptr.dtype.element_ty), inside)
    if G_GRAD:
        overlaps += beta[:, None] * dlower
        to_start = tl.exp(decay) * q_norm * scale * from_output + beta * from_state
        to_end = tl.exp(tl.where(inside, last - decay, 0.0)) * k_norm * moved
        dg = log_decay_gradient(to_start, to_end, overlaps, tl.exp(last) * tl.sum(overlap, 0))
        tl.store(dg_ptr + place, dg.to(dg_ptr.dtype.element_ty), inside)


@kernel(do_not_specialize=["documents"])
def _qkv_gradient_kernel(
    do_ptr, qkv_ptr, norms_ptr, decay_ptr, beta_ptr, cu_seqlens_ptr, states_ptr, values_ptr, dstates_ptr, x_ptr,
    dpairs_ptr, dlower_ptr, dqkv_ptr, stride, documents, scale,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr,
    KEY_TILE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program: dq and dk of one chunk and key head, and dv of the value heads that share it."""
    GROUP: tl.constexpr = VALUE_HEADS // KEY_HEADS
    QKV_COLUMNS: tl.constexpr = 2 * KEY_HEADS * KEY_SIZE + VALUE_HEADS * VALUE_SIZE
    key_head = tl.program_id(0) % KEY_HEADS
    slot = (tl.program_id(0) // KEY_HEADS).to(tl.int64)
    first, rows = locate_slot(cu_seqlens_ptr, slot, documents, SPAN)
    if rows <= 0:
        return
    EXACT: tl.constexpr = VALUE_SIZE % COLUMNS == 0
    TOKEN_STRIDE: tl.constexpr = VALUE_HEADS * VALUE_SIZE
    index, row = tl.arange(0, SPAN), tl.arange(0, KEY_TILE)
    inside, end = index < rows, tl.minimum(rows, SPAN) - 1
    q_ptr = qkv_ptr + first * stride + key_head * KEY_SIZE
    k_ptr = q_ptr + KEY_HEADS * KEY_SIZE
    dqkv_ptr += first * QKV_COLUMNS
    norms_ptr += first * (2 * KEY_HEADS) + key_head
    q = load_rows(q_ptr, rows, index, stride, row, KEY_SIZE, KEY_SIZE == KEY_TILE)
    k = load_rows(k_ptr, rows, index, stride, row, KEY_SIZE, KEY_SIZE == KEY_TILE)
    q_norm, k_norm = load_norms(norms_ptr, rows, KEY_HEADS)
    dq, dk = tl.zeros([SPAN, KEY_TILE], tl.float32), tl.zeros([SPAN, KEY_TILE], tl.float32)
    for member in range(GROUP):
        head = key_head * GROUP + member
        here = first * VALUE_HEADS + head
        decay = tl.load(decay_ptr + here + index * VALUE_HEADS, inside, other=0.0)
        beta = tl.load(beta_ptr + here + index * VALUE_HEADS, inside, other=0.0).to(tl.float32)
        last = tl.load(decay_ptr + here + end * VALUE_HEADS)
        at_chunk = (slot * VALUE_HEADS + head) * (KEY_SIZE * VALUE_SIZE)
        factor = tl.exp(decay)[:, None]
        left = tl.exp(tl.where(inside, last - decay, 0.0))[:, None]
        for tile in range((VALUE_SIZE + COLUMNS - 1) // COLUMNS):
            column = tile * COLUMNS + tl.arange(0, COLUMNS)
            do = load_rows(do_ptr + here * VALUE_SIZE, rows, index, TOKEN_STRIDE, column, VALUE_SIZE, EXACT)
            value = load_rows(values_ptr + here * VALUE_SIZE, rows, index, TOKEN_STRIDE, column, VALUE_SIZE, EXACT)
            x = load_rows(x_ptr + here * VALUE_SIZE, rows, index, TOKEN_STRIDE, column, VALUE_SIZE, EXACT)
            state = load_rows(states_ptr + at_chunk, KEY_SIZE, row, VALUE_SIZE, column, VALUE_SIZE, EXACT)
            dstate = load_rows(dstates_ptr + at_chunk, KEY_SIZE, row, VALUE_SIZE, column, VALUE_SIZE, EXACT)
            dv = beta[:, None] * x.to(tl.float32)
            dv_ptr = dqkv_ptr + 2 * KEY_HEADS * KEY_SIZE + head * VALUE_SIZE
            in_values = tile_mask(rows, index, column, VALUE_SIZE, EXACT)
            tl.store(
                dv_ptr + index[:, None] * QKV_COLUMNS + column[None, :], dv.to(dqkv_ptr.dtype.element_ty), in_values
            )
            decayed_do = (factor * do.to(tl.float32)).to(k.dtype)
            dq = tl.dot(decayed_do, tl.trans(state), dq, input_precision="ieee")
            dk = tl.dot((-factor * dv).to(k.dtype), tl.trans(state), dk, input_precision="ieee")
            left_value = (left * value.to(tl.float32)).to(k.dtype)
            dk = tl.dot(left_value, tl.trans(dstate), dk, input_precision="ieee")
        at = index[:, None] * (VALUE_HEADS * SPAN) + index[None, :]
        dpairs = tl.load(dpairs_ptr + here * SPAN + at, inside[:, None], other=0.0).to(tl.float32)
        dq = tl.dot((dpairs * k_norm[None, :]).to(k.dtype), k, dq, input_precision="ieee")
        dpairs = (dpairs * (q_norm * scale)[:, None]).to(k.dtype)
        dk = tl.dot(tl.trans(dpairs), q, dk, input_precision="ieee")
        dlower = tl.load(dlower_ptr + here * SPAN + at, inside[:, None], other=0.0).to(tl.float32)
        dk = tl.dot((dlower * k_norm[None, :]).to(k.dtype), k, dk, input_precision="ieee")
        dk = tl.dot(tl.trans((dlower * k_norm[:, None]).to(k.dtype)), k, dk, input_precision="ieee")
    _store_norm_gradient(
        q_ptr, dqkv_ptr + key_head * KEY_SIZE, norms_ptr, dq, rows, stride, QKV_COLUMNS, scale,
        KEY_HEADS, KEY_SIZE, KEY_TILE,
    )  # fmt: skip
    _store_norm_gradient(
        k_ptr, dqkv_ptr + (KEY_HEADS + key_head) * KEY_SIZE, norms_ptr + KEY_HEADS, dk, rows, stride, QKV_COLUMNS,
        1.0, KEY_HEADS, KEY_SIZE, KEY_TILE,
    )  # fmt: skip


def compute_gradients(
    inputs: DeltaInputs, pairs: Tensor, do: Tensor, scanned: tuple[Tensor, Tensor, Tensor, Tensor],
    dqkv: Tensor | None, dg: Tensor | None, dbeta: Tensor | None,
) -> None:  # fmt: skip
    """Writes the gradients that are given. scanned: states, V', gradients of states, X, from the two scans."""
    qkv, stride, beta, norms, decay, _, cu_seqlens, shape = inputs
    gates, products = _gradients(
        shape, qkv.itemsize, has_wide_units(qkv.device), dqkv is not None, dg is not None, dbeta is not None
    )
    slots, documents, scale = inputs.slots, inputs.documents, inputs.scale
    dpairs = dlower = pairs
    if dqkv is not None:
        dpairs, dlower = torch.empty_like(pairs), torch.empty_like(pairs)
    gates(
        slots * shape.value_heads,
        do, qkv, norms, decay, beta, pairs, cu_seqlens, *scanned, dpairs, dlower,
        decay if dg is None else dg, decay if dbeta is None else dbeta, stride, documents, scale,
    )  # fmt: skip
    if dqkv is not None:
        products(
            slots * shape.key_heads,
            do, qkv, norms, decay, beta, cu_seqlens, *scanned, dpairs, dlower, dqkv, stride, documents, scale,
        )  # fmt: skip


@functools.cache
def _gradients(
    shape: DeltaShape, itemsize: int, wide: bool, qkv_grad: bool, g_grad: bool, beta_grad: bool
) -> tuple[Launcher, Launcher]:
    columns, warps = GATE_GRADIENT_TILES[wide][itemsize]
    gates = _gate_gradient_kernel.bind(
        QKV_GRAD=qkv_grad, G_GRAD=g_grad, BETA_GRAD=beta_grad, **shape.constants(),
        COLUMNS=tile_columns(columns, shape.value_size), num_warps=warps, num_stages=1,
    )  # fmt: skip
    columns, warps = QKV_GRADIENT_TILES[wide][itemsize]
    products = _qkv_gradient_kernel.bind(
        **shape.constants(), COLUMNS=tile_columns(columns, shape.value_size), num_warps=warps, num_stages=1
    )
    return gates, products
