"""Whole rows as tiles, for the norms: what one program holds, and how many programs share the rows of backward.

Must not know which norm: only how wide a row is and how many tensors of such rows a program streams.
"""

import functools

import torch
import triton
import triton.language as tl

from ligermodels.kernels.op import multiprocessors, shared_memory

MAX_COLUMNS = 65536
TILE_ELEMENTS = 2048  # at least: short rows share a program
BACKWARD_ELEMENTS = 24  # of a row a thread, at most: it holds the weights' gradients and two values more of each
PROGRAMS = {4: 3, 8: 2, 16: 1}  # of backward, a multiprocessor, by their warps: one works while another waits for a sum
REGISTERS = 65536  # of a multiprocessor, for all of these
RESERVED_BYTES = 8192  # of shared memory a program, for sums across warps and what the driver takes


def tiles_of(rows: int, tile: dict[str, int]) -> int:
    """How many tiles cover `rows` rows."""
    return -(-rows // tile["ROWS"])  # triton.cdiv takes a microsecond


@triton.jit
def zero_beyond(x, in_row):
    """x, which a masked load has already made 0 beyond the row: so told, the compiler gives idle lanes no registers."""
    return tl.where(in_row, x, 0.0)


@functools.cache
def forward_tile(columns: int, elements: int) -> dict[str, int]:
    """What a kernel that holds whole rows is built with: ROWS of COLUMNS elements, in tiles of a power of two.

    elements: of a row, that a thread holds at most.
    """
    if columns > MAX_COLUMNS:
        raise ValueError(f"norm: rows of {columns} elements; at most {MAX_COLUMNS} fit one program")
    width = triton.next_power_of_2(columns)
    warps = min(16, max(4, triton.next_power_of_2(triton.cdiv(columns, 32 * elements))))
    return {"ROWS": max(1, TILE_ELEMENTS // width), "COLUMNS": columns, "WIDTH": width, "num_warps": warps}


@functools.cache
def backward_tile(columns: int, streams: int, itemsize: int, device: torch.device) -> tuple[dict[str, int], int]:
    """What a persistent kernel that reads `streams` tensors row by row is built with, and how many programs of it.

    STAGES - 1 tiles are on their way through shared memory while one is worked on.
    """
    tile = forward_tile(columns, BACKWARD_ELEMENTS)
    programs = PROGRAMS[tile["num_warps"]]
    if device.type == "cpu":  # the interpreter: no stages, no registers
        return tile | {"STAGES": 1}, programs * multiprocessors(device)
    room = shared_memory(device) // programs - RESERVED_BYTES
    ahead = min(2, room // (streams * tile["ROWS"] * tile["WIDTH"] * itemsize))
    registers = {} if torch.version.hip else {"maxnreg": REGISTERS // (32 * tile["num_warps"] * programs) // 8 * 8}
    return tile | registers | {"STAGES": 1 + ahead}, programs * multiprocessors(device)
