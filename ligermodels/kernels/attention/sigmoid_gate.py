"""Sigmoid gate of attention's output: y = x s, s = sigmoid(z), elementwise.

Backward: dx = dy s;  dz = dy x s (1 - s).
x, z, y [B, T, H, D] any float dtype, x and z in any layout of their heads: the gates may be columns of a wider
projection, between those of queries. Computed in fp32, one rounding. Moves 3 B T H D elements forward, 5 backward:
bound by memory bandwidth.
The output gate of Qiu et al. 2025, https://arxiv.org/abs/2505.06708.
"""

import functools

import triton
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.attention.qkv_heads import with_unit_stride
from ligermodels.kernels.dispatch import Node, check_floats, check_shape, register_op, runs_kernels, shape_of, widen
from ligermodels.kernels.launch import Launcher, cdiv, empty_where, kernel

GATED_ELEMENTS, GATED_WARPS = 2048, 4  # of one program: a thread loads 16 elements of each tensor


def sigmoid_gate_reference(x: Tensor, z: Tensor) -> Tensor:
    return (widen(x) * widen(z).sigmoid()).to(x.dtype)


@triton.jit
def _load_rows(x_ptr, batch_stride, token_stride, head_stride, row, length, column, mask, HEADS: tl.constexpr):
    """Rows of heads, in fp32. row: of all heads of all tokens, int64."""
    token, head = row // HEADS, row % HEADS
    offset = token // length * batch_stride + token % length * token_stride + head * head_stride
    return tl.load(x_ptr + offset + column, mask, other=0.0).to(tl.float32)


@triton.jit
def _sigmoids(z):
    """sigmoid(z) and sigmoid(-z), neither of which cancels. A second division where `activate` of gated_activation.py
    multiplies: one rounding less, without which dz is outside of the error budget."""
    tail = tl.exp(-tl.abs(z))
    large, small = 1.0 / (1.0 + tail), tail / (1.0 + tail)
    return tl.where(z >= 0.0, large, small), tl.where(z >= 0.0, small, large)


@kernel(do_not_specialize=["rows", "length"])
def _forward_kernel(
    x_ptr, z_ptr, y_ptr, x_batch, x_token, x_head, z_batch, z_token, z_head, rows, length,
    HEADS: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One program: ROWS rows of SIZE elements, each a head of a token."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    mask = (row < rows) & (column < SIZE)
    x = _load_rows(x_ptr, x_batch, x_token, x_head, row, length, column, mask, HEADS)
    z = _load_rows(z_ptr, z_batch, z_token, z_head, row, length, column, mask, HEADS)
    gate, _ = _sigmoids(z)
    tl.store(y_ptr + row * SIZE + column, (x * gate).to(y_ptr.dtype.element_ty), mask)


@kernel(do_not_specialize=["rows", "length"])
def _backward_kernel(
    dy_ptr, x_ptr, z_ptr, dx_ptr, dz_ptr, dy_batch, dy_token, dy_head, x_batch, x_token, x_head, z_batch, z_token,
    z_head, rows, length, X_GRAD: tl.constexpr, Z_GRAD: tl.constexpr,
    HEADS: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Computes the gradients that are needed, for the same rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    mask = (row < rows) & (column < SIZE)
    dy = _load_rows(dy_ptr, dy_batch, dy_token, dy_head, row, length, column, mask, HEADS)
    z = _load_rows(z_ptr, z_batch, z_token, z_head, row, length, column, mask, HEADS)
    gate, rest = _sigmoids(z)
    dx = dy * gate
    if X_GRAD:
        tl.store(dx_ptr + row * SIZE + column, dx.to(dx_ptr.dtype.element_ty), mask)
    if Z_GRAD:
        x = _load_rows(x_ptr, x_batch, x_token, x_head, row, length, column, mask, HEADS)
        tl.store(dz_ptr + row * SIZE + column, (dx * x * rest).to(dz_ptr.dtype.element_ty), mask)


@functools.cache
def _tile(heads: int, size: int) -> tuple[dict[str, int], int]:
    """The constants of a launch, and the rows of a program."""
    width = triton.next_power_of_2(size)
    rows = max(1, GATED_ELEMENTS // width)
    return {"HEADS": heads, "SIZE": size, "ROWS": rows, "WIDTH": width, "num_warps": GATED_WARPS}, rows


@functools.cache
def _forward(heads: int, size: int) -> tuple[Launcher, int]:
    constants, rows = _tile(heads, size)
    return _forward_kernel.bind(**constants), rows


@functools.cache
def _backward(heads: int, size: int, x_grad: bool, z_grad: bool) -> tuple[Launcher, int]:
    constants, rows = _tile(heads, size)
    return _backward_kernel.bind(X_GRAD=x_grad, Z_GRAD=z_grad, **constants), rows


def _launch_forward(x: Tensor, z: Tensor) -> Tensor:
    y = x.new_empty(x.shape)
    _, length, heads, size = x.shape
    launch, tile_rows = _forward(heads, size)
    if rows := y.numel() // size:
        (x, x_strides), (z, z_strides) = with_unit_stride(x), with_unit_stride(z)
        launch(cdiv(rows, tile_rows), x, z, y, *x_strides, *z_strides, rows, length)
    return y


def _launch_backward(
    dy: Tensor, x: Tensor, z: Tensor, x_grad: bool, z_grad: bool
) -> tuple[Tensor | None, Tensor | None]:
    """(dx, dz), each None where it is not needed."""
    dx, dz = empty_where((x_grad, z_grad), x, z)
    _, length, heads, size = x.shape
    launch, tile_rows = _backward(heads, size, x_grad, z_grad)
    if rows := x.numel() // size:
        (dy, dy_strides), (x, x_strides), (z, z_strides) = map(with_unit_stride, (dy, x, z))
        written = [dy if gradient is None else gradient for gradient in (dx, dz)]
        launch(cdiv(rows, tile_rows), dy, x, z, *written, *dy_strides, *x_strides, *z_strides, rows, length)
    return dx, dz


def _fake_backward(dy, x, z, *needed):
    return empty_where(needed, x, z)


_gate = register_op("sigmoid_gate", _launch_forward)
_gate_backward = register_op("sigmoid_gate_backward", _launch_backward, _fake_backward)


class _SigmoidGate(Node):
    @staticmethod
    def forward(ctx, x, z):
        ctx.save_for_backward(x, z)
        return _gate(x, z)

    @staticmethod
    def backward(ctx, dy):
        x_grad, z_grad = ctx.needs_input_grad
        dx, dz = _gate_backward(dy, *ctx.saved_tensors, x_grad, z_grad)
        return dx if x_grad else None, dz if z_grad else None


def sigmoid_gate(x: Tensor, z: Tensor) -> Tensor:
    """x sigmoid(z), elementwise: x and z [B, T, H, D] float, in any layout -> [B, T, H, D] in x's dtype, contiguous.

    Raises ValueError for shapes that differ, or are not those of heads.
    """
    check_shape("sigmoid_gate", "z", z, *shape_of("sigmoid_gate", "x", x, "B, T, H, D"))
    check_floats("sigmoid_gate", x=x, z=z)
    return _SigmoidGate.apply(x, z) if runs_kernels(x) else sigmoid_gate_reference(x, z)
