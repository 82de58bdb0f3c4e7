"""Folders and files that are written atomically: what a killed writer leaves, and who removes it."""

import errno
import fcntl
import os
import signal

import pytest

import ligermodels
from ligermodels.errors import CheckpointError
from ligermodels.weights import writing
from ligermodels.weights.writing import atomic_folder, exchange, remove_leftovers, replace_file
from tests.cases.llama import LLAMA
from tests.forking import start
from tests.suites import slow


def write_half(ready, folder):
    with atomic_folder(folder) as temporary:
        (temporary / "half").write_bytes(bytes(1000))
        ready()
        os.kill(os.getpid(), signal.SIGKILL)


def write_until_killed(folder):
    """Begins to write a folder in another process, which is killed."""
    start(write_half, folder).join()


def names(folder):
    return {path.name for path in folder.iterdir()}


@slow
def test_what_a_killed_writer_leaves_is_removed_by_the_next(tmp_path):
    out = tmp_path / "out"
    for _ in range(2):
        write_until_killed(out)
    assert len(names(tmp_path)) == 2 and not out.exists()  # the folder of the second writer alone, and its lock
    with atomic_folder(out) as temporary:
        (temporary / "whole").touch()
    assert names(tmp_path) == {"out"} and names(out) == {"whole"}


@slow
def test_leftovers_are_removed_without_writing_and_a_similar_name_stays(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/file").touch()
    (tmp_path / "out.tmp-ligermodels-link").symlink_to("elsewhere")
    (tmp_path / "out.tmp-ligermodels-file").touch()
    for own in ("out.tmp-1", "out.tmp", "other.tmp-ligermodels-host-1"):
        (tmp_path / own).mkdir()
    write_until_killed(tmp_path / "out")
    remove_leftovers(tmp_path / "out")
    assert names(tmp_path) == {"out.tmp-1", "out.tmp", "other.tmp-ligermodels-host-1", "elsewhere"}
    assert (tmp_path / "elsewhere/file").exists()


def test_the_lock_that_a_killed_writer_leaves_beside_a_whole_folder_goes_at_the_next_refusal(tmp_path):
    """It was killed after the rename. Nothing is written then, so there is no unfinished folder either."""
    model = ligermodels.create(LLAMA)
    ligermodels.export(model, tmp_path / "out")
    (tmp_path / ".out.lock").write_text("process 1 on another host\n")
    with pytest.raises(CheckpointError, match="out: exists and is not an empty folder"):
        ligermodels.export(model, tmp_path / "out")
    assert names(tmp_path) == {"out"}
    (tmp_path / ".out.lock").touch()
    ligermodels.export(model, tmp_path / "out", overwrite=True)
    (tmp_path / ".new.lock").touch()
    ligermodels.export(model, tmp_path / "new")
    assert names(tmp_path) == {"out", "new"}


def test_the_folder_of_a_living_writer_stays_and_a_second_writer_is_refused(tmp_path):
    out = tmp_path / "out"
    with atomic_folder(out) as temporary:
        (temporary / "whole").touch()
        with pytest.raises(CheckpointError, match=rf"out: is being written by process {os.getpid()} on "):
            remove_leftovers(out)
        with pytest.raises(CheckpointError, match="is being written by"), atomic_folder(out):
            raise AssertionError
    assert names(tmp_path) == {"out"} and names(out) == {"whole"}


def test_a_file_system_without_locks_keeps_leftovers_and_can_be_written(tmp_path, monkeypatch):
    def without_locks(file, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    (tmp_path / "out.tmp-ligermodels-other-1").mkdir()
    monkeypatch.setattr(fcntl, "flock", without_locks)
    with atomic_folder(tmp_path / "out"):
        pass
    assert names(tmp_path) == {"out", "out.tmp-ligermodels-other-1"}


@pytest.mark.parametrize("can_exchange", [True, False])
def test_two_folders_exchange_their_names_also_where_the_file_system_cannot(tmp_path, monkeypatch, can_exchange):
    if not can_exchange:
        monkeypatch.setattr(writing, "RENAME_EXCHANGE", 1 << 20)  # no such flag: EINVAL, as from NFS
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    exchange(tmp_path / "one", tmp_path / "other")
    assert names(tmp_path) == {"one", "other"} == names(tmp_path / "one") | names(tmp_path / "other")
    assert names(tmp_path / "one") == {"other"}
    with pytest.raises(FileNotFoundError):
        exchange(tmp_path / "one", tmp_path / "none")


def test_after_an_error_no_folder_and_no_lock_is_left(tmp_path):
    with pytest.raises(ZeroDivisionError), atomic_folder(tmp_path / "deep/er/out"):
        raise ZeroDivisionError
    assert not names(tmp_path)


def test_a_file_is_replaced_and_no_link_of_its_temporary_name_is_written_through(tmp_path):
    (tmp_path / "elsewhere").write_text("mine")
    (tmp_path / ".file").symlink_to("elsewhere")
    (tmp_path / "file").write_text("old")
    replace_file(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_text() == "new" and (tmp_path / "elsewhere").read_text() == "mine"
    assert names(tmp_path) == {"file", "elsewhere"}
