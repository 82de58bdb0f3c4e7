"""Signals are noted and handed back, and end a run without a step; one run holds a folder, until it is done or dead."""

import os
import pty
import signal
import socket

import pytest

from ligermodels import cli
from ligermodels.errors import InputError
from ligermodels.training import TrainConfig, loop
from ligermodels.training.run.folder import locked
from ligermodels.training.run.stopping import signals
from tests.forking import start
from tests.suites import slow

GIVE_UP = 600  # seconds
NOTED = signal.SIGTERM, signal.SIGINT, signal.SIGHUP


@pytest.fixture(autouse=True)
def not_under_nohup():
    """Whatever the tests are run under."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", NOTED)
def test_a_signal_is_recorded_and_the_handlers_are_restored(number, capfd):
    before = [signal.getsignal(n) for n in NOTED]
    with signals() as stop:
        stop.takes_steps = True
        assert not stop.requested
        os.kill(os.getpid(), number)
        assert stop.requested
    assert [signal.getsignal(n) for n in NOTED] == before
    assert f"{number.name}: stopping after this step" in capfd.readouterr().err


@pytest.mark.parametrize("place", ["prepare", "place_model"])
@pytest.mark.parametrize(
    ("number", "status", "line"),
    [
        (signal.SIGTERM, 143, "ligermodels: SIGTERM: ended before the first step\n"),
        (signal.SIGINT, 130, "ligermodels: interrupted\n"),
    ],
)
def test_a_run_that_has_taken_no_step_ends_at_once(place, number, status, line, monkeypatch, tmp_path, capfd):
    """While it tokenises, and while it loads weights."""
    usual, before = getattr(loop, place), [signal.getsignal(n) for n in NOTED]

    def signalled(*arguments):
        os.kill(os.getpid(), number)
        return usual(*arguments)

    monkeypatch.setattr(loop, place, signalled)
    flags = ["--model", "llama", "--data", "random", "--steps", "2", "--output", str(tmp_path / "run")]
    try:
        found = cli.main(["train", *flags])
    except SystemExit as end:
        found = end.code
    assert found == status and [signal.getsignal(n) for n in NOTED] == before
    assert capfd.readouterr().err == line
    assert [*(tmp_path / "run").glob("checkpoints/*")] == []


def test_a_signal_is_recorded_when_the_reader_of_stderr_has_left(monkeypatch):
    """As in `python train.py … 2>&1 | tee log`, where Ctrl-C ends both."""
    monkeypatch.setattr(os, "write", lambda *_: (_ for _ in ()).throw(BrokenPipeError()).send(None))
    with signals() as stop:
        stop.takes_steps = True
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested


def test_under_nohup_a_closed_terminal_stops_nothing():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with signals() as stop:
        stop.takes_steps = True
        os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    assert not stop.requested


def print_after_a_hangup(ready, terminal):
    signal.alarm(GIVE_UP)  # otherwise a child that notes no signal would outlive the tests
    os.login_tty(os.open(terminal, os.O_RDWR))
    with signals() as stop:
        stop.takes_steps = True
        os.write(1, b".")
        ready()
        while not stop.requested:
            pass
        os.write(1, b"Saved")
        os.write(2, b"Saved")


@slow
def test_a_run_whose_terminal_is_closed_can_still_print():
    ours, its = pty.openpty()
    child = start(print_after_a_hangup, os.ttyname(its))
    os.close(its)
    assert os.read(ours, 1) == b"."
    os.close(ours)
    child.join()
    assert child.exitcode == 0


def test_only_rank_0_prints(monkeypatch, capfd):
    monkeypatch.setenv("RANK", "1")
    with signals() as stop:
        stop.takes_steps = True
        os.kill(os.getpid(), signal.SIGTERM)
    assert stop.requested and capfd.readouterr().err == ""


def be_interrupted(ready):
    with signals() as stop:
        stop.takes_steps = True
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        if stop.requested:
            ready()
        while True:
            signal.pause()


@slow
def test_a_second_interrupt_ends_the_process_at_once():
    child = start(be_interrupted)
    os.kill(child.pid, signal.SIGINT)
    child.join()
    assert child.exitcode == -signal.SIGINT


def hold(ready, folder):
    with locked(folder):
        ready()
        signal.pause()


@slow
def test_two_runs_on_one_folder_are_refused_until_the_first_is_dead(tmp_path):
    child = start(hold, tmp_path / "run")
    message = rf"/run: in use by process {child.pid} on {socket.gethostname()}; .*choose another --output"
    for _ in range(2):
        with pytest.raises(InputError, match=message), locked(tmp_path / "run"):
            pass
    child.kill()
    child.join()
    for _ in range(2):
        with (
            locked(tmp_path / "run"),
            pytest.raises(InputError, match=f"process {os.getpid()} "),
            locked(tmp_path / "run"),
        ):
            pass


def test_a_folder_that_cannot_be_created_is_named_in_the_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="file/run: not written: Not a directory"), locked(tmp_path / "file/run"):
        pass


def test_a_run_has_a_heartbeat_before_it_reads_anything(monkeypatch):
    def beating():
        raise InputError("beating")

    monkeypatch.setattr(loop, "heartbeat", beating)
    with pytest.raises(InputError, match="beating"):
        loop.train(TrainConfig(model="nosuch"))
