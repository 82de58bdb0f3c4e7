"""Teachers of distillation: a frozen model beside the student.

The states of a teacher may be on the disk (`--teacher-states`): during training only its head is in memory then. They
are those of the run's own rows, at their supervised tokens, so that the whole distribution is as exact as that of a
teacher in memory. The first run that names the folder writes it, and all ranks map it: bytes of M places in the order
of the rows, those of the training before those of the validation; the teacher's head; and what they belong to.
"""

import gc
import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from ligermodels.hub import create, quantise_on_meta, resolve
from ligermodels.layers.decoder import CausalLM
from ligermodels.layers.reward_model import RewardModel
from ligermodels.memory.model import decoder_blocks, gathered_bytes, held_bytes, inference_memory
from ligermodels.tokenizer import Tokenizer
from ligermodels.training.data import Data
from ligermodels.training.data.preferences import PreferenceBatch
from ligermodels.training.data.rows.packing import ConcatenatedRows, Segment
from ligermodels.training.data.rows.run_rows import Batch, collate, is_supervised
from ligermodels.training.data.run_tokenizer import refuse_other_tokens, tokenizer_of
from ligermodels.training.parallel import fsdp
from ligermodels.training.planning.plan import free_space
from ligermodels.training.settings.config import RunConfig
from ligermodels.units import memory_size
from ligermodels.weights.loading import load_weights
from ligermodels.weights.reading import read_json
from ligermodels.weights.writing import Entry, failure, write_json, write_safetensors

STATES, HEAD, DESCRIPTION = "states", "head.safetensors", "teacher.json"
SAMPLE_BYTES, SAMPLE_DISTANCE = 4096, 4 * 2**20  # of weights: a change anywhere in a matrix of 4 MiB is noticed


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


class TeacherModel:
    """A model without gradients, sharded as the student is. Its weights are read by `prepare`."""

    def __init__(self, name: str) -> None:
        """Reads the configuration. The model is on the meta device; it has to get the compute dtype of the run.

        Raises HubError, ConfigError or CheckpointError; InputError for a reward model, which has no logits.
        """
        self.folder = resolve(name)
        self.model = create(self.folder, device="meta").requires_grad_(False)
        quantise_on_meta(self.model, self.folder, None)
        if isinstance(self.model, RewardModel):
            raise InputError(f"--teacher {name}: is a reward model, without logits of tokens; name a language model")

    @property
    def tokenizer(self) -> Tokenizer | None:
        return tokenizer_of(self.folder)

    @property
    def options(self) -> dict[str, Any]:
        """What the teacher does to its logits, as options of `linear_divergence`."""
        config = self.model.config
        return {"teacher_softcap": config.logit_softcap, "teacher_logit_scale": config.logit_scale}

    def prepare(self, world: World, dp_replicate: int, micro_batch_size: int) -> None:
        """Reads the weights, sharded as the student's. micro_batch_size counts the rows of a pass."""
        fsdp.shard_frozen(self.model, world, self.model.dtype, dp_replicate=dp_replicate)
        self.model.to_empty(device=world.device)
        load_weights(self.model, self.folder)
        self.model.eval()

    @contextmanager
    def read(self, batch: Batch | PreferenceBatch) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields (states, weight) of the batch for `linear_divergence`: [N, H] at `batch.rows`, or [B, T, H]."""
        states = self.hidden(batch)
        with fsdp.gathered_head(self.model) as weight:
            yield states, weight

    @torch.no_grad()
    def hidden(self, batch: Batch | PreferenceBatch) -> Tensor:
        return self.model.final_hidden(
            batch.input_ids, cu_seqlens=batch.cu_seqlens, max_seqlen=batch.max_seqlen, rows=batch.rows
        )

    def memory(self, tokens: int, shards: int) -> int:
        """The bytes of a rank: its shard of the weights, and one block with the head while they compute."""
        fp32 = set(self.model.fp32_parameters())
        held = held_bytes(self.model.parameters(), shards, fp32)
        computing = inference_memory(self.model, 1, tokens, self.model.dtype).prompt
        if shards == 1:
            return held + computing
        size = self.model.dtype.itemsize
        gathered = max(gathered_bytes(block, size, fp32) for block in decoder_blocks(self.model))
        return held + computing + 2 * gathered + self.model.head.weight.numel() * size


def common_vocabulary(
    student: CausalLM, teacher: CausalLM, names: tuple[str, str], tokenizers: tuple[Tokenizer | None, Tokenizer | None]
) -> int | None:
    """The number of classes that are compared; None for all, if both models have equally many.

    Heads may be padded beyond the tokenizer to any size; what is compared is the tokenizer's part, renormalised.
    names: of student and teacher. Raises InputError for tokenizers that give a number to different tokens, and for
    heads of different sizes without tokenizers that tell which part is padding.
    """
    sizes = student.config.vocab_size, teacher.config.vocab_size
    own, other = tokenizers
    if own is not None and other is not None:
        refuse_other_tokens(own, other, names[0], f"--teacher {names[1]}")
    if sizes[0] == sizes[1]:
        return None
    if own is None or other is None or own.vocab_size > min(sizes):
        raise InputError(
            f"--teacher {names[1]}: has {sizes[1]} classes, {names[0]} has {sizes[0]}, and no tokenizer of both says "
            "that the rest is padding; take a teacher with the student's vocabulary"
        )
    return own.vocab_size


class StoredTeacher(TeacherModel):
    """A teacher whose hidden states are on the disk. places counts the supervised tokens of all rows, whose states are
    stored."""

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
        """The bytes of a rank: the head, whole, and the states of a micro-batch."""
        head = self.model.head.weight.numel()
        return (head + (self.config.micro_batch_size or 1) * tokens * self.width) * self.model.dtype.itemsize

    def writing_memory(self, tokens: int, shards: int) -> int:
        """The bytes of a rank while the states are written; 0 where they are there."""
        return 0 if self.written else super().memory(tokens, shards)

    def prepare(self, world: World, dp_replicate: int, micro_batch_size: int) -> None:
        """Writes the states where they are missing, by the same passes as those of a teacher in memory."""
        if not self.written:
            super().prepare(world, dp_replicate, micro_batch_size)
            self.write(world, micro_batch_size)
            self.model = create(self.folder, device="meta")  # frees the weights
            gc.collect()
        self.head = read_head(self.states_folder, world.device)
        stored = StoredStates.map(self.states_folder, self.offsets, self.width, self.head.dtype, writes=False)
        self.data.training.states_beside = self.data.validation.states_beside = stored.beside
        self.data.validation.first = len(self.data.training)

    def write(self, world: World, micro_batch_size: int) -> None:
        with fsdp.gathered_head(self.model) as weight:
            head = weight.detach().clone().cpu()
        states = self.compute(world, micro_batch_size)
        write_states(self.states_folder, states, head, self.offsets, self.description, world)
        self.written = True

    def compute(self, world: World, size: int) -> Iterator[tuple[int, Tensor]]:
        """Yields this rank's (first row, states of the rows from there on), of `size` rows a pass.

        All ranks take as many batches.
        """
        first = 0
        for rows in self.parts:
            for start in range(0, len(rows), world.size * size):
                begin = start + world.rank * size
                numbers = range(begin, begin + size)
                segments = [rows.segments(row) if row < len(rows) else [] for row in numbers]
                batch = collate(segments, rows.length, self.data.training.packing, world)
                yield min(first + begin, len(self.offsets) - 1), self.states_of(batch, world)
            first += len(rows)

    def states_of(self, batch: Batch, world: World) -> Tensor:
        """Computes the states at the supervised places of a batch, [n, H] in host memory."""
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
