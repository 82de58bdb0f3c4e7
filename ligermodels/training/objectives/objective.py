"""Objective: the interface between the training loop and what a run minimises. The package's docstring has its order.

Must not know any one objective.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ligermodels.distributed import World
from ligermodels.layers.decoder import CausalLM
from ligermodels.memory import TrainingMemory
from ligermodels.training.checkpoints import Progress
from ligermodels.training.config import RunConfig, TrainConfig
from ligermodels.training.data import Data
from ligermodels.training.data.preferences import PreferenceData
from ligermodels.training.runs.defaults import Choice
from ligermodels.training.runs.stopping import Stop


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


class Validation(NamedTuple):
    """A validation of the model.

    loss: the objective's own, which --best-checkpoint and --early-stopping compare. metrics: of the record, by name.
    perplexity: whether the loss is in nats per token, so that it has one. floor: the lowest loss that any model can
    reach, if known. answers: questions answered correctly, and their number. sample: a prompt and its continuation.
    """

    loss: float
    metrics: Mapping[str, float] = {}
    perplexity: bool = False
    floor: float | None = None
    answers: tuple[int, int] | None = None
    sample: str | None = None


class Objective(ABC):
    """What a run minimises. Every rank has one, and calls the same methods.

    units: the field of TrainConfig that says how many units a step takes, such as "pairs". data: what `open` opened.
    """

    units: ClassVar[str]
    data: Data | PreferenceData

    def __init__(self, config: TrainConfig, world: World) -> None:
        """Raises InputError for options that contradict each other. Reads no file."""
        self.config, self.world = config, world

    # Before any memory is allocated.

    @abstractmethod
    def open(self, folder: Path | None, model: CausalLM, adapter: Path | None) -> None:
        """Sets `data`. folder, adapter: as for `open_data`. model: on the meta device. Raises InputError for data that
        cannot be used."""

    @abstractmethod
    def choices(self, hidden_size: int) -> dict[str, Choice]:
        """Values for settings that were not given, such as the units of a step and the learning rate."""

    def complete(self, config: RunConfig) -> None:
        """Takes the settings with all choices made. Raises InputError where the data are too few for a step."""
        self.config = config

    @property
    def rows_are_given(self) -> bool:
        """Whether --micro-batch-size says how many rows a micro-batch has; otherwise it is one packed row."""
        return False

    @property
    def trains_chats(self) -> bool:
        """Whether the data have prompts and answers, so that an export should stop where an answer ends."""
        return True

    def phases(self, model: CausalLM, train: TrainingMemory, dtype: torch.dtype) -> Mapping[str, int]:
        """Peak bytes of a rank by phase: "train" is there always; others, such as "precompute", where there are any.

        model: on the meta device. train: the memory of a training step without the objective's references.
        """
        return {"train": train.peak}

    def notes(self) -> list[str]:
        """Lines that a run prints once, before its first step."""
        return []

    # During the run.

    def prepare(self, model: CausalLM, say: Callable[[str], Any]) -> None:
        """Makes the references. model: sharded, with the weights that the run begins with; a resumed run restores its
        checkpoint afterwards. The random state must be as it was. say: prints a line, on the first rank alone."""

    @abstractmethod
    def work(self, model: CausalLM, progress: Progress) -> Work:
        """The step behind `progress`. It depends on the weights and on `progress`, not on the number of ranks."""

    @abstractmethod
    def loss(self, model: CausalLM, batch: Any, work: Work) -> Share:
        """Of one of `work.batches`. The shares of all micro-batches and ranks add up to the loss of the step."""

    def metrics(self, sums: Mapping[str, float], maxima: Mapping[str, float], step: int) -> dict[str, float]:
        """The metrics of a step, on the host. sums, maxima: those of its shares, over all micro-batches and ranks."""
        return {}

    def warnings(self) -> list[str]:
        """Lines about the steps so far that a user should see, each once. Called after `metrics`."""
        return []

    def finish_step(self, model: CausalLM, step: int) -> None:
        """Called after the update of step number `step`, from 1."""

    @abstractmethod
    def validate(self, model: CausalLM, stop: Stop) -> Validation | None:
        """The model on the validation data, the same numbers on every rank; None where a signal requests a stop."""

    # In a checkpoint.

    def tensors(self) -> dict[str, Tensor]:
        """Tensors of fixed shapes, perhaps sharded like the model's, which a checkpoint saves and fills in place."""
        return {}

    def state(self) -> dict[str, Tensor]:
        """This rank's own tensors, of any shape, such as rollouts. They are saved beside its random state."""
        return {}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Takes back what `state` returned; {} on another number of ranks, where a resume is not bit-exact."""
