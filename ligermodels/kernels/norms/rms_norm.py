"""RMSNorm: y = h * rstd * (w + offset), rstd = rsqrt(mean(h²) + eps), where h = x, or h = x + residual (add_rms_norm).

Backward, with g = dy * (w + offset) and n = h * rstd:
    dh = rstd * (g - n * mean(g * n)) + (the gradient that reaches h on the residual stream)
    dw = Σ_rows dy * n
x, residual, y [..., N] any float dtype, w [N], rstd [..., 1] fp32; sums in fp32, one rounding at the end. The norm
reads h after it was rounded to the stored dtype, so that backward recomputes exactly what forward used. offset is 1 for
Gemma, 0 elsewhere. Without a weight, w + offset is 1.
Moves 2 M N elements forward, 3 M N backward (4 and 4 with the residual): bound by memory bandwidth.
Maths: Zhang & Sennrich 2019, https://arxiv.org/abs/1910.07467.
"""

import functools

import torch
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.dispatch import (
    Node,
    check_floats,
    check_shape,
    promoted_dtype,
    register_op,
    runs_kernels,
    shape_of,
    widen,
)
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
    sum_columns,
    to_fp32,
    to_fp32_again,
)
from ligermodels.kernels.norms.partial_sums import sum_partials
from ligermodels.kernels.pdl import launch_dependents, pdl_constants, wait_for_previous_kernel
from ligermodels.kernels.row_sharding import RowSharding

RMS_NORM_ELEMENTS_PER_THREAD = {False: 28, True: 18}  # forward, of a row, at most; without and with the residual
MAX_COLUMNS = 65536
CHUNK = 4096  # columns
CHUNKED_WIDTHS = {2 * CHUNK}  # rows of these widths are read in chunks, and a second time from the cache
CHUNKED_WARPS = 16


def check_norm(op: str, x: Tensor, residual: Tensor | None, **weights: Tensor | None) -> None:
    """Raises ValueError if x and residual differ in shape, a weight or bias is not as long as a row, a row is too long,
    or one of them is not floating point."""
    columns = shape_of(op, "x", x)[-1]
    if columns > MAX_COLUMNS:
        raise ValueError(f"{op}: rows of x have {columns} elements; the kernels support at most {MAX_COLUMNS}")
    check_shape(op, "residual", residual, *x.shape)
    for name, weight in weights.items():
        check_shape(op, name, weight, columns)
    check_floats(op, x=x, residual=residual, **weights)


def added(x: Tensor, residual: Tensor | None) -> Tensor:
    """The residual stream of a reference."""
    return x if residual is None else x + residual


def rms_norm_reference(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, offset: float = 0.0) -> Tensor:
    wide = widen(x)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        normed = normed * (widen(weight) + offset if offset else widen(weight))
    return normed.to(x.dtype)


def add_rms_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    hidden = added(x, residual)
    return rms_norm_reference(hidden, weight, eps, offset), hidden


@kernel(do_not_specialize=["rows"])
def _forward_kernel(
    x_ptr, residual_ptr, weight_ptr, y_ptr, hidden_ptr, rstd_ptr, x_stride, residual_stride, rows, eps, offset,
    ADD: tl.constexpr, SCALE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program normalizes ROWS whole rows. SCALE: there is a weight."""
    wait_for_previous_kernel(PDL)
    launch_dependents(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None].to(tl.int64)
    column = tl.arange(0, WIDTH)[None, :]
    mask = (row < rows) & (column < COLUMNS)
    hidden = load_tile(x_ptr, row, x_stride, column, mask).to(tl.float32)
    if ADD:
        hidden += load_tile(residual_ptr, row, residual_stride, column, mask).to(tl.float32)
        stored = hidden.to(hidden_ptr.dtype.element_ty)
        tl.store(hidden_ptr + row * COLUMNS + column, stored, mask)
        hidden = stored.to(tl.float32)
    if SCALE:
        weight = tl.load(weight_ptr + column, column < COLUMNS, other=0.0, eviction_policy="evict_last").to(tl.float32)
    rstd = tl.rsqrt(tl.sum(hidden * hidden, 1, keep_dims=True) / COLUMNS + eps)
    y = hidden * rstd * (weight + offset) if SCALE else hidden * rstd
    store_tile(y_ptr, y, row, column, mask, COLUMNS)
    tl.store(rstd_ptr + row, rstd, row < rows)


@kernel()
def _chunked_forward_kernel(
    x_ptr, weight_ptr, y_ptr, rstd_ptr, x_stride, eps, offset,
    SCALE: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program normalizes one row and holds one chunk of it: fewer registers double the occupancy."""
    wait_for_previous_kernel(PDL)
    launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, CHUNK)
    squares = tl.zeros([CHUNK], tl.float32)
    for first in tl.range(0, COLUMNS, CHUNK):
        x = tl.load(x_ptr + row * x_stride + first + column, eviction_policy="evict_last").to(tl.float32)
        squares += x * x
    rstd = tl.rsqrt(tl.sum(squares, 0) / COLUMNS + eps)
    tl.store(rstd_ptr + row, rstd)
    for first in tl.range(0, COLUMNS, CHUNK):
        x = tl.load(x_ptr + row * x_stride + first + column, eviction_policy="evict_first").to(tl.float32)
        if SCALE:
            weight = tl.load(weight_ptr + first + column, eviction_policy="evict_last").to(tl.float32)
        y = x * rstd * (weight + offset) if SCALE else x * rstd
        tl.store(y_ptr + row * COLUMNS + first + column, y.to(y_ptr.dtype.element_ty))


@kernel(do_not_specialize=["rows"])
def _backward_kernel(
    dy_ptr, dhidden_ptr, hidden_ptr, rstd_ptr, weight_ptr, dx_ptr, partials_ptr, dweight_ptr, y_ptr,
    dy_stride, dhidden_stride, hidden_stride, rows, offset,
    ADD: tl.constexpr, SCALE: tl.constexpr, INPUT_GRAD: tl.constexpr, WEIGHT_GRAD: tl.constexpr, EMIT: tl.constexpr,
    SMALL_M: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Persistent kernel: each program loops over row tiles and keeps its share of dw in registers.

    With SMALL_M each of the first `rows` programs takes one row; the others sum dw over columns.
    """
    wait_for_previous_kernel(PDL)
    launch_dependents(PDL)
    if SMALL_M:  # noqa: SIM102  a compile-time constant: without it the branch is not compiled
        if tl.program_id(0) >= rows:
            sum_columns(
                dy_ptr, hidden_ptr, rstd_ptr, rstd_ptr, dweight_ptr, dweight_ptr, dy_stride, hidden_stride, rows,
                tl.program_id(0) - rows, False, WEIGHT_GRAD, False, COLUMNS,
            )  # fmt: skip
            return
    tiles, step = backward_loop(rows, ROWS, SMALL_M)
    column = tl.arange(0, WIDTH)[None, :]
    in_row = column < COLUMNS
    dweight = tl.zeros([ROWS, WIDTH], tl.float32)
    for index in tl.range(tl.program_id(0), tiles, step, num_stages=STAGES):
        row, mask = reversed_tile_rows(index, tiles, rows, in_row, ROWS)
        stored_dy = load_tile(dy_ptr, row, dy_stride, column, mask)
        stored_hidden = load_tile(hidden_ptr, row, hidden_stride, column, mask)
        stored_weight = tl.load(weight_ptr + column, in_row, other=0.0) if SCALE else 1.0
        rstd = tl.load(rstd_ptr + row, row < rows, other=0.0)
        dy, normed = masked_fp32(stored_dy, in_row), mask_columns(to_fp32(stored_hidden) * rstd, in_row)
        if WEIGHT_GRAD:
            dweight += dy * normed
        weight = mask_columns(to_fp32(stored_weight) + offset, in_row) if SCALE else 1.0
        mean = tl.sum(dy * weight * normed, 1, keep_dims=True) / COLUMNS
        dy, hidden = masked_fp32_again(stored_dy, in_row), masked_fp32_again(stored_hidden, in_row)
        weight = mask_columns(to_fp32_again(stored_weight) + offset, in_row) if SCALE else 1.0
        if EMIT:
            store_tile(y_ptr, hidden * rstd * weight, row, column, mask, COLUMNS)
        dx = rstd * (dy * weight - hidden * (rstd * mean))
        if ADD:
            dx += load_tile(dhidden_ptr, row, dhidden_stride, column, mask).to(tl.float32)
        if INPUT_GRAD:  # without it the compiler removes what only dx needs
            store_tile(dx_ptr, dx, row, column, mask, COLUMNS)
    if WEIGHT_GRAD and not SMALL_M:
        store_partial(partials_ptr + tl.program_id(0) * COLUMNS, dweight, column, in_row)


@functools.cache
def _forward(columns: int, add: bool, scale: bool, device: torch.device) -> tuple[Launcher, int]:
    """The launcher of forward, and how many rows a program normalizes."""
    tile = norm_forward_tile(columns, RMS_NORM_ELEMENTS_PER_THREAD[add], device)
    return _forward_kernel.bind(ADD=add, SCALE=scale, **tile.constants()), tile.rows


@functools.cache
def _chunked_forward(columns: int, scale: bool, device: torch.device) -> Launcher:
    return _chunked_forward_kernel.bind(
        SCALE=scale, COLUMNS=columns, CHUNK=CHUNK, num_warps=CHUNKED_WARPS, **pdl_constants(device)
    )


def _launch_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, offset: float,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(y, hidden, rstd); y is in `dtype`, or in the dtype of the sum. Without a residual, hidden is y itself."""
    *batch, columns = shape = x.shape
    add = residual is not None
    wide = x.dtype if residual is None else promoted_dtype(x, residual)
    y = x.new_empty(*shape, dtype=dtype or wide)
    hidden = y if residual is None else x.new_empty(*shape, dtype=wide)
    scale = weight is not None
    launch, tile_rows = _forward(columns, add, scale, x.device)
    rstd = x.new_empty(*batch, 1, dtype=torch.float32)
    x, x_stride = as_rows_with_stride(x, columns)
    residual, residual_stride = (x, x_stride) if residual is None else as_rows_with_stride(residual, columns)
    weight = x if weight is None else weight.contiguous()
    rows = x.numel() // columns
    if rows and not add and columns in CHUNKED_WIDTHS:
        _chunked_forward(columns, scale, x.device)(rows, x, weight, y, rstd, x_stride, eps, offset)
    elif rows:
        launch(
            cdiv(rows, tile_rows),
            x, residual, weight, y, hidden, rstd, x_stride, residual_stride, rows, eps, offset,
        )  # fmt: skip
    return y, hidden, rstd


def _launch_rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, offset: float, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    y, _, rstd = _launch_forward(x, None, weight, eps, offset, dtype)
    return y, rstd


@functools.cache
def _backward(
    columns: int, itemsize: int, small_m: bool, device: torch.device,
    add: bool, scale: bool, input_grad: bool, weight_grad: bool, emit: bool,
) -> tuple[Launcher, BackwardNormTile, int]:  # fmt: skip
    """The launcher of backward, its tile, and how many programs sum dw over columns."""
    tile = norm_backward_tile(columns, 3 + add, itemsize, small_m, device)
    launch = _backward_kernel.bind(
        ADD=add, SCALE=scale, INPUT_GRAD=input_grad, WEIGHT_GRAD=weight_grad, EMIT=emit, **tile.constants()
    )
    return launch, tile, column_sum_programs(columns) if small_m and weight_grad else 0


def _launch_backward(
    dy: Tensor, dhidden: Tensor | None, hidden: Tensor, rstd: Tensor, weight: Tensor | None, offset: float,
    input_grad: int, weight_grad: int, emit: int,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """(dx, dweight, y), each None where it is not needed.

    emit: also return y, recomputed in the dtype of dy.
    """
    dx = hidden.new_empty(*hidden.shape) if input_grad else None
    dhidden = dhidden if input_grad else None  # only dx depends on it
    y = hidden.new_empty(*hidden.shape, dtype=dy.dtype) if emit else None
    dweight = weight.new_empty(*weight.shape) if weight_grad and weight is not None else None
    add, columns, rows = dhidden is not None, hidden.shape[-1], rstd.numel()
    small_m = 0 < rows <= SMALL_M_ROWS
    launch, tile, column_programs = _backward(
        columns, hidden.itemsize, small_m, hidden.device, add, weight is not None, input_grad, weight_grad, emit
    )
    programs = min(cdiv(rows, tile.rows), tile.max_programs)
    (dy, dy_stride), (hidden, hidden_stride) = as_rows_with_stride(dy, columns), as_rows_with_stride(hidden, columns)
    dhidden, dhidden_stride = (dy, dy_stride) if dhidden is None else as_rows_with_stride(dhidden, columns)
    summed = [] if dweight is None or small_m else [dweight]
    partials = rstd.new_empty(programs, columns) if summed else rstd
    if rows:
        launch(
            programs + column_programs, dy, dhidden, hidden, rstd, hidden if weight is None else weight.contiguous(),
            hidden if dx is None else dx, partials, rstd if dweight is None else dweight, hidden if y is None else y,
            dy_stride, dhidden_stride, hidden_stride, rows, offset,
        )  # fmt: skip
    if summed:
        sum_partials(partials, *summed)
    return dx, dweight, y


def _fake_rms_norm(x, weight, eps, offset, dtype=None):
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)


def _fake_add_rms_norm(x, residual, weight, eps, offset, dtype=None):
    hidden = x.new_empty(x.shape, dtype=promoted_dtype(x, residual))
    y, rstd = _fake_rms_norm(hidden, weight, eps, offset, dtype)
    return y, hidden, rstd


def _fake_backward(dy, dhidden, hidden, rstd, weight, offset, input_grad, weight_grad, emit):
    dx = hidden.new_empty(hidden.shape) if input_grad else None
    dweight = weight.new_empty(weight.shape) if weight_grad else None
    return dx, dweight, dy.new_empty(hidden.shape) if emit else None


NORM_SHARDING = RowSharding(dict.fromkeys(("x", "residual", "y", "hidden", "rstd", "dy", "dhidden", "dx"), 0))
rms_norm_forward = register_op("rms_norm", _launch_rms_norm, _fake_rms_norm, NORM_SHARDING, outputs=("y", "rstd"))
add_rms_norm_forward = register_op(
    "add_rms_norm", _launch_forward, _fake_add_rms_norm, NORM_SHARDING, outputs=("y", "hidden", "rstd")
)
rms_norm_backward = register_op(
    "rms_norm_backward", _launch_backward, _fake_backward, NORM_SHARDING, outputs=("dx", "dweight", "y")
)


class _RMSNorm(Node):
    @staticmethod
    def forward(ctx, x, weight, eps, offset):
        y, rstd = rms_norm_forward(x, weight, eps, offset)
        ctx.save_for_backward(x, rstd, weight)
        ctx.offset = offset
        return y

    @staticmethod
    def backward(ctx, dy):
        x, rstd, weight = ctx.saved_tensors
        input_grad, weight_grad, *_ = ctx.needs_input_grad
        dx, dweight, _ = rms_norm_backward(dy, None, x, rstd, weight, ctx.offset, input_grad, weight_grad, False)
        return dx if input_grad else None, dweight if weight_grad else None, None, None


class _AddRMSNorm(Node):
    @staticmethod
    def forward(ctx, x, residual, weight, eps, offset):
        ctx.set_materialize_grads(False)  # for DTensors autograd would make zeros that are none
        y, hidden, rstd = add_rms_norm_forward(x, residual, weight, eps, offset)
        ctx.save_for_backward(hidden, rstd, weight)
        ctx.offset = offset
        return y, hidden

    @staticmethod
    def backward(ctx, dy, dhidden):
        hidden, rstd, weight = ctx.saved_tensors
        needs_x, needs_residual, needs_weight, *_ = ctx.needs_input_grad
        if dy is None:  # only the sum was used
            dx, dweight = dhidden, torch.zeros_like(weight) if needs_weight else None
        else:
            dx, dweight, _ = rms_norm_backward(
                dy, dhidden, hidden, rstd, weight, ctx.offset, needs_x or needs_residual, needs_weight, False
            )
        return dx if needs_x else None, dx if needs_residual else None, dweight if needs_weight else None, None, None


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, offset: float = 0.0) -> Tensor:
    """Root-mean-square norm over the last dimension: x * rsqrt(mean(x²) + eps) * (weight + offset).

    x [..., N] float, weight [N] float or None, which scales by 1 -> y [..., N] in x's dtype. Raises ValueError if the
    shapes disagree, if N exceeds 65536, and for an offset without a weight.
    """
    if weight is None:
        check_offset("rms_norm", offset)
    check_norm("rms_norm", x, None, weight=weight)
    if not runs_kernels(x):
        return rms_norm_reference(x, weight, eps, offset)
    return _RMSNorm.apply(x, weight, eps, offset)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """RMSNorm of the sum x + residual, and the sum itself, which is the new residual stream.

    x, residual [..., N], weight [N] or None, which scales by 1 -> (y [..., N], hidden [..., N]), both in the dtype of
    x + residual. Raises ValueError if the shapes disagree, if N exceeds 65536, and for an offset without a weight.
    """
    if weight is None:
        check_offset("add_rms_norm", offset)
    check_norm("add_rms_norm", x, residual, weight=weight)
    if not runs_kernels(x):
        return add_rms_norm_reference(x, residual, weight, eps, offset)
    return _AddRMSNorm.apply(x, residual, weight, eps, offset)


def check_offset(op: str, offset: float) -> None:
    """Raises ValueError if a norm without a weight has an offset, which would have no effect."""
    if offset:
        raise ValueError(f"{op}: offset is {offset:g}, but there is no weight to add it to; leave it at 0")
