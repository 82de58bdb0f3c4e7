"""A run whose export fails: its last step is saved, so that resuming it only repeats the export."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from ligermodels.errors import InputError
from ligermodels.training.checkpoints import Checkpoints, Progress
from ligermodels.training.optimizers.adamw import AdamW


@contextmanager
def rescued(
    checkpoints: Checkpoints, model: nn.Module, optimizer: AdamW, progress: Progress, command: str
) -> Iterator[None]:
    """Where the body raises, on all ranks, saves the run's state and says so in the error.

    command: resumes the run from there.
    """
    try:
        yield
    except Exception as error:
        try:
            checkpoints.save(model, optimizer, progress)
            checkpoints.wait()
            saved = f"the last step is saved; to export it again: {command}"
        except InputError as another:
            saved = f"the last step could not be saved either: {another}"
        if isinstance(error, InputError | OSError):
            raise InputError(f"{error}; {saved}") from error
        error.add_note(saved)
        raise
