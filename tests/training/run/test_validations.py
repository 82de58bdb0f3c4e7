"""The best validation, and how many in a row had no lower loss, from the records of a run alone."""

import math

import pytest

from ligermodels.training import TrainConfig
from ligermodels.training.reporting.metrics import METRICS_FILE, Validation, read_metrics
from ligermodels.training.run.validations import Validations, checkpoint_due, validation_losses
from tests.training.reporting.test_metrics import run

nan, inf = math.nan, math.inf


@pytest.mark.parametrize(
    "losses, best, since",
    [
        ({}, None, 0),
        ({0: 1.0}, None, 0),  # before the first step
        ({0: 1.0, 5: 3.0}, 5, 0),
        ({5: 3.0, 10: 2.0, 12: 2.0, 15: 2.5}, 10, 2),  # an equal loss is no lower one
        ({5: nan, 10: inf}, None, 2),
        ({5: nan, 10: 9.0, 15: nan}, 10, 1),
    ],
)
def test_the_first_lowest_loss_is_the_best_and_the_validations_after_it_are_counted(losses, best, since):
    validations = Validations(TrainConfig(best_checkpoint=True, early_stopping=2), {}, saved=losses)
    for step, loss in losses.items():
        validations.add(step, loss)
    assert (validations.best, validations.since_lowest, validations.end_run) == (best, since, since >= 2)
    without = Validations(TrainConfig(), losses, saved=losses)
    assert (without.best, without.end_run, without.lost_line()) == (None, False, None)


def test_the_best_of_the_steps_that_have_a_checkpoint_is_taken():
    config, losses = TrainConfig(best_checkpoint=True), {4: 1.0, 8: 3.0, 12: 2.0}
    validations = Validations(config, losses, saved=[8, 12])
    assert validations.best == 12 and "step 4 has the lowest validation loss so far, 1.0" in validations.lost_line()
    validations.add(16, 1.5)
    assert validations.best == 16
    assert Validations(config, losses, saved=[4, 12]).lost_line() is None


def test_the_losses_are_those_of_whole_records(tmp_path):
    with run(tmp_path, 9) as metrics:
        metrics.step(3, 1.0, 1.0, 0.1, tokens=1)
        metrics.validation(2, Validation(0.1))
        metrics.validation(4, Validation(nan))
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write('{"step": 3, "validation_loss": 0.1')  # where the process was killed
    assert validation_losses(read_metrics(tmp_path / METRICS_FILE)) == {2: 0.1, 4: inf}


@pytest.mark.parametrize("every, due", [(None, [3, 6]), (4, [4, 6]), (3, [3, 6]), (0, [])])
def test_a_checkpoint_is_due_by_time_or_by_steps_and_at_the_end(every, due):
    config = TrainConfig(steps=6, checkpoint_every=every)
    assert [step for step in range(1, 7) if checkpoint_due(config, step, overdue=step == 3)] == due
