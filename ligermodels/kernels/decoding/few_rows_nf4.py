"""The kernel of few_rows_linear.py for a weight in NF4, which is dequantised where it is multiplied.

A tile has three dimensions: rows of W, blocks of 64 columns, bytes of a block. The two elements of a byte are
multiplied one after the other by their own columns of x, so that no tile is rearranged, and a block's scale is computed
beside the bytes that it scales. Elements are rounded to y's dtype before they are multiplied: they are the numbers of
`nf4_dequantize`. Bound by the look-up of values, two for each byte: one row of 4096 x 28672 takes 77 us on an H200,
where the same weight in bf16 takes 55, and dequantising it before a dense product 146.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ligermodels.kernels.decoding.few_rows_input import few_rows_input
from ligermodels.kernels.launch import Launcher, cdiv, kernel, multiprocessors
from ligermodels.kernels.pdl import launch_dependents, pdl_constants, wait_for_previous_kernel
from ligermodels.kernels.quant.nf4 import nf4_scales


class Nf4Tile(NamedTuple):
    """What a program reads in one step: rows of W, blocks of each."""

    columns: int
    blocks: int
    warps: int


TILES = {2: Nf4Tile(8, 8, 4), 4: Nf4Tile(4, 8, 4), 8: Nf4Tile(2, 8, 4)}  # by rows of x, at most; of two on an H200
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
    tile = next(tile for at_most, tile in TILES.items() if rows <= at_most)
    width = tile.columns
    while width > MIN_NF4_COLUMNS and cdiv(columns, width) < NF4_PROGRAMS_PER_MULTIPROCESSOR * multiprocessors(device):
        width //= 2
    launch = _nf4_linear_kernel.bind(
        ROWS=rows, DEPTH=depth, COLUMNS=width, BLOCKS=min(tile.blocks, triton.next_power_of_2(depth // 64)),
        num_warps=tile.warps, **constants, **pdl_constants(device),
    )  # fmt: skip
    return launch, cdiv(columns, width)
