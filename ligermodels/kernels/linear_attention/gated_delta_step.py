"""One token of the gated delta rule, for decoding: the states of many rows are updated in place.

Per row and value head, as in gated_delta_rule.py, which has the meaning of every symbol:
    S̃ = exp(g) S;  e = v - S̃ᵀk̂;  S <- S̃ + β k̂ eᵀ;  o = Sᵀq̂
All in fp32. Reads and writes S once, 8 hk hv bytes a row and value head: bound by memory bandwidth.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.dispatch import (
    check_floats,
    check_shape,
    register_op,
    runs_kernels,
    shape_of,
    wide_dtype,
)
from ligermodels.kernels.launch import as_rows_with_stride, cdiv, kernel
from ligermodels.kernels.linear_attention.delta_chunks import L2_EPS, delta_shape
from ligermodels.kernels.linear_attention.document_chunks import check_pool, tile_columns
from ligermodels.kernels.linear_attention.gated_delta_rule import gated_delta_rule_reference

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


_step = register_op(
    "gated_delta_step(Tensor qkv, Tensor g, Tensor beta, int key_heads, int key_size, Tensor(a!) pool, Tensor row,"
    " float eps) -> Tensor",
    _launch_step,
    _fake_step,
)


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
