"""Locks of files: one holder at a time, also where a holder removes the file."""

import os
import signal

import pytest

from ligermodels.weights import writing
from ligermodels.weights.writing import lock_file
from tests.forking import start
from tests.suites import slow


def test_a_second_lock_is_refused_with_its_holder_until_the_first_is_closed(tmp_path):
    file = tmp_path / "lock"
    with lock_file(file), pytest.raises(BlockingIOError) as refused:
        lock_file(file)
    assert refused.value.strerror == file.read_text().strip() == f"process {os.getpid()} on {os.uname().nodename}"
    lock_file(file).close()


def hold(ready, file):
    with lock_file(file):
        ready()
        signal.pause()


@slow
def test_the_lock_of_a_killed_process_is_free_and_its_text_is_replaced(tmp_path):
    file = tmp_path / "lock"
    child = start(hold, file)
    with pytest.raises(BlockingIOError, match=f"process {child.pid} on "):
        lock_file(file)
    child.kill()
    child.join()
    with lock_file(file):
        assert file.read_text() == f"process {os.getpid()} on {os.uname().nodename}\n"


def test_a_file_that_its_holder_removed_before_it_could_be_locked_is_made_anew(tmp_path, monkeypatch):
    file, take = tmp_path / "lock", writing.take

    def after_the_holder_has_left(lock):
        monkeypatch.setattr(writing, "take", take)
        file.unlink()
        take(lock)

    monkeypatch.setattr(writing, "take", after_the_holder_has_left)
    with lock_file(file), pytest.raises(BlockingIOError):
        lock_file(file)


def test_a_link_is_not_written_through(tmp_path):
    (tmp_path / "elsewhere").write_text("mine")
    (tmp_path / "lock").symlink_to("elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        lock_file(tmp_path / "lock")
    assert (tmp_path / "elsewhere").read_text() == "mine"
