"""What failing data and a failing export leave: the last step saved, and an error that says so."""

import pytest

from ligermodels.errors import CheckpointError, InputError
from ligermodels.training.data import DataError
from ligermodels.training.run.resuming import reading_data, rescued


class Saving:
    """Stands for the checkpoints of a run, whose saves fail when they are waited for."""

    def __init__(self, failing=False):
        self.failing, self.saved = failing, 0

    def save(self):
        self.saved += 1

    def wait(self):
        if self.failing:
            raise CheckpointError("full too")


@pytest.mark.parametrize("failing", [False, True])
def test_a_successful_export_saves_nothing_and_warns_of_a_last_checkpoint_that_failed(failing):
    saving, said = Saving(failing), []
    with rescued(saving, saving.save, "again", said.append):
        assert said == []
    assert saving.saved == 0 and said == ["warning: full too"] * failing


@pytest.mark.parametrize("saves", [False, True])  # where the run has not saved its last step
@pytest.mark.parametrize(
    ("failing", "outcome"),
    [
        (False, "the last step is saved; to export it again: again"),
        (True, "the last step could not be saved either: full too"),
    ],
)
def test_an_error_names_the_saved_step_and_a_bug_keeps_its_traceback(failing, outcome, saves):
    saving, said = Saving(failing), []
    arguments = saving, saving.save if saves else None, "again", said.append
    for error in (InputError("full"), OSError("full")):
        with pytest.raises(InputError) as refused, rescued(*arguments):
            raise error
        assert str(refused.value) == f"full; {outcome}"
    with pytest.raises(KeyError) as raised, rescued(*arguments):
        raise KeyError("bug")
    assert raised.value.__notes__ == [outcome] and saving.saved == 3 * saves and said == []


@pytest.mark.parametrize(
    ("failing", "outcome"),
    [
        (False, "bad image; step 3 is saved; to continue from it: again"),
        (True, "bad image; step 3 could not be saved either: full too"),
    ],
)
def test_data_that_cannot_be_read_leave_the_last_step_saved(failing, outcome):
    saving = Saving(failing)
    with pytest.raises(InputError) as refused, reading_data(saving, saving.save, 3, "again"):
        raise DataError("bad image")
    assert str(refused.value) == outcome and saving.saved == 1


@pytest.mark.parametrize(
    ("step", "error"), [(0, DataError("bad image")), (3, InputError("of one rank")), (3, KeyError())]
)
def test_nothing_is_saved_before_the_first_step_and_for_errors_of_one_rank(step, error):
    saving = Saving()
    with pytest.raises(type(error)) as raised, reading_data(saving, saving.save, step, "again"):
        raise error
    assert raised.value is error and saving.saved == 0
