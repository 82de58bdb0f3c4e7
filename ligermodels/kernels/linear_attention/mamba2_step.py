"""One token of the Mamba-2 scan, for decoding: the states of many rows are updated in place.

Per row and head, as in mamba2_scan.py, which has the meaning of every symbol:
    S <- exp(a δ) S + B (δ x)ᵀ;  y = SᵀC + D x
All in fp32. Reads and writes S once, 8 N P bytes a row and head: bound by memory bandwidth.
"""

import torch
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
from ligermodels.kernels.linear_attention.document_chunks import check_pool, tile_columns
from ligermodels.kernels.linear_attention.mamba2_chunks import scan_shape
from ligermodels.kernels.linear_attention.mamba2_scan import mamba2_scan_reference

COLUMNS, WARPS = 32, 4  # of a state, of one program. To be measured


@kernel()
def _step_kernel(
    xbc_ptr, delta_ptr, a_ptr, d_ptr, row_ptr, pool_ptr, y_ptr, stride,
    HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, GROUPS: tl.constexpr, STATE_SIZE: tl.constexpr,
    STATE_TILE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program: COLUMNS columns of one head's state in one row."""
    TILES: tl.constexpr = (HEAD_SIZE + COLUMNS - 1) // COLUMNS
    tile, head = tl.program_id(0) % TILES, tl.program_id(0) // TILES % HEADS
    index = (tl.program_id(0) // (TILES * HEADS)).to(tl.int64)
    row, column = tl.arange(0, STATE_TILE), tile * COLUMNS + tl.arange(0, COLUMNS)
    in_state, in_value = row < STATE_SIZE, column < HEAD_SIZE
    xbc_ptr += index * stride
    x = tl.load(xbc_ptr + head * HEAD_SIZE + column, in_value, other=0.0).to(tl.float32)
    b_ptr = xbc_ptr + HEADS * HEAD_SIZE + head // (HEADS // GROUPS) * STATE_SIZE + row
    b = tl.load(b_ptr, in_state, other=0.0).to(tl.float32)
    c = tl.load(b_ptr + GROUPS * STATE_SIZE, in_state, other=0.0).to(tl.float32)
    delta = tl.load(delta_ptr + index * HEADS + head).to(tl.float32)
    decay = tl.exp(tl.load(a_ptr + head).to(tl.float32) * delta)
    place = tl.load(row_ptr + index).to(tl.int64) * HEADS + head
    state_ptr = pool_ptr + place * (STATE_SIZE * HEAD_SIZE) + row[:, None] * HEAD_SIZE + column[None, :]
    mask = in_state[:, None] & in_value[None, :]
    state = decay * tl.load(state_ptr, mask, other=0.0) + b[:, None] * (delta * x)[None, :]
    tl.store(state_ptr, state, mask)
    y = tl.sum(state * c[:, None], 0) + tl.load(d_ptr + head).to(tl.float32) * x
    tl.store(y_ptr + (index * HEADS + head) * HEAD_SIZE + column, y.to(y_ptr.dtype.element_ty), in_value)


def _launch_step(
    xbc: Tensor, delta: Tensor, a: Tensor, d: Tensor, groups: int, state_size: int, pool: Tensor, row: Tensor
) -> Tensor:
    shape = scan_shape(xbc, delta, groups, state_size)
    y = _fake_step(xbc, delta, a, d, groups, state_size, pool, row)
    if y.numel():
        xbc, stride = as_rows_with_stride(xbc, shape.columns)
        columns = tile_columns(COLUMNS, shape.head_size)
        launch = _step_kernel.bind(**shape.constants(), COLUMNS=columns, num_warps=WARPS)
        launch(
            delta.numel() * cdiv(shape.head_size, columns),
            xbc, delta.contiguous(), a.contiguous(), d.contiguous(), row.contiguous(), pool, y, stride,
        )  # fmt: skip
    return y


def _fake_step(xbc, delta, a, d, groups, state_size, pool, row):
    return xbc.new_empty(*delta.shape, pool.shape[3])


_step = register_op(
    "mamba2_step(Tensor xbc, Tensor delta, Tensor a, Tensor d, int groups, int state_size, Tensor(a!) pool,"
    " Tensor row) -> Tensor",
    _launch_step,
    _fake_step,
)


def mamba2_step_reference(
    xbc: Tensor, delta: Tensor, a: Tensor, d: Tensor, groups: int, state_size: int, pool: Tensor, row: Tensor
) -> tuple[Tensor, Tensor]:
    """The output, and the pool afterwards."""
    before = pool[row.long()]
    y, states = mamba2_scan_reference(xbc[:, None], delta[:, None], a, d, groups, state_size, before)
    return y[:, 0], pool.index_copy(0, row.long(), states.to(pool.dtype))


@torch.no_grad()
def mamba2_step_(
    xbc: Tensor, delta: Tensor, a: Tensor, d: Tensor, groups: int, state_size: int, pool: Tensor, row: Tensor
) -> Tensor:
    """One token of each of B rows of the Mamba-2 scan, whose states it moves on in place.

    xbc [B, H P + 2 G N], delta [B, H], a, d [H], groups, state_size: as in `mamba2_scan`, without the length.
    pool fp32 [R, H, N, P] contiguous, fp64 if xbc is: states. row int32 or int64 [B]: the state of each token, no two
    the same -> y [B, H, P] in the dtype of xbc. Shapes are static and nothing waits for the device: a CUDA graph can
    hold it. Not differentiable. Raises ValueError where shapes or dtypes disagree.
    """
    op = "mamba2_step_"
    rows, _ = shape_of(op, "xbc", xbc, "B, columns")
    check_shape(op, "delta", delta, rows, shape_of(op, "delta", delta)[-1])
    check_floats(op, xbc=xbc, delta=delta, a=a, d=d)
    shape = scan_shape(xbc, delta, groups, state_size, op)
    check_shape(op, "a", a, shape.heads)
    check_shape(op, "d", d, shape.heads)
    check_pool(op, pool, row, rows, wide_dtype(xbc), shape.heads, state_size, shape.head_size)
    if runs_kernels(xbc):
        return _step(xbc, delta, a, d, groups, state_size, pool, row)
    y, moved = mamba2_step_reference(xbc, delta, a, d, groups, state_size, pool, row)
    pool.copy_(moved)
    return y
