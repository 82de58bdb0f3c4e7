"""LayerNorm: y = n * w + b, n = (x - mean(x)) * rstd, rstd = rsqrt(mean((x - mean(x))²) + eps); b may be absent.

Backward, with g = dy * w:
    dx = rstd * (g - mean(g) - n * mean(g * n))
    dw = Σ_rows dy * n,    db = Σ_rows dy
x, y [..., N] any float dtype, w, b [N]; sums in fp32, one rounding at the end. The variance is the mean square of the
centred values, because E[x²] - E[x]² cancels where the mean is large. stats [2, ...] fp32 holds mean, then rstd.
Moves 2 M N elements forward, 3 M N backward: bound by memory bandwidth.
Maths: Ba, Kiros & Hinton 2016, https://arxiv.org/abs/1607.06450.
"""

import functools

import torch
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.dispatch import Node, register_op, runs_kernels, widen
from ligermodels.kernels.launch import Launcher, as_rows_with_stride, cdiv, kernel
from ligermodels.kernels.norm_tiles import (
    SMALL_M_ROWS,
    BackwardNormTile,
    backward_loop,
    check_weights,
    column_sum_programs,
    load_tile,
    mask_columns,
    masked_fp32,
    masked_fp32_again,
    norm_backward_tile,
    norm_forward_tile,
    reversed_tile_rows,
    store_partial,
    store_tile,
    sum_both,
    sum_columns,
    to_fp32,
    to_fp32_again,
)
from ligermodels.kernels.partial_sums import sum_partials
from ligermodels.kernels.pdl import launch_dependents, wait_for_previous_kernel
from ligermodels.kernels.row_sharding import RowSharding

# Forward, of a row, at most: more than for RMSNorm, because fewer warps spend less on the two reductions.
LAYER_NORM_ELEMENTS_PER_THREAD = 40


def layer_norm_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    wide = widen(x)
    centred = wide - wide.mean(-1, keepdim=True)
    y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps) * widen(weight)
    return (y if bias is None else y + widen(bias)).to(x.dtype)


@kernel(do_not_specialize=["rows"])
def _forward_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, stats_ptr, x_stride, rows, eps,
    BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program normalizes ROWS whole rows."""
    wait_for_previous_kernel(PDL)
    launch_dependents(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None].to(tl.int64)
    column = tl.arange(0, WIDTH)[None, :]
    in_row = column < COLUMNS
    mask = (row < rows) & in_row
    x = load_tile(x_ptr, row, x_stride, column, mask).to(tl.float32)
    mean = tl.sum(x, 1, keep_dims=True) / COLUMNS
    centred = tl.where(in_row, x - mean, 0.0)
    rstd = tl.rsqrt(tl.sum(centred * centred, 1, keep_dims=True) / COLUMNS + eps)
    y = centred * rstd * tl.load(weight_ptr + column, in_row, other=0.0, eviction_policy="evict_last").to(tl.float32)
    if BIAS:
        y += tl.load(bias_ptr + column, in_row, other=0.0, eviction_policy="evict_last").to(tl.float32)
    store_tile(y_ptr, y, row, column, mask, COLUMNS)
    tl.store(stats_ptr + row, mean, row < rows)
    tl.store(stats_ptr + rows + row, rstd, row < rows)


@kernel(do_not_specialize=["rows"])
def _backward_kernel(
    dy_ptr, x_ptr, stats_ptr, weight_ptr, dx_ptr, partials_ptr, dweight_ptr, dbias_ptr,
    dy_stride, x_stride, rows,
    INPUT_GRAD: tl.constexpr, WEIGHT_GRAD: tl.constexpr, BIAS_GRAD: tl.constexpr, SMALL_M: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Persistent kernel: each program loops over row tiles and keeps its share of dw and db in registers.

    With SMALL_M each of the first `rows` programs takes one row; the others sum dw and db over columns.
    """
    wait_for_previous_kernel(PDL)
    launch_dependents(PDL)
    if SMALL_M:  # noqa: SIM102  a compile-time constant: without it the branch is not compiled
        if tl.program_id(0) >= rows:
            sum_columns(
                dy_ptr, x_ptr, stats_ptr, stats_ptr + rows, dweight_ptr, dbias_ptr, dy_stride, x_stride, rows,
                tl.program_id(0) - rows, True, WEIGHT_GRAD, BIAS_GRAD, COLUMNS,
            )  # fmt: skip
            return
    tiles, step = backward_loop(rows, ROWS, SMALL_M)
    column = tl.arange(0, WIDTH)[None, :]
    in_row = column < COLUMNS
    dweight = tl.zeros([ROWS, WIDTH], tl.float32)
    dbias = tl.zeros([ROWS, WIDTH], tl.float32)
    for index in tl.range(tl.program_id(0), tiles, step, num_stages=STAGES):
        row, mask = reversed_tile_rows(index, tiles, rows, in_row, ROWS)
        stored_dy = load_tile(dy_ptr, row, dy_stride, column, mask)
        stored_x = load_tile(x_ptr, row, x_stride, column, mask)
        stored_weight = tl.load(weight_ptr + column, in_row, other=0.0)
        mean = tl.load(stats_ptr + row, row < rows, other=0.0)
        rstd = tl.load(stats_ptr + rows + row, row < rows, other=0.0)
        dy, normed = masked_fp32(stored_dy, in_row), mask_columns((to_fp32(stored_x) - mean) * rstd, in_row)
        if WEIGHT_GRAD:
            dweight += dy * normed
        if BIAS_GRAD:
            dbias += dy
        g = dy * masked_fp32(stored_weight, in_row)
        g_mean, gn_mean = sum_both(g, g * normed)
        if STAGES == 1:  # without prefetching the kernel needs more registers: the weight is loaded again instead
            stored_weight = tl.load(weight_ptr + column, in_row, other=0.0, eviction_policy="evict_last")
        dy = masked_fp32_again(stored_dy, in_row)
        g = dy * masked_fp32_again(stored_weight, in_row)
        centred = mask_columns(to_fp32_again(stored_x) - mean, in_row)
        dx = rstd * (g - g_mean / COLUMNS - centred * (rstd * gn_mean / COLUMNS))
        if INPUT_GRAD:  # without it the compiler removes what only dx needs
            store_tile(dx_ptr, dx, row, column, mask, COLUMNS)
    if not SMALL_M:
        partials_ptr += tl.program_id(0) * (COLUMNS * (WEIGHT_GRAD + BIAS_GRAD))
        if WEIGHT_GRAD:
            store_partial(partials_ptr, dweight, column, in_row)
        if BIAS_GRAD:
            store_partial(partials_ptr + COLUMNS * WEIGHT_GRAD, dbias, column, in_row)


@functools.cache
def _forward(columns: int, bias: bool, device: torch.device) -> tuple[Launcher, int]:
    """The launcher of forward, and how many rows a program normalizes."""
    tile = norm_forward_tile(columns, LAYER_NORM_ELEMENTS_PER_THREAD, device)
    return _forward_kernel.bind(BIAS=bias, **tile.constants()), tile.rows


def _launch_forward(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    *batch, columns = shape = x.shape
    y = x.new_empty(*shape)
    check_weights("layer_norm", columns, weight, bias)
    launch, tile_rows = _forward(columns, bias is not None, x.device)
    stats = x.new_empty(2, *batch, dtype=torch.float32)
    x, x_stride = as_rows_with_stride(x, columns)
    rows = x.numel() // columns
    if rows:
        bias = weight if bias is None else bias
        programs = cdiv(rows, tile_rows)
        launch(programs, x, weight.contiguous(), bias.contiguous(), y, stats, x_stride, rows, eps)
    return y, stats


@functools.cache
def _backward(
    columns: int, itemsize: int, small_m: bool, device: torch.device,
    input_grad: bool, weight_grad: bool, bias_grad: bool,
) -> tuple[Launcher, BackwardNormTile, int]:  # fmt: skip
    """The launcher of backward, its tile, and how many programs sum dw and db over columns."""
    tile = norm_backward_tile(columns, 3, itemsize, small_m, device)
    launch = _backward_kernel.bind(
        INPUT_GRAD=input_grad, WEIGHT_GRAD=weight_grad, BIAS_GRAD=bias_grad, **tile.constants()
    )
    return launch, tile, column_sum_programs(columns) if small_m and (weight_grad or bias_grad) else 0


def _launch_backward(
    dy: Tensor, x: Tensor, stats: Tensor, weight: Tensor, input_grad: bool, weight_grad: bool, bias_grad: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dx, dweight, dbias), each None where it is not needed."""
    dx = x.new_empty(*x.shape) if input_grad else None
    dweight = weight.new_empty(*weight.shape) if weight_grad else None
    dbias = weight.new_empty(*weight.shape) if bias_grad else None
    columns, rows = x.shape[-1], stats.numel() // 2
    small_m = 0 < rows <= SMALL_M_ROWS
    launch, tile, column_programs = _backward(
        columns, x.itemsize, small_m, x.device, input_grad, weight_grad, bias_grad
    )
    programs = min(cdiv(rows, tile.rows), tile.max_programs)
    (dy, dy_stride), (x, x_stride) = as_rows_with_stride(dy, columns), as_rows_with_stride(x, columns)
    summed = [] if small_m else [gradient for gradient in (dweight, dbias) if gradient is not None]
    partials = stats.new_empty(programs, len(summed) * columns) if summed else stats
    if rows:
        launch(
            programs + column_programs, dy, x, stats, weight.contiguous(), x if dx is None else dx, partials,
            stats if dweight is None else dweight, stats if dbias is None else dbias,
            dy_stride, x_stride, rows,
        )  # fmt: skip
    if summed:
        sum_partials(partials, *summed)
    return dx, dweight, dbias


def _fake_forward(x, weight, bias, eps):
    return x.new_empty(x.shape), x.new_empty(2, *x.shape[:-1], dtype=torch.float32)


def _fake_backward(dy, x, stats, weight, input_grad, weight_grad, bias_grad):
    dweight, dbias = (weight.new_empty(weight.shape) if needed else None for needed in (weight_grad, bias_grad))
    return x.new_empty(x.shape) if input_grad else None, dweight, dbias


LAYER_NORM_SHARDING = RowSharding({"x": 0, "y": 0, "stats": 1, "dy": 0, "dx": 0})
layer_norm_forward = register_op(
    "layer_norm(Tensor x, Tensor weight, Tensor? bias, float eps) -> (Tensor y, Tensor stats)",
    _launch_forward,
    _fake_forward,
    LAYER_NORM_SHARDING,
)
layer_norm_backward = register_op(
    "layer_norm_backward(Tensor dy, Tensor x, Tensor stats, Tensor weight, int input_grad,"
    " int weight_grad, int bias_grad) -> (Tensor dx, Tensor dweight, Tensor dbias)",
    _launch_backward,
    _fake_backward,
    LAYER_NORM_SHARDING,
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


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """Layer norm over the last dimension.

    x [..., N] float, weight [N] float, bias [N] or None -> y [..., N] in x's dtype. Raises ValueError if the shapes
    disagree or N exceeds 65536.
    """
    if not runs_kernels(x):
        return layer_norm_reference(x, weight, bias, eps)
    return _LayerNorm.apply(x, weight, bias, eps)
