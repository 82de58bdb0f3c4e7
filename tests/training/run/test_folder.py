"""The folder of a run: when it counts as used, and what is left of a run that ends before it has begun."""

import pytest

from ligermodels.errors import InputError
from ligermodels.training.run.folder import locked, new_folder
from ligermodels.weights.writing import UNFINISHED_FOLDER


def names(folder):
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("left", [[], ["lock"], ["lock", ".train.toml"], ["lock", "train.toml", ".train.toml"]])
def test_a_folder_with_nothing_but_what_a_run_writes_first_is_not_in_use(left, tmp_path):
    for name in left:
        (tmp_path / name).touch()
    assert new_folder(tmp_path, tmp_path) == tmp_path


@pytest.mark.parametrize("left", [["train.toml"], ["lock", "metrics.jsonl"], ["lock", "train.toml", "checkpoints"]])
def test_a_folder_with_anything_else_is_in_use(left, tmp_path):
    for name in left:
        (tmp_path / name).touch()
    with pytest.raises(InputError, match="exists already; give another --output, or resume it with --resume"):
        new_folder(tmp_path, tmp_path)


def test_a_folder_that_the_system_cannot_look_up_is_refused(tmp_path):
    with pytest.raises(InputError, match="x: not written: File name too long"):
        new_folder(tmp_path / ("x" * 300), tmp_path)


def test_a_new_run_that_fails_before_its_first_step_leaves_nothing(tmp_path):
    with pytest.raises(ZeroDivisionError), locked(tmp_path / "deep/run"):
        (tmp_path / "deep/run/train.toml").touch()
        raise ZeroDivisionError
    assert not names(tmp_path)


def test_a_run_that_was_killed_before_its_first_step_keeps_its_settings_when_it_fails_again(tmp_path):
    for name in ("lock", "train.toml"):
        (tmp_path / name).touch()
    with pytest.raises(ZeroDivisionError), locked(tmp_path):
        raise ZeroDivisionError
    assert names(tmp_path) == {"lock", "train.toml"}


def test_what_a_killed_export_left_is_removed_when_the_run_is_locked(tmp_path):
    (tmp_path / f"model{UNFINISHED_FOLDER}host-1").mkdir()
    for name in ("metrics.jsonl", ".adapter.lock"):  # killed after the rename
        (tmp_path / name).touch()
    with locked(tmp_path):
        assert names(tmp_path) == {"lock", "metrics.jsonl"}


def test_a_path_of_the_folder_that_cannot_be_used_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(InputError, match=r"metrics\.jsonl: cannot be used: Is a directory"), locked(tmp_path):
        (tmp_path / "metrics.jsonl").open("a")
    with pytest.raises(IsADirectoryError), locked(tmp_path):
        tmp_path.parent.open()


def test_a_folder_that_is_removed_during_the_run_is_no_further_error(tmp_path):
    with locked(tmp_path / "run"):
        (tmp_path / "run/lock").unlink()
        (tmp_path / "run").rmdir()
