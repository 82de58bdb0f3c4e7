"""LayerNorm: y = n * w + b, n = (x - mean(x)) * rstd, rstd = rsqrt(mean((x - mean(x))²) + eps); b may be absent.

Backward, with g = dy * w:
    dx = rstd * (g - mean(g) - n * mean(g * n))
    dw = Σ_rows dy * n,    db = Σ_rows dy
x, y [..., N] any float dtype, w, b [N]; sums in fp32, the variance's over centred values, because E[x²] - E[x]² cancels
where the mean is large; one rounding at the end. stats [2, rows] fp32: mean, then rstd.
Moves 2 M N elements forward, 3 M N backward: bound by memory bandwidth.
Maths: Ba, Kiros & Hinton 2016, https://arxiv.org/abs/1607.06450.
"""

import functools

import torch
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.dispatch import Node, register, runs_kernels, widen
from ligermodels.kernels.launch import Launcher, cdiv, kernel, rows_of
from ligermodels.kernels.norm_tiles import (
    FEW_ROWS,
    backward_tile,
    check_weights,
    forward_tile,
    programs_over_columns,
    sum_both,
    sum_columns,
    widened,
    widened_again,
    zero_beyond,
)
from ligermodels.kernels.partial_sums import sum_partials
from ligermodels.kernels.pdl import launch_dependents, wait_for_previous_kernel

FORWARD_ELEMENTS = 40  # of a row a thread, at most: fewer warps wait for each other's two sums


def layer_norm_reference(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    wide = widen(x)
    centred = wide - wide.mean(-1, keepdim=True)
    y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps) * widen(weight)
    return (y if bias is None else y + widen(bias)).to(x.dtype)


@kernel(do_not_specialize=["rows"])
def _forward_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, stats_ptr, x_stride, rows, eps,
    BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program norms ROWS whole rows."""
    wait_for_previous_kernel(PDL)
    launch_dependents(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None].to(tl.int64)
    column = tl.arange(0, WIDTH)[None, :]
    in_row = column < COLUMNS
    mask = (row < rows) & in_row
    x = tl.load(x_ptr + row * x_stride + column, mask, other=0.0).to(tl.float32)
    mean = tl.sum(x, 1, keep_dims=True) / COLUMNS
    centred = tl.where(in_row, x - mean, 0.0)
    rstd = tl.rsqrt(tl.sum(centred * centred, 1, keep_dims=True) / COLUMNS + eps)
    y = centred * rstd * tl.load(weight_ptr + column, in_row, other=0.0, eviction_policy="evict_last").to(tl.float32)
    if BIAS:
        y += tl.load(bias_ptr + column, in_row, other=0.0, eviction_policy="evict_last").to(tl.float32)
    tl.store(y_ptr + row * COLUMNS + column, y.to(y_ptr.dtype.element_ty), mask)
    tl.store(stats_ptr + row, mean, row < rows)
    tl.store(stats_ptr + rows + row, rstd, row < rows)


@kernel(do_not_specialize=["rows"])
def _backward_kernel(
    dy_ptr, x_ptr, stats_ptr, weight_ptr, dx_ptr, partials_ptr, dweight_ptr, dbias_ptr,
    dy_stride, x_stride, rows,
    INPUT_GRAD: tl.constexpr, WEIGHT_GRAD: tl.constexpr, BIAS_GRAD: tl.constexpr, FEW: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One of a few persistent programs: strides over row tiles, keeps its share of dw and db in registers.

    From the last tile to the first: what was written or read last before may still be in the cache. Of FEW rows each
    program takes one; those beyond sum dw and db over columns instead.
    """
    wait_for_previous_kernel(PDL)
    launch_dependents(PDL)
    if FEW:  # noqa: SIM102  a constant: of other kernels the branch is no part
        if tl.program_id(0) >= rows:
            sum_columns(
                dy_ptr, x_ptr, stats_ptr, stats_ptr + rows, dweight_ptr, dbias_ptr, dy_stride, x_stride, rows,
                tl.program_id(0) - rows, True, WEIGHT_GRAD, BIAS_GRAD, COLUMNS,
            )  # fmt: skip
            return
    programs = rows if FEW else tl.num_programs(0)
    tiles = tl.cdiv(rows, ROWS)
    column = tl.arange(0, WIDTH)[None, :]
    in_row = column < COLUMNS
    dweight = tl.zeros([ROWS, WIDTH], tl.float32)
    dbias = tl.zeros([ROWS, WIDTH], tl.float32)
    for i in tl.range(tl.program_id(0), tiles, programs, num_stages=STAGES):
        row = tl.arange(0, ROWS)[:, None].to(tl.int64) + (tiles - 1 - i) * ROWS
        mask = in_row if ROWS == 1 else (row < rows) & in_row
        stored_dy = tl.load(dy_ptr + row * dy_stride + column, mask, other=0.0)
        stored_x = tl.load(x_ptr + row * x_stride + column, mask, other=0.0)
        stored_weight = tl.load(weight_ptr + column, in_row, other=0.0)
        mean = tl.load(stats_ptr + row, row < rows, other=0.0)
        rstd = tl.load(stats_ptr + rows + row, row < rows, other=0.0)
        dy, normed = zero_beyond(widened(stored_dy), in_row), zero_beyond((widened(stored_x) - mean) * rstd, in_row)
        if WEIGHT_GRAD:
            dweight += dy * normed
        if BIAS_GRAD:
            dbias += dy
        g = dy * zero_beyond(widened(stored_weight), in_row)
        g_mean, gn_mean = sum_both(g, g * normed)
        if STAGES == 1:  # prefetching nothing takes more registers: not even the weight is kept
            stored_weight = tl.load(weight_ptr + column, in_row, other=0.0, eviction_policy="evict_last")
        dy = zero_beyond(widened_again(stored_dy), in_row)
        g = dy * zero_beyond(widened_again(stored_weight), in_row)
        centred = zero_beyond(widened_again(stored_x) - mean, in_row)
        dx = rstd * (g - g_mean / COLUMNS - centred * (rstd * gn_mean / COLUMNS))
        if INPUT_GRAD:  # the compiler drops what only an unwanted dx needs
            tl.store(dx_ptr + row * COLUMNS + column, dx.to(dx_ptr.dtype.element_ty), mask)
    if not FEW:
        partials_ptr += tl.program_id(0) * (COLUMNS * (WEIGHT_GRAD + BIAS_GRAD))
        if WEIGHT_GRAD:
            tl.store(partials_ptr + column, tl.sum(dweight, 0)[None, :], in_row)
        if BIAS_GRAD:
            tl.store(partials_ptr + COLUMNS * WEIGHT_GRAD + column, tl.sum(dbias, 0)[None, :], in_row)


@functools.cache
def _forward(columns: int, bias: bool, device: torch.device) -> tuple[Launcher, int]:
    """What launches forward, and how many rows a program norms."""
    tile = forward_tile(columns, FORWARD_ELEMENTS, device)
    return _forward_kernel.bind(BIAS=bias, **tile), tile["ROWS"]


def _launch_forward(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    y = x.new_empty(*x.shape)
    columns = x.shape[-1]
    check_weights("layer_norm", columns, weight, bias)
    launch, tile_rows = _forward(columns, bias is not None, x.device)
    x, x_stride = rows_of(x, columns)
    rows = x.numel() // columns
    stats = x.new_empty(2, rows, dtype=torch.float32)
    if rows:
        bias = weight if bias is None else bias
        programs = cdiv(rows, tile_rows)
        launch(programs, x, weight.contiguous(), bias.contiguous(), y, stats, x_stride, rows, eps)
    return y, stats


@functools.cache
def _backward(
    columns: int, itemsize: int, few: bool, device: torch.device,
    input_grad: bool, weight_grad: bool, bias_grad: bool,
) -> tuple[Launcher, int, int, int]:  # fmt: skip
    """What launches backward, how many rows a tile has, how many programs take rows at most, and how many columns."""
    tile, most = backward_tile(columns, 3, itemsize, few, device)
    launch = _backward_kernel.bind(INPUT_GRAD=input_grad, WEIGHT_GRAD=weight_grad, BIAS_GRAD=bias_grad, **tile)
    return launch, tile["ROWS"], most, programs_over_columns(columns) * (few and (weight_grad or bias_grad))


def _launch_backward(
    dy: Tensor, x: Tensor, stats: Tensor, weight: Tensor, input_grad: bool, weight_grad: bool, bias_grad: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    dx = x.new_empty(*x.shape) if input_grad else None
    dweight = weight.new_empty(*weight.shape) if weight_grad else None
    dbias = weight.new_empty(*weight.shape) if bias_grad else None
    columns, rows = x.shape[-1], stats.shape[1]
    few = 0 < rows <= FEW_ROWS
    launch, tile_rows, most, over_columns = _backward(
        columns, x.itemsize, few, x.device, input_grad, weight_grad, bias_grad
    )
    programs = min(cdiv(rows, tile_rows), most)
    (dy, dy_stride), (x, x_stride) = rows_of(dy, columns), rows_of(x, columns)
    summed = [] if few else [gradient for gradient in (dweight, dbias) if gradient is not None]
    partials = stats.new_empty(programs, len(summed) * columns) if summed else stats
    if rows:
        launch(
            programs + over_columns, dy, x, stats, weight.contiguous(), x if dx is None else dx, partials,
            stats if dweight is None else dweight, stats if dbias is None else dbias,
            dy_stride, x_stride, rows,
        )  # fmt: skip
    if summed:
        sum_partials(partials, *summed)
    return dx, dweight, dbias


def _fake_forward(x, weight, bias, eps):
    return x.new_empty(x.shape), x.new_empty(2, x.numel() // x.shape[-1], dtype=torch.float32)


def _fake_backward(dy, x, stats, weight, input_grad, weight_grad, bias_grad):
    dweight, dbias = (weight.new_empty(weight.shape) if needed else None for needed in (weight_grad, bias_grad))
    return x.new_empty(x.shape) if input_grad else None, dweight, dbias


layer_norm_forward = register(
    "layer_norm(Tensor x, Tensor weight, Tensor? bias, float eps) -> (Tensor y, Tensor stats)",
    _launch_forward,
    _fake_forward,
)
layer_norm_backward = register(
    "layer_norm_backward(Tensor dy, Tensor x, Tensor stats, Tensor weight, bool input_grad,"
    " bool weight_grad, bool bias_grad) -> (Tensor dx, Tensor dweight, Tensor dbias)",
    _launch_backward,
    _fake_backward,
)


class _LayerNorm(Node):
    @staticmethod
    def forward(ctx, x, weight, bias, eps):
        y, stats = layer_norm_forward(x, weight, bias, eps)
        ctx.save_for_backward(x, stats, weight)
        return y

    @staticmethod
    def backward(ctx, dy):
        input_grad, weight_grad, bias_grad, _ = ctx.needs_input_grad
        dx, dweight, dbias = layer_norm_backward(dy, *ctx.saved_tensors, input_grad, weight_grad, bias_grad)
        return dx if input_grad else None, dweight if weight_grad else None, dbias if bias_grad else None, None


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Layer norm over the last dimension.

    x [..., N] float, weight [N] float, bias [N] or None -> y [..., N] in x's dtype. Raises ValueError where the shapes
    disagree and where N exceeds 65536.
    """
    if not runs_kernels(x):
        return layer_norm_reference(x, weight, bias, eps)
    return _LayerNorm.apply(x, weight, bias, eps)
