"""Tensors in files, those of a checkpoint folder, and the boxes of tensors that are viewed in another shape."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

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


FP4_DTYPE = torch.float4_e2m1fn_x2  # of tensors with two elements a byte, whose shape counts elements


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file. begin: its offset in bytes from the start of the file."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int

    @property
    def nbytes(self) -> int:
        return self.bytes_of(math.prod(self.shape))

    def bytes_of(self, elements: int) -> int:
        """The size of so many elements."""
        return elements // 2 if self.dtype == FP4_DTYPE else elements * self.dtype.itemsize

    @property
    def files(self) -> set[Path]:
        """The files that reading it opens."""
        return {self.file}


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of a folder, by their Hub names. It keeps no file open.

    folder: or the GGUF file. converted: whether the files store them otherwise than the Hub does, so that an export
    copies no bytes of them.
    """

    folder: Path
    tensors: Mapping[str, StoredTensor]
    converted: bool = False

    @property
    def description(self) -> str:
        """Where the model is described, for errors."""
        return "metadata" if self.converted else "config.json"
