"""After which steps a run validates and saves a checkpoint. Must not know how. Steps count from 1."""

from ligermodels.training.settings.config import RunConfig


def validation_due(config: RunConfig, step: int) -> bool:
    return step % config.eval_every == 0 or step == config.steps


def checkpoint_due(config: RunConfig, step: int, *, overdue: bool) -> bool:
    """overdue: whether the last checkpoint is older than `checkpoint_minutes`."""
    every = config.checkpoint_every
    if every == 0:
        return False
    return step == config.steps or (overdue if every is None else step % every == 0)
