"""What a failing export leaves: the last step saved, and an error that says so."""

import pytest

from ligermodels.errors import CheckpointError, InputError
from ligermodels.training.runs.rescue import rescued


class Saving:
    """Stands for the checkpoints of a run, whose saves fail when they are waited for."""

    def __init__(self, failing=False):
        self.failing, self.saved = failing, []

    def save(self, *state):
        self.saved.append(state)

    def wait(self):
        if self.failing:
            raise CheckpointError("full too")


STATE = "model", "optimizer", "progress"


def test_a_successful_export_saves_no_checkpoint():
    saving = Saving()
    with rescued(saving, *STATE, "again"):
        pass
    assert saving.saved == []


@pytest.mark.parametrize(
    ("failing", "outcome"),
    [
        (False, "the last step is saved; to export it again: again"),
        (True, "the last step could not be saved either: full too"),
    ],
)
def test_an_error_names_the_saved_step_and_a_bug_keeps_its_traceback(failing, outcome):
    saving = Saving(failing)
    for error in (InputError("full"), OSError("full")):
        with pytest.raises(InputError) as refused, rescued(saving, *STATE, "again"):
            raise error
        assert str(refused.value) == f"full; {outcome}"
    with pytest.raises(KeyError) as raised, rescued(saving, *STATE, "again"):
        raise KeyError("bug")
    assert raised.value.__notes__ == [outcome] and saving.saved == [STATE] * 3
