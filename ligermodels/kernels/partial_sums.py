"""The sum of the partial weight gradients of persistent programs: dw = Σ_programs partial, rounded once.

Each program keeps its share in fp32 registers and writes it as a row of its own, without atomics: the sum, taken here
in an order that the shapes alone decide, is bit-identical from run to run. Must not know what is summed.
"""

import functools

import torch
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.launch import Launcher, cdiv, kernel
from ligermodels.kernels.pdl import launch_dependents, pdl_constants, wait_for_previous_kernel

# Rows, columns and warps of one program: narrow, so that most multiprocessors have a share, and tall where the columns
# are few and the programs that left partials many.
FEW_COLUMNS = 1024
TILES = {True: (512, 8, 8), False: (64, 16, 4)}


@kernel(do_not_specialize=["rows"])
def _sum_kernel(
    partials_ptr, first_ptr, last_ptr, rows, columns, first_columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program sums COLUMNS columns; those from first_columns on belong to the last gradient."""
    wait_for_previous_kernel(PDL)
    launch_dependents(PDL)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        total += tl.load(partials_ptr + row * columns + column, (row < rows) & (column < columns), other=0.0)
    total = tl.sum(total, 0)[None, :].to(first_ptr.dtype.element_ty)
    of_last = column - first_columns
    tl.store(first_ptr + column, total, of_last < 0)
    tl.store(last_ptr + of_last, total, (of_last >= 0) & (column < columns))


def sum_partials(partials: Tensor, *gradients: Tensor) -> None:
    """Fills one weight's gradient, or those of two weights of one dtype whose partials lie side by side.

    partials fp32 [programs, N] contiguous; gradients contiguous, of N elements in all.
    """
    rows, columns = partials.shape
    launch, tile_columns = _launcher(columns <= FEW_COLUMNS, partials.device)
    first, last = gradients[0], gradients[-1]
    launch(cdiv(columns, tile_columns), partials, first, last, rows, columns, first.numel())


@functools.cache
def _launcher(few: bool, device: torch.device) -> tuple[Launcher, int]:
    rows, columns, warps = TILES[few]
    return _sum_kernel.bind(ROWS=rows, COLUMNS=columns, num_warps=warps, **pdl_constants(device)), columns
