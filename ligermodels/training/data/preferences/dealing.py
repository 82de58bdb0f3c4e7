"""Dealing: which rank and which row each unit of a step is in, by its tokens.

Units go to ranks longest first, each to the rank with the fewest tokens; a rank packs its own into rows by best fit.
Every rank computes the whole deal, and so knows how many rows the others have. Results of a step do not depend on the
deal but by rounding. Must not know what units are.
"""

from collections.abc import Sequence

import numpy as np

from ligermodels.training.data.rows.packing import best_fit


def deal_units(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """The numbers of the units of each rank, ascending. sizes: tokens of each unit."""
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for unit in np.argsort(-np.asarray(sizes, np.int64), kind="stable").tolist():
        rank = loads.index(min(loads))
        dealt[rank].append(unit)
        loads[rank] += sizes[unit]
    return [sorted(units) for units in dealt]


def pack_units(sizes: Sequence[int], length: int) -> list[list[int]]:
    """The numbers of the units of each row of at most `length` tokens, ascending; a longer unit has its own row."""
    order = np.argsort(-np.asarray(sizes, np.int64), kind="stable")
    capped = np.minimum(np.asarray(sizes, np.int64)[order], length)
    row_of, count = best_fit(capped, length)
    rows: list[list[int]] = [[] for _ in range(count)]
    for unit, row in zip(order.tolist(), row_of.tolist(), strict=True):
        rows[row].append(unit)
    return [sorted(units) for units in rows]
