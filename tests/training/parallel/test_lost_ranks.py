"""One rank of two dies or hangs: the other one ends within the timeout, and sooner after a SIGTERM from torchrun, or by
the heartbeat."""

import re
import signal
import time

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


def silence_of(lost):
    """What the other rank says of one that is stopped."""
    silence = rf"rank {lost} has not answered for 0\.6 s, since [\d:]+: it is stopped, or its host is lost"
    return rf"rank {1 - lost}: {silence}; --resume continues from the last checkpoint\n"


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


@pytest.mark.parametrize("how", ["agent", "first"])
def test_a_rank_that_is_stopped_ends_the_other_by_its_heartbeat(how, launch):
    status, error = end_of_first(launch("heartbeat", how).kill(signal.SIGSTOP, rank=1))
    assert status == 1 and re.fullmatch(silence_of(1), error), error


def test_the_first_rank_that_is_stopped_with_the_store_ends_the_other(launch, launcher):
    run = launch("heartbeat", "first").kill(signal.SIGSTOP)
    assert launcher.ask(wait=run.processes.pop()) == 1
    error = run.kill(signal.SIGKILL).wait().stderr
    assert re.fullmatch(silence_of(0), error), error


def test_a_rank_that_computes_for_long_or_has_left_is_not_lost(launch):
    run = launch("heartbeat", "slow").wait()
    assert run.statuses == [0, 0] and run.stdout.endswith("done\n") and not run.stderr


def test_ranks_that_are_all_stopped_and_continued_are_not_lost(launch, launcher):
    run = launch("heartbeat", "agent")
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for rank in (0, 1):
            run.kill(number, rank)
        time.sleep(1.5)  # twice as long as the heartbeat is patient
    assert not run.stderr
    status, error = end_of_first(run.kill(signal.SIGSTOP, rank=1))
    assert status == 1 and re.fullmatch(silence_of(1), error), error
