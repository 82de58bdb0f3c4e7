"""The files of a checkpoint: their contents, the atomic write, and errors that name a damaged file."""

import json
import os
import re

import pytest

from ligermodels.errors import CheckpointError
from ligermodels.training.checkpoints import files
from ligermodels.weights import writing
from ligermodels.weights.files import read_header
from tests.training.checkpoints.checkpointing import assert_same, flip, new_run, restore, save, state_of, train

# saving.py ignores it too, but pytest resets the filters.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_nothing_is_pickled_and_every_byte_belongs_to_a_tensor(tmp_path):
    run = new_run("muon")
    train(*run, range(1))
    save(tmp_path, *run, step=1)
    names = {path.name for path in (tmp_path / "step-000001").iterdir()}
    assert names == {"rank-00000.safetensors", "training.json", "manifest.json"}
    for name in ("training.json", "manifest.json"):
        json.loads((tmp_path / "step-000001" / name).read_text())
    stored = read_header(
        tmp_path / "step-000001/rank-00000.safetensors"
    )  # raises for gaps and for bytes after the last tensor
    assert "weights.embed.weight" in stored and "weights.head.weight" not in stored  # tied: once
    assert "optimizer.blocks.0.mlp.down_proj.weight.momentum_buffer" in stored and "rank-0.random.cpu" in stored


def test_the_manifest_has_the_size_and_the_hash_of_every_file(tmp_path):
    run = new_run()
    save(tmp_path, *run, step=1)
    manifest = json.loads((tmp_path / "step-000001/manifest.json").read_text())["files"]
    assert manifest["training.json"]["bytes"] == (tmp_path / "step-000001/training.json").stat().st_size
    assert all(re.fullmatch("[0-9a-f]{64}", entry["sha256"]) for entry in manifest.values())


def test_all_files_are_synced_before_the_folder_gets_its_final_name(tmp_path, monkeypatch):
    synced, rename = [], writing.Path.rename
    monkeypatch.setattr(
        writing.os, "fsync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    )
    monkeypatch.setattr(
        writing.Path, "rename", lambda path, to: (synced.append(f"{path.name} -> {to.name}"), rename(path, to))
    )
    save(tmp_path, *new_run(), step=1)
    renamed = synced.index("step-000001.tmp -> step-000001")
    temporary = f"{tmp_path}/step-000001.tmp"
    assert set(synced[:renamed]) == {
        temporary, *(f"{temporary}/{name}" for name in ("rank-00000.safetensors", "training.json", "manifest.json"))
    }  # fmt: skip
    assert synced[renamed + 1 :] == [str(tmp_path)]
    assert synced.count(f"{temporary}/rank-00000.safetensors") == 2  # by the rank that wrote it, and by rank 0


@pytest.mark.parametrize("name", ["rank-00000.safetensors", "training.json", "manifest.json"])
@pytest.mark.parametrize("place", [0, 40, 0.5, -3])
def test_a_flipped_bit_is_detected_and_the_error_names_the_file(name, place, tmp_path):
    run = new_run()
    train(*run, range(1))
    for step in (1, 2):
        save(tmp_path, *run, step=step)
    file = tmp_path / "step-000002" / name
    flip(file, int(place * file.stat().st_size) if isinstance(place, float) else place)
    other = new_run(seed=2)
    before = state_of(*other)
    with pytest.raises(CheckpointError) as error:
        restore(tmp_path, *other)
    named = re.compile(r"step-000002/(rank-00000.safetensors|training.json|manifest.json)")
    assert (
        named.search(str(error.value)) if name == "manifest.json" else str(error.value).startswith(f"{file}: damaged")
    )
    assert str(error.value).endswith(f"remove {tmp_path}/step-000002 to resume from step-000001")
    assert_same(state_of(*other), before)


def test_a_damaged_checkpoint_is_not_skipped_silently_and_the_error_names_the_one_before(tmp_path):
    run = new_run()
    for step in (1, 2):
        save(tmp_path, *run, step=step)
    flip(tmp_path / "step-000002/rank-00000.safetensors", -1)
    with pytest.raises(CheckpointError, match=r"remove \S+/step-000002 to resume from step-000001$"):
        restore(tmp_path, *run)


def test_the_error_names_missing_and_unexpected_files(tmp_path):
    run = new_run()
    save(tmp_path, *run, step=1)
    unexpected = tmp_path / "step-000001/more.safetensors"
    unexpected.touch()
    with pytest.raises(CheckpointError, match=r"more\.safetensors: is not in the manifest"):
        restore(tmp_path, *run)
    unexpected.unlink()
    (tmp_path / "step-000001/rank-00000.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"rank-00000\.safetensors: is missing"):
        restore(tmp_path, *run)
    (tmp_path / "step-000001/manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"manifest\.json: is missing; remove \S+ to resume from the beginning$"):
        restore(tmp_path, *run)


def edit_record(checkpoint, change):
    """Edits training.json, and its hash in the manifest."""
    record = json.loads((checkpoint / "training.json").read_text())
    change(record)
    (checkpoint / "training.json").write_text(json.dumps(record))
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"]["training.json"] = files.manifest_entry(checkpoint / "training.json")
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        *((lambda record, name=name: record.pop(name), f"{name} is None") for name in files.TRAINING_FIELDS),
        *(
            (lambda record, name=name: record.update({name: [1]}), rf"{name} is \[1\]")
            for name in files.TRAINING_FIELDS
        ),
        (lambda record: record["progress"].pop("rows"), r"progress\.rows is None"),
        (lambda record: record["progress"].update(rows="3"), r"progress\.rows is '3'"),
        (lambda record: record["progress"].update(tokens=-1), r"progress\.tokens is -1"),
        (lambda record: record["progress"].update(seconds=True), r"progress\.seconds is True"),
        (lambda record: record["progress"].update(step=2), r"progress is \{'step': 2"),
        (lambda record: record["progress"].update(more=2), r"progress is \{"),
    ],
)
def test_an_edited_record_with_a_matching_hash_is_refused_before_anything_changes(change, fault, tmp_path):
    save(tmp_path, *new_run(), step=1)
    edit_record(tmp_path / "step-000001", change)
    run = new_run(seed=2)
    before = {name: value.clone() for name, value in state_of(*run).items()}
    with pytest.raises(CheckpointError, match=rf"training\.json: field {fault}.*; remove \S+ to resume from"):
        restore(tmp_path, *run)
    assert_same(state_of(*run), before)


@pytest.mark.parametrize("left", ["file", "link", "folder"])
def test_whatever_has_the_name_of_an_unfinished_checkpoint_is_removed_and_no_link_is_written_through(left, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    unfinished = tmp_path / "checkpoints/step-000001.tmp"
    unfinished.parent.mkdir()
    {"file": unfinished.touch, "folder": unfinished.mkdir, "link": lambda: unfinished.symlink_to("../elsewhere")}[
        left
    ]()
    save(tmp_path / "checkpoints", *new_run(), step=1)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000001"]
    assert not list((tmp_path / "elsewhere").iterdir())
    restore(tmp_path / "checkpoints", *new_run())


def test_a_format_of_another_version_is_rejected(tmp_path, monkeypatch):
    run = new_run()
    with monkeypatch.context() as later:
        later.setattr(files, "FORMAT", 2)
        save(tmp_path, *run, step=1)
    with pytest.raises(CheckpointError, match=r"training\.json: format is 2, but this version reads 1"):
        restore(tmp_path, *run)
