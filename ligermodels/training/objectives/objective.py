"""Objective: the interface between the training loop and what a run minimises; the package has the order of calls."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ligermodels.distributed import World, largest, total
from ligermodels.layers.context_parallel import ContextGroup
from ligermodels.layers.decoder import CausalLM
from ligermodels.memory.blocks import CROSS_ENTROPY, HeadOp
from ligermodels.memory.model import TrainingMemory
from ligermodels.training.checkpoints import Progress
from ligermodels.training.data import Data
from ligermodels.training.data.preferences import PreferenceData
from ligermodels.training.planning.defaults import Choice
from ligermodels.training.reporting.metrics import Validation
from ligermodels.training.run.stopping import Stop
from ligermodels.training.settings.config import RunConfig, TrainConfig


class Work(NamedTuple):
    """A step, before its first backward pass.

    batches: this rank's micro-batches, on its device; every rank has as many, some of them perhaps of padding alone.
    counts: what `loss` divides by, over all ranks, on the device; its meaning is the objective's. units: how far the
    step moves the data cursor (`Progress.rows`). tokens: positions computed, over all ranks, for the throughput.
    metrics: of the whole step, as far as the host knows them by now.
    """

    batches: Sequence[Any]
    counts: Tensor
    units: int
    tokens: int
    metrics: Mapping[str, float] = {}


class Share(NamedTuple):
    """What one micro-batch adds to its step.

    loss: its share of the step's loss, a scalar with a graph. sums: detached scalars by name, which are added over the
    micro-batches and ranks of the step. maxima: likewise, of which the largest is kept. The names are the same in every
    micro-batch, also in one of padding alone.
    """

    loss: Tensor
    sums: Mapping[str, Tensor] = {}
    maxima: Mapping[str, Tensor] = {}

    def map(self, function: Callable[[Tensor], Tensor]) -> "Share":
        """The share with the function's values of its scalars."""
        sums, maxima = ({name: function(x) for name, x in values.items()} for values in (self.sums, self.maxima))
        return Share(function(self.loss), sums, maxima)


class StepTotals:
    """The shares of a step, added up over micro-batches, and then over ranks."""

    def __init__(self, device: torch.device) -> None:
        self.loss = torch.zeros((), device=device)
        self.sums: dict[str, Tensor] = {}
        self.maxima: dict[str, Tensor] = {}

    def add(self, share: Share) -> None:
        self.loss = self.loss + share.loss.detach()
        for name, value in share.sums.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value
        for name, value in share.maxima.items():
            self.maxima[name] = torch.maximum(self.maxima[name], value) if name in self.maxima else value

    def over_ranks(self, signs: Sequence[float]) -> Tensor:
        """A device vector, fp32: the loss, the sum of each of `signs`, the sums, the maxima."""
        notes = [torch.full_like(self.loss, float(sign)) for sign in signs]
        sums = total(torch.stack([self.loss, *notes, *(value.float() for value in self.sums.values())]))
        if not self.maxima:
            return sums
        return torch.cat([sums, largest(torch.stack([value.float() for value in self.maxima.values()]))])

    def named(self, values: Sequence[float], signs: int) -> tuple[Sequence[float], dict[str, float], dict[str, float]]:
        """What the host read of that vector: (the loss and the signs, sums by name, maxima by name)."""
        first, last = 1 + signs, 1 + signs + len(self.sums)
        sums, maxima = zip(self.sums, values[first:last], strict=True), zip(self.maxima, values[last:], strict=True)
        return values[:first], dict(sums), dict(maxima)


@dataclass(frozen=True)
class RunSetup:
    """What an objective reads of its run once the model is in place.

    folder is that of the run. micro_batch_size counts the rows of a micro-batch, where rows are all of one length.
    context holds the ranks that share this rank's rows, where there are others. say prints a line, on the first rank
    alone.
    """

    folder: Path
    micro_batch_size: int = 1
    context: ContextGroup | None = None
    say: Callable[[str], Any] = print


class Objective(ABC):
    """What a run minimises. Every rank has one, and calls the same methods.

    config holds the settings: those that need no data at first, all of them from `complete` on. data is what `open`
    opened, run what `prepare` got. takes_rows says whether a step takes rows, which micro-batches divide; else it takes
    groups, and a micro-batch is one row that is packed with them. is_capturable says whether `loss` reads nothing but
    the tensors of the micro-batch and its counts, and never waits for the device.
    """

    data: Data | PreferenceData
    run: RunSetup
    takes_rows = False
    is_capturable = False

    def __init__(self, config: TrainConfig, world: World) -> None:
        """Raises InputError for options that contradict each other. Reads no file."""
        self.config, self.world = config, world

    # Before any memory is allocated.

    def run_code(self) -> None:  # noqa: B027
        """Runs the files of code that the settings name, such as rewards. Raises InputError for one that fails. Not
        called where a run is only planned for someone who may not run code, or its checkpoint is only read."""

    @abstractmethod
    def open(self, folder: Path | None, model: CausalLM, adapter: Path | None) -> None:
        """Opens the data, as `data`. Raises InputError for data that cannot be used.

        folder and adapter have the model's and the adapter's files, where there are any. The model is on the meta
        device.
        """

    @abstractmethod
    def choices(self, hidden_size: int) -> dict[str, Choice]:
        """Values for settings that were not given, such as the units of a step and the learning rate."""

    @property
    def passes_beside(self) -> float:
        """How many forward passes of the model a unit takes beside its own, in training as in a validation."""
        return 0

    def complete(self, config: RunConfig) -> None:
        """Takes the settings with all choices made. Raises InputError where the data are too few for a step."""
        self.config = config

    @property
    @abstractmethod
    def tokens_per_step(self) -> int:
        """Positions that a step computes over all ranks, about, for the plan."""

    def micro_batches(self, size: int) -> int:
        """How many micro-batches of `size` rows a rank has in a step; of packed rows about, and 1 only where it is
        never more. Known when the settings are complete."""
        config, world = self.config, self.world
        assert isinstance(config, RunConfig)
        own = -(-config.units // world.data_size)
        if self.takes_rows:
            return -(-own // size)
        return max(min(own, 2), -(-self.tokens_per_step // (config.sequence_length * world.data_size)))

    @property
    def head_op(self) -> HeadOp:
        """The op of the head and its loss, for the plan."""
        return CROSS_ENTROPY

    @property
    def trains_chats(self) -> bool:
        """Whether the data have prompts and answers, so that an export should stop where an answer ends."""
        return True

    def bytes_beside(self, model: CausalLM) -> int:
        """The bytes of a rank that stay beside the model, such as a reference or a teacher.

        The model is on the meta device.
        """
        return 0

    def phases(self, model: CausalLM, train: TrainingMemory) -> Mapping[str, int]:
        """The peak bytes of a rank by phase: always "train", and others, such as "precompute", where there are any.

        The model is on the meta device. train is the memory of a training step, with what is beside.
        """
        return {"train": train.peak}

    def facts(self) -> dict[str, str]:
        """Further lines of the plan, by their label, such as what is kept on the disk."""
        return {}

    def advice(self) -> list[str]:
        """Warnings that the plan of a run shows, about its settings and data."""
        return []

    # During the run.

    def prepare(self, model: CausalLM, run: RunSetup) -> None:
        """Makes the references. The random state must be as it was.

        The model is sharded and has the weights that the run begins with; a resumed run restores its checkpoint
        afterwards.
        """
        self.run = run

    @abstractmethod
    def work(self, model: CausalLM, progress: Progress) -> Work:
        """The step behind `progress`. It depends on the weights and on `progress`, not on the number of ranks."""

    @abstractmethod
    def loss(self, model: CausalLM, batch: Any, work: Work) -> Share:
        """The loss of one of `work.batches`. The shares of all micro-batches and ranks add up to that of the step."""

    def metrics(self, sums: Mapping[str, float], maxima: Mapping[str, float], step: int) -> dict[str, float]:
        """The metrics of a step, on the host. sums, maxima: those of its shares, over all micro-batches and ranks."""
        return {}

    def warnings(self, values: Mapping[str, float], step: int) -> list[str]:
        """Lines that a user should see, each once. values: the metrics of step number `step`, from 1."""
        return []

    def finish_step(self, model: CausalLM, step: int) -> None:  # noqa: B027
        """Called after the update of step number `step`, from 1; not after a step without an update."""

    @abstractmethod
    def validate(self, model: CausalLM, step: int, stop: Stop) -> Validation | None:
        """The model after `step` on the validation data, the same on every rank; None where a signal requests a stop.

        --best-checkpoint and --early-stopping compare its loss."""

    # In a checkpoint.

    def tensors(self) -> dict[str, Tensor]:
        """Tensors of fixed shapes, perhaps sharded like the model's, which a checkpoint saves and fills in place."""
        return {}

    def state(self) -> dict[str, Tensor]:
        """This rank's own tensors, of any shape, such as rollouts. They are saved beside its random state."""
        return {}

    def restore(self, state: Mapping[str, Tensor]) -> None:  # noqa: B027
        """Takes back what `state` returned; {} on another number of ranks, where a resume is not bit-exact."""
