"""Every damaged or hostile folder is refused by one line that names the file."""

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


def safetensors_bytes(header, data=b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(begin, end, dtype="F32", shape=(1,)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def refused(folder, *, file=SINGLE_FILE) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    message = str(caught.value)
    assert str(folder / file) in message and "\n" not in message
    return message


def test_a_sound_file_gives_dtypes_shapes_and_places(folder):
    checkpoint = open_checkpoint(folder)
    assert {name: (t.dtype, t.shape, t.begin) for name, t in checkpoint.tensors.items()} == {
        "a": (torch.float32, (3, 4), 0),
        "b": (torch.bfloat16, (2,), 48),
    }


def test_scalars_and_empty_tensors_are_sound(tmp_path):
    save_file({"scalar": torch.tensor(3.0), "empty": torch.empty(0, 4)}, tmp_path / SINGLE_FILE)
    shapes = {name: t.shape for name, t in open_checkpoint(tmp_path).tensors.items()}
    assert shapes == {"scalar": (), "empty": (0, 4)}


@pytest.mark.parametrize("kept", [0, 5, 40, -1])
def test_truncated_file(folder, kept):
    content = (folder / SINGLE_FILE).read_bytes()
    (folder / SINGLE_FILE).write_bytes(content[:kept])
    assert any(word in refused(folder) for word in ("truncated", "too few"))


@pytest.mark.parametrize("length", [100_000_001, 2**60, 2**64 - 1])
def test_header_length_beyond_reason_allocates_nothing(folder, length):
    (folder / SINGLE_FILE).write_bytes(length.to_bytes(8, "little") + b"{}")
    assert str(length) in refused(folder)


def test_git_lfs_pointer(folder):
    (folder / SINGLE_FILE).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n")
    assert "git lfs pull" in refused(folder)


@pytest.mark.parametrize("page", ["<!DOCTYPE html><html>", "\n<html>", '<?xml version="1.0"?><Error>'])
def test_web_page(folder, page):
    (folder / SINGLE_FILE).write_text(page)
    assert "web page" in refused(folder)


@pytest.mark.parametrize(
    ("header", "size", "names"),
    [
        ({"a": entry(0, 4), "b": entry(2, 6)}, 6, "tensor b overlaps"),
        ({"a": entry(0, 4), "b": entry(6, 10)}, 10, "tensor b leaves a gap"),
        ({"a": entry(0, 4), "b": entry(4, 8)}, 6, "tensor b ends at byte 8 of 6"),
        ({"a": entry(0, 4)}, 9, "5 bytes after the last tensor"),
        ({"a": entry(0, 8)}, 8, "tensor a needs 4 bytes, data_offsets give 8"),
        ({"a": entry(4, 0)}, 4, "tensor a needs 4 bytes, data_offsets give -4"),
        ({"a": entry(0, 4, shape=(2**40, 2**40))}, 4, "tensor a needs 4835703278458516698824704 bytes"),
        ({"a": entry(0, 4, shape=(-1,))}, 4, "tensor a lacks a valid"),
        ({"a": entry(0, 4, shape=(True,))}, 4, "tensor a lacks a valid"),
        ({"a": entry(0, 2**64)}, 4, "a.data_offsets[1]"),
        ({"a": entry(0, 1, dtype="F6")}, 1, "tensor a has dtype F6"),
        ({"a": 5}, 0, "tensor a lacks a valid"),
        ([], 0, "not a JSON object"),
        (b"{", 0, "not JSON"),
        (b"", 0, "not JSON"),
        (b"\xff\xfe", 0, "not JSON"),
        (b'{"a":' + b"[" * 200_000, 0, 'field "a" is nested too deeply'),
    ],
)
def test_damaged_header(folder, header, size, names):
    (folder / SINGLE_FILE).write_bytes(safetensors_bytes(header, bytes(size)))
    assert names in refused(folder)


def write_index(folder, weight_map):
    (folder / SINGLE_FILE).unlink(missing_ok=True)
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_index_joins_shards(tmp_path):
    for name, tensor in TENSORS.items():
        save_file({name: tensor}, tmp_path / f"{name}.safetensors")
    write_index(tmp_path, {name: f"{name}.safetensors" for name in TENSORS})
    checkpoint = open_checkpoint(tmp_path)
    assert {name: t.file.name for name, t in checkpoint.tensors.items()} == {"a": "a.safetensors", "b": "b.safetensors"}


@pytest.mark.parametrize(
    "shard", ["../x.safetensors", "/etc/x.safetensors", "sub/x.safetensors", "..\\x.safetensors", "x"]
)
def test_index_that_leads_out_of_the_folder(folder, shard):
    write_index(folder, {"a": shard})
    assert repr(shard) in refused(folder, file=INDEX_FILE)


def test_index_naming_absent_shards_lists_them_all(tmp_path):
    shards = [f"model-{i:05d}-of-00012.safetensors" for i in range(1, 13)]
    write_index(tmp_path, {f"t{i}": shard for i, shard in enumerate(shards)})
    assert ", ".join(shards) in refused(tmp_path, file=INDEX_FILE)


def test_index_naming_tensors_that_their_shard_lacks(tmp_path):
    save_file(TENSORS, tmp_path / "x.safetensors")
    write_index(tmp_path, {"a": "x.safetensors", "c": "x.safetensors"})
    assert "do not hold c;" in refused(tmp_path, file=INDEX_FILE)


@pytest.mark.parametrize("weight_map", [None, [], {"a": 1}])
def test_index_without_a_weight_map(tmp_path, weight_map):
    write_index(tmp_path, weight_map)
    assert "weight_map" in refused(tmp_path, file=INDEX_FILE)


def test_a_link_out_of_the_folder(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "model").mkdir()
    save_file(TENSORS, tmp_path / "elsewhere" / SINGLE_FILE)
    (tmp_path / "model" / SINGLE_FILE).symlink_to(tmp_path / "elsewhere" / SINGLE_FILE)
    assert "leads out of the folder" in refused(tmp_path / "model")


def test_a_link_into_the_blobs_of_the_hub_cache_is_followed(tmp_path):
    blobs, snapshot = tmp_path / "models--o--m" / "blobs", tmp_path / "models--o--m" / "snapshots" / "0a1b"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    save_file(TENSORS, blobs / "abcdef")
    (snapshot / SINGLE_FILE).symlink_to("../../blobs/abcdef")
    assert set(open_checkpoint(snapshot).tensors) == {"a", "b"}
    (tmp_path / "linked").symlink_to(snapshot)
    assert set(open_checkpoint(tmp_path / "linked").tensors) == {"a", "b"}


def test_a_link_into_the_blobs_that_repositories_share_is_followed_and_no_other(tmp_path):
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
    assert "leads out of the folder" in refused(snapshot)


def test_a_pipe_in_place_of_weights_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / SINGLE_FILE)
    assert "not a regular file" in refused(tmp_path)


class Bomb:
    def __reduce__(self):
        return os.abort, ()


def test_pickled_weights_are_refused_unopened(tmp_path):
    torch.save(Bomb(), tmp_path / "pytorch_model.bin")
    assert "convert to safetensors" in refused(tmp_path, file="pytorch_model.bin")


def test_a_folder_without_weights(tmp_path):
    assert SINGLE_FILE in refused(tmp_path, file="")


def test_long_lists_are_shortened():
    assert shortened("abc") == "a, b, c"
    assert shortened(f"t{i}" for i in range(20)) == "t0, t1, t2, t3, t4, t5, t6, t7 and 12 more"


@pytest.mark.parametrize("block", [1, 7, 2**20])
def test_the_hash_of_a_tensor_is_that_of_its_bytes(folder, monkeypatch, block):
    monkeypatch.setattr(files, "HASHED_BYTES", block)
    expected = {name: hashlib.sha256(bytes(x.flatten().view(torch.uint8).tolist())) for name, x in TENSORS.items()}
    assert tensor_hashes(folder) == {name: digest.hexdigest() for name, digest in expected.items()}


def test_a_file_that_is_cut_short_while_it_is_hashed_is_named(folder):
    stored = open_checkpoint(folder).tensors
    os.truncate(folder / SINGLE_FILE, (folder / SINGLE_FILE).stat().st_size - 1)
    last = max(stored.values(), key=lambda tensor: tensor.begin)
    with pytest.raises(CheckpointError, match=f"{folder / SINGLE_FILE}: truncated while it was read"):
        files.hash_of(last)


def test_a_file_below_the_folder_may_be_a_link_to_the_cache_alone(tmp_path):
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "0a", tmp_path / "models--a--b" / "blobs"
    (snapshot / "templates").mkdir(parents=True)
    blobs.mkdir()
    for name, place in {"own.jinja": blobs, "stolen.jinja": tmp_path}.items():
        (place / "blob").write_text("x")
        (snapshot / "templates" / name).symlink_to(place / "blob")
    assert files.safe_file(snapshot, "templates/own.jinja").read_text() == "x"
    with pytest.raises(CheckpointError, match=r"templates/stolen\.jinja: is a link that leads out of the folder"):
        files.safe_file(snapshot, "templates/stolen.jinja")
    (snapshot / "elsewhere").symlink_to(tmp_path)
    with pytest.raises(CheckpointError, match="is a link that leads out"):
        files.safe_file(snapshot, "elsewhere/blob")
