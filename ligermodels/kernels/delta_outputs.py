"""Outputs and gradients of the gated delta rule that depend on one chunk alone: all chunks in parallel.

Symbols as in gated_delta_rule.py. With S the state at a chunk's start, V' its corrected values, dS the gradient of the
state at its end and X = MᵀdV', all from delta_states.py:
    O = e^G∘(Q S) + P V'
    dP = dO V'ᵀ        dA = -strict_lower(X V'ᵀ)        N = β∘dA∘Γ        Y = -X Sᵀ        W = V' dSᵀ
    dQ = e^G∘(dO Sᵀ) + (dP∘Γ) K
    dK = (dP∘Γ)ᵀQ + r∘W + β e^G∘Y + (N + Nᵀ) K
    dV = β∘X        dβ = Σ X∘V + e^G Σ Y∘K + rowsum(dA∘Γ∘K Kᵀ)
    dG = Σ (e^G∘Q)∘(dO Sᵀ) + Σ (β e^G∘K)∘Y + rowsum(Z) - colsum(Z) - z,  Z = dP∘P + dA∘A,  z = Σ (r∘K)∘W
    dG_C += Σ z + e^{G_C} <S, dS>        dg = reverse cumsum of dG
dQ and dK are sums over the value heads that share a key head; then follow the scale and the gradient of the norm.
Z is subtracted from itself in the same fp32 values, so that where decay is strong dg is as small as it should be.
"""

import functools

import triton
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.delta_chunks import (
    CHUNK,
    DeltaShape,
    fit_columns,
    load_rows,
    load_unit_rows,
    locate_slot,
    number_of_slots,
    pair_decay,
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
    first, _, end, _ = locate_slot(cu_seqlens_ptr, slot, documents, CHUNK)
    if first >= end:
        return
    token, row, column = first + tl.arange(0, CHUNK), tl.arange(0, KEY_TILE), tile * COLUMNS + tl.arange(0, COLUMNS)
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    q_ptr, norms_ptr = qkv_ptr + key_head * KEY_SIZE, norms_ptr + key_head
    q = load_unit_rows(q_ptr, norms_ptr, token, stride, 2 * KEY_HEADS, row, KEY_SIZE, end, scale)
    k = load_unit_rows(
        q_ptr + KEY_HEADS * KEY_SIZE, norms_ptr + KEY_HEADS, token, stride, 2 * KEY_HEADS, row, KEY_SIZE, end, 1.0
    )
    decay = tl.load(decay_ptr + token * VALUE_HEADS + head, token < end, other=0.0)
    state = load_rows(
        states_ptr + (slot * VALUE_HEADS + head) * KEY_SIZE * VALUE_SIZE, row, VALUE_SIZE, column, VALUE_SIZE, KEY_SIZE
    )
    value = load_rows(values_ptr + head * VALUE_SIZE, token, VALUE_HEADS * VALUE_SIZE, column, VALUE_SIZE, end)
    pairs = (tl.dot(q, tl.trans(k), input_precision="ieee") * pair_decay(decay, False)).to(k.dtype)
    o = tl.exp(decay)[:, None] * tl.dot(q, state, input_precision="ieee")
    o = tl.dot(pairs, value, o, input_precision="ieee").to(o_ptr.dtype.element_ty)
    at = (token * VALUE_HEADS + head)[:, None] * VALUE_SIZE + column[None, :]
    tl.store(o_ptr + at, o, (token < end)[:, None] & (column < VALUE_SIZE)[None, :])


@triton.jit
def _store_norm_gradient(x_ptr, dx_ptr, norms_ptr, dx, token, stride, columns, norms_stride, column, size, end, scale):
    """Stores the gradient of x, given that of x̂ = scale x ρ: ρ (dx̂ - x̂ (x̂·dx̂))."""
    norm = tl.load(norms_ptr + token * norms_stride, token < end, other=0.0)[:, None]
    unit = load_rows(x_ptr, token, stride, column, size, end).to(tl.float32) * norm
    dx = norm * scale * (dx - unit * tl.sum(unit * dx, 1, keep_dims=True))
    mask = (token < end)[:, None] & (column < size)[None, :]
    tl.store(dx_ptr + token[:, None] * columns + column[None, :], dx.to(dx_ptr.dtype.element_ty), mask)


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
    key_head = tl.program_id(0) % KEY_HEADS
    slot = (tl.program_id(0) // KEY_HEADS).to(tl.int64)
    first, _, end, _ = locate_slot(cu_seqlens_ptr, slot, documents, CHUNK)
    if first >= end:
        return
    index = tl.arange(0, CHUNK)
    token, row = first + index, tl.arange(0, KEY_TILE)
    inside = token < end
    q_columns = key_head * KEY_SIZE
    k_columns = (KEY_HEADS + key_head) * KEY_SIZE
    norms_ptr += key_head
    q = load_unit_rows(qkv_ptr + q_columns, norms_ptr, token, stride, 2 * KEY_HEADS, row, KEY_SIZE, end, scale)
    k = load_unit_rows(
        qkv_ptr + k_columns, norms_ptr + KEY_HEADS, token, stride, 2 * KEY_HEADS, row, KEY_SIZE, end, 1.0
    )
    dq, dk = tl.zeros([CHUNK, KEY_TILE], tl.float32), tl.zeros([CHUNK, KEY_TILE], tl.float32)
    for member in range(GROUP):
        head = key_head * GROUP + member
        place = token * VALUE_HEADS + head
        decay = tl.load(decay_ptr + place, inside, other=0.0)
        beta = tl.load(beta_ptr + place, inside, other=0.0).to(tl.float32)
        last = tl.load(decay_ptr + (tl.minimum(first + CHUNK, end) - 1) * VALUE_HEADS + head)
        state_ptr = states_ptr + (slot * VALUE_HEADS + head) * KEY_SIZE * VALUE_SIZE
        dstate_ptr = dstates_ptr + (slot * VALUE_HEADS + head) * KEY_SIZE * VALUE_SIZE
        dpairs, dlower = tl.zeros([CHUNK, CHUNK], tl.float32), tl.zeros([CHUNK, CHUNK], tl.float32)
        query_part = tl.zeros([CHUNK, KEY_TILE], tl.float32)  # dO Sᵀ
        key_part = tl.zeros([CHUNK, KEY_TILE], tl.float32)  # X Sᵀ
        value_part = tl.zeros([CHUNK, KEY_TILE], tl.float32)  # V' dSᵀ
        dbeta = tl.zeros([CHUNK], tl.float32)
        overlap = 0.0  # <S, dS>
        for tile in range((VALUE_SIZE + COLUMNS - 1) // COLUMNS):
            column = tile * COLUMNS + tl.arange(0, COLUMNS)
            do = load_rows(do_ptr + head * VALUE_SIZE, token, VALUE_HEADS * VALUE_SIZE, column, VALUE_SIZE, end)
            value = load_rows(values_ptr + head * VALUE_SIZE, token, VALUE_HEADS * VALUE_SIZE, column, VALUE_SIZE, end)
            x = load_rows(x_ptr + head * VALUE_SIZE, token, VALUE_HEADS * VALUE_SIZE, column, VALUE_SIZE, end)
            state = load_rows(state_ptr, row, VALUE_SIZE, column, VALUE_SIZE, KEY_SIZE)
            dstate = load_rows(dstate_ptr, row, VALUE_SIZE, column, VALUE_SIZE, KEY_SIZE)
            v_columns = 2 * KEY_HEADS * KEY_SIZE + head * VALUE_SIZE
            v = load_rows(qkv_ptr + v_columns, token, stride, column, VALUE_SIZE, end)
            do = do.to(k.dtype)
            wide = x.to(tl.float32)
            if QKV_GRAD:
                columns: tl.constexpr = 2 * KEY_HEADS * KEY_SIZE + VALUE_HEADS * VALUE_SIZE
                tl.store(
                    dqkv_ptr + v_columns + token[:, None] * columns + column[None, :],
                    (beta[:, None] * wide).to(dqkv_ptr.dtype.element_ty),
                    inside[:, None] & (column < VALUE_SIZE)[None, :],
                )
            dbeta += tl.sum(wide * v.to(tl.float32), 1)
            overlap += tl.sum(state.to(tl.float32) * dstate.to(tl.float32))
            dpairs = tl.dot(do, tl.trans(value), dpairs, input_precision="ieee")
            dlower = tl.dot(x, tl.trans(value), dlower, input_precision="ieee")
            query_part = tl.dot(do, tl.trans(state), query_part, input_precision="ieee")
            key_part = tl.dot(x, tl.trans(state), key_part, input_precision="ieee")
            value_part = tl.dot(value, tl.trans(dstate), value_part, input_precision="ieee")
        factor = tl.exp(decay)
        left = tl.exp(tl.where(inside, last - decay, 0.0))
        query_part *= factor[:, None]
        key_part *= -factor[:, None]  # e^G∘Y
        value_part *= left[:, None]
        products = tl.dot(k, tl.trans(k), input_precision="ieee")
        dpairs *= pair_decay(decay, False)
        dlower *= -pair_decay(decay, True)
        if G_GRAD:
            moved = tl.sum(k.to(tl.float32) * value_part, 1)  # z
            z = dpairs * tl.dot(q, tl.trans(k), input_precision="ieee") + dlower * products * beta[:, None]
            ddecay = tl.sum(q.to(tl.float32) * query_part, 1) + beta * tl.sum(k.to(tl.float32) * key_part, 1)
            ddecay += tl.sum(z, 1) - tl.sum(z, 0) - moved
            ddecay += tl.where(token == tl.minimum(first + CHUNK, end) - 1, tl.sum(moved) + tl.exp(last) * overlap, 0.0)
            later = tl.where(inside, ddecay, 0.0)
            dg = tl.sum(tl.where(index[:, None] <= index[None, :], later[None, :], 0.0), 1)
            tl.store(dg_ptr + place, dg.to(dg_ptr.dtype.element_ty), inside)
        if BETA_GRAD:
            dbeta += tl.sum(k.to(tl.float32) * key_part, 1) + tl.sum(dlower * products, 1)
            tl.store(dbeta_ptr + place, dbeta.to(dbeta_ptr.dtype.element_ty), inside)
        if QKV_GRAD:
            dpairs = dpairs.to(k.dtype)
            dlower = (dlower * beta[:, None]).to(k.dtype)  # N
            dq += query_part
            dq = tl.dot(dpairs, k, dq, input_precision="ieee")
            dk += value_part + beta[:, None] * key_part
            dk = tl.dot(tl.trans(dpairs), q, dk, input_precision="ieee")
            dk = tl.dot(dlower, k, dk, input_precision="ieee")
            dk = tl.dot(tl.trans(dlower), k, dk, input_precision="ieee")
    if QKV_GRAD:
        columns: tl.constexpr = 2 * KEY_HEADS * KEY_SIZE + VALUE_HEADS * VALUE_SIZE
        _store_norm_gradient(
            qkv_ptr + q_columns, dqkv_ptr + q_columns, norms_ptr, dq, token, stride, columns, 2 * KEY_HEADS, row,
            KEY_SIZE, end, scale,
        )  # fmt: skip
        _store_norm_gradient(
            qkv_ptr + k_columns, dqkv_ptr + k_columns, norms_ptr + KEY_HEADS, dk, token, stride, columns, 2 * KEY_HEADS,
            row, KEY_SIZE, end, 1.0,
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
