"""Outputs and gradients of the gated delta rule that depend on one chunk alone: all chunks in parallel.

Symbols as in gated_delta_rule.py. With S the state at a chunk's start, V' its corrected values, dS the gradient of the
state at its end and X = MᵀdV', all from delta_states.py:
    O = e^G∘(Q S) + P V'
    dP = dO V'ᵀ        dA = -strict_lower(X V'ᵀ)        N = β∘dA∘Γ
    dQ = (e^G∘dO) Sᵀ + (dP∘Γ) K
    dK = (dP∘Γ)ᵀQ + (r∘V') dSᵀ - (β e^G∘X) Sᵀ + (N + Nᵀ) K
    dV = β∘X        y = -Σ (e^G∘X)∘(K S)        dβ = Σ X∘V + y + rowsum(dA∘Γ∘K Kᵀ)
    dG = Σ (e^G∘dO)∘(Q S) + β∘y + rowsum(Z) - colsum(Z) - z,  Z = dP∘P + dA∘A,  z = Σ (r∘V')∘(K dS)
    dG_C += Σ z + e^{G_C} <S, dS>        dg = reverse cumsum of dG
dQ and dK are sums over the value heads that share a key head; then follow the scale and the gradient of the norm.
Products with S and dS are accumulated in dQ and dK directly, and the sums of rows have thin products of their own: three
more products, but a third of the registers. Z is subtracted from itself in the same fp32 values, so that where decay is strong dg is as small as it should be.
"""

import functools

import triton
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.delta_chunks import (
    CHUNK,
    DeltaShape,
    fit_columns,
    load_norms,
    load_rows,
    locate_slot,
    number_of_slots,
    pair_decay,
    tile_mask,
)
from ligermodels.kernels.launch import Launcher, cdiv, kernel

# By element size in bytes: columns of values at a time, and warps. To be measured.
OUTPUT_TILES = {2: (64, 4), 4: (32, 4)}
GRADIENT_TILES = {2: (32, 8), 4: (16, 8)}


@kernel(do_not_specialize=["documents"])
def _output_kernel(
    qkv_ptr, norms_ptr, decay_ptr, cu_seqlens_ptr, states_ptr, values_ptr, o_ptr, stride, documents, scale,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr,
    KEY_TILE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program: COLUMNS columns of the output of one chunk and value head."""
    TILES: tl.constexpr = (VALUE_SIZE + COLUMNS - 1) // COLUMNS
    tile, head = tl.program_id(0) % TILES, tl.program_id(0) // TILES % VALUE_HEADS
    slot = (tl.program_id(0) // (TILES * VALUE_HEADS)).to(tl.int64)
    first, rows = locate_slot(cu_seqlens_ptr, slot, documents, CHUNK)
    if rows <= 0:
        return
    EXACT: tl.constexpr = VALUE_SIZE % COLUMNS == 0
    index, row, column = tl.arange(0, CHUNK), tl.arange(0, KEY_TILE), tile * COLUMNS + tl.arange(0, COLUMNS)
    key_head, here = head // (VALUE_HEADS // KEY_HEADS), first * VALUE_HEADS + head
    q_ptr, norms_ptr = qkv_ptr + first * stride + key_head * KEY_SIZE, norms_ptr + first * (2 * KEY_HEADS) + key_head
    k_ptr = q_ptr + KEY_HEADS * KEY_SIZE
    q = load_rows(q_ptr, rows, index, stride, row, KEY_SIZE, KEY_SIZE == KEY_TILE)
    k = load_rows(k_ptr, rows, index, stride, row, KEY_SIZE, KEY_SIZE == KEY_TILE)
    q_norm, k_norm = load_norms(norms_ptr, rows, KEY_HEADS)
    q_norm *= scale
    decay = tl.load(decay_ptr + here + index * VALUE_HEADS, index < rows, other=0.0)
    states_ptr += (slot * VALUE_HEADS + head) * (KEY_SIZE * VALUE_SIZE)
    state = load_rows(states_ptr, KEY_SIZE, row, VALUE_SIZE, column, VALUE_SIZE, EXACT)
    value = load_rows(
        values_ptr + here * VALUE_SIZE, rows, index, VALUE_HEADS * VALUE_SIZE, column, VALUE_SIZE, EXACT
    )  # fmt: skip
    pairs = pair_decay(decay, False) * q_norm[:, None] * k_norm[None, :]
    pairs = (pairs * tl.dot(q, tl.trans(k), input_precision="ieee")).to(k.dtype)
    o = (tl.exp(decay) * q_norm)[:, None] * tl.dot(q, state, input_precision="ieee")
    o = tl.dot(pairs, value, o, input_precision="ieee").to(o_ptr.dtype.element_ty)
    at = index[:, None] * (VALUE_HEADS * VALUE_SIZE) + column[None, :]
    tl.store(o_ptr + here * VALUE_SIZE + at, o, tile_mask(rows, index, column, VALUE_SIZE, EXACT))


@triton.jit
def _store_norm_gradient(
    x_ptr, dx_ptr, norms_ptr, dx, rows, stride, dx_stride, scale,
    HEADS: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Stores the gradient of x, given that of x̂ = scale x ρ: ρ (dx̂ - x̂ (x̂·dx̂))."""
    row, column = tl.arange(0, CHUNK), tl.arange(0, TILE)
    norm = tl.load(norms_ptr + row * (2 * HEADS), row < rows, other=0.0)[:, None]
    unit = load_rows(x_ptr, rows, row, stride, column, SIZE, SIZE == TILE).to(tl.float32) * norm
    dx = norm * scale * (dx - unit * tl.sum(unit * dx, 1, keep_dims=True))
    offset = row[:, None] * dx_stride + column[None, :]
    tl.store(dx_ptr + offset, dx.to(dx_ptr.dtype.element_ty), tile_mask(rows, row, column, SIZE, SIZE == TILE))


@kernel(do_not_specialize=["documents"])
def _gradient_kernel(
    do_ptr, qkv_ptr, norms_ptr, decay_ptr, beta_ptr, cu_seqlens_ptr, states_ptr, values_ptr, dstates_ptr, x_ptr,
    dqkv_ptr, dg_ptr, dbeta_ptr, stride, documents, scale,
    QKV_GRAD: tl.constexpr, G_GRAD: tl.constexpr, BETA_GRAD: tl.constexpr, KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr, KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, KEY_TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program: one chunk of one key head and of the value heads that share it."""
    GROUP: tl.constexpr = VALUE_HEADS // KEY_HEADS
    QKV_COLUMNS: tl.constexpr = 2 * KEY_HEADS * KEY_SIZE + VALUE_HEADS * VALUE_SIZE
    key_head = tl.program_id(0) % KEY_HEADS
    slot = (tl.program_id(0) // KEY_HEADS).to(tl.int64)
    first, rows = locate_slot(cu_seqlens_ptr, slot, documents, CHUNK)
    if rows <= 0:
        return
    EXACT: tl.constexpr = VALUE_SIZE % COLUMNS == 0
    index, row = tl.arange(0, CHUNK), tl.arange(0, KEY_TILE)
    inside, end = index < rows, tl.minimum(rows, CHUNK) - 1
    qkv_ptr += first * stride
    dqkv_ptr += first * QKV_COLUMNS
    norms_ptr += first * (2 * KEY_HEADS) + key_head
    q_ptr = qkv_ptr + key_head * KEY_SIZE
    k_ptr = q_ptr + KEY_HEADS * KEY_SIZE
    q = load_rows(q_ptr, rows, index, stride, row, KEY_SIZE, KEY_SIZE == KEY_TILE)
    k = load_rows(k_ptr, rows, index, stride, row, KEY_SIZE, KEY_SIZE == KEY_TILE)
    q_norm, k_norm = load_norms(norms_ptr, rows, KEY_HEADS)
    q_norm *= scale
    dq, dk = tl.zeros([CHUNK, KEY_TILE], tl.float32), tl.zeros([CHUNK, KEY_TILE], tl.float32)
    for member in range(GROUP):
        head = key_head * GROUP + member
        here, place = first * VALUE_HEADS + head, index * VALUE_HEADS
        decay = tl.load(decay_ptr + here + place, inside, other=0.0)
        beta = tl.load(beta_ptr + here + place, inside, other=0.0).to(tl.float32)
        last = tl.load(decay_ptr + here + end * VALUE_HEADS)
        at_chunk = (slot * VALUE_HEADS + head) * (KEY_SIZE * VALUE_SIZE)
        v_columns = 2 * KEY_HEADS * KEY_SIZE + head * VALUE_SIZE
        factor = tl.exp(decay)[:, None]
        left = tl.exp(tl.where(inside, last - decay, 0.0))[:, None]
        dpairs, dlower = tl.zeros([CHUNK, CHUNK], tl.float32), tl.zeros([CHUNK, CHUNK], tl.float32)
        dbeta, ddecay = tl.zeros([CHUNK], tl.float32), tl.zeros([CHUNK], tl.float32)
        moved = tl.zeros([CHUNK], tl.float32)  # z
        overlap = 0.0  # <S, dS>
        for tile in range((VALUE_SIZE + COLUMNS - 1) // COLUMNS):
            column = tile * COLUMNS + tl.arange(0, COLUMNS)
            at, token_stride = here * VALUE_SIZE, VALUE_HEADS * VALUE_SIZE
            do = load_rows(do_ptr + at, rows, index, token_stride, column, VALUE_SIZE, EXACT)
            value = load_rows(values_ptr + at, rows, index, token_stride, column, VALUE_SIZE, EXACT)
            x = load_rows(x_ptr + at, rows, index, token_stride, column, VALUE_SIZE, EXACT)
            state = load_rows(states_ptr + at_chunk, KEY_SIZE, row, VALUE_SIZE, column, VALUE_SIZE, EXACT)
            dstate = load_rows(dstates_ptr + at_chunk, KEY_SIZE, row, VALUE_SIZE, column, VALUE_SIZE, EXACT)
            v = load_rows(qkv_ptr + v_columns, rows, index, stride, column, VALUE_SIZE, EXACT)
            do = do.to(k.dtype)
            dpairs = tl.dot(do, tl.trans(value), dpairs, input_precision="ieee")
            dlower = tl.dot(x, tl.trans(value), dlower, input_precision="ieee")
            decayed_do, decayed_x = factor * do.to(tl.float32), -factor * x.to(tl.float32)
            left_value = left * value.to(tl.float32)
            if QKV_GRAD:
                dv = (beta[:, None] * x.to(tl.float32)).to(dqkv_ptr.dtype.element_ty)
                in_values = tile_mask(rows, index, column, VALUE_SIZE, EXACT)
                tl.store(dqkv_ptr + v_columns + index[:, None] * QKV_COLUMNS + column[None, :], dv, in_values)
                dq = tl.dot(decayed_do.to(k.dtype), tl.trans(state), dq, input_precision="ieee")
                dk = tl.dot((beta[:, None] * decayed_x).to(k.dtype), tl.trans(state), dk, input_precision="ieee")
                dk = tl.dot(left_value.to(k.dtype), tl.trans(dstate), dk, input_precision="ieee")
            if G_GRAD or BETA_GRAD:
                from_state = k_norm * tl.sum(decayed_x * tl.dot(k, state, input_precision="ieee"), 1)
                dbeta += tl.sum(x.to(tl.float32) * v.to(tl.float32), 1) + from_state
                ddecay += beta * from_state
            if G_GRAD:
                ddecay += q_norm * tl.sum(decayed_do * tl.dot(q, state, input_precision="ieee"), 1)
                moved += k_norm * tl.sum(left_value * tl.dot(k, dstate, input_precision="ieee"), 1)
                overlap += tl.sum(state.to(tl.float32) * dstate.to(tl.float32))
        dpairs *= pair_decay(decay, False)
        dlower *= -pair_decay(decay, True)
        if G_GRAD or BETA_GRAD:
            products = dlower * k_norm[:, None] * k_norm[None, :] * tl.dot(k, tl.trans(k), input_precision="ieee")
        if BETA_GRAD:
            dbeta += tl.sum(products, 1)
            tl.store(dbeta_ptr + here + place, dbeta.to(dbeta_ptr.dtype.element_ty), inside)
        if G_GRAD:
            z = dpairs * q_norm[:, None] * k_norm[None, :] * tl.dot(q, tl.trans(k), input_precision="ieee")
            z += beta[:, None] * products
            ddecay += tl.sum(z, 1) - tl.sum(z, 0) - moved
            ddecay += tl.where(index == end, tl.sum(moved) + tl.exp(last) * overlap, 0.0)
            later = tl.where(inside, ddecay, 0.0)
            dg = tl.sum(tl.where(index[:, None] <= index[None, :], later[None, :], 0.0), 1)
            tl.store(dg_ptr + here + place, dg.to(dg_ptr.dtype.element_ty), inside)
        if QKV_GRAD:
            dlower *= beta[:, None]  # N
            dq = tl.dot((dpairs * k_norm[None, :]).to(k.dtype), k, dq, input_precision="ieee")
            dk = tl.dot(tl.trans((dpairs * q_norm[:, None]).to(k.dtype)), q, dk, input_precision="ieee")
            dlower = (dlower * k_norm[None, :] + tl.trans(dlower * k_norm[:, None])).to(k.dtype)
            dk = tl.dot(dlower, k, dk, input_precision="ieee")
    if QKV_GRAD:
        _store_norm_gradient(
            q_ptr, dqkv_ptr + key_head * KEY_SIZE, norms_ptr, dq, rows, stride, QKV_COLUMNS, scale,
            KEY_HEADS, KEY_SIZE, KEY_TILE,
        )  # fmt: skip
        _store_norm_gradient(
            k_ptr, dqkv_ptr + (KEY_HEADS + key_head) * KEY_SIZE, norms_ptr + KEY_HEADS, dk, rows, stride, QKV_COLUMNS,
            1.0, KEY_HEADS, KEY_SIZE, KEY_TILE,
        )  # fmt: skip


def compute_outputs(
    qkv: Tensor, stride: int, norms: Tensor, decay: Tensor, cu_seqlens: Tensor, states: Tensor, values: Tensor,
    scale: float, shape: DeltaShape, o: Tensor,
) -> None:  # fmt: skip
    """Writes o, given what the forward scan stored."""
    launch, tiles = _outputs(shape, qkv.itemsize)
    slots = number_of_slots(decay.numel() // shape.value_heads, cu_seqlens)
    launch(
        slots * shape.value_heads * tiles,
        qkv, norms, decay, cu_seqlens, states, values, o, stride, cu_seqlens.shape[0] - 1, scale,
    )  # fmt: skip


def compute_gradients(
    do: Tensor, qkv: Tensor, stride: int, norms: Tensor, decay: Tensor, beta: Tensor, cu_seqlens: Tensor,
    scanned: tuple[Tensor, Tensor, Tensor, Tensor], scale: float, shape: DeltaShape,
    dqkv: Tensor | None, dg: Tensor | None, dbeta: Tensor | None,
) -> None:  # fmt: skip
    """Writes the gradients that are given. scanned: states, V', gradients of states, X, from the two scans."""
    launch = _gradients(shape, qkv.itemsize, dqkv is not None, dg is not None, dbeta is not None)
    launch(
        number_of_slots(decay.numel() // shape.value_heads, cu_seqlens) * shape.key_heads,
        do, qkv, norms, decay, beta, cu_seqlens, *scanned,
        qkv if dqkv is None else dqkv, decay if dg is None else dg, decay if dbeta is None else dbeta,
        stride, cu_seqlens.shape[0] - 1, scale,
    )  # fmt: skip


@functools.cache
def _outputs(shape: DeltaShape, itemsize: int) -> tuple[Launcher, int]:
    """The launcher, and how many programs share a chunk of a head."""
    columns, warps = OUTPUT_TILES[itemsize]
    columns = fit_columns(columns, shape)
    launch = _output_kernel.bind(**shape.constants(), COLUMNS=columns, num_warps=warps)
    return launch, cdiv(shape.value_size, columns)


@functools.cache
def _gradients(shape: DeltaShape, itemsize: int, qkv_grad: bool, g_grad: bool, beta_grad: bool) -> Launcher:
    columns, warps = GRADIENT_TILES[itemsize]
    return _gradient_kernel.bind(
        QKV_GRAD=qkv_grad, G_GRAD=g_grad, BETA_GRAD=beta_grad, **shape.constants(),
        COLUMNS=fit_columns(columns, shape), num_warps=warps,
    )  # fmt: skip
