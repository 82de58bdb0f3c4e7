"""Index arithmetic of tensors that are viewed in another shape: which boxes make up a range of row-major numbers."""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

Shape = tuple[int, ...]
Sides = tuple[slice, ...]


class RowRun(NamedTuple):
    """The row-major numbers from start to stop of a shape, which are one box of it."""

    start: int
    stop: int
    sides: Sides


def split_dimensions(shape: Sequence[int], into: Sequence[int]) -> list[Shape]:
    """The sizes in `into` that each dimension of `shape` is split into; a dimension of size 1 may have none."""
    left, groups = list(into), []
    for size in shape:
        group: list[int] = []
        while math.prod(group) < size:
            group.append(left.pop(0))
        groups.append(tuple(group))
    groups[-1] += tuple(left)
    return groups


def boxes_of(source: Sequence[slice], groups: Sequence[Shape]) -> Iterator[tuple[Sides, Sides]]:
    """Parts of the box `source` that stay boxes when its dimensions are split: (in `source`, in the split shape).

    groups: the sizes into which each dimension is split.
    """
    runs = [runs_of_range(side.start, side.stop, sizes) for side, sizes in zip(source, groups, strict=True)]
    for chosen in itertools.product(*runs):
        within = (
            slice(run.start - side.start, run.stop - side.start) for run, side in zip(chosen, source, strict=True)
        )
        yield tuple(within), tuple(side for run in chosen for side in run.sides)


def runs_of_range(start: int, stop: int, sizes: Shape) -> list[RowRun]:
    """The row-major numbers from start to stop of a shape, as at most 2 len(sizes) - 1 boxes, in order."""
    if not sizes:
        return [RowRun(start, stop, ())]
    inner = math.prod(sizes[1:])
    first, last = -(-start // inner), stop // inner  # the rows that are covered completely
    if first > last:
        return runs_of_row(last, start, stop, sizes)
    whole = [RowRun(first * inner, last * inner, (slice(first, last), *(slice(0, n) for n in sizes[1:])))]
    before = runs_of_row(first - 1, start, first * inner, sizes) if start < first * inner else []
    after = runs_of_row(last, last * inner, stop, sizes) if last * inner < stop else []
    return [*before, *(whole if first < last else []), *after]


def runs_of_row(row: int, start: int, stop: int, sizes: Shape) -> list[RowRun]:
    """runs_of_range for numbers within one row."""
    first = row * math.prod(sizes[1:])
    runs = runs_of_range(start - first, stop - first, sizes[1:])
    return [RowRun(run.start + first, run.stop + first, (slice(row, row + 1), *run.sides)) for run in runs]
