"""Signals are noted and handed back; one run holds a folder, until it is done or dead."""

import os
import pty
import signal
import socket

import pytest

from ligermodels.errors import InputError
from ligermodels.training.runs.folder import locked
from ligermodels.training.runs.stopping import signals

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
        assert not stop.requested
        os.kill(os.getpid(), number)
        assert stop.requested
    assert [signal.getsignal(n) for n in NOTED] == before
    assert f"{number.name}: stopping after this step" in capfd.readouterr().err


def test_a_signal_is_recorded_when_the_reader_of_stderr_has_left(monkeypatch):
    """As in `python train.py … 2>&1 | tee log`, where Ctrl-C ends both."""
    monkeypatch.setattr(os, "write", lambda *_: (_ for _ in ()).throw(BrokenPipeError()).send(None))
    with signals() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested


def test_under_nohup_a_closed_terminal_stops_nothing():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with signals() as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    assert not stop.requested


def test_a_run_whose_terminal_is_closed_can_still_print():
    child, terminal = pty.fork()
    if child == 0:
        try:
            signal.alarm(GIVE_UP)  # otherwise a child that notes no signal would outlive the tests
            with signals() as stop:
                os.write(1, b".")
                while not stop.requested:
                    pass
                os.write(1, b"Saved")
                os.write(2, b"Saved")
                os._exit(0)
        finally:
            os._exit(1)
    assert os.read(terminal, 1) == b"."
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_only_rank_0_prints(monkeypatch, capfd):
    monkeypatch.setenv("RANK", "1")
    with signals() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
    assert stop.requested and capfd.readouterr().err == ""


def forked(function):
    """The id of a child that runs it, once it has said that it is ready by calling what it is given."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            function(lambda: os.write(write, b"."))
        finally:
            os._exit(1)
    assert os.read(read, 1) == b"."
    os.close(read)
    os.close(write)
    return child


def test_a_second_interrupt_ends_the_process_at_once():
    def run(ready):
        with signals() as stop:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)
            if stop.requested:
                ready()
            while True:
                signal.pause()

    child = forked(run)
    os.kill(child, signal.SIGINT)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGINT


def test_two_runs_on_one_folder_are_refused_until_the_first_is_dead(tmp_path):
    def run(ready):
        with locked(tmp_path / "run"):
            ready()
            signal.pause()

    child = forked(run)
    message = rf"/run: in use by process {child} on {socket.gethostname()}; .*choose another --output"
    for _ in range(2):
        with pytest.raises(InputError, match=message), locked(tmp_path / "run"):
            pass
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
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
