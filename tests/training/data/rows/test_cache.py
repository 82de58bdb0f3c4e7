import errno
import fcntl
import multiprocessing
import os
import shutil

import pytest
import torch.distributed as dist

from ligermodels.errors import InputError
from ligermodels.training.data.rows.store import cache_folder, cached_folder, cached_folders
from ligermodels.weights import user_cache
from ligermodels.weights.writing import UNFINISHED_FOLDER


def fill_and_note(folder):
    (folder / "content").write_text("whole")
    with (cache_folder() / "notes").open("a") as notes:
        notes.write("filled ")


def fail(folder):
    (folder / "half").write_text("")
    raise InputError("d.jsonl:7: bad")


def rank(number, store, key, fill, outcomes):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=2)

    os.environ["LOCAL_RANK"] = str(number)
    try:
        outcomes.put((cached_folder(key, fill) / "content").read_text())
    except InputError as error:
        outcomes.put(str(error))
    dist.destroy_process_group()


def two_ranks(store, key, fill):
    context = multiprocessing.get_context("fork")
    outcomes = context.Queue()
    ranks = [context.Process(target=rank, args=(number, store, key, fill, outcomes)) for number in range(2)]
    for process in ranks:
        process.start()
    found = [outcomes.get() for _ in ranks]
    for process in ranks:
        process.join()
    return found


def test_a_folder_is_filled_once_per_key(cache_of_its_own):
    folders = [cached_folder({"a": value}, fill_and_note) for value in (1, 2, 1)]
    assert folders[0] == folders[2] != folders[1]
    assert (cache_folder() / "notes").read_text() == "filled filled "
    assert cache_folder().is_relative_to(cache_of_its_own)


def test_a_failed_fill_leaves_nothing_and_the_next_call_tries_again(cache_of_its_own):
    with pytest.raises(InputError, match=r"d\.jsonl:7: bad"):
        cached_folder({}, fail)
    assert [file.suffix for file in cache_folder().iterdir()] == [".lock"]
    assert (cached_folder({}, fill_and_note) / "content").read_text() == "whole"


def test_one_of_two_ranks_fills_a_folder_that_both_use(tmp_path):
    assert two_ranks(tmp_path / "store", {}, fill_and_note) == ["whole", "whole"]
    assert (cache_folder() / "notes").read_text() == "filled "


def test_an_error_of_the_filling_rank_is_raised_on_every_rank(tmp_path):
    assert two_ranks(tmp_path / "store", {}, fail) == ["d.jsonl:7: bad"] * 2


def test_the_error_for_a_cache_that_is_not_writable_names_the_remedy(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(InputError, match="set XDG_CACHE_HOME to a writable folder"):
        cached_folder({}, fill_and_note)


def test_only_the_leftovers_of_a_killed_run_are_removed(cache_of_its_own):
    folder = cached_folder({}, fill_and_note)
    others = folder.with_name("another.tmp-7")
    shutil.move(folder, folder.with_name(f"{folder.name}{UNFINISHED_FOLDER}host-123456"))
    others.mkdir()
    assert (cached_folder({}, fill_and_note) / "content").read_text() == "whole"
    assert {file.name for file in cache_folder().iterdir() if file.is_dir()} == {folder.name, others.name}


def test_a_run_that_waits_for_another_prints_a_line(cache_of_its_own, monkeypatch):
    folder = cached_folder({}, fill_and_note)
    printed = []
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        def unlock(line):
            printed.append(line)
            fcntl.flock(lock, fcntl.LOCK_UN)

        monkeypatch.setattr(user_cache, "print_to_stderr", unlock)
        assert cached_folder({}, fill_and_note) == folder
    assert printed == [f"Waiting for another run that is preparing the same data: {folder}"]


def fail_on_full_disk(folder):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_the_error_for_a_full_disk_names_the_variable_that_moves_the_cache(cache_of_its_own):
    with pytest.raises(InputError, match=r"No space left on device; .*; XDG_CACHE_HOME sets the folder of the cache"):
        cached_folder({}, fail_on_full_disk)
    assert [file.suffix for file in cache_folder().iterdir()] == [".lock"]


def test_ranks_synchronise_once_for_several_folders(cache_of_its_own, monkeypatch):
    synchronised = []
    monkeypatch.setattr(
        "ligermodels.training.data.rows.store.raise_on_all", lambda error, group: synchronised.append(error)
    )
    folders = cached_folders([({"a": value}, fill_and_note) for value in (1, 2, 1)])
    assert folders[0] == folders[2] != folders[1] and all((folder / "content").exists() for folder in folders)
    assert synchronised == [None] and (cache_folder() / "notes").read_text() == "filled filled "
