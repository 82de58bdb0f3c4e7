"""Whole rows as tiles, for the norms: what one program holds, and how many programs share the rows of backward."""

import functools

import torch
import triton
from torch import Tensor

from ligermodels.kernels.op import as_rows, multiprocessors

MAX_COLUMNS = 65536


def rows_of(x: Tensor) -> tuple[Tensor, int]:
    """x [..., N] with unit stride along N, and the stride between its rows; x itself where it is contiguous."""
    if x.is_contiguous():
        return x, x.shape[-1]
    x = as_rows(x)
    return x, x.stride(0)


@functools.cache
def forward_tile(columns: int) -> dict[str, int]:
    """What a kernel that holds whole rows once is built with: several rows a program when they are short."""
    if columns > MAX_COLUMNS:
        raise ValueError(f"norm: rows of {columns} elements; at most {MAX_COLUMNS} fit one program")
    width = triton.next_power_of_2(columns)
    return {
        "ROWS": max(1, 1024 // width),
        "COLUMNS": columns,
        "WIDTH": width,
        "num_warps": min(16, max(4, width // 512)),
    }


@functools.cache
def backward_tile(columns: int) -> dict[str, int]:
    width = triton.next_power_of_2(columns)
    return {
        "ROWS": max(1, 1024 // width),
        "COLUMNS": columns,
        "WIDTH": width,
        "num_warps": min(32, max(4, width // 512)),
    }


@functools.cache
def backward_programs(device: torch.device, warps: int) -> int:
    """Programs that find room on a device: each strides over the rows and leaves one row of partial gradients."""
    return 32 // warps * multiprocessors(device)
