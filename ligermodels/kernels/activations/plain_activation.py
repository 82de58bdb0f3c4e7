"""An activation without a gate: y = act(x). act is one of those of gated_activation.py, or

    quick_gelu  act(x) = x σ(1.702 x)
Backward: dx = dy act'(x). With `emit` it also recomputes y, for the weight gradient of the following linear.
x, y [..., I] any float dtype; computed in fp32, rounded once. M tokens move 2 M I elements forward and 3 M I backward,
4 M I with `emit`: bound by memory bandwidth.
Maths: Hendrycks & Gimpel 2016, https://arxiv.org/abs/1606.08415.
"""

import functools
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.activations.gated_activation import ACTIVATION_FUNCTIONS, activate, locate_tile, split_row
from ligermodels.kernels.dispatch import Node, check_floats, is_last_use, register_op, runs_kernels, shape_of, widen
from ligermodels.kernels.launch import Launcher, as_rows_with_stride, kernel
from ligermodels.kernels.pdl import pdl_constants, wait_for_previous_kernel
from ligermodels.kernels.row_sharding import RowSharding

QUICK_GELU = tl.constexpr(1.702)


def quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(QUICK_GELU.value * x)


PLAIN_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {**ACTIVATION_FUNCTIONS, "quick_gelu": quick_gelu}


def plain_activation_reference(x: Tensor, activation: str) -> Tensor:
    return PLAIN_FUNCTIONS[activation](widen(x)).to(x.dtype)


@triton.jit
def _value_and_slope(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "quick_gelu":  # silu with a factor: act(x) = silu(c x) / c, act'(x) = silu'(c x)
        y, slope = activate(QUICK_GELU * x, "silu")
        y = y / QUICK_GELU
    else:
        y, slope = activate(x, ACTIVATION)
    return y, slope


@kernel()
def _forward_kernel(x_ptr, y_ptr, x_stride, COLUMNS: tl.constexpr, ACTIVATION: tl.constexpr, TILE: tl.constexpr):
    """One program computes TILE columns of one row."""
    row, column, mask = locate_tile(COLUMNS, TILE)
    x = tl.load(x_ptr + row * x_stride + column, mask, other=0.0).to(tl.float32)
    y, _ = _value_and_slope(x, ACTIVATION)
    tl.store(y_ptr + row * COLUMNS + column, y.to(y_ptr.dtype.element_ty), mask)


@kernel()
def _backward_kernel(
    dy_ptr, x_ptr, dx_ptr, y_ptr, dy_stride, x_stride, COLUMNS: tl.constexpr, ACTIVATION: tl.constexpr,
    EMIT: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program computes TILE columns of one row of dx and, if EMIT, of y."""
    wait_for_previous_kernel(PDL)
    row, column, mask = locate_tile(COLUMNS, TILE)
    x = tl.load(x_ptr + row * x_stride + column, mask, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + row * dy_stride + column, mask, other=0.0).to(tl.float32)
    y, slope = _value_and_slope(x, ACTIVATION)
    tl.store(dx_ptr + row * COLUMNS + column, (dy * slope).to(dx_ptr.dtype.element_ty), mask)
    if EMIT:
        tl.store(y_ptr + row * COLUMNS + column, y.to(y_ptr.dtype.element_ty), mask)


@functools.cache
def _forward(columns: int, activation: str) -> tuple[Launcher, int]:
    """(launcher, tiles per row)."""
    tiles, tile = split_row(columns)
    return _forward_kernel.bind(COLUMNS=columns, ACTIVATION=activation, TILE=tile), tiles


def _launch_forward(x: Tensor, activation: str) -> Tensor:
    y, columns = x.new_empty(*x.shape), x.shape[-1]
    if size := y.numel():
        launch, tiles = _forward(columns, activation)
        x, stride = as_rows_with_stride(x, columns)
        launch(size // columns * tiles, x, y, stride)
    return y


@functools.cache
def _backward(columns: int, activation: str, emit: bool, device: torch.device) -> tuple[Launcher, int]:
    """(launcher, tiles per row)."""
    tiles, tile = split_row(columns)
    constants = pdl_constants(device)
    return _backward_kernel.bind(COLUMNS=columns, ACTIVATION=activation, EMIT=emit, TILE=tile, **constants), tiles


def _launch_backward(
    dy: Tensor, x: Tensor, activation: str, emit: int, *, inplace: bool = False
) -> tuple[Tensor, Tensor | None]:
    """inplace: dx overwrites x and y overwrites dy. Both must be contiguous. This is safe because each program reads
    its tile before it writes it."""
    dx = x.detach() if inplace else x.new_empty(*x.shape)
    y = (dy if inplace else x.new_empty(*x.shape)) if emit else None
    if size := dy.numel():
        columns = dy.shape[-1]
        launch, tiles = _backward(columns, activation, emit, dy.device)
        (dy, dy_stride), (x, x_stride) = as_rows_with_stride(dy, columns), as_rows_with_stride(x, columns)
        launch(size // columns * tiles, dy, x, dx, dx if y is None else y, dy_stride, x_stride)
    return dx, y


def _fake_backward(dy, x, activation, emit):
    return x.new_empty(x.shape), x.new_empty(x.shape) if emit else None


PLAIN_SHARDING = RowSharding({"x": 0, "y": 0, "dy": 0, "dx": 0}, columns="x")
plain_activation_forward = register_op("plain_activation", _launch_forward, None, PLAIN_SHARDING, outputs=("y",))
plain_activation_backward = register_op(
    "plain_activation_backward", _launch_backward, _fake_backward, PLAIN_SHARDING, outputs=("dx", "y")
)


def plain_backward_from_saved(
    dy: Tensor, x: Tensor, activation: str, emit: bool, inplace: bool
) -> tuple[Tensor, Tensor | None]:
    """plain_activation_backward for a node that saved x and, with `emit`, computed dy itself (contiguous).

    inplace: dx takes the memory of x and y that of dy, if this is their last use.
    """
    if not (inplace and x.is_contiguous() and is_last_use(x, dy)):
        return plain_activation_backward(dy, x, activation, emit)
    gradients = _launch_backward(dy, x, activation, emit, inplace=True)
    torch.autograd.graph.increment_version(x)  # so that autograd raises if another node saved it
    return gradients


class _PlainActivation(Node):
    @staticmethod
    def forward(ctx, x, activation):
        ctx.save_for_backward(x)
        ctx.activation = activation
        return plain_activation_forward(x, activation)

    @staticmethod
    def backward(ctx, dy):
        dx, _ = plain_activation_backward(dy, *ctx.saved_tensors, ctx.activation, False)
        return dx, None


def check_activation(op: str, x: Tensor, activation: str) -> None:
    """Raises ValueError for an unknown activation, and other than floats."""
    shape_of(op, "x", x)
    check_floats(op, x=x)
    if activation not in PLAIN_FUNCTIONS:
        raise ValueError(f"{op}: unknown activation {activation!r}; supported: {', '.join(PLAIN_FUNCTIONS)}")


def plain_activation(x: Tensor, activation: str) -> Tensor:
    """activation(x): x [..., I] float, any strides -> [..., I] in the same dtype.

    activation: "silu", "gelu", "gelu_tanh" or "quick_gelu". Raises ValueError for any other.
    """
    check_activation("plain_activation", x, activation)
    if not runs_kernels(x):
        return plain_activation_reference(x, activation)
    return _PlainActivation.apply(x, activation)
