"""Hidden states of a teacher at the supervised places of a run's rows, on the disk: written once, mapped by all ranks.

A folder has the states, bytes of M places in the order of the rows, those of the training before those of the
validation; the teacher's head; and what they belong to.
"""

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ligermodels import distributed
from ligermodels.distributed import World
from ligermodels.errors import CheckpointError, InputError
from ligermodels.training.data.rows.packing import ConcatenatedRows, Segment
from ligermodels.training.data.rows.run_rows import Batch, is_supervised
from ligermodels.weights.reading import read_json
from ligermodels.weights.writing import Entry, failure, write_json, write_safetensors

STATES, HEAD, DESCRIPTION = "states", "head.safetensors", "teacher.json"


def supervised_places(labels: Tensor) -> np.ndarray:
    """Returns the places of flattened labels whose next token is supervised."""
    return np.flatnonzero(is_supervised(labels))


def supervised_count(segments: Sequence[Segment]) -> int:
    """Counts the supervised tokens of a row; the first token of a segment is context."""
    return sum(
        size - 1 if store.supervised is None else int(store.supervised[start + 1 : start + size].sum())
        for store, start, size in segments
    )


def offsets_of_rows(parts: Sequence[ConcatenatedRows]) -> np.ndarray:
    """Returns int64 [R + 1]: where the places of each row begin, of R rows in all parts."""
    counts = [supervised_count(rows.segments(row)) for rows in parts for row in range(len(rows))]
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])


@dataclass(frozen=True)
class StoredStates:
    """The states [M, H] of R rows, memory-mapped. offsets: int64 [R + 1], where the states of each row begin."""

    states: Tensor
    offsets: np.ndarray

    @classmethod
    def map(cls, folder: Path, offsets: np.ndarray, width: int, dtype: torch.dtype, *, writes: bool) -> "StoredStates":
        """Returns the states in a folder.

        writes: makes the file if it is not there, and a change of the tensor changes it; otherwise the file must be
        there as a whole: raises InputError.
        """
        count = int(offsets[-1])
        if not writes:
            check_size(folder / STATES, count * width * dtype.itemsize)
        states = torch.from_file(str(folder / STATES), shared=writes, size=count * width, dtype=dtype)
        return cls(states.view(count, width), offsets)

    def beside(self, batch: Batch, numbers: Sequence[int | None], world: World) -> Batch:
        """Returns the batch with the states of its rows, of these numbers; None for a row of padding."""
        states = self.of_rows(numbers, batch.labels, batch.rows, world.device.type == "cuda")
        return batch._replace(teacher_states=states)

    def of_rows(self, numbers: Sequence[int | None], labels: Tensor, rows: Tensor | None, pinned: bool) -> Tensor:
        """Returns what `final_hidden` would return for a batch: [N, H] at `rows` [N], or [*labels.shape, H].

        numbers: of the batch's rows; None for one of padding. Places that are not supervised have ones.
        """
        spans = [self.states[self.offsets[n] : self.offsets[n + 1]] for n in numbers if n is not None]
        found = torch.cat([*spans, self.states[:0]])
        places = supervised_places(labels)
        count = labels.numel() if rows is None else len(rows)
        states = torch.ones(count, found.shape[1], dtype=found.dtype, pin_memory=pinned)
        if rows is not None:
            states[: len(found)] = found
            return states
        states[torch.from_numpy(places)] = found
        return states.view(*labels.shape, -1)


def described_as(folder: Path, description: Mapping[str, Any]) -> bool:
    """Returns whether states of this description are in a folder; False where it does not exist.

    Raises InputError for a folder with anything else.
    """
    if not folder.exists():
        return False
    try:
        found = read_json(folder / DESCRIPTION)
    except CheckpointError as error:
        raise InputError(f"--teacher-states {folder}: has no states of a teacher: {error}; name a new folder") from None
    other = next((name for name, value in description.items() if found.get(name) != value), None)
    if other is not None:
        raise InputError(
            f"--teacher-states {folder}: was written for another {other}; name a new folder, or remove this one"
        )
    return True


def read_head(folder: Path, device: torch.device) -> Tensor:
    """Returns the teacher's head [V, H]. Raises InputError for a file that is missing or damaged."""
    try:
        return load_file(folder / HEAD, device=str(device))["weight"]
    except (OSError, SafetensorError, KeyError) as error:
        raise InputError(f"{folder / HEAD}: cannot be read: {error}; remove the folder") from error


def check_size(file: Path, expected: int) -> None:
    """Raises InputError for a file that is missing or has another number of bytes."""
    found = file.stat().st_size if file.is_file() else 0
    if found != expected:
        raise InputError(f"{file}: has {found:,} bytes instead of {expected:,}; remove the folder")


def write_states(
    folder: Path, parts: Iterator[tuple[int, Tensor]], head: Tensor, offsets: np.ndarray,
    description: Mapping[str, Any], world: World,
) -> None:  # fmt: skip
    """Makes the folder; it exists only when it is complete. Every rank must call it, on one file system.

    parts: of this rank, (first row, states [n, H] of the rows from there on). head: [V, H], of the states' dtype.
    Raises InputError on every rank where one cannot write.
    """
    temporary = folder.with_name(f".{folder.name}")
    distributed.raise_on_all(failure(start_folder, temporary) if world.is_first else None)
    distributed.raise_on_all(failure(write_parts, temporary, parts, head, offsets))
    distributed.raise_on_all(failure(finish_folder, temporary, folder, head, description) if world.is_first else None)


def start_folder(temporary: Path) -> None:
    shutil.rmtree(temporary, ignore_errors=True)  # of a run that was killed
    temporary.mkdir(parents=True)


def write_parts(temporary: Path, parts: Iterator[tuple[int, Tensor]], head: Tensor, offsets: np.ndarray) -> None:
    stored = StoredStates.map(temporary, offsets, head.shape[1], head.dtype, writes=True)
    for first, states in parts:
        begin = int(offsets[first])
        stored.states[begin : begin + len(states)] = states


def finish_folder(temporary: Path, folder: Path, head: Tensor, description: Mapping[str, Any]) -> None:
    entry = Entry("weight", head.dtype, tuple(head.shape))
    write_safetensors(temporary / HEAD, [entry], iter([iter([head])]))
    write_json(temporary / DESCRIPTION, description)
    with (temporary / STATES).open("rb+") as stream:
        os.fsync(stream.fileno())
    temporary.rename(folder)
