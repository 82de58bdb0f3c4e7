"""Whole rows as tiles, for the norms: what one program holds, and how many programs share the rows of backward.

Must not know which norm: only how wide a row is and how many tensors of such rows a program streams.
"""

import functools

import torch
import triton
from torch import Tensor

from ligermodels.kernels.op import as_rows, multiprocessors, shared_memory

MAX_COLUMNS = 65536
ELEMENTS_PER_THREAD = 16  # of a row: at 80 registers a thread, 24 warps find room on a multiprocessor of 65536
WARPS_PER_MULTIPROCESSOR = 24


def rows_of(x: Tensor) -> tuple[Tensor, int]:
    """x [..., N] with unit stride along N, and the stride between its rows; x itself where it is contiguous."""
    if x.is_contiguous():
        return x, x.shape[-1]
    x = as_rows(x)
    return x, x.stride(0)


@functools.cache
def forward_tile(columns: int) -> dict[str, int]:
    """What a kernel that holds whole rows is built with: several rows a program where they are short."""
    if columns > MAX_COLUMNS:
        raise ValueError(f"norm: rows of {columns} elements; at most {MAX_COLUMNS} fit one program")
    width = triton.next_power_of_2(columns)
    warps = min(16, max(4, width // (32 * ELEMENTS_PER_THREAD)))
    return {"ROWS": max(1, 1024 // width), "COLUMNS": columns, "WIDTH": width, "num_warps": warps}


@functools.cache
def backward_tile(columns: int, streams: int, itemsize: int, device: torch.device) -> tuple[dict[str, int], int]:
    """What a persistent kernel that reads `streams` tensors row by row is built with, and how many programs of it."""
    tile = forward_tile(columns)
    programs = max(1, WARPS_PER_MULTIPROCESSOR // tile["num_warps"])
    tile_bytes = streams * tile["ROWS"] * tile["WIDTH"] * itemsize
    ahead = shared_memory(device) // programs // tile_bytes if device.type == "cuda" else 0
    return tile | {"STAGES": 1 + min(2, ahead)}, programs * multiprocessors(device)
