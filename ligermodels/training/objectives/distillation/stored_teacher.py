"""A teacher whose hidden states are on the disk (`--teacher-states`): during training only its head is in memory.

The states are those of the run's own rows, at their supervised tokens, so that the whole distribution is as exact as
that of a teacher beside the student. The first run that names the folder writes it. Must not know losses or steps.
"""

import gc
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ligermodels.distributed import World
from ligermodels.errors import InputError
from ligermodels.hub import create
from ligermodels.training.data import Data
from ligermodels.training.data.preferences import PreferenceBatch
from ligermodels.training.data.rows.batches import Batch, collate
from ligermodels.training.data.rows.stored_states import (
    StoredStates,
    described_as,
    offsets_of_rows,
    read_head,
    supervised_places,
    write_states,
)
from ligermodels.training.objectives.distillation.teachers import TeacherModel
from ligermodels.training.parallel import fsdp
from ligermodels.training.planning.plan import free_space
from ligermodels.training.settings.config import RunConfig
from ligermodels.units import memory_size

SAMPLE_BYTES, SAMPLE_DISTANCE = 4096, 4 * 2**20  # of weights: a change anywhere in a matrix of 4 MiB is noticed


class StoredTeacher(TeacherModel):
    """The same interface as `TeacherModel`. places: supervised tokens of all rows, whose states are stored."""

    micro_batch_size = 1  # rows of a pass that writes

    def __init__(self, name: str, folder: Path) -> None:
        super().__init__(name)
        self.states_folder = folder

    def complete(self, config: RunConfig, data: Data) -> None:
        """Looks for the states of these data. Raises InputError for those of others, or where the disk has no room."""
        self.config, self.data = config, data
        self.parts = [*data.training.sources, data.validation.rows]
        self.offsets = offsets_of_rows(self.parts)
        self.places, self.width = int(self.offsets[-1]), self.model.head.weight.shape[1]
        self.size = self.places * self.width * self.model.dtype.itemsize
        self.written = described_as(self.states_folder, self.description)
        there, free = free_space(self.states_folder)
        if not self.written and self.size > free:
            raise InputError(
                f"--teacher-states {self.states_folder}: needs {memory_size(self.size)}, and {there} has "
                f"{memory_size(free)}; name a folder on another disk"
            )

    @property
    def description(self) -> dict[str, Any]:
        rows = [part.fingerprint for rows in self.parts for part in rows.parts]
        return {
            "teacher": sampled_hash(self.folder), "data": hashlib.sha256("".join(rows).encode()).hexdigest(),
            "dtype": str(self.model.dtype).removeprefix("torch."), "shape": [self.places, self.width],
        }  # fmt: skip

    @property
    def line(self) -> str:
        """What is on the disk, or will be."""
        state = "in" if self.written else "written once to"
        shape = f"{self.places:,} x {self.width:,}"
        return f"{memory_size(self.size)}, hidden states {shape}, {state} {self.states_folder}"

    def memory(self, tokens: int, shards: int) -> int:
        """Bytes of a rank: the head, whole, and the states of a micro-batch."""
        head = self.model.head.weight.numel()
        return (head + (self.config.micro_batch_size or 1) * tokens * self.width) * self.model.dtype.itemsize

    def writing_memory(self, tokens: int, shards: int) -> int:
        """Bytes of a rank while the states are written; 0 where they are there."""
        return 0 if self.written else super().memory(tokens, shards)

    def prepare(self, world: World, dp_replicate: int) -> None:
        if not self.written:
            super().prepare(world, dp_replicate)
            self.write(world)
            self.model = create(self.folder, device="meta")  # frees the weights
            gc.collect()
        self.head = read_head(self.states_folder, world.device)
        stored = StoredStates.map(self.states_folder, self.offsets, self.width, self.head.dtype, writes=False)
        self.data.training.stored = self.data.validation.stored = stored
        self.data.validation.first = len(self.data.training)

    def write(self, world: World) -> None:
        with fsdp.gathered_head(self.model) as weight:
            head = weight.detach().clone().cpu()
        write_states(self.states_folder, self.compute(world), head, self.offsets, self.description, world)
        self.written = True

    def compute(self, world: World) -> Iterator[tuple[int, Tensor]]:
        """This rank's (first row, states of the rows from there on). All ranks take as many batches."""
        size, first = self.micro_batch_size, 0
        for rows in self.parts:
            for start in range(0, len(rows), world.size * size):
                begin = start + world.rank * size
                numbers = range(begin, begin + size)
                segments = [rows.segments(row) if row < len(rows) else [] for row in numbers]
                batch = collate(segments, rows.length, self.data.training.packing, world)
                yield min(first + begin, len(self.offsets) - 1), self.states_of(batch, world)
            first += len(rows)

    def states_of(self, batch: Batch, world: World) -> Tensor:
        """[n, H] in host memory, at the supervised places of a batch."""
        places = torch.from_numpy(supervised_places(batch.labels))
        states = self.hidden(batch.to(world.device)).flatten(0, -2)
        return (states[: len(places)] if batch.rows is not None else states[places.to(states.device)]).cpu()

    @contextmanager
    def read(self, batch: Batch | PreferenceBatch) -> Iterator[tuple[Tensor, Tensor]]:
        assert isinstance(batch, Batch) and batch.teacher_states is not None
        yield batch.teacher_states.to(self.head.device, non_blocking=True), self.head


def sampled_hash(folder: Path) -> str:
    """A hash of the sizes of a checkpoint's files and of a part of every 4 MiB of them."""
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        digest.update(f"{file.name} {file.stat().st_size} ".encode())
        with file.open("rb") as stream:
            for place in range(0, file.stat().st_size, SAMPLE_DISTANCE):
                stream.seek(place)
                digest.update(stream.read(SAMPLE_BYTES))
    return digest.hexdigest()
