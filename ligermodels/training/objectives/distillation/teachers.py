"""Teachers of distillation: a frozen model beside the student.

The states of a teacher may be on the disk (`--teacher-states`): during training only its head is in memory then. They
are those of the run's own rows, at their supervised tokens, so that the whole distribution is as exact as that of a
teacher in memory. The first run that names the folder writes it.
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
from ligermodels.hub import create, quantise_on_meta, resolve
from ligermodels.layers.decoder import CausalLM
from ligermodels.layers.reward_model import RewardModel
from ligermodels.memory.model import decoder_blocks, gathered_bytes, held_bytes, inference_memory
from ligermodels.tokenizer import Tokenizer
from ligermodels.training.data import Data
from ligermodels.training.data.preferences import PreferenceBatch
from ligermodels.training.data.rows.run_rows import Batch, collate
from ligermodels.training.data.run_tokenizer import refuse_other_tokens, tokenizer_of
from ligermodels.training.objectives.distillation.stored_states import (
    StoredStates,
    described_as,
    offsets_of_rows,
    read_head,
    supervised_places,
    write_states,
)
from ligermodels.training.parallel import fsdp
from ligermodels.training.planning.plan import free_space
from ligermodels.training.settings.config import RunConfig
from ligermodels.units import memory_size
from ligermodels.weights.loading import load_weights

SAMPLE_BYTES, SAMPLE_DISTANCE = 4096, 4 * 2**20  # of weights: a change anywhere in a matrix of 4 MiB is noticed


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
