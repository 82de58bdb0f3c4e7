"""A linear of few rows, alone or with the norm or the gated activation before it, in one kernel: a step of generation.

    few_rows_linear          y = x Wᵀ + b
    few_rows_norm_linear     y = rms_norm(h) Wᵀ + b, h = x + residual
    few_rows_gated_linear    y = p Wᵀ + b, p = d act(m gate) * up
x [M, K] (gate_up [M, 2 K]), W [N, K], b [N] -> y [M, N], any float dtype. Forward only.
Every program multiplies some rows of W by all of x. The norm needs no pass of its own: its factor of each row,
1 / rms(h), is constant along K, so that a program sums h² beside the products and multiplies at the end. The input,
which is small and stays in the cache, is computed anew by each program. All in fp32, rounded once (h before the norm,
because the residual stream goes on with it): more exact than norm or activation, and then a linear.
Moves N K elements: bound by memory bandwidth. Products are not by tensor cores, whose tiles have more rows. From about
eight rows on that would be the limit.

W in NF4 is dequantised where it is multiplied, by a kernel whose tile has three dimensions: rows of W, blocks of 64
columns, bytes of a block. The two elements of a byte are multiplied one after the other by their own columns of x, so
that no tile is rearranged, and a block's scale is computed beside the bytes that it scales. Elements are rounded to y's
dtype before they are multiplied: they are the numbers of `nf4_dequantize`. Bound by the look-up of values, two for each
byte: one row of 4096 x 28672 takes 77 us on an H200, where the same weight in bf16 takes 55, and dequantising it before
a dense product 146.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.activations.gated_activation import activate, check_gate_up
from ligermodels.kernels.dispatch import (
    autocast,
    check_dtypes,
    check_floats,
    check_linear,
    promoted_dtype,
    refuse_gradients,
    register_op,
    runs_kernels,
)
from ligermodels.kernels.launch import Launcher, as_rows, cdiv, kernel, multiprocessors
from ligermodels.kernels.linear.linear import gated_linear_reference, low_rank_linear_reference, norm_linear_reference
from ligermodels.kernels.norms.norm_tiles import to_fp32
from ligermodels.kernels.norms.rms_norm import check_norm, check_offset
from ligermodels.kernels.pdl import launch_dependents, pdl_constants, wait_for_previous_kernel
from ligermodels.kernels.quant.nf4 import Nf4, nf4_scales, sections
from ligermodels.kernels.quant.quantised_weight import Weight, aligned, operand

FEW_ROWS = 2  # up to so many, layers take these kernels instead of cuBLAS, which is faster from four on (H200)
MAX_ROWS = 8  # of x: more would not fit into the registers
STEP_BYTES = 1024  # of each row of W that a program reads in one step
COLUMNS = {1: 8, 2: 8, 4: 4, 8: 2}  # rows of W that a program multiplies, at most; by rows of x, at most
MIN_COLUMNS = 2
WARPS, STAGES = 4, 3
LINEAR_PROGRAMS_PER_MULTIPROCESSOR = 2  # at least, if there are enough rows of W


class Nf4Tile(NamedTuple):
    """What a program reads in one step: rows of W, blocks of each."""

    columns: int
    blocks: int
    warps: int


NF4_TILES = {2: Nf4Tile(8, 8, 4), 4: Nf4Tile(4, 8, 4), 8: Nf4Tile(2, 8, 4)}  # by rows of x, at most; of two on an H200
MIN_NF4_COLUMNS = 2
NF4_PROGRAMS_PER_MULTIPROCESSOR = 2  # at least, if there are enough rows of W


@kernel()
def _nf4_linear_kernel(
    x_ptr, residual_ptr, norm_ptr, weight_ptr, bias_ptr, hidden_ptr, y_ptr, x_stride, residual_stride,
    columns, eps, offset, nested_scale, nested_offset, scales, codes, ROWS: tl.constexpr,
    DEPTH: tl.constexpr, NORM: tl.constexpr, ADD: tl.constexpr, SCALE: tl.constexpr, BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr, GATE_MULTIPLIER: tl.constexpr, DOWN_MULTIPLIER: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program computes COLUMNS columns of all ROWS rows of y. ADD: there is a residual; SCALE: a norm's weight.

    weight_ptr has the bytes of a quantised weight, whose sections begin at nested_scale to codes.
    """
    wait_for_previous_kernel(PDL)
    launch_dependents(PDL)
    values_ptr = weight_ptr.to(tl.pointer_type(tl.float32))
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    exists = (column < columns)[:, None]
    weight_row = column.to(tl.int64)[:, None]
    byte = tl.arange(0, 32)
    total = ()
    squares = ()
    for _row in tl.static_range(ROWS):
        total += (tl.zeros([COLUMNS, BLOCKS, 32], tl.float32),)  # type: ignore[assignment]
        squares += (tl.zeros([BLOCKS, 32], tl.float32),)  # type: ignore[assignment]
    for first in range(0, DEPTH // 64, BLOCKS):
        block = first + tl.arange(0, BLOCKS)
        mask = exists & (block < DEPTH // 64)[None, :]
        number = weight_row * (DEPTH // 64) + block[None, :]
        pair = tl.load(weight_ptr + codes + number[:, :, None] * 32 + byte[None, None, :], mask[:, :, None], other=0)
        factor = nf4_scales(weight_ptr, weight_row, number, mask, nested_scale, nested_offset, scales)
        for second in tl.static_range(2):
            code = (pair & 15 if second else pair >> 4).to(tl.int32)
            weight = (tl.load(values_ptr + code) * factor[:, :, None]).to(y_ptr.dtype.element_ty).to(tl.float32)
            k = block[:, None] * 64 + byte[None, :] * 2 + second
            inside = k < DEPTH
            scale = tl.load(norm_ptr + k, inside, other=0.0).to(tl.float32) + offset if SCALE else 1.0
            new_total = ()
            new_squares = ()
            for row in tl.static_range(ROWS):
                x, plain = few_rows_input(
                    x_ptr, residual_ptr, hidden_ptr, row, k, inside, x_stride, residual_stride, scale,
                    DEPTH, ADD, ACTIVATION, GATE_MULTIPLIER, DOWN_MULTIPLIER,
                )  # fmt: skip
                new_squares += (squares[row] + plain * plain if NORM else squares[row],)  # type: ignore[assignment]
                new_total += (total[row] + weight * x[None, :, :],)  # type: ignore[assignment]
            total = new_total
            squares = new_squares
    bias = tl.load(bias_ptr + column, column < columns, other=0.0).to(tl.float32) if BIAS else 0.0
    for row in tl.static_range(ROWS):
        y = tl.sum(tl.sum(total[row], 2), 1)
        if NORM:
            y *= tl.rsqrt(tl.sum(tl.sum(squares[row], 1), 0) / DEPTH + eps)
        tl.store(y_ptr + row * columns + column, (y + bias).to(y_ptr.dtype.element_ty), column < columns)


@functools.cache
def nf4_launcher(
    rows: int, columns: int, depth: int, device: torch.device, **constants: object
) -> tuple[Launcher, int]:
    """The launcher, and how many programs it takes. constants: those of the kernel that say what it computes."""
    tile = next(tile for at_most, tile in NF4_TILES.items() if rows <= at_most)
    width = tile.columns
    while width > MIN_NF4_COLUMNS and cdiv(columns, width) < NF4_PROGRAMS_PER_MULTIPROCESSOR * multiprocessors(device):
        width //= 2
    launch = _nf4_linear_kernel.bind(
        ROWS=rows, DEPTH=depth, COLUMNS=width, BLOCKS=min(tile.blocks, triton.next_power_of_2(depth // 64)),
        num_warps=tile.warps, **constants, **pdl_constants(device),
    )  # fmt: skip
    return launch, cdiv(columns, width)


@triton.jit
def few_rows_input(
    x_ptr, residual_ptr, hidden_ptr, row, k, inside, x_stride, residual_stride, scale,
    DEPTH: tl.constexpr, ADD: tl.constexpr, ACTIVATION: tl.constexpr, GATE_MULTIPLIER: tl.constexpr,
    DOWN_MULTIPLIER: tl.constexpr,
):  # fmt: skip
    """Columns k of a row -> (what is multiplied by the weight, what the norm squares), fp32.

    inside: which columns there are. scale: of the norm's weight. The first program stores the sum with the residual.
    """
    x = tl.load(x_ptr + row * x_stride + k, inside, other=0.0).to(tl.float32)
    if ADD:
        residual = tl.load(residual_ptr + row * residual_stride + k, inside, other=0.0).to(tl.float32)
        hidden = (x + residual).to(hidden_ptr.dtype.element_ty)
        tl.store(hidden_ptr + row * DEPTH + k, hidden, inside & (tl.program_id(0) == 0))
        x = hidden.to(tl.float32)
    if ACTIVATION is not None:
        up = tl.load(x_ptr + row * x_stride + DEPTH + k, inside, other=0.0).to(tl.float32)
        activated, _ = activate(x * GATE_MULTIPLIER, ACTIVATION)
        x = activated * up * DOWN_MULTIPLIER
    return x * scale, x


@kernel()
def _linear_kernel(
    x_ptr, residual_ptr, norm_ptr, weight_ptr, bias_ptr, hidden_ptr, y_ptr, x_stride, residual_stride, weight_stride,
    columns, eps, offset, ROWS: tl.constexpr,
    DEPTH: tl.constexpr, NORM: tl.constexpr, ADD: tl.constexpr, SCALE: tl.constexpr, BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr, GATE_MULTIPLIER: tl.constexpr, DOWN_MULTIPLIER: tl.constexpr, COLUMNS: tl.constexpr,
    STEP: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program computes COLUMNS columns of all ROWS rows of y. ADD: there is a residual; SCALE: a norm's weight."""
    wait_for_previous_kernel(PDL)
    launch_dependents(PDL)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row_ptr = weight_ptr + column.to(tl.int64)[:, None] * weight_stride
    total = ()
    squares = ()
    for _row in tl.static_range(ROWS):
        total += (tl.zeros([COLUMNS, STEP], tl.float32),)  # type: ignore[assignment]
        squares += (tl.zeros([STEP], tl.float32),)  # type: ignore[assignment]
    for start in tl.range(0, DEPTH, STEP, num_stages=STAGES):
        k = start + tl.arange(0, STEP)
        inside = k < DEPTH
        mask = (column < columns)[:, None] & inside[None, :]
        weight = to_fp32(tl.load(row_ptr + k[None, :], mask, other=0.0, eviction_policy="evict_first"))
        scale = tl.load(norm_ptr + k, inside, other=0.0).to(tl.float32) + offset if SCALE else 1.0
        new_total = ()
        new_squares = ()
        for row in tl.static_range(ROWS):
            x, plain = few_rows_input(
                x_ptr, residual_ptr, hidden_ptr, row, k, inside, x_stride, residual_stride, scale,
                DEPTH, ADD, ACTIVATION, GATE_MULTIPLIER, DOWN_MULTIPLIER,
            )  # fmt: skip
            new_squares += (squares[row] + plain * plain if NORM else squares[row],)  # type: ignore[assignment]
            new_total += (total[row] + weight * x[None, :],)  # type: ignore[assignment]
        total = new_total
        squares = new_squares
    bias = tl.load(bias_ptr + column, column < columns, other=0.0).to(tl.float32) if BIAS else 0.0
    for row in tl.static_range(ROWS):
        y = tl.sum(total[row], 1)
        if NORM:
            y *= tl.rsqrt(tl.sum(squares[row], 0) / DEPTH + eps)
        tl.store(y_ptr + row * columns + column, (y + bias).to(y_ptr.dtype.element_ty), column < columns)


@functools.cache
def _launcher(
    rows: int, columns: int, depth: int, itemsize: int, device: torch.device, **constants: object
) -> tuple[Launcher, int]:
    """The launcher, and how many programs it takes. constants: those of the kernel that say what it computes."""
    tile = columns_of_program(rows, columns, device)
    launch = _linear_kernel.bind(
        ROWS=rows, DEPTH=depth, COLUMNS=tile, STEP=STEP_BYTES // itemsize, STAGES=STAGES, num_warps=WARPS, **constants,
        **pdl_constants(device),
    )  # fmt: skip
    return launch, cdiv(columns, tile)


def columns_of_program(rows: int, columns: int, device: torch.device) -> int:
    """How many of y's columns one program computes, a power of two."""
    tile = next(most for at_most, most in COLUMNS.items() if rows <= at_most)
    while tile > MIN_COLUMNS and cdiv(columns, tile) < LINEAR_PROGRAMS_PER_MULTIPROCESSOR * multiprocessors(device):
        tile //= 2
    return tile


def _launch(
    x: Tensor, residual: Tensor | None, norm_weight: Tensor | None, weight: Tensor, columns: int, depth: int,
    groups: int, dtype: torch.dtype, bias: Tensor | None, norm: bool, eps: float, offset: float, activation: str | None,
    gate_multiplier: float, down_multiplier: float,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """(y, hidden); hidden is None without a residual. groups: of scales of a weight in NF4; 0 for any other."""
    y, hidden = _fake(x, residual, norm_weight, weight, columns, depth, groups, dtype)
    if not y.numel():
        return y, hidden
    x, weight = as_rows(x), aligned(weight) if groups else as_rows(weight)
    residual = None if residual is None else as_rows(residual)
    constants = {
        "NORM": norm, "ADD": residual is not None, "SCALE": norm_weight is not None, "BIAS": bias is not None,
        "ACTIVATION": activation, "GATE_MULTIPLIER": gate_multiplier, "DOWN_MULTIPLIER": down_multiplier,
    }  # fmt: skip
    tensors = (
        x, x if residual is None else residual, x if norm_weight is None else norm_weight.contiguous(),
        weight, x if bias is None else bias.contiguous(), y if hidden is None else hidden, y,
    )  # fmt: skip
    strides = x.stride(0), 0 if residual is None else residual.stride(0)
    if groups:
        at = sections(columns, depth, groups)
        launch, programs = nf4_launcher(x.shape[0], columns, depth, x.device, **constants)
        places = at.nested_scale, at.nested_offset, at.scale, at.codes
        launch(programs, *tensors, *strides, columns, float(eps), float(offset), *places)
    else:
        launch, programs = _launcher(x.shape[0], columns, depth, dtype.itemsize, x.device, **constants)
        launch(programs, *tensors, *strides, weight.stride(0), columns, float(eps), float(offset))
    return y, hidden


def _fake(x, residual, norm_weight, weight, columns, depth, groups, dtype, *others):
    y = x.new_empty(*x.shape[:-1], columns, dtype=dtype)
    return y, None if residual is None else x.new_empty(x.shape, dtype=promoted_dtype(x, residual))


_linear = register_op("few_rows_linear", _launch, _fake)


def few_rows_linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """F.linear of at most MAX_ROWS rows.

    x [..., K], weight [N, K], a tensor or in NF4, bias [N] or None -> [..., N] in weight's dtype. Raises ValueError for
    more rows and for shapes that disagree, RuntimeError if a gradient is needed.
    """
    refuse_gradients("few_rows_linear", x, operand(weight)[0], bias)
    check_floats("few_rows_linear", x=x)
    _check("few_rows_linear", x, weight, bias, x.shape[-1])
    x, weight, bias = autocast(x, weight, bias)
    check_dtypes("few_rows_linear", weight=weight, bias=bias)
    if not runs_kernels(x):
        return low_rank_linear_reference(x.to(weight.dtype), weight, bias, None)
    y, _ = _linear(x, None, None, *_numbers(weight), bias, False, 0.0, 0.0, None, 1.0, 1.0)
    return y


def few_rows_norm_linear(
    x: Tensor, residual: Tensor | None, norm_weight: Tensor | None, weight: Weight, bias: Tensor | None = None,
    eps: float = 1e-6, offset: float = 0.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`norm_linear` of at most MAX_ROWS rows: arguments, results and errors as there; hidden is x without a residual.

    Raises ValueError for more rows too, RuntimeError if a gradient is needed.
    """
    refuse_gradients("few_rows_norm_linear", x, residual, norm_weight, operand(weight)[0], bias)
    _check("few_rows_norm_linear", x, weight, bias, x.shape[-1])
    check_norm("few_rows_norm_linear", x, residual, norm_weight=norm_weight)
    if norm_weight is None:
        check_offset("few_rows_norm_linear", offset)
    weight, bias = autocast(weight, bias)
    check_dtypes("few_rows_norm_linear", weight=weight, bias=bias)
    if not runs_kernels(x):
        return norm_linear_reference(x, residual, norm_weight, weight, bias, eps, offset)
    y, hidden = _linear(x, residual, norm_weight, *_numbers(weight), bias, True, eps, offset, None, 1.0, 1.0)
    return y, x if residual is None else hidden


def few_rows_gated_linear(
    gate_up: Tensor, weight: Weight, bias: Tensor | None = None, activation: str = "silu", *,
    gate_multiplier: float = 1.0, down_multiplier: float = 1.0,
) -> Tensor:  # fmt: skip
    """`gated_linear` of at most MAX_ROWS rows: arguments, result and errors as there.

    Raises ValueError for more rows too, RuntimeError if a gradient is needed.
    """
    refuse_gradients("few_rows_gated_linear", gate_up, operand(weight)[0], bias)
    check_gate_up("few_rows_gated_linear", gate_up, activation)
    _check("few_rows_gated_linear", gate_up, weight, bias, gate_up.shape[-1] // 2)
    gate_up, weight, bias = autocast(gate_up, weight, bias)
    check_dtypes("few_rows_gated_linear", gate_up=gate_up, weight=weight, bias=bias)
    if not runs_kernels(gate_up):
        return gated_linear_reference(
            gate_up, weight, bias, activation, gate_multiplier=gate_multiplier, down_multiplier=down_multiplier
        )
    y, _ = _linear(
        gate_up, None, None, *_numbers(weight), bias, False, 0.0, 0.0, activation, gate_multiplier, down_multiplier
    )  # fmt: skip
    return y


def _numbers(weight: Weight) -> tuple[Tensor, int, int, int, torch.dtype]:
    """What the op takes in place of a weight, which may be in NF4."""
    columns, depth = weight.shape
    if isinstance(weight, Tensor):
        return weight, columns, depth, 0, weight.dtype
    assert isinstance(weight.layout, Nf4)
    return weight.data, columns, depth, weight.layout.groups, weight.dtype


def _check(op: str, x: Tensor, weight: Weight, bias: Tensor | None, depth: int) -> None:
    rows = x.shape[:-1].numel()
    if rows > MAX_ROWS:
        raise ValueError(f"{op}: {rows} rows; at most {MAX_ROWS} are supported, use F.linear")
    check_linear(op, depth, weight, bias)
