"""Sums the partial weight gradients of persistent programs: dw = Σ_programs partial, rounded once.

Each program keeps its share in fp32 registers and writes it to a row of its own, without atomics. The rows are summed
here in an order that depends on the shapes alone, so the result is bit-identical from run to run.
Moves 4 P N bytes for P programs and N columns.
"""

import functools
from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.launch import Launcher, cdiv, kernel
from ligermodels.kernels.pdl import launch_dependents, pdl_constants, wait_for_previous_kernel


@dataclass(frozen=True)
class SumTile:
    """What one program holds at a time of the partials."""

    rows: int
    columns: int
    warps: int


# Tiles are narrow, so that most multiprocessors get one. Up to NARROW_COLUMNS columns, where there are many partials of
# few columns each, they are narrower still, and tall.
NARROW_COLUMNS = 1024
NARROW_SUM_TILE = SumTile(rows=512, columns=8, warps=8)
WIDE_SUM_TILE = SumTile(rows=64, columns=16, warps=4)


@kernel(do_not_specialize=["rows"])
def _sum_kernel(
    partials_ptr, first_ptr, last_ptr, rows, columns, first_columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program sums COLUMNS columns. Columns from first_columns on belong to the last gradient."""
    wait_for_previous_kernel(PDL)
    launch_dependents(PDL)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        total += tl.load(partials_ptr + row * columns + column, (row < rows) & (column < columns), other=0.0)
    total = tl.sum(total, 0)[None, :].to(first_ptr.dtype.element_ty)
    last_column = column - first_columns
    tl.store(first_ptr + column, total, last_column < 0)
    tl.store(last_ptr + last_column, total, (last_column >= 0) & (column < columns))


def sum_partials(partials: Tensor, *gradients: Tensor) -> None:
    """Writes the gradient of one weight, or of two weights of the same dtype whose partials lie side by side.

    partials fp32 [programs, N] contiguous; gradients contiguous, N elements in total. No partials sum to zero.
    """
    rows, columns = partials.shape
    launch, tile_columns = _sum_launcher(columns <= NARROW_COLUMNS, partials.device)
    first, last = gradients[0], gradients[-1]
    launch(cdiv(columns, tile_columns), partials, first, last, rows, columns, first.numel())


@functools.cache
def _sum_launcher(narrow: bool, device: torch.device) -> tuple[Launcher, int]:
    """The launcher, and how many columns a program sums."""
    tile = NARROW_SUM_TILE if narrow else WIDE_SUM_TILE
    launch = _sum_kernel.bind(ROWS=tile.rows, COLUMNS=tile.columns, num_warps=tile.warps, **pdl_constants(device))
    return launch, tile.columns
