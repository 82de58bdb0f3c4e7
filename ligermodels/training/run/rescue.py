"""A run whose data or export fail: its last step is saved, so that resuming it repeats nothing but what failed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ligermodels.errors import CheckpointError, InputError
from ligermodels.training.checkpoints import Checkpoints
from ligermodels.training.data import DataError


@contextmanager
def rescued(
    checkpoints: Checkpoints, save: Callable[[], None] | None, command: str, say: Callable[[str], None]
) -> Iterator[None]:
    """Waits for the run's last checkpoint, then runs the body, which exports.

    Where the body raises, on all ranks, the error says whether the last step is saved. A checkpoint that could not be
    written does not keep the run from its export; it is a warning then.
    save: saves the last step, for a run without a checkpoint of it. command: resumes the run. say: gets the warning.
    """
    unsaved = save_error(checkpoints.wait)
    try:
        yield
    except Exception as error:
        if save is not None:
            unsaved = save_error(save) or save_error(checkpoints.wait)
        saved = f"the last step is saved; to export it again: {command}"
        if unsaved:
            saved = f"the last step could not be saved either: {unsaved}"
        if isinstance(error, InputError | OSError):
            raise InputError(f"{error}; {saved}") from error
        error.add_note(saved)
        raise
    if unsaved:
        say(f"warning: {unsaved}")


@contextmanager
def reading_data(checkpoints: Checkpoints, save: Callable[[], None], step: int, command: str) -> Iterator[None]:
    """Runs the body, which reads data of the run, such as images, and changes nothing.

    Where they cannot be read, on all ranks, the error says that the last step is saved, and how to continue.
    save: saves the last step, `step`; there is nothing to save at 0. command: resumes the run.
    """
    try:
        yield
    except DataError as error:
        if not step:
            raise
        unsaved = save_error(save) or save_error(checkpoints.wait)
        if unsaved:
            raise InputError(f"{error}; step {step} could not be saved either: {unsaved}") from error
        raise InputError(f"{error}; step {step} is saved; to continue from it: {command}") from error


def save_error(save: Callable[[], None]) -> CheckpointError | None:
    try:
        save()
    except CheckpointError as error:
        return error
    return None
