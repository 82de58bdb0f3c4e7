"""What the norms' kernels share: tiles of whole rows, their launch constants, and the parts of backward.

A program holds whole rows, so that it reduces over a row without another pass over memory. Backward of many rows is a
persistent kernel: a fixed number of programs, each of which loops over row tiles, prefetches them through shared memory
and keeps its partial weight gradients in registers. Backward of few rows (small M) is one launch too: programs over
rows compute dx, programs over columns sum the weight gradients.
"""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ligermodels.kernels.launch import PTX, cdiv, multiprocessors, shared_memory
from ligermodels.kernels.pdl import pdl_constants

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
FORWARD_TILE_ELEMENTS, BACKWARD_TILE_ELEMENTS = 2048, 4096  # at least: short rows share a tile
MIN_WARPS, MAX_WARPS = 4, 16  # of a program, except for narrow tiles
NARROW_TILE_WARPS, NARROW_TILE_ELEMENTS = 2, 1792  # forward, elements at most: two warps synchronize faster than four
# Backward, by warps of a program. Elements of a row that a thread holds, at most: for each it also keeps the weight
# gradients and two more values. Programs a multiprocessor: one computes while another waits for a reduction. Measured
# on an H200.
BACKWARD_ELEMENTS_PER_THREAD = {4: 28, 8: 24, 16: 24}
BACKWARD_PROGRAMS_PER_MULTIPROCESSOR = {4: 2, 8: 2, 16: 1}
MAX_PREFETCHED_TILES = 2  # in flight through shared memory
REGISTERS_PER_MULTIPROCESSOR, MAX_REGISTERS_PER_THREAD = 65536, 255
# Up to so many rows take the small-M path, which reads them twice: by rows for dx, by columns for the weight gradients.
# Both parts are one launch, because a second launch would take the host longer than the second read takes the device.
SMALL_M_ROWS = 128
COLUMN_SUM_ROWS, COLUMN_SUM_COLUMNS = tl.constexpr(64), tl.constexpr(32)  # the tile of `sum_columns`
RESERVED_BYTES = 8192  # of shared memory a program: reductions across warps, and what the driver reserves


@dataclass(frozen=True)
class NormTile:
    """What one program holds at a time: `rows` rows of `columns` elements each, padded to `width`, a power of two."""

    rows: int
    columns: int
    width: int
    warps: int
    device: torch.device

    def constants(self) -> dict[str, int]:
        """The constants to bind a forward kernel with."""
        shape = {"ROWS": self.rows, "COLUMNS": self.columns, "WIDTH": self.width}
        return shape | {"num_warps": self.warps} | pdl_constants(self.device)


@dataclass(frozen=True)
class BackwardNormTile(NormTile):
    """A tile of backward and its loop: one row a program with `small_m`, otherwise a persistent kernel."""

    small_m: bool
    stages: int  # tiles in flight and the one being computed
    max_programs: int  # that take rows
    max_registers: int | None  # of a thread; None leaves them to the compiler

    def constants(self) -> dict[str, int]:
        """The constants to bind a backward kernel with."""
        registers = {} if self.max_registers is None else {"maxnreg": self.max_registers}
        return super().constants() | registers | {"SMALL_M": self.small_m, "STAGES": self.stages}


@functools.cache
def norm_forward_tile(columns: int, elements: int, device: torch.device) -> NormTile:
    """The tile of a forward kernel of which a thread holds at most `elements` of a row."""
    rows, width = _tile_shape(columns, FORWARD_TILE_ELEMENTS)
    warps = min(MAX_WARPS, max(MIN_WARPS, triton.next_power_of_2(cdiv(columns, 32 * elements))))
    if rows * columns <= NARROW_TILE_ELEMENTS:
        warps = NARROW_TILE_WARPS
    return NormTile(rows, columns, width, warps, device)


@functools.cache
def norm_backward_tile(
    columns: int, streams: int, itemsize: int, small_m: bool, device: torch.device
) -> BackwardNormTile:
    """The tile of a backward kernel that reads `streams` tensors row by row, `itemsize` bytes an element."""
    fitting = (warps for warps, most in BACKWARD_ELEMENTS_PER_THREAD.items() if columns <= 32 * warps * most)
    warps = next(fitting, MAX_WARPS)
    rows, width = _tile_shape(columns, 1 if small_m else BACKWARD_TILE_ELEMENTS)
    if small_m:
        return BackwardNormTile(rows, columns, width, warps, device, True, 1, SMALL_M_ROWS, None)
    programs = BACKWARD_PROGRAMS_PER_MULTIPROCESSOR[warps]
    # Too many elements for a thread's registers: half as many threads, each with twice the registers.
    launched_warps = warps // 2 if columns > 32 * warps * BACKWARD_ELEMENTS_PER_THREAD[warps] else warps
    if triton.knobs.runtime.interpret:
        max_programs = programs * multiprocessors(device)
        return BackwardNormTile(rows, columns, width, launched_warps, device, False, 1, max_programs, None)
    tile_bytes = streams * rows * width * itemsize
    if _prefetched_tiles(tile_bytes, programs, device) < MAX_PREFETCHED_TILES and warps > MIN_WARPS:
        programs = 1  # one program with room to prefetch waits less for its loads than two without
    stages = 1 + _prefetched_tiles(tile_bytes, programs, device)
    max_programs = programs * multiprocessors(device)
    registers = None if torch.version.hip else _registers_per_thread(32 * launched_warps * programs)
    return BackwardNormTile(rows, columns, width, launched_warps, device, False, stages, max_programs, registers)


def _tile_shape(columns: int, min_elements: int) -> tuple[int, int]:
    """(rows, width) of a tile of at least `min_elements` elements."""
    width = triton.next_power_of_2(columns)
    return max(1, min_elements // width), width


def _prefetched_tiles(tile_bytes: int, programs: int, device: torch.device) -> int:
    """How many tiles of `tile_bytes` can be in flight where `programs` programs share a multiprocessor."""
    return min(MAX_PREFETCHED_TILES, (shared_memory(device) // programs - RESERVED_BYTES) // tile_bytes)


def _registers_per_thread(threads: int) -> int:
    """What each of `threads` threads of a multiprocessor may use, a multiple of 8."""
    return min(MAX_REGISTERS_PER_THREAD, REGISTERS_PER_MULTIPROCESSOR // threads // 8 * 8)


def column_sum_programs(columns: int) -> int:
    """How many programs of the small-M path run `sum_columns`."""
    return cdiv(columns, COLUMN_SUM_COLUMNS.value)


@triton.jit
def load_tile(x_ptr, row, stride, column, mask):
    return tl.load(x_ptr + row * stride + column, mask, other=0.0)


@triton.jit
def store_tile(y_ptr, y, row, column, mask, COLUMNS: tl.constexpr):
    """Rounds y once, to the dtype of y_ptr, whose rows are contiguous."""
    tl.store(y_ptr + row * COLUMNS + column, y.to(y_ptr.dtype.element_ty), mask)


@triton.jit
def mask_columns(x, in_row):
    """x with its padding columns set to 0.

    Masked loads have done that already. Here it tells the compiler that padding lanes are constant: they take no
    registers.
    """
    return tl.where(in_row, x, 0.0)


@triton.jit
def _bf16_pair_to_fp32(x, INSTRUCTIONS: tl.constexpr):
    """Splits each register of two bf16 into two registers with a bf16 in the upper half: the same value in fp32."""
    wide = tl.inline_asm_elementwise(INSTRUCTIONS, "=r,=r,r", [x], tl.int32, is_pure=True, pack=2)
    return wide.to(tl.float32, bitcast=True)


@triton.jit
def to_fp32(x):
    """Equal to x.to(tl.float32). A pair of bf16 takes two instructions; the compiler's conversion takes three."""
    if PTX and x.dtype == tl.bfloat16:
        return _bf16_pair_to_fp32(x, "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;")
    else:
        return x.to(tl.float32)


@triton.jit
def to_fp32_again(x):
    """`to_fp32` by other instructions, which the compiler cannot merge with the first conversion.

    What is converted before a reduction over the row is converted again after it. Otherwise the compiler would keep the
    fp32 values in registers across the reduction; this way it keeps x, which takes half as many.
    """
    if PTX and x.dtype == tl.bfloat16:
        return _bf16_pair_to_fp32(x, "prmt.b32 $0, $2, 0, 0x1044; prmt.b32 $1, $2, 0, 0x3244;")
    else:
        return x.to(tl.float32)


@triton.jit
def masked_fp32(x, in_row):
    return mask_columns(to_fp32(x), in_row)


@triton.jit
def masked_fp32_again(x, in_row):
    return mask_columns(to_fp32_again(x), in_row)


@triton.jit
def _add_pairwise(a, b, c, d):
    return a + c, b + d


@triton.jit
def sum_both(a, b):
    """The sums of a and of b over the row in one reduction: warps synchronize once."""
    if INTERPRETED:  # the interpreter reduces by a custom function one element at a time
        return tl.sum(a, 1, keep_dims=True), tl.sum(b, 1, keep_dims=True)
    else:
        return tl.reduce((a, b), 1, _add_pairwise, keep_dims=True)


@triton.jit
def backward_loop(rows, ROWS: tl.constexpr, SMALL_M: tl.constexpr):
    """(tiles, step): program p takes every step-th tile from p on. With SMALL_M only the first `rows` programs do."""
    step = rows if SMALL_M else tl.num_programs(0)
    return tl.cdiv(rows, ROWS), step


@triton.jit
def reversed_tile_rows(index, tiles, rows, in_row, ROWS: tl.constexpr):
    """(rows, mask) of the tile `index`, counted from the last one: rows written or read last may still be in the cache.

    A tile of one row has no rows to mask.
    """
    row = tl.arange(0, ROWS)[:, None].to(tl.int64) + (tiles - 1 - index) * ROWS
    return row, in_row if ROWS == 1 else (row < rows) & in_row


@triton.jit
def store_partial(partial_ptr, gradient, column, in_row):
    """Stores a program's partial weight gradient, summed over the rows of its tile."""
    tl.store(partial_ptr + column, tl.sum(gradient, 0)[None, :], in_row)


@triton.jit
def sum_columns(
    dy_ptr, x_ptr, mean_ptr, rstd_ptr, dweight_ptr, dbias_ptr, dy_stride, x_stride, rows, program,
    MEAN: tl.constexpr, WEIGHT_GRAD: tl.constexpr, BIAS_GRAD: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """dw = Σ_rows dy * (x - mean) * rstd and db = Σ_rows dy of one tile of columns; without MEAN, mean is 0."""
    column = program * COLUMN_SUM_COLUMNS + tl.arange(0, COLUMN_SUM_COLUMNS)[None, :]
    dweight = tl.zeros([COLUMN_SUM_ROWS, COLUMN_SUM_COLUMNS], tl.float32)
    dbias = tl.zeros([COLUMN_SUM_ROWS, COLUMN_SUM_COLUMNS], tl.float32)
    for start in tl.range(0, rows, COLUMN_SUM_ROWS, num_stages=1):
        row = tl.arange(0, COLUMN_SUM_ROWS)[:, None].to(tl.int64) + start
        mask = (row < rows) & (column < COLUMNS)
        dy = load_tile(dy_ptr, row, dy_stride, column, mask).to(tl.float32)
        if WEIGHT_GRAD:
            x = load_tile(x_ptr, row, x_stride, column, mask).to(tl.float32)
            if MEAN:
                x -= tl.load(mean_ptr + row, row < rows, other=0.0)
            dweight += dy * (x * tl.load(rstd_ptr + row, row < rows, other=0.0))
        if BIAS_GRAD:
            dbias += dy
    if WEIGHT_GRAD:
        tl.store(dweight_ptr + column, tl.sum(dweight, 0)[None, :].to(dweight_ptr.dtype.element_ty), column < COLUMNS)
    if BIAS_GRAD:
        tl.store(dbias_ptr + column, tl.sum(dbias, 0)[None, :].to(dbias_ptr.dtype.element_ty), column < COLUMNS)
