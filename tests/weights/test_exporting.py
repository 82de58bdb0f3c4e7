import errno
import json
import os
import re
import stat

import pytest
import torch
import torch.multiprocessing
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ligermodels.weights import writing
from ligermodels.weights.exporting import export_weights, split
from ligermodels.weights.files import INDEX_FILE, SINGLE_FILE, CheckpointError, open_checkpoint
from ligermodels.weights.loading import load_weights
from ligermodels.weights.writing import Entry
from tests.weights.tiny import RAW, Tiny, TinyConfig, hub_state, randomized

EXTRAS = {
    "generation_config.json": b'{"eos_token_id": [1, 2]}',
    "tokenizer.json": b"{}",
    "tokenizer.model": b"\x00\xff",
    "merges.txt": b"#version: 0.2\n",
    "LICENSE.txt": b"licence",
    "USE_POLICY.md": b"policy",
}


def same_bits(state, other):
    assert set(state) == set(other)
    for name, tensor in state.items():
        assert tensor.dtype == other[name].dtype and tensor.shape == other[name].shape, name
        assert torch.equal(tensor.flatten().view(torch.uint8), other[name].flatten().view(torch.uint8)), name


def read_all(folder):
    return {name: x for file in folder.glob("*.safetensors") for name, x in load_file(file).items()}


@pytest.fixture
def source(tmp_path):
    """A downloaded folder: config.json in an unusual layout, weights with a NaN, tokenizer files, others."""
    folder = tmp_path / "source"
    folder.mkdir()
    state = hub_state(randomized(Tiny()))
    state["model.norm.weight"][0] = float("nan")
    save_file(state, folder / SINGLE_FILE, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(RAW, indent=7))
    for name, content in (EXTRAS | {"README.md": b"x", "model.bin": b"x"}).items():
        (folder / name).write_bytes(content)
    return folder


def test_load_then_export_gives_back_the_same_bits_and_files(source, tmp_path):
    model = Tiny()
    load_weights(model, source)
    out = tmp_path / "deep" / "out"
    export_weights(model, out, source=source)
    same_bits(read_all(out), load_file(source / SINGLE_FILE))
    assert (out / "config.json").read_bytes() == (source / "config.json").read_bytes()
    assert {name: (out / name).read_bytes() for name in EXTRAS} == EXTRAS
    assert {file.name for file in out.iterdir()} == {SINGLE_FILE, "config.json", *EXTRAS}
    assert not list(out.parent.glob("*.tmp-*"))


def test_safetensors_file_is_as_other_readers_expect(tmp_path):
    export_weights(randomized(Tiny()), tmp_path / "out")
    file = tmp_path / "out" / SINGLE_FILE
    with safe_open(file, framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    assert int.from_bytes(file.read_bytes()[:8], "little") % 8 == 0
    assert all(stat.S_IMODE(f.stat().st_mode) == 0o644 for f in file.parent.iterdir())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_cast_model_exports_its_dtype(source, tmp_path, dtype):
    model = Tiny().to(dtype)
    load_weights(model, source)
    export_weights(model, tmp_path / "out", source=source)
    same_bits(read_all(tmp_path / "out"), {n: x.to(dtype) for n, x in load_file(source / SINGLE_FILE).items()})
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == RAW | {"torch_dtype": str(dtype).removeprefix("torch.")}


def test_mixed_dtypes_stay_aligned(tmp_path):
    model = randomized(Tiny()).bfloat16()
    model.model.norm.weight.data = model.model.norm.weight.data.float()
    model.model.embed_tokens.weight.data = model.model.embed_tokens.weight.data[:, :1].contiguous()  # 11 elements
    export_weights(model, tmp_path / "out")
    same_bits(read_all(tmp_path / "out"), hub_state(model))
    assert all(x.begin % x.dtype.itemsize == 0 for x in open_checkpoint(tmp_path / "out").tensors.values())


def test_shards_are_filled_up_and_a_larger_tensor_stands_alone():
    entries = [Entry(str(size), torch.uint8, (size,)) for size in (3, 3, 1, 9, 3, 2, 2)]
    shards = [[entry.shape[0] for entry in shard] for shard in split(entries, 6)]
    assert shards == [[3, 3], [1], [9], [3, 2], [2]]


@pytest.mark.parametrize("limit", [1, 300, 600])
def test_shards_and_index(tmp_path, limit):
    model = randomized(Tiny())
    export_weights(model, tmp_path / "out", max_shard_size=limit)
    out, expected = tmp_path / "out", hub_state(model)
    index = json.loads((out / INDEX_FILE).read_text())
    shards = sorted(file.name for file in out.glob("*.safetensors"))
    assert shards == [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    assert len(shards) == len(expected) if limit == 1 else 1 < len(shards) < len(expected)
    assert index["metadata"] == {
        "total_parameters": sum(x.numel() for x in expected.values()),
        "total_size": sum(x.nbytes for x in expected.values()),
    }
    assert list(index["weight_map"]) == sorted(expected)
    for shard in shards:
        state = load_file(out / shard)
        assert {name for name, file in index["weight_map"].items() if file == shard} == set(state)
        assert len(state) == 1 or sum(x.nbytes for x in state.values()) <= limit
    same_bits(read_all(out), expected)
    load_weights(Tiny(), out)


def test_tied_head_is_not_written(tmp_path):
    model = randomized(Tiny(TinyConfig(tie_word_embeddings=True)))
    export_weights(model, tmp_path / "out")
    same_bits(read_all(tmp_path / "out"), hub_state(model))
    assert "lm_head.weight" not in read_all(tmp_path / "out")


def test_created_model_gets_architectures_dtype_and_both_spellings(tmp_path):
    raw = {"dtype": "float32", "model_type": "tiny", "rope_parameters": {"rope_theta": 5.0, "rope_type": "default"}}
    export_weights(Tiny(TinyConfig(raw)), tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == raw | {
        "architectures": ["TinyForCausalLM"],
        "rope_theta": 5.0,
        "rope_scaling": None,
        "torch_dtype": "float32",
    }


def test_a_field_that_was_renamed_is_exported_under_both_names(tmp_path):
    export_weights(Tiny(TinyConfig(RAW | {"local_experts": 3})), tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == RAW | {"local_experts": 3, "experts": 3}


def test_what_was_loaded_in_another_layout_is_exported_in_the_hubs_own(tmp_path):
    model = randomized(Tiny())
    (tmp_path / "in").mkdir()
    other = {re.sub("^model", "model.language_model", name): x.detach() for name, x in model.named_parameters()}
    save_file(other, tmp_path / "in" / SINGLE_FILE)
    loaded = Tiny()
    load_weights(loaded, tmp_path / "in")
    export_weights(loaded, tmp_path / "out")
    same_bits(read_all(tmp_path / "out"), hub_state(model))


def test_a_folder_in_use_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=f"{tmp_path}: exists and is not an empty folder"):
        export_weights(Tiny(), tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


def test_an_empty_folder_is_filled(tmp_path):
    (tmp_path / "out").mkdir()
    export_weights(Tiny(), tmp_path / "out")
    assert (tmp_path / "out" / SINGLE_FILE).exists()


def test_a_full_disk_leaves_nothing_behind(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(writing.os, "fsync", full)
    with pytest.raises(CheckpointError, match=f"{tmp_path / 'out'}: not written: .*No space left on device"):
        export_weights(Tiny(), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_tokenizer_linked_from_elsewhere_is_not_copied(source, tmp_path):
    (tmp_path / "secret").write_text("secret")
    (source / "tokenizer.json").unlink()
    (source / "tokenizer.json").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: is a link"):
        export_weights(Tiny(), tmp_path / "out", source=source)
    assert not (tmp_path / "out").exists()


def sharded_round_trip(rank, folder, out, store):
    """Loads into FSDP2 shards of a tied model and exports from them."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model = Tiny(TinyConfig(tie_word_embeddings=True))
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    load_weights(model, folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    export_weights(model, out, max_shard_size=300)
    assert (out / "config.json").exists()
    torch.distributed.destroy_process_group()


def test_fsdp_round_trip_on_two_ranks(tmp_path):
    model = randomized(Tiny(TinyConfig(tie_word_embeddings=True)))
    export_weights(model, tmp_path / "in")
    args = tmp_path / "in", tmp_path / "out", tmp_path / "store"
    torch.multiprocessing.spawn(sharded_round_trip, args, nprocs=2)
    same_bits(read_all(tmp_path / "out"), hub_state(model))
