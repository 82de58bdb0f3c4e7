"""LayerNorm: y = n * w + b, n = (h - mean(h)) * rstd, rstd = rsqrt(mean((h - mean(h))²) + eps); b may be absent.

h = x, or h = x + residual in the node of linear.py. Backward, with g = dy * w:
    dh = rstd * (g - mean(g) - n * mean(g * n)) + (the gradient that reaches h on the residual stream)
    dw = Σ_rows dy * n,    db = Σ_rows dy
x, residual, y [..., N] any float dtype, w, b [N]; sums in fp32, one rounding at the end. The norm reads h after it was
rounded to the stored dtype, so that backward recomputes exactly what forward used. The variance is the mean square of
the centred values, because E[h²] - E[h]² cancels where the mean is large. stats [2, ...] fp32 holds mean, then rstd.
Moves 2 M N elements forward, 3 M N backward (4 and 4 with the residual): bound by memory bandwidth.
Maths: Ba, Kiros & Hinton 2016, https://arxiv.org/abs/1607.06450.
"""

import functools

import torch
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.dispatch import Node, promoted_dtype, register_op, runs_kernels, widen
from ligermodels.kernels.launch import Launcher, as_rows_with_stride, cdiv, kernel
from ligermodels.kernels.norms.norm_tiles import (
    SMALL_M_ROWS,
    BackwardNormTile,
    backward_loop,
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
from ligermodels.kernels.norms.partial_sums import sum_partials
from ligermodels.kernels.norms.rms_norm import check_norm
from ligermodels.kernels.pdl import launch_dependents, wait_for_previous_kernel
from ligermodels.kernels.row_sharding import RowSharding

# Forward, of a row, at most; without the residual more than for RMSNorm, because fewer warps spend less on the two
# reductions; with it as many.
LAYER_NORM_ELEMENTS_PER_THREAD = {False: 40, True: 18}


def layer_norm_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    wide = widen(x)
    centred = wide - wide.mean(-1, keepdim=True)
    y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps) * widen(weight)
    return (y if bias is None else y + widen(bias)).to(x.dtype)


@kernel(do_not_specialize=["rows"])
def _forward_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, hidden_ptr, stats_ptr, x_stride, residual_stride, rows, eps,
    ADD: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program normalizes ROWS whole rows."""
    wait_for_previous_kernel(PDL)
    launch_dependents(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None].to(tl.int64)
    column = tl.arange(0, WIDTH)[None, :]
    in_row = column < COLUMNS
    mask = (row < rows) & in_row
    hidden = load_tile(x_ptr, row, x_stride, column, mask).to(tl.float32)
    if ADD:
        hidden += load_tile(residual_ptr, row, residual_stride, column, mask).to(tl.float32)
        stored = hidden.to(hidden_ptr.dtype.element_ty)
        tl.store(hidden_ptr + row * COLUMNS + column, stored, mask)
        hidden = stored.to(tl.float32)
    mean = tl.sum(hidden, 1, keep_dims=True) / COLUMNS
    centred = tl.where(in_row, hidden - mean, 0.0)
    rstd = tl.rsqrt(tl.sum(centred * centred, 1, keep_dims=True) / COLUMNS + eps)
    y = centred * rstd * tl.load(weight_ptr + column, in_row, other=0.0, eviction_policy="evict_last").to(tl.float32)
    if BIAS:
        y += tl.load(bias_ptr + column, in_row, other=0.0, eviction_policy="evict_last").to(tl.float32)
    store_tile(y_ptr, y, row, column, mask, COLUMNS)
    tl.store(stats_ptr + row, mean, row < rows)
    tl.store(stats_ptr + rows + row, rstd, row < rows)


@kernel(do_not_specialize=["rows"])
def _backward_kernel(
    dy_ptr, dhidden_ptr, hidden_ptr, stats_ptr, weight_ptr, bias_ptr, dx_ptr, partials_ptr, dweight_ptr, dbias_ptr,
    y_ptr, dy_stride, dhidden_stride, hidden_stride, rows,
    ADD: tl.constexpr, BIAS: tl.constexpr, INPUT_GRAD: tl.constexpr, WEIGHT_GRAD: tl.constexpr, BIAS_GRAD: tl.constexpr,
    EMIT: tl.constexpr, SMALL_M: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Persistent kernel: each program loops over row tiles and keeps its share of dw and db in registers.

    BIAS: y, which is computed again with EMIT, has a bias.
    With SMALL_M each of the first `rows` programs takes one row; the others sum dw and db over columns.
    """
    wait_for_previous_kernel(PDL)
    launch_dependents(PDL)
    if SMALL_M:  # noqa: SIM102  a compile-time constant: without it the branch is not compiled
        if tl.program_id(0) >= rows:
            sum_columns(
                dy_ptr, hidden_ptr, stats_ptr, stats_ptr + rows, dweight_ptr, dbias_ptr, dy_stride, hidden_stride, rows,
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
        stored_hidden = load_tile(hidden_ptr, row, hidden_stride, column, mask)
        stored_weight = tl.load(weight_ptr + column, in_row, other=0.0)
        mean = tl.load(stats_ptr + row, row < rows, other=0.0)
        rstd = tl.load(stats_ptr + rows + row, row < rows, other=0.0)
        dy, normed = masked_fp32(stored_dy, in_row), mask_columns((to_fp32(stored_hidden) - mean) * rstd, in_row)
        if WEIGHT_GRAD:
            dweight += dy * normed
        if BIAS_GRAD:
            dbias += dy
        g = dy * masked_fp32(stored_weight, in_row)
        g_mean, gn_mean = sum_both(g, g * normed)
        if STAGES == 1:  # without prefetching the kernel needs more registers: the weight is loaded again instead
            stored_weight = tl.load(weight_ptr + column, in_row, other=0.0, eviction_policy="evict_last")
        dy, weight = masked_fp32_again(stored_dy, in_row), masked_fp32_again(stored_weight, in_row)
        g = dy * weight
        centred = mask_columns(to_fp32_again(stored_hidden) - mean, in_row)
        if EMIT:
            y = centred * rstd * weight
            if BIAS:
                y += tl.load(bias_ptr + column, in_row, other=0.0).to(tl.float32)
            store_tile(y_ptr, y, row, column, mask, COLUMNS)
        dx = rstd * (g - g_mean / COLUMNS - centred * (rstd * gn_mean / COLUMNS))
        if ADD:
            dx += load_tile(dhidden_ptr, row, dhidden_stride, column, mask).to(tl.float32)
        if INPUT_GRAD:  # without it the compiler removes what only dx needs
            store_tile(dx_ptr, dx, row, column, mask, COLUMNS)
    if not SMALL_M:
        partials_ptr += tl.program_id(0) * (COLUMNS * (WEIGHT_GRAD + BIAS_GRAD))
        if WEIGHT_GRAD:
            store_partial(partials_ptr, dweight, column, in_row)
        if BIAS_GRAD:
            store_partial(partials_ptr + COLUMNS * WEIGHT_GRAD, dbias, column, in_row)


@functools.cache
def _forward(columns: int, add: bool, bias: bool, device: torch.device) -> tuple[Launcher, int]:
    """The launcher of forward, and how many rows a program normalizes."""
    tile = norm_forward_tile(columns, LAYER_NORM_ELEMENTS_PER_THREAD[add], device)
    return _forward_kernel.bind(ADD=add, BIAS=bias, **tile.constants()), tile.rows


def _launch_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, hidden, stats); y is in `dtype`, or in the dtype of the sum. Without a residual, hidden is y itself."""
    *batch, columns = shape = x.shape
    add = residual is not None
    wide = x.dtype if residual is None else promoted_dtype(x, residual)
    y = x.new_empty(*shape, dtype=dtype or wide)
    hidden = y if residual is None else x.new_empty(*shape, dtype=wide)
    launch, tile_rows = _forward(columns, add, bias is not None, x.device)
    stats = x.new_empty(2, *batch, dtype=torch.float32)
    x, x_stride = as_rows_with_stride(x, columns)
    residual, residual_stride = (x, x_stride) if residual is None else as_rows_with_stride(residual, columns)
    rows = x.numel() // columns
    if rows:
        bias = weight if bias is None else bias
        launch(
            cdiv(rows, tile_rows),
            x, residual, weight.contiguous(), bias.contiguous(), y, hidden, stats, x_stride, residual_stride, rows, eps,
        )  # fmt: skip
    return y, hidden, stats


def _launch_layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    y, _, stats = _launch_forward(x, None, weight, bias, eps, dtype)
    return y, stats


@functools.cache
def _backward(
    columns: int, itemsize: int, small_m: bool, device: torch.device,
    add: bool, bias: bool, input_grad: bool, weight_grad: bool, bias_grad: bool, emit: bool,
) -> tuple[Launcher, BackwardNormTile, int]:  # fmt: skip
    """The launcher of backward, its tile, and how many programs sum dw and db over columns."""
    tile = norm_backward_tile(columns, 3 + add + bias, itemsize, small_m, device)
    launch = _backward_kernel.bind(
        ADD=add, BIAS=bias, INPUT_GRAD=input_grad, WEIGHT_GRAD=weight_grad, BIAS_GRAD=bias_grad, EMIT=emit,
        **tile.constants(),
    )  # fmt: skip
    return launch, tile, column_sum_programs(columns) if small_m and (weight_grad or bias_grad) else 0


def _launch_backward(
    dy: Tensor, dhidden: Tensor | None, hidden: Tensor, stats: Tensor, weight: Tensor, bias: Tensor | None,
    input_grad: int, weight_grad: int, bias_grad: int, emit: int,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """(dx, dweight, dbias, y), each None where it is not needed.

    emit: also return y, recomputed in the dtype of dy; only y depends on the bias.
    """
    dx = hidden.new_empty(*hidden.shape) if input_grad else None
    dhidden = dhidden if input_grad else None  # only dx depends on it
    bias = bias if emit else None
    dweight = weight.new_empty(*weight.shape) if weight_grad else None
    dbias = weight.new_empty(*weight.shape) if bias_grad else None
    y = hidden.new_empty(*hidden.shape, dtype=dy.dtype) if emit else None
    columns, rows = hidden.shape[-1], stats.numel() // 2
    small_m = 0 < rows <= SMALL_M_ROWS
    launch, tile, column_programs = _backward(
        columns, hidden.itemsize, small_m, hidden.device, dhidden is not None, bias is not None, input_grad,
        weight_grad, bias_grad, emit,
    )  # fmt: skip
    programs = min(cdiv(rows, tile.rows), tile.max_programs)
    (dy, dy_stride), (hidden, hidden_stride) = as_rows_with_stride(dy, columns), as_rows_with_stride(hidden, columns)
    dhidden, dhidden_stride = (dy, dy_stride) if dhidden is None else as_rows_with_stride(dhidden, columns)
    summed = [] if small_m else [gradient for gradient in (dweight, dbias) if gradient is not None]
    partials = stats.new_empty(programs, len(summed) * columns) if summed else stats
    if rows:
        weight = weight.contiguous()
        launch(
            programs + column_programs, dy, dhidden, hidden, stats, weight,
            weight if bias is None else bias.contiguous(), hidden if dx is None else dx, partials,
            stats if dweight is None else dweight, stats if dbias is None else dbias, hidden if y is None else y,
            dy_stride, dhidden_stride, hidden_stride, rows,
        )  # fmt: skip
    if summed:
        sum_partials(partials, *summed)
    return dx, dweight, dbias, y


def _fake_layer_norm(x, weight, bias, eps, dtype=None):
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(2, *x.shape[:-1], dtype=torch.float32)


def _fake_add_layer_norm(x, residual, weight, bias, eps, dtype):
    hidden = x.new_empty(x.shape, dtype=promoted_dtype(x, residual))
    y, stats = _fake_layer_norm(hidden, weight, bias, eps, dtype)
    return y, hidden, stats


def _fake_backward(dy, dhidden, hidden, stats, weight, bias, input_grad, weight_grad, bias_grad, emit):
    dx = hidden.new_empty(hidden.shape) if input_grad else None
    dweight, dbias = (weight.new_empty(weight.shape) if needed else None for needed in (weight_grad, bias_grad))
    return dx, dweight, dbias, dy.new_empty(hidden.shape) if emit else None


LAYER_NORM_SHARDING = RowSharding(
    dict.fromkeys(("x", "residual", "y", "hidden", "dy", "dhidden", "dx"), 0) | {"stats": 1}
)
layer_norm_forward = register_op(
    "layer_norm", _launch_layer_norm, _fake_layer_norm, LAYER_NORM_SHARDING, outputs=("y", "stats")
)
add_layer_norm_forward = register_op(
    "add_layer_norm", _launch_forward, _fake_add_layer_norm, LAYER_NORM_SHARDING, outputs=("y", "hidden", "stats")
)
layer_norm_backward = register_op(
    "layer_norm_backward",
    _launch_backward,
    _fake_backward,
    LAYER_NORM_SHARDING,
    outputs=("dx", "dweight", "dbias", "y"),
)


class _LayerNorm(Node):
    @staticmethod
    def forward(ctx, x, weight, bias, eps):
        y, stats = layer_norm_forward(x, weight, bias, eps)
        ctx.save_for_backward(x, stats, weight)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, stats, weight = ctx.saved_tensors
        input_grad, weight_grad, bias_grad, _ = ctx.needs_input_grad
        dx, dweight, dbias, _ = layer_norm_backward(
            dy, None, x, stats, weight, None, input_grad, weight_grad, bias_grad, False
        )
        return dx if input_grad else None, dweight if weight_grad else None, dbias if bias_grad else None, None


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """Layer norm over the last dimension.

    x [..., N] float, weight [N] float, bias [N] or None -> y [..., N] in x's dtype. Raises ValueError if the shapes
    disagree or N exceeds 65536.
    """
    check_norm("layer_norm", x, None, weight=weight, bias=bias)
    if not runs_kernels(x):
        return layer_norm_reference(x, weight, bias, eps)
    return _LayerNorm.apply(x, weight, bias, eps)
