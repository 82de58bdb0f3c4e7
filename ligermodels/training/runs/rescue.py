"""A run whose export fails: its last step is saved, so that `--resume` has only to export once more."""

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
    """Where what runs within fails, on all ranks as on one, the run's state is saved, and the error says so.

    command: what goes on from there.
    """
    try:
        yield
    except Exception as error:
        try:
            checkpoints.save(model, optimizer, progress)
            checkpoints.wait()
            saved = f"its last step is saved, to export it once more: {command}"
        except InputError as another:
            saved = f"its last step could not be saved either: {another}"
        if isinstance(error, InputError | OSError):
            raise InputError(f"{error}; {saved}") from error
        error.add_note(saved)
        raise
