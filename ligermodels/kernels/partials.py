"""The sum of the partial weight gradients of persistent programs: dw = Σ_programs partial, rounded once.

Each program keeps its share in fp32 registers and writes it as a row of its own, without atomics: the sum, taken here
in an order that the shapes alone decide, is bit-identical from run to run. Must not know what is summed.
"""

import torch
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.early import await_previous, early
from ligermodels.kernels.op import cdiv, kernel

# Rows, columns and warps of one program: narrow, so that most multiprocessors have a share, and tall where the columns
# are few and the programs that left partials many.
FEW_COLUMNS = 1024
TILES = {True: (512, 8, 8), False: (64, 16, 4)}


@kernel(do_not_specialize=["rows"])
def _sum_kernel(
    partials_ptr, first_ptr, last_ptr, rows, columns, first_columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program sums COLUMNS columns; those from first_columns on belong to the last gradient."""
    await_previous(EARLY)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        total += tl.load(partials_ptr + row * columns + column, (row < rows) & (column < columns), other=0.0)
    total = tl.sum(total, 0)[None, :].to(first_ptr.dtype.element_ty)
    of_last = column - first_columns
    tl.store(first_ptr + column, total, of_last < 0)
    tl.store(last_ptr + of_last, total, (of_last >= 0) & (column < columns))


def sum_partials(partials: Tensor, *weights: Tensor) -> list[Tensor]:
    """The gradients of one weight, or of two of one dtype whose partials lie side by side.

    partials fp32 [programs, N] contiguous, N elements in all weights -> for each of `weights` one like it.
    """
    gradients = [torch.empty_like(weight) for weight in weights]
    rows, columns = partials.shape
    tile_rows, tile_columns, warps = TILES[columns <= FEW_COLUMNS]
    launch = _sum_kernel.bind(
        ROWS=tile_rows, COLUMNS=tile_columns, num_warps=warps, **early(partials.device)
    )  # fmt: skip
    programs = cdiv(columns, tile_columns)
    launch(programs, partials, gradients[0], gradients[-1], rows, columns, gradients[0].numel())
    return gradients
