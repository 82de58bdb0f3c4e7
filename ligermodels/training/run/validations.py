"""The validation losses of a run: which checkpoint is the best, and when early stopping ends the run.

Both depend on the losses alone, so a resumed run finds them again in metrics.jsonl. The validation before the first
step counts for neither: nothing is trained then. Here is also after which steps a run validates and saves a checkpoint.
Steps count from 1.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ligermodels.training.settings.config import RunConfig, TrainConfig
from ligermodels.units import counted, loss_text


def validation_losses(records: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """The validation losses by step, in nats per token, from the records of metrics.jsonl; inf if not finite."""
    found = {record["step"]: record["validation_loss"] for record in records if "validation_loss" in record}
    return {step: loss if isinstance(loss, int | float) else math.inf for step, loss in found.items()}


class Validations:
    """The validations of a run, in order.

    losses: by step, those before a resume. saved: the steps of the checkpoints that are there.
    """

    def __init__(self, config: TrainConfig, losses: Mapping[int, float], saved: Collection[int] = ()) -> None:
        self.config = config
        self.losses = dict(losses)
        self.unsaved = self.losses.keys() - saved

    def add(self, step: int, loss: float) -> None:
        """Adds a validation. Where its step is then the best one, the caller saves a checkpoint of it."""
        self.losses[step] = loss

    @property
    def best(self) -> int | None:
        """The step with the lowest loss of those with a checkpoint; None without any, or without --best-checkpoint."""
        if not self.config.best_checkpoint:
            return None
        return lowest({step: loss for step, loss in self.losses.items() if step not in self.unsaved})

    @property
    def since_lowest(self) -> int:
        """How many validations in a row had no lower loss than one before them."""
        first = lowest(self.losses) or 0
        return sum(step > first for step in self.losses)

    @property
    def end_run(self) -> bool:
        """Whether early stopping ends the run now."""
        patience = self.config.early_stopping
        return patience is not None and self.since_lowest >= patience

    def early_stopping_line(self) -> str:
        step, number = lowest(self.losses), counted(self.since_lowest, "validation")
        return f"early stopping: {number} in a row had no lower loss" + (f" than step {step}" if step else "")

    def best_line(self) -> str:
        """Says which weights are exported with --best-checkpoint."""
        step = self.best
        if step is None:
            return "no validation loss was finite: the last weights are exported"
        return f"step {step} has the lowest validation loss, {loss_text(self.losses[step])}: its weights are exported"

    def lost_line(self) -> str | None:
        """A warning where the best checkpoint so far, which --best-checkpoint would export, is not there."""
        step = lowest(self.losses)
        if not self.config.best_checkpoint or step not in self.unsaved:
            return None
        loss = loss_text(self.losses[step])
        return f"warning: step {step} has the lowest validation loss so far, {loss}, but no checkpoint"


def lowest(losses: Mapping[int, float]) -> int | None:
    """The step with the lowest finite loss after the start of the run, the first of equal ones; None without any."""
    trained = {step: loss for step, loss in losses.items() if step > 0 and math.isfinite(loss)}
    return min(trained, key=trained.__getitem__, default=None)


def validation_due(config: RunConfig, step: int) -> bool:
    return step % config.eval_every == 0 or step == config.steps


def checkpoint_due(config: RunConfig, step: int, *, overdue: bool) -> bool:
    """Tells whether a checkpoint is due. overdue says whether the last one is older than `checkpoint_minutes`."""
    every = config.checkpoint_every
    if every == 0:
        return False
    return step == config.steps or (overdue if every is None else step % every == 0)
