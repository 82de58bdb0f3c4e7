import errno
import fcntl
import multiprocessing
import os
import shutil

import pytest
import torch.distributed as dist

from ligermodels.errors import InputError
from ligermodels.training.data import cache
from ligermodels.training.data.cache import all_cached, cache_folder, cached


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
        outcomes.put((cached(key, fill) / "content").read_text())
    except InputError as error:
        outcomes.put(str(error))
    dist.destroy_process_group()


def two_ranks(store, key, fill):
    context = multiprocessing.get_context("fork")
    outcomes = context.Queue()
    ranks = [context.Process(target=rank, args=(number, store, key, fill, outcomes)) for number in range(2)]
    for process in ranks:
        process.start()
    found = [outcomes.get(timeout=60) for _ in ranks]
    for process in ranks:
        process.join()
    return found


def test_a_folder_is_filled_once_for_each_key(cache_of_its_own):
    folders = [cached({"a": value}, fill_and_note) for value in (1, 2, 1)]
    assert folders[0] == folders[2] != folders[1]
    assert (cache_folder() / "notes").read_text() == "filled filled "
    assert cache_folder().is_relative_to(cache_of_its_own)


def test_a_failure_leaves_nothing_and_is_tried_again(cache_of_its_own):
    with pytest.raises(InputError, match=r"d\.jsonl:7: bad"):
        cached({}, fail)
    assert [file.suffix for file in cache_folder().iterdir()] == [".lock"]
    assert (cached({}, fill_and_note) / "content").read_text() == "whole"


def test_of_two_ranks_one_fills_and_both_have_it(tmp_path):
    assert two_ranks(tmp_path / "store", {}, fill_and_note) == ["whole", "whole"]
    assert (cache_folder() / "notes").read_text() == "filled "


def test_a_failure_of_the_rank_that_fills_is_raised_on_every_rank(tmp_path):
    assert two_ranks(tmp_path / "store", {}, fail) == ["d.jsonl:7: bad"] * 2


def test_a_cache_that_cannot_be_written_to_is_named_with_the_remedy(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(InputError, match="set XDG_CACHE_HOME to a folder that can be written to"):
        cached({}, fill_and_note)


def test_what_a_killed_run_left_is_removed_by_the_next_and_nothing_else(cache_of_its_own):
    folder = cached({}, fill_and_note)
    others = folder.with_name("another.tmp-7")
    shutil.move(folder, folder.with_name(f"{folder.name}.tmp-123456"))
    others.mkdir()
    assert (cached({}, fill_and_note) / "content").read_text() == "whole"
    assert {file.name for file in cache_folder().iterdir() if file.is_dir()} == {folder.name, others.name}


def test_who_waits_for_another_run_says_so(cache_of_its_own, monkeypatch):
    folder = cached({}, fill_and_note)
    said = []
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        monkeypatch.setattr(cache, "say", lambda line: said.append(line) or fcntl.flock(lock, fcntl.LOCK_UN))
        assert cached({}, fill_and_note) == folder
    assert said == [f"Waiting for another run, which makes what this one needs: {folder}"]


def fail_for_want_of_room(folder):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_told_with_what_names_another(cache_of_its_own):
    with pytest.raises(
        InputError, match="No space left on device; make room there, or choose another folder, by XDG_CA"
    ):
        cached({}, fail_for_want_of_room)
    assert [file.suffix for file in cache_folder().iterdir()] == [".lock"]


def test_ranks_wait_once_for_any_number_of_folders(cache_of_its_own, monkeypatch):
    waited = []
    monkeypatch.setattr(cache, "raise_error_of_any", waited.append)
    folders = all_cached([({"a": value}, fill_and_note) for value in (1, 2, 1)])
    assert folders[0] == folders[2] != folders[1] and all((folder / "content").exists() for folder in folders)
    assert waited == [None] and (cache_folder() / "notes").read_text() == "filled filled "
