"""Whole rows as tiles, for the norms: what one program holds, and how many programs share the rows of backward.

Must not know which norm: only how wide a row is and how many tensors of such rows a program streams.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.launch import cdiv, multiprocessors, shared_memory
from ligermodels.kernels.pdl import pdl_constants

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
PTX = tl.constexpr(not triton.knobs.runtime.interpret and torch.version.hip is None)
MAX_COLUMNS = 65536
FORWARD_TILE, BACKWARD_TILE = 2048, 4096  # elements, at least: short rows share a program
FEWEST_WARPS, MOST_WARPS = 4, 16  # of a program, but for those of narrow tiles
NARROW_WARPS, NARROW_TILE = 2, 1792  # of forward, elements at most: two wait for each other less than four
# Of backward, by a program's warps: elements that a thread holds at most, with the weights' gradients and two values
# more of each; and programs a multiprocessor, of which one works while another waits for a sum. Measured on an H200.
BACKWARD_ELEMENTS = {4: 28, 8: 24, 16: 24}
BACKWARD_PROGRAMS = {4: 2, 8: 2, 16: 1}
BACKWARD_AHEAD = 2  # tiles on their way through shared memory, at most
REGISTERS, MOST_REGISTERS = 65536, 255  # of a multiprocessor, for all of these; of a thread
# Few enough rows are read twice, by rows for dx and by columns for the weights' gradients: two kernels would take the
# host longer to launch.
FEW_ROWS = 128
TILE_ROWS, TILE_COLUMNS = tl.constexpr(64), tl.constexpr(32)
RESERVED_BYTES = 8192  # of shared memory a program, for sums across warps and what the driver takes


def programs_over_columns(columns: int) -> int:
    """How many programs of backward sum the weights' gradients of few rows."""
    return cdiv(columns, TILE_COLUMNS.value)


@triton.jit
def zero_beyond(x, in_row):
    """x, which a masked load has already made 0 beyond the row: so told, the compiler gives idle lanes no registers."""
    return tl.where(in_row, x, 0.0)


@triton.jit
def _halves(x, INSTRUCTIONS: tl.constexpr):
    """The two bf16 of a register, each as the upper half of a register of its own: that is the same value in fp32."""
    wide = tl.inline_asm_elementwise(INSTRUCTIONS, "=r,=r,r", [x], tl.int32, is_pure=True, pack=2)
    return wide.to(tl.float32, bitcast=True)


@triton.jit
def widened(x):
    """x in fp32, as x.to(tl.float32) is; a pair of bf16 takes two instructions, of the compiler's three."""
    if PTX and x.dtype == tl.bfloat16:
        return _halves(x, "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;")
    else:
        return x.to(tl.float32)


@triton.jit
def widened_again(x):
    """The same by other instructions.

    What was widened before a sum over the row is widened again after it, and the compiler, which would keep the first
    result in registers, keeps x: half of them.
    """
    if PTX and x.dtype == tl.bfloat16:
        return _halves(x, "prmt.b32 $0, $2, 0, 0x1044; prmt.b32 $1, $2, 0, 0x3244;")
    else:
        return x.to(tl.float32)


@triton.jit
def _add_both(a, b, c, d):
    return a + c, b + d


@triton.jit
def sum_both(a, b):
    """The sums of a and of b over the row, taken together: warps wait for each other once."""
    if INTERPRETED:  # which reduces by a function of ours one element at a time
        return tl.sum(a, 1, keep_dims=True), tl.sum(b, 1, keep_dims=True)
    else:
        return tl.reduce((a, b), 1, _add_both, keep_dims=True)


@triton.jit
def sum_columns(
    dy_ptr, x_ptr, mean_ptr, rstd_ptr, dweight_ptr, dbias_ptr, dy_stride, x_stride, rows, program,
    MEAN: tl.constexpr, WEIGHT_GRAD: tl.constexpr, BIAS_GRAD: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """dw = Σ_rows dy * (x - mean) * rstd and db = Σ_rows dy, of a tile of columns; without MEAN it is 0."""
    column = program * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)[None, :]
    dweight = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32)
    dbias = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32)
    for start in tl.range(0, rows, TILE_ROWS, num_stages=1):
        row = tl.arange(0, TILE_ROWS)[:, None].to(tl.int64) + start
        mask = (row < rows) & (column < COLUMNS)
        dy = tl.load(dy_ptr + row * dy_stride + column, mask, other=0.0).to(tl.float32)
        if WEIGHT_GRAD:
            x = tl.load(x_ptr + row * x_stride + column, mask, other=0.0).to(tl.float32)
            if MEAN:
                x -= tl.load(mean_ptr + row, row < rows, other=0.0)
            dweight += dy * (x * tl.load(rstd_ptr + row, row < rows, other=0.0))
        if BIAS_GRAD:
            dbias += dy
    if WEIGHT_GRAD:
        tl.store(dweight_ptr + column, tl.sum(dweight, 0)[None, :].to(dweight_ptr.dtype.element_ty), column < COLUMNS)
    if BIAS_GRAD:
        tl.store(dbias_ptr + column, tl.sum(dbias, 0)[None, :].to(dbias_ptr.dtype.element_ty), column < COLUMNS)


def check_weights(op: str, columns: int, *weights: Tensor | None) -> None:
    """Raises ValueError where one is not as long as a row: a kernel would read beyond it."""
    for weight in weights:
        if weight is not None and weight.numel() != columns:
            raise ValueError(f"{op}: a weight or bias of {weight.numel()} elements for rows of {columns}")


def tile_of(columns: int, warps: int, least: int, device: torch.device) -> dict[str, int]:
    """ROWS of COLUMNS elements, in tiles of a power of two that have at least so many: what a kernel is built with."""
    if columns > MAX_COLUMNS:
        raise ValueError(f"norm: rows of {columns} elements; at most {MAX_COLUMNS} fit one program")
    width = triton.next_power_of_2(columns)
    rows = max(1, least // width)
    return {"ROWS": rows, "COLUMNS": columns, "WIDTH": width, "num_warps": warps} | pdl_constants(device)


@functools.cache
def forward_tile(columns: int, elements: int, device: torch.device) -> dict[str, int]:
    """What a kernel that holds whole rows is built with; elements: of a row a thread, at most."""
    warps = min(MOST_WARPS, max(FEWEST_WARPS, triton.next_power_of_2(cdiv(columns, 32 * elements))))
    tile = tile_of(columns, warps, FORWARD_TILE, device)
    return tile | {"num_warps": NARROW_WARPS} if tile["ROWS"] * columns <= NARROW_TILE else tile


@functools.cache
def backward_tile(
    columns: int, streams: int, itemsize: int, few: bool, device: torch.device
) -> tuple[dict[str, int], int]:
    """What a kernel that reads `streams` tensors row by row is built with, and how many programs take rows, at most.

    Of few rows each program takes one. Of more it is persistent: STAGES - 1 tiles are on their way through shared
    memory while one is worked on.
    """
    warps = next((warps for warps, most in BACKWARD_ELEMENTS.items() if columns <= 32 * warps * most), MOST_WARPS)
    tile = tile_of(columns, warps, 1 if few else BACKWARD_TILE, device) | {"FEW": few}
    if few:
        return tile | {"STAGES": 1}, FEW_ROWS
    programs = BACKWARD_PROGRAMS[warps]
    if columns > 32 * warps * BACKWARD_ELEMENTS[warps]:  # too many for a thread: half as many, of twice the registers
        tile["num_warps"] //= 2
    if triton.knobs.runtime.interpret:
        return tile | {"STAGES": 1}, programs * multiprocessors(device)
    stage = streams * tile["ROWS"] * tile["WIDTH"] * itemsize
    if tiles_ahead(stage, programs, device) < BACKWARD_AHEAD and warps > FEWEST_WARPS:
        programs = 1  # which waits less for its loads than two with less room for them
    registers = min(MOST_REGISTERS, REGISTERS // (32 * tile["num_warps"] * programs) // 8 * 8)
    limit = {} if torch.version.hip else {"maxnreg": registers}
    return tile | limit | {"STAGES": 1 + tiles_ahead(stage, programs, device)}, programs * multiprocessors(device)


def tiles_ahead(stage: int, programs: int, device: torch.device) -> int:
    """How many tiles of so many bytes can be on their way, where so many programs share a multiprocessor."""
    return min(BACKWARD_AHEAD, (shared_memory(device) // programs - RESERVED_BYTES) // stage)
