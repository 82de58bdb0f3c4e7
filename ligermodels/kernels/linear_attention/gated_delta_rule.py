"""Gated delta rule: linear attention whose state forgets by g and corrects what a key stores by beta.

Per value head, with S [hk, hv] fp32, k̂ = k rsqrt(Σ k² + eps), q̂ = hk^-½ q rsqrt(Σ q² + eps); value head j reads the
queries and keys of key head j // (Hv / Hk):
    S̃ = exp(g_t) S;  e = v_t - S̃ᵀk̂_t;  S = S̃ + β_t k̂_t eᵀ;  o_t = Sᵀq̂_t
Backward, over t in reverse, with dS the gradient of S:
    dS += q̂ doᵀ;  dq̂ = S do;  w = dSᵀk̂;  dk̂ = β dS e - β S̃ w;  dβ = e·w;  dv = β w;  dS̃ = dS - k̂ (β w)ᵀ
    dg = <S̃, dS̃>;  dS <- exp(g) dS̃
The kernels compute chunks of 64 tokens. In a chunk, with G = cumsum(g), Γ_ij = exp(G_i - G_j) for i >= j, S the state
at its start and Q, K, V its rows:
    M = (1 + strict_lower(β∘(K Kᵀ)∘Γ))^-1        V' = M (β∘(V - e^G∘(K S)))        P = (Q Kᵀ)∘Γ
    O = e^G∘(Q S) + P V'        S <- e^{G_C} S + Kᵀ(r∘V'), r = exp(G_C - G)
delta_chunks.py computes M, delta_states.py passes states forward and gradients back, delta_gradients.py has the rest of
the gradients; each has its formulas. g, G, S, M's inversion and all sums are in fp32; operands of products are in the
dtype of qkv.
Moves, forward, qkv and o once for each tile of a head's columns, and 64 elements of M a token and value head. Kept for
backward: qkv, beta, G, M and the reciprocal norms; states are computed again.
One token of each row, for decoding, updates the state in place in a kernel of its own, all in fp32: it reads and writes
S once, 8 hk hv bytes a row and value head, and is bound by memory bandwidth.
Yang, Kautz & Hatamizadeh 2024, https://arxiv.org/abs/2412.06464.
"""

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.dispatch import (
    Node,
    as_factor,
    autocast,
    check_floats,
    check_shape,
    register_op,
    runs_kernels,
    shape_of,
    wide_dtype,
    widen,
)
from ligermodels.kernels.launch import as_rows_with_stride, cdiv, empty_where, kernel
from ligermodels.kernels.linear_attention.delta_chunks import (
    L2_EPS,
    DeltaInputs,
    DeltaShape,
    compute_pairs,
    delta_shape,
    prepare_chunks,
)
from ligermodels.kernels.linear_attention.delta_gradients import compute_gradients
from ligermodels.kernels.linear_attention.delta_states import backward_scan, forward_scan, recompute_states
from ligermodels.kernels.linear_attention.document_chunks import (
    SPAN,
    check_pool,
    count_documents,
    each_document,
    tile_columns,
)


def gated_delta_rule_reference(
    qkv: Tensor, g: Tensor, beta: Tensor, key_heads: int, key_size: int, initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None, eps: float = L2_EPS,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Token by token. As in a matrix product, factors are in the dtype of qkv and sums in fp32; the state is fp32."""
    (qkv,) = autocast(qkv)
    shape = delta_shape(qkv, g, key_heads, key_size)
    if cu_seqlens is not None:
        alone = partial(gated_delta_rule_reference, key_heads=key_heads, key_size=key_size, eps=eps)
        return each_document(
            lambda *tokens: alone(*tokens[:3], initial_state=tokens[3]), (qkv, g, beta), initial_state, cu_seqlens
        )
    batch, length = qkv.shape[:2]
    q, k, v = split_qkv(qkv, shape)
    group = shape.value_heads // key_heads
    q, k = (
        as_factor(_unit_reference(x, eps) * s, qkv).repeat_interleave(group, 2)
        for x, s in ((q, key_size**-0.5), (k, 1.0))
    )
    v, decay, beta = widen(v), widen(g).exp(), widen(beta)
    state = decay.new_zeros(batch, shape.value_heads, key_size, shape.value_size)
    state = state if initial_state is None else state + widen(initial_state)
    outputs = []
    for t in range(length):
        state = state * decay[:, t, :, None, None]
        error = v[:, t] - (as_factor(state, qkv) * k[:, t, :, :, None]).sum(2)
        state = state + k[:, t, :, :, None] * as_factor(beta[:, t, :, None] * error, qkv)[:, :, None]
        outputs.append((as_factor(state, qkv) * q[:, t, :, :, None]).sum(2))
    o = torch.stack(outputs, 1) if outputs else decay.new_empty(*v.shape)
    return o.to(qkv.dtype), state


def split_qkv(qkv: Tensor, shape: DeltaShape) -> tuple[Tensor, Tensor, Tensor]:
    """q, k [..., Hk, hk] and v [..., Hv, hv] of a packed qkv."""
    q, k, v = qkv.split([shape.key_columns, shape.key_columns, shape.columns - 2 * shape.key_columns], -1)
    return *(x.unflatten(-1, (shape.key_heads, -1)) for x in (q, k)), v.unflatten(-1, (shape.value_heads, -1))


def _unit_reference(x: Tensor, eps: float) -> Tensor:
    wide = widen(x)
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)


def _launch_forward(
    qkv: Tensor, g: Tensor, beta: Tensor, key_heads: int, key_size: int, initial_state: Tensor | None,
    cu_seqlens: Tensor | None, eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(o, final_state, norms, decay, inverse)."""
    o, final, norms, decay, inverse = _fake_forward(qkv, g, beta, key_heads, key_size, initial_state, cu_seqlens, eps)
    if not g.numel():
        return o, final.zero_() if initial_state is None else final.copy_(initial_state), norms, decay, inverse
    inputs = DeltaInputs.of(qkv, beta, (norms, decay, inverse), key_heads, key_size, cu_seqlens)
    initial_state = None if initial_state is None else initial_state.contiguous()
    prepare_chunks(inputs, g.contiguous(), eps)
    forward_scan(inputs, compute_pairs(inputs), initial_state, o, final)
    return o, final, norms, decay, inverse


def _launch_backward(
    do: Tensor, dfinal: Tensor | None, qkv: Tensor, g: Tensor, beta: Tensor, norms: Tensor, decay: Tensor,
    inverse: Tensor, key_heads: int, key_size: int, initial_state: Tensor | None, cu_seqlens: Tensor | None,
    qkv_grad: bool, g_grad: bool, beta_grad: bool, initial_grad: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """(dqkv, dg, dbeta, dinitial), each None where it is not needed."""
    gradients = empty_where((qkv_grad, g_grad, beta_grad, initial_grad), qkv, g, beta, initial_state)
    *of_tokens, dinitial = gradients
    if not g.numel():
        if dinitial is not None:
            dinitial.zero_() if dfinal is None else dinitial.copy_(dfinal)
        return gradients
    inputs = DeltaInputs.of(qkv, beta, (norms, decay, inverse), key_heads, key_size, cu_seqlens)
    do = do.contiguous()
    dfinal = None if dfinal is None else dfinal.contiguous()
    initial_state = None if initial_state is None else initial_state.contiguous()
    pairs = compute_pairs(inputs)
    passed = backward_scan(inputs, pairs, do, dfinal, dinitial)
    if qkv_grad or g_grad or beta_grad:
        states = recompute_states(inputs, initial_state)
        compute_gradients(inputs, pairs, do, (*states, *passed), *of_tokens)
    return gradients


def _fake_forward(qkv, g, beta, key_heads, key_size, initial_state, cu_seqlens, eps):
    shape = delta_shape(qkv, g, key_heads, key_size)
    batch, length, value_heads = g.shape
    documents = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    o = qkv.new_empty(batch, length, value_heads, shape.value_size)
    final = qkv.new_empty(documents, value_heads, key_size, shape.value_size, dtype=torch.float32)
    norms = qkv.new_empty(batch, length, 2, key_heads, dtype=torch.float32)
    decay = qkv.new_empty(batch, length, value_heads, dtype=torch.float32)
    return o, final, norms, decay, qkv.new_empty(batch, length, value_heads, SPAN.value)


def _fake_backward(
    do, dfinal, qkv, g, beta, norms, decay, inverse, key_heads, key_size, initial_state, cu_seqlens, *needed
):
    return empty_where(needed, qkv, g, beta, initial_state)


_forward = register_op("gated_delta_rule", _launch_forward, _fake_forward)
_backward = register_op("gated_delta_rule_backward", _launch_backward, _fake_backward)


class _GatedDeltaRule(Node):
    @staticmethod
    def forward(ctx, qkv, g, beta, key_heads, key_size, initial_state, cu_seqlens, eps):
        ctx.set_materialize_grads(False)
        o, final, *chunks = _forward(qkv, g, beta, key_heads, key_size, initial_state, cu_seqlens, eps)
        ctx.save_for_backward(qkv, g, beta, *chunks, initial_state, cu_seqlens)
        ctx.heads = key_heads, key_size
        return o, final

    @staticmethod
    def backward(ctx, do, dfinal):
        qkv, g, beta, *chunks, initial_state, cu_seqlens = ctx.saved_tensors
        needed = *ctx.needs_input_grad[:3], ctx.needs_input_grad[5]
        if do is None:  # only the state was used
            do = qkv.new_zeros(*g.shape, delta_shape(qkv, g, *ctx.heads).value_size)
        gradients = _backward(do, dfinal, qkv, g, beta, *chunks, *ctx.heads, initial_state, cu_seqlens, *needed)
        dqkv, dg, dbeta, dinitial = (x if need else None for x, need in zip(gradients, needed, strict=True))
        return dqkv, dg, dbeta, None, None, dinitial, None, None


def gated_delta_rule(
    qkv: Tensor, g: Tensor, beta: Tensor, key_heads: int, key_size: int, initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None, eps: float = L2_EPS,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gated delta rule over whole sequences: (o, final_state).

    qkv [B, T, 2 Hk hk + Hv hv] float: queries, keys and values, packed and head by head, as `causal_conv` returns them.
    g [B, T, Hv] float, at most 0: log of the decay, -exp(A_log) softplus(a + dt_bias). beta [B, T, Hv] float, 0 to 1.
    Both are read in fp32 and should be fp32. key_heads: Hk, of which Hv is a multiple; key_size: hk <= 256.
    initial_state [N, Hv, hk, hv] float, zeros if None. cu_seqlens int32 [N + 1]: offsets of the documents packed into
    one row (B = 1), the first 0, the last T; each document starts from its own initial state. Without it each row is a
    document, N = B. eps: of the norms of queries and keys, which are normalized and scaled by hk^-½ here.
    -> o [B, T, Hv, hv] in the dtype of qkv, final_state [N, Hv, hk, hv] fp32: the state after each document's last
    token. Where beta and g are 0 a token leaves the state as it is.

    Differentiable in qkv, g, beta and initial_state, by o and by final_state. Under torch.autocast qkv is cast.
    Raises ValueError where shapes or dtypes disagree. `gated_delta_step_` computes one token of each of many rows.
    """
    (qkv,) = autocast(qkv)
    check_arguments(qkv, g, beta, key_heads, key_size, initial_state, cu_seqlens)
    if not runs_kernels(qkv):
        return gated_delta_rule_reference(qkv, g, beta, key_heads, key_size, initial_state, cu_seqlens, eps)
    return _GatedDeltaRule.apply(qkv, g, beta, key_heads, key_size, initial_state, cu_seqlens, eps)


def check_arguments(qkv, g, beta, key_heads, key_size, initial_state, cu_seqlens) -> None:
    """Raises ValueError where shapes or dtypes disagree."""
    op = "gated_delta_rule"
    batch, tokens, _ = shape_of(op, "qkv", qkv, "B, T, columns")
    check_shape(op, "g", g, batch, tokens, shape_of(op, "g", g)[-1])
    check_shape(op, "beta", beta, *g.shape)
    shape = delta_shape(qkv, g, key_heads, key_size)
    documents = count_documents(op, batch, cu_seqlens)
    check_shape(op, "initial_state", initial_state, documents, shape.value_heads, key_size, shape.value_size)
    check_floats(op, qkv=qkv, g=g, beta=beta, initial_state=initial_state)


COLUMNS, WARPS = 32, 4  # of a state, of one program. To be measured


@triton.jit
def _unit(x, eps):
    return x * tl.rsqrt(tl.sum(x * x, 0) + eps)


@kernel()
def _step_kernel(
    qkv_ptr, g_ptr, beta_ptr, row_ptr, pool_ptr, o_ptr, stride, scale, eps,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr,
    KEY_TILE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program: COLUMNS columns of one value head's state in one row."""
    TILES: tl.constexpr = (VALUE_SIZE + COLUMNS - 1) // COLUMNS
    tile, head = tl.program_id(0) % TILES, tl.program_id(0) // TILES % VALUE_HEADS
    index = (tl.program_id(0) // (TILES * VALUE_HEADS)).to(tl.int64)
    row, column = tl.arange(0, KEY_TILE), tile * COLUMNS + tl.arange(0, COLUMNS)
    in_key, in_value = row < KEY_SIZE, column < VALUE_SIZE
    qkv_ptr += index * stride
    q_ptr = qkv_ptr + head // (VALUE_HEADS // KEY_HEADS) * KEY_SIZE
    q = _unit(tl.load(q_ptr + row, in_key, other=0.0).to(tl.float32), eps) * scale
    k = _unit(tl.load(q_ptr + KEY_HEADS * KEY_SIZE + row, in_key, other=0.0).to(tl.float32), eps)
    v_ptr = qkv_ptr + 2 * KEY_HEADS * KEY_SIZE + head * VALUE_SIZE
    v = tl.load(v_ptr + column, in_value, other=0.0).to(tl.float32)
    decay = tl.exp(tl.load(g_ptr + index * VALUE_HEADS + head).to(tl.float32))
    beta = tl.load(beta_ptr + index * VALUE_HEADS + head).to(tl.float32)
    place = tl.load(row_ptr + index).to(tl.int64) * VALUE_HEADS + head
    state_ptr = pool_ptr + place * (KEY_SIZE * VALUE_SIZE) + row[:, None] * VALUE_SIZE + column[None, :]
    mask = in_key[:, None] & in_value[None, :]
    state = decay * tl.load(state_ptr, mask, other=0.0)
    error = v - tl.sum(state * k[:, None], 0)
    state += k[:, None] * (beta * error)[None, :]
    tl.store(state_ptr, state, mask)
    o = tl.sum(state * q[:, None], 0).to(o_ptr.dtype.element_ty)
    tl.store(o_ptr + (index * VALUE_HEADS + head) * VALUE_SIZE + column, o, in_value)


def _launch_step(
    qkv: Tensor, g: Tensor, beta: Tensor, key_heads: int, key_size: int, pool: Tensor, row: Tensor, eps: float
) -> Tensor:
    shape = delta_shape(qkv, g, key_heads, key_size)
    o = _fake_step(qkv, g, beta, key_heads, key_size, pool, row, eps)
    if o.numel():
        qkv, stride = as_rows_with_stride(qkv, shape.columns)
        columns = tile_columns(COLUMNS, shape.value_size)
        launch = _step_kernel.bind(**shape.constants(), COLUMNS=columns, num_warps=WARPS)
        launch(
            g.numel() * cdiv(shape.value_size, columns),
            qkv, g.contiguous(), beta.contiguous(), row.contiguous(), pool, o, stride, key_size**-0.5, eps,
        )  # fmt: skip
    return o


def _fake_step(qkv, g, beta, key_heads, key_size, pool, row, eps):
    return qkv.new_empty(*g.shape, pool.shape[3])


_step = register_op("gated_delta_step", _launch_step, _fake_step, writes=("pool",))


def gated_delta_step_reference(
    qkv: Tensor, g: Tensor, beta: Tensor, key_heads: int, key_size: int, pool: Tensor, row: Tensor, eps: float = L2_EPS
) -> tuple[Tensor, Tensor]:
    """The output, and the pool afterwards."""
    qkv, g, beta = qkv[:, None], g[:, None], beta[:, None]
    o, states = gated_delta_rule_reference(qkv, g, beta, key_heads, key_size, pool[row.long()], eps=eps)
    return o[:, 0], pool.index_copy(0, row.long(), states.to(pool.dtype))


@torch.no_grad()
def gated_delta_step_(
    qkv: Tensor, g: Tensor, beta: Tensor, key_heads: int, key_size: int, pool: Tensor, row: Tensor, eps: float = L2_EPS
) -> Tensor:
    """One token of each of B rows of the gated delta rule, whose states it moves on in place.

    qkv [B, 2 Hk hk + Hv hv], g, beta [B, Hv], key_heads, key_size, eps: as in `gated_delta_rule`, without the length.
    pool fp32 [R, Hv, hk, hv] contiguous, fp64 if qkv is: states. row int32 or int64 [B]: the state of each token, no
    two the same -> o [B, Hv, hv] in the dtype of qkv. Shapes are static and nothing waits for the device: a CUDA graph
    can hold it. Not differentiable. Raises ValueError where shapes or dtypes disagree.
    """
    op = "gated_delta_step_"
    rows, _ = shape_of(op, "qkv", qkv, "B, columns")
    check_shape(op, "g", g, rows, shape_of(op, "g", g)[-1])
    check_shape(op, "beta", beta, *g.shape)
    check_floats(op, qkv=qkv, g=g, beta=beta)
    shape = delta_shape(qkv, g, key_heads, key_size, op)
    check_pool(op, pool, row, rows, wide_dtype(qkv), shape.value_heads, key_size, shape.value_size)
    if runs_kernels(qkv):
        return _step(qkv, g, beta, key_heads, key_size, pool, row, eps)
    o, moved = gated_delta_step_reference(qkv, g, beta, key_heads, key_size, pool, row, eps)
    pool.copy_(moved)
    return o
