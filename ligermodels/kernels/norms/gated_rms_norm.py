"""Gated RMSNorm: y = n w silu(z), n = x rstd, rstd = rsqrt(mean(x²) + eps) over the last dimension.

Backward, with s = silu(z) and u = dy s w:
    dx = rstd (u - n mean(u n));  dz = dy w n silu'(z);  dw = Σ_rows dy s n
With the gate first, y = n w, n = h rstd, h = x s, rstd = rsqrt(mean(h²) + eps), and with u = dy w:
    dh = rstd (u - n mean(u n));  dx = dh s;  dz = dh x silu'(z);  dw = Σ_rows dy n
x, z, y [..., N] any float dtype, w [N], rstd fp32; computed in fp32, one rounding at the end. Rows are the heads of a
linear attention layer, N = 128, or with the gate first those of a Mamba-2 layer, N = 2 H: rows of several heads may be
columns of a wider projection.
Moves 3 M N elements forward, 5 M N backward: bound by memory bandwidth.
The output norms of Yang, Kautz & Hatamizadeh 2024, https://arxiv.org/abs/2412.06464, and of Dao & Gu 2024,
https://arxiv.org/abs/2405.21060.
"""

import functools

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.activations.gated_activation import activate
from ligermodels.kernels.dispatch import Node, check_floats, check_shape, register_op, runs_kernels, widen
from ligermodels.kernels.launch import Launcher, cdiv, empty_where, kernel, multiprocessors
from ligermodels.kernels.norms.partial_sums import sum_partials
from ligermodels.kernels.norms.rms_norm import check_norm

TILE_ELEMENTS, WARPS = 4096, 4  # of a program at a time. To be measured
WIDE_WARPS = 16  # of rows that are wider than that
MAX_GATED_NORM_COLUMNS = 16384
PROGRAMS_PER_MULTIPROCESSOR = 4  # of the backward pass


def gated_rms_norm_reference(
    x: Tensor, z: Tensor, weight: Tensor, eps: float = 1e-6, gate_first: bool = False
) -> Tensor:
    wide, gate = widen(x), F.silu(widen(z))
    wide = wide * gate if gate_first else wide
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * widen(weight)
    return (normed if gate_first else normed * gate).to(x.dtype)


@triton.jit
def _row_offset(row, stride, HEADS: tl.constexpr, COLUMNS: tl.constexpr):
    """Offset of a row: the heads of a token are contiguous, tokens are `stride` apart."""
    return row // HEADS * stride + row % HEADS * COLUMNS


@kernel(do_not_specialize=["rows"])
def _forward_kernel(
    x_ptr, z_ptr, weight_ptr, y_ptr, x_stride, z_stride, rows, eps,
    GATE_FIRST: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One program: ROWS rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    mask = (row < rows) & (column < COLUMNS)
    x = tl.load(x_ptr + _row_offset(row, x_stride, HEADS, COLUMNS) + column, mask, other=0.0).to(tl.float32)
    z = tl.load(z_ptr + _row_offset(row, z_stride, HEADS, COLUMNS) + column, mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, column < COLUMNS, other=0.0).to(tl.float32)
    gate, _ = activate(z, "silu")
    if GATE_FIRST:
        x *= gate
    y = x * tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) / COLUMNS + eps) * weight
    if not GATE_FIRST:
        y *= gate
    tl.store(y_ptr + row * COLUMNS + column, y.to(y_ptr.dtype.element_ty), mask)


@kernel(do_not_specialize=["rows"])
def _backward_kernel(
    dy_ptr, x_ptr, z_ptr, weight_ptr, dx_ptr, dz_ptr, partials_ptr, dy_stride, x_stride, z_stride, rows, eps,
    GATE_FIRST: tl.constexpr, X_GRAD: tl.constexpr, Z_GRAD: tl.constexpr, WEIGHT_GRAD: tl.constexpr,
    HEADS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Persistent kernel: each program loops over tiles of ROWS rows and keeps its share of dw in registers."""
    column = tl.arange(0, WIDTH)[None, :]
    weight = tl.load(weight_ptr + column, column < COLUMNS, other=0.0).to(tl.float32)
    dweight = tl.zeros([ROWS, WIDTH], tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=2):
        row = tl.arange(0, ROWS)[:, None].to(tl.int64) + tile * ROWS
        mask = (row < rows) & (column < COLUMNS)
        dy = tl.load(dy_ptr + _row_offset(row, dy_stride, HEADS, COLUMNS) + column, mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + _row_offset(row, x_stride, HEADS, COLUMNS) + column, mask, other=0.0).to(tl.float32)
        z = tl.load(z_ptr + _row_offset(row, z_stride, HEADS, COLUMNS) + column, mask, other=0.0).to(tl.float32)
        gate, slope = activate(z, "silu")
        hidden = x * gate if GATE_FIRST else x
        rstd = tl.rsqrt(tl.sum(hidden * hidden, 1, keep_dims=True) / COLUMNS + eps)
        normed = hidden * rstd
        gated = dy if GATE_FIRST else dy * gate
        if WEIGHT_GRAD:
            dweight += gated * normed
        gated *= weight
        if X_GRAD or GATE_FIRST:
            dhidden = rstd * (gated - normed * (tl.sum(gated * normed, 1, keep_dims=True) / COLUMNS))
        if X_GRAD:
            dx = dhidden * gate if GATE_FIRST else dhidden
            tl.store(dx_ptr + row * COLUMNS + column, dx.to(dx_ptr.dtype.element_ty), mask)
        if Z_GRAD:
            dz = slope * (dhidden * x if GATE_FIRST else dy * weight * normed)
            tl.store(dz_ptr + row * COLUMNS + column, dz.to(dz_ptr.dtype.element_ty), mask)
    if WEIGHT_GRAD:
        partials_ptr += tl.program_id(0) * COLUMNS
        tl.store(partials_ptr + column, tl.sum(dweight, 0)[None, :], column < COLUMNS)


def _heads_with_stride(x: Tensor) -> tuple[Tensor, int]:
    """x [..., H, N] with the heads of a token contiguous, and the stride between tokens; a view where possible."""
    x = x.reshape(-1, *x.shape[-2:]) if x.ndim > 1 else x[None, None]
    if x.stride(2) != 1 or (x.shape[1] > 1 and x.stride(1) != x.shape[2]):
        x = x.contiguous()
    return x, x.stride(0)


def _heads(x: Tensor) -> int:
    return x.shape[-2] if x.ndim > 1 else 1


def _launch_forward(x: Tensor, z: Tensor, weight: Tensor, eps: float, gate_first: bool) -> Tensor:
    y, columns = x.new_empty(x.shape), x.shape[-1]
    rows = y.numel() // columns
    if rows:
        launch, tile_rows = _forward(gate_first, _heads(x), columns)
        (x, x_stride), (z, z_stride) = _heads_with_stride(x), _heads_with_stride(z)
        launch(cdiv(rows, tile_rows), x, z, weight.contiguous(), y, x_stride, z_stride, rows, eps)
    return y


def _launch_backward(
    dy: Tensor, x: Tensor, z: Tensor, weight: Tensor, eps: float, gate_first: bool, x_grad: bool, z_grad: bool,
    weight_grad: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """(dx, dz, dweight), each None where it is not needed."""
    dx, dz, dweight = gradients = empty_where((x_grad, z_grad, weight_grad), x, z, weight)
    columns = x.shape[-1]
    rows, heads = x.numel() // columns, _heads(x)
    launch, tile_rows = _backward(gate_first, heads, columns, x_grad, z_grad, weight_grad)
    programs = min(cdiv(rows, tile_rows), PROGRAMS_PER_MULTIPROCESSOR * multiprocessors(x.device))
    partials = x.new_empty(programs, columns, dtype=torch.float32) if weight_grad else x
    if rows:
        (dy, dy_stride), (x, x_stride), (z, z_stride) = map(_heads_with_stride, (dy, x, z))
        launch(
            programs, dy, x, z, weight.contiguous(), x if dx is None else dx, x if dz is None else dz, partials,
            dy_stride, x_stride, z_stride, rows, eps,
        )  # fmt: skip
    if dweight is not None:
        sum_partials(partials, dweight)
    return gradients


@functools.cache
def _forward(gate_first: bool, heads: int, columns: int) -> tuple[Launcher, int]:
    """The launcher, and the rows of a program."""
    rows, tile = _tile(columns, TILE_ELEMENTS)
    return _forward_kernel.bind(GATE_FIRST=gate_first, HEADS=heads, **tile), rows


@functools.cache
def _backward(
    gate_first: bool, heads: int, columns: int, x_grad: bool, z_grad: bool, weight_grad: bool
) -> tuple[Launcher, int]:
    """The launcher, and the rows of a tile."""
    rows, tile = _tile(columns, TILE_ELEMENTS // 2)  # it holds twice as many tensors as forward
    launch = _backward_kernel.bind(
        GATE_FIRST=gate_first, X_GRAD=x_grad, Z_GRAD=z_grad, WEIGHT_GRAD=weight_grad, HEADS=heads, **tile
    )
    return launch, rows


def _tile(columns: int, elements: int) -> tuple[int, dict[str, int]]:
    """The rows of a tile, and the constants that say so."""
    width = triton.next_power_of_2(columns)
    rows = max(1, elements // width)
    warps = WARPS if width <= TILE_ELEMENTS // 2 else WIDE_WARPS
    return rows, {"ROWS": rows, "COLUMNS": columns, "WIDTH": width, "num_warps": warps}


def _fake_backward(dy, x, z, weight, eps, gate_first, *needed):
    return empty_where(needed, x, z, weight)


_norm = register_op("gated_rms_norm", _launch_forward)
_norm_backward = register_op("gated_rms_norm_backward", _launch_backward, _fake_backward)


class _GatedRMSNorm(Node):
    @staticmethod
    def forward(ctx, x, z, weight, eps, gate_first):
        ctx.save_for_backward(x, z, weight)
        ctx.options = eps, gate_first
        return _norm(x, z, weight, eps, gate_first)

    @staticmethod
    def backward(ctx, dy):
        x, z, weight = ctx.saved_tensors
        needed = ctx.needs_input_grad[:3]
        gradients = _norm_backward(dy, x, z, weight, *ctx.options, *needed)
        return *(y if need else None for y, need in zip(gradients, needed, strict=True)), None, None


def gated_rms_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float = 1e-6, gate_first: bool = False) -> Tensor:
    """Root-mean-square norm over the last dimension, times weight and silu(z): the output norm of linear attention.

    x, z [..., N] float of one shape, weight [N] float -> [..., N] in the dtype of x. z may be a slice of a wider
    projection: [B, T, H, N] whose heads are contiguous is not copied. N is at most 16384.
    gate_first: the norm is that of x silu(z), as in Mamba-2.
    Raises ValueError if the shapes disagree, or if N is larger.
    """
    check_norm("gated_rms_norm", x, None, weight=weight)
    check_shape("gated_rms_norm", "z", z, *x.shape)
    check_floats("gated_rms_norm", z=z)
    if x.shape[-1] > MAX_GATED_NORM_COLUMNS:
        raise ValueError(
            f"gated_rms_norm: rows of x have {x.shape[-1]} elements; the kernels support at most"
            f" {MAX_GATED_NORM_COLUMNS}"
        )
    if not runs_kernels(x):
        return gated_rms_norm_reference(x, z, weight, eps, gate_first)
    return _GatedRMSNorm.apply(x, z, weight, eps, gate_first)
