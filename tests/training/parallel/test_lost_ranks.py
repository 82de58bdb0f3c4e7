"""One rank of two dies or hangs: the other one ends within the timeout, and sooner after a SIGTERM from torchrun."""

import re
import signal

import pytest

LIMIT = 10  # seconds a rank waits for the others, also for the first meeting on a busy machine


@pytest.fixture
def launch(launcher):
    """Starts two ranks, and returns their run when they have met."""
    runs = []

    def launch(*arguments):
        run = launcher.start(*arguments, ranks=2, module="tests.training.parallel.lost_ranks")
        runs.append(run)
        run.read_until("together")
        return run

    yield launch
    for run in runs:
        if not run.output.closed:  # a failure came between
            run.kill(signal.SIGKILL)
            end_of_first(run)


def end_of_first(run):
    """Waits until the first rank has ended by itself, and ends the other. Returns its status and all that they said."""
    run.stdout += run.output.read()
    run.kill(signal.SIGKILL, rank=1).wait()
    return run.status, run.stderr


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "hangs"])
def test_the_other_rank_ends_when_one(how, launch):
    status, error = end_of_first(launch(LIMIT).kill(how, rank=1))
    assert status == 1 and "all_reduce" in error
    assert how == signal.SIGKILL or re.search(rf"[Tt]imed out .*{LIMIT}000 ?ms", error), error


def test_after_sigterm_a_rank_finishes_its_step_but_does_not_wait_for_a_lost_rank(launch):
    run = launch().kill(signal.SIGTERM)
    run.read_until("saved")
    run.read_until("together")  # to which the other has come from a step of its own
    status, error = end_of_first(run.kill(signal.SIGTERM))
    lost = "rank 0: signalled to stop, and still waiting for other ranks after 2 s: one of them is lost"
    assert status == 1
    assert f"{lost}; --resume continues from the last checkpoint\n" in error and "Traceback" not in error
