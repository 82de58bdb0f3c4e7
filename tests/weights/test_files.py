"""Valid checkpoint folders. Damaged and hostile folders are tested in tests/test_faults.py."""

import hashlib
import json
import os

import pytest
import torch
from safetensors.torch import save_file

from ligermodels.weights import files
from ligermodels.weights.files import (
    INDEX_FILE,
    SINGLE_FILE,
    CheckpointError,
    open_checkpoint,
    shortened,
    tensor_hashes,
)

TENSORS = {"a": torch.arange(12.0).view(3, 4), "b": torch.tensor([1.0, float("nan")], dtype=torch.bfloat16)}


@pytest.fixture
def folder(tmp_path):
    save_file(TENSORS, tmp_path / SINGLE_FILE)
    return tmp_path


def test_a_valid_file_gives_dtypes_shapes_and_offsets(folder):
    checkpoint = open_checkpoint(folder)
    data = 8 + int.from_bytes((folder / SINGLE_FILE).read_bytes()[:8], "little")
    assert {name: (t.dtype, t.shape, t.begin - data) for name, t in checkpoint.tensors.items()} == {
        "a": (torch.float32, (3, 4), 0),
        "b": (torch.bfloat16, (2,), 48),
    }


def test_scalars_and_empty_tensors_are_valid(tmp_path):
    save_file({"scalar": torch.tensor(3.0), "empty": torch.empty(0, 4)}, tmp_path / SINGLE_FILE)
    shapes = {name: t.shape for name, t in open_checkpoint(tmp_path).tensors.items()}
    assert shapes == {"scalar": (), "empty": (0, 4)}


def write_index(folder, weight_map):
    (folder / SINGLE_FILE).unlink(missing_ok=True)
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_the_index_combines_the_shards(tmp_path):
    for name, tensor in TENSORS.items():
        save_file({name: tensor}, tmp_path / f"{name}.safetensors")
    write_index(tmp_path, {name: f"{name}.safetensors" for name in TENSORS})
    checkpoint = open_checkpoint(tmp_path)
    assert {name: t.file.name for name, t in checkpoint.tensors.items()} == {"a": "a.safetensors", "b": "b.safetensors"}


@pytest.mark.parametrize("name", ["a\0b.safetensors", "\x1b[2J.safetensors", "a\nb.safetensors"])
def test_an_index_with_control_characters_in_a_name_is_refused(tmp_path, name):
    write_index(tmp_path, {"a": name})
    with pytest.raises(CheckpointError, match=r"not a \.safetensors file of the same folder") as caught:
        open_checkpoint(tmp_path)
    assert repr(name) in str(caught.value) and str(caught.value).isprintable()


def test_a_link_into_the_blobs_of_the_hub_cache_is_followed(tmp_path):
    blobs, snapshot = tmp_path / "models--o--m" / "blobs", tmp_path / "models--o--m" / "snapshots" / "0a1b"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    save_file(TENSORS, blobs / "abcdef")
    (snapshot / SINGLE_FILE).symlink_to("../../blobs/abcdef")
    assert set(open_checkpoint(snapshot).tensors) == {"a", "b"}
    (tmp_path / "linked").symlink_to(snapshot)
    assert set(open_checkpoint(tmp_path / "linked").tensors) == {"a", "b"}


def test_a_link_into_the_shared_blobs_of_the_hub_cache_is_followed_and_no_other(tmp_path):
    blob, snapshot = tmp_path / "hub/blobs/ab/abcdef", tmp_path / "hub/models--o--m/snapshots/0a1b"
    for folder in (blob.parent, snapshot, snapshot.parents[1] / "blobs"):
        folder.mkdir(parents=True)
    save_file(TENSORS, blob)
    (snapshot.parents[1] / "blobs/etag").symlink_to("../../blobs/ab/abcdef")
    (snapshot / SINGLE_FILE).symlink_to("../../blobs/etag")
    assert set(open_checkpoint(snapshot).tensors) == {"a", "b"}
    blob.rename(tmp_path / "hub/abcdef")
    (snapshot.parents[1] / "blobs/etag").unlink()
    (snapshot.parents[1] / "blobs/etag").symlink_to("../../abcdef")
    with pytest.raises(CheckpointError, match="leads out of the folder"):
        open_checkpoint(snapshot)


@pytest.mark.parametrize("sharded", [False, True])
def test_weights_are_linked_from_elsewhere_into_a_folder_but_not_into_a_download(tmp_path, sharded):
    disk, named, snapshot = (tmp_path / name for name in ("disk", "named", "models--o--m/snapshots/0a1b"))
    for folder in (disk, named, snapshot):
        folder.mkdir(parents=True)
    save_file(TENSORS, disk / "x.safetensors")
    for folder in (named, snapshot):
        name = "model-1.safetensors" if sharded else SINGLE_FILE
        (folder / name).symlink_to(disk / "x.safetensors")
        if sharded:
            (folder / INDEX_FILE).write_text(json.dumps({"weight_map": dict.fromkeys(TENSORS, name)}))
    assert set(open_checkpoint(named).tensors) == {"a", "b"}
    with pytest.raises(CheckpointError, match="leads out of the folder"):
        open_checkpoint(snapshot)


def test_long_lists_are_shortened():
    assert shortened("abc") == "a, b, c"
    assert shortened(f"t{i}" for i in range(20)) == "t0, t1, t2, t3, t4, t5, t6, t7 and 12 more"


@pytest.mark.parametrize("block", [1, 7, 2**20])
def test_the_hash_of_a_tensor_is_the_sha256_of_its_bytes(folder, monkeypatch, block):
    monkeypatch.setattr(files, "HASH_BLOCK_BYTES", block)
    expected = {name: hashlib.sha256(bytes(x.flatten().view(torch.uint8).tolist())) for name, x in TENSORS.items()}
    assert tensor_hashes(folder) == {name: digest.hexdigest() for name, digest in expected.items()}


def test_an_error_names_the_file_that_was_truncated_while_it_was_hashed(folder):
    stored = open_checkpoint(folder).tensors
    os.truncate(folder / SINGLE_FILE, (folder / SINGLE_FILE).stat().st_size - 1)
    last = max(stored.values(), key=lambda tensor: tensor.begin)
    with pytest.raises(CheckpointError, match=f"{folder / SINGLE_FILE}: truncated while it was read"):
        files.sha256_of(last)
