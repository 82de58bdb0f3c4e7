import errno
import gc
import hashlib
import json
import os
import re
import resource
import stat
import weakref
from contextlib import contextmanager

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import ligermodels
from ligermodels.adapters.lora_targets import add_lora
from ligermodels.errors import InputError
from ligermodels.units import size_in_bytes
from ligermodels.weights import exporting, writing
from ligermodels.weights.copying import split_into_shards
from ligermodels.weights.exporting import export_weights, hub_weights
from ligermodels.weights.files import INDEX_FILE, SINGLE_FILE, CheckpointError, open_checkpoint
from ligermodels.weights.loading import load_weights
from ligermodels.weights.writing import Entry
from tests.weights.tiny import INNER, RAW, Tiny, TinyConfig, hub_state, randomized

EXTRAS = {
    "generation_config.json": b'{"eos_token_id": [1, 2]}',
    "tokenizer.json": b"{}",
    "tokenizer.model": b"\x00\xff",
    "merges.txt": b"#version: 0.2\n",
    "chat_template.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "additional_chat_templates/tool_use.jinja": b"{{ tools }}",
    "preprocessor_config.json": b"{}",
    "processor_config.json": b"{}",
    "video_preprocessor_config.json": b"{}",
    "LICENSE.txt": b"licence",
    "USE_POLICY.md": b"policy",
}


def same_bits(state, other):
    assert set(state) == set(other)
    for name, tensor in state.items():
        assert tensor.dtype == other[name].dtype and tensor.shape == other[name].shape, name
        assert torch.equal(tensor.flatten().view(torch.uint8), other[name].flatten().view(torch.uint8)), name


def files_of(folder):
    return {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}


def sha256_of_files(folder):
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


def read_all(folder):
    return {name: x for file in folder.glob("*.safetensors") for name, x in load_file(file).items()}


@pytest.fixture
def source(tmp_path):
    """A downloaded folder: config.json with unusual indentation, weights with a -0, tokenizer files and others."""
    folder = tmp_path / "source"
    folder.mkdir()
    state = hub_state(randomized(Tiny()))
    state["model.norm.weight"][0] = -0.0
    save_file(state, folder / SINGLE_FILE, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(RAW, indent=7))
    (folder / "additional_chat_templates").mkdir()
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
    assert files_of(out) == {SINGLE_FILE, "config.json", *EXTRAS}
    assert not list(out.parent.glob("*.tmp-*"))


@pytest.mark.parametrize("metadata", [{"format": "pt", "by": "Ü \n"}, None])
@pytest.mark.parametrize("files", [1, 3])
def test_the_files_of_an_untouched_model_are_those_that_were_read(tmp_path, files, metadata):
    """Written by safetensors, with dtypes of two sizes; the index too."""
    source, out, state = tmp_path / "in", tmp_path / "out", hub_state(randomized(Tiny()))
    source.mkdir()
    state["model.norm.weight"] = state["model.norm.weight"].bfloat16()
    (source / "config.json").write_text(json.dumps(RAW))
    names = sorted(state, key=lambda name: name[::-1])
    shards = {f"part-{i}.safetensors" if files > 1 else SINGLE_FILE: names[i::files] for i in range(files)}
    for file, group in shards.items():
        save_file({name: state[name].contiguous() for name in group}, source / file, metadata=metadata)
    if files > 1:
        weight_map = {name: file for file, group in shards.items() for name in group}
        (source / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}, indent=3))
    model = Tiny()
    model.model.norm.bfloat16()
    load_weights(model, source)
    export_weights(model, out, source=source)
    assert sha256_of_files(out) == sha256_of_files(source)


def test_a_created_model_is_written_as_safetensors_writes_it(tmp_path):
    model = randomized(Tiny())
    export_weights(model, tmp_path / "out")
    state = {name: x.contiguous() for name, x in hub_state(model).items()}
    save_file(state, tmp_path / SINGLE_FILE, metadata={"format": "pt"})
    assert (tmp_path / "out" / SINGLE_FILE).read_bytes() == (tmp_path / SINGLE_FILE).read_bytes()


def test_the_safetensors_file_has_the_format_that_other_readers_expect(tmp_path):
    export_weights(randomized(Tiny()), tmp_path / "out")
    file = tmp_path / "out" / SINGLE_FILE
    with safe_open(file, framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    assert int.from_bytes(file.read_bytes()[:8], "little") % 8 == 0


@pytest.mark.parametrize(("umask", "shut"), [(0o022, 0o022), (0o002, 0o002), (0o077, 0o077)])
def test_file_modes_follow_the_umask(source, tmp_path, umask, shut):
    """They are not those of a temporary file or folder, nor those of the copied files."""
    for file in source.iterdir():
        file.chmod(0o700 if file.is_dir() else 0o600)
    before = os.umask(umask)
    try:
        export_weights(Tiny(), tmp_path / "out", source=source, max_shard_size=600)
    finally:
        os.umask(before)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "out", *(tmp_path / "out").rglob("*"))}
    assert len(modes) > len(EXTRAS)
    assert all(mode == (0o777 if path.is_dir() else 0o666) & ~shut for path, mode in modes.items()), modes


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_model_is_exported_in_its_own_dtype(source, tmp_path, dtype):
    model = Tiny().to(dtype)
    load_weights(model, source)
    export_weights(model, tmp_path / "out", source=source)
    same_bits(read_all(tmp_path / "out"), {n: x.to(dtype) for n, x in load_file(source / SINGLE_FILE).items()})
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == RAW | {"torch_dtype": str(dtype).removeprefix("torch.")}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_weights_are_converted_while_they_are_written(source, tmp_path, dtype):
    """config.json has the new dtype, and is copied unchanged if the dtype is the same; the model is not changed."""
    model = Tiny()
    load_weights(model, source)
    export_weights(model, tmp_path / "out", source=source, dtype=dtype, max_shard_size=300)
    expected = {name: x.to(dtype) for name, x in load_file(source / SINGLE_FILE).items()}
    same_bits(read_all(tmp_path / "out"), expected)
    index = json.loads((tmp_path / "out" / INDEX_FILE).read_text())
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in expected.values())
    written, original = ((folder / "config.json").read_bytes() for folder in (tmp_path / "out", source))
    assert json.loads(written) == RAW | {"torch_dtype": str(dtype).removeprefix("torch.")}
    assert (written == original) == (dtype == torch.float32)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("adapted", [False, True], ids=["plain", "lora"])
def test_tensors_in_memory_are_those_of_an_export(tmp_path, adapted):
    """Under the same names, with LoRA merged, to the bit."""
    model = ligermodels.create("qwen2", size="tiny")
    if adapted:
        add_lora(model, rank=2)
        for name, parameter in model.named_parameters():
            if name.endswith("lora_B"):
                torch.nn.init.normal_(parameter, std=0.02)
    export_weights(model, tmp_path / "out", dtype="bfloat16")
    same_bits(dict(hub_weights(model, torch.bfloat16)), read_all(tmp_path / "out"))


def test_a_finite_value_that_overflows_is_refused_and_an_infinite_value_is_kept(tmp_path):
    model = randomized(Tiny())
    model.model.norm.weight.data[0] = float("inf")
    export_weights(model, tmp_path / "out", dtype=torch.float16)
    same_bits(read_all(tmp_path / "out"), {name: x.half() for name, x in hub_state(model).items()})
    model.model.layers[1].mlp.gate_up_proj.weight.data[INNER] = 1e5
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight holds values larger than .*65504"):
        export_weights(model, tmp_path / "other", dtype=torch.float16)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_an_unsupported_dtype_is_refused(tmp_path, dtype):
    with pytest.raises(InputError, match=f"dtype is {dtype}; must be one of float64, float32"):
        export_weights(Tiny(), tmp_path / "out", dtype=dtype)


def test_mixed_dtypes_stay_aligned(tmp_path):
    model = randomized(Tiny()).bfloat16()
    model.model.norm.weight.data = model.model.norm.weight.data.float()
    model.model.embed_tokens.weight.data = model.model.embed_tokens.weight.data[:, :1].contiguous()  # 11 elements
    export_weights(model, tmp_path / "out")
    same_bits(read_all(tmp_path / "out"), hub_state(model))
    assert all(x.begin % x.dtype.itemsize == 0 for x in open_checkpoint(tmp_path / "out").tensors.values())


def test_shards_are_filled_and_a_larger_tensor_is_a_shard_by_itself():
    entries = [Entry(str(size), torch.uint8, (size,)) for size in (3, 3, 1, 9, 3, 2, 2)]
    shards = [[entry.shape[0] for entry in shard] for shard in split_into_shards(entries, 6)]
    assert shards == [[3, 3], [1], [9], [3, 2], [2]]


@pytest.mark.parametrize(
    ("size", "expected"),
    [(7, 7), ("5GB", 5 * 10**9), ("500mb", 5 * 10**8), ("2GiB", 2**31), ("1.5 KB", 1500), ("3TB", 3 * 10**12)],
)
def test_a_size_may_have_a_decimal_or_a_binary_unit(size, expected):
    assert size_in_bytes(size) == expected


@pytest.mark.parametrize("size", [0, -1, "5", "GB", "-1GB", "0.0KB", "5 gigabytes", "5GB\n6GB", f"{10**399}GB"])
def test_an_invalid_size_is_refused(tmp_path, size):
    with pytest.raises(InputError, match=r"max_shard_size is .*; must be a number of bytes above zero, such as 5GB or"):
        export_weights(Tiny(), tmp_path / "out", max_shard_size=size)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("limit", [1, 300, "0.6KB"])
def test_shards_respect_the_limit_and_the_index_names_every_tensor(tmp_path, limit):
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
        assert len(state) == 1 or sum(x.nbytes for x in state.values()) <= size_in_bytes(limit)
    same_bits(read_all(out), expected)
    load_weights(Tiny(), out)


def test_a_tied_head_is_not_written(tmp_path):
    model = randomized(Tiny(TinyConfig(tie_word_embeddings=True)))
    export_weights(model, tmp_path / "out")
    same_bits(read_all(tmp_path / "out"), hub_state(model))
    assert "lm_head.weight" not in read_all(tmp_path / "out")


def test_the_config_of_a_created_model_gets_architectures_and_the_old_fields(tmp_path):
    raw = {"dtype": "float32", "model_type": "tiny", "rope_parameters": {"rope_theta": 5.0, "rope_type": "default"}}
    export_weights(Tiny(TinyConfig(raw)), tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == raw | {
        "architectures": ["TinyForCausalLM"],
        "rope_theta": 5.0,
        "rope_scaling": None,
        "torch_dtype": "float32",
    }


def test_a_renamed_field_is_exported_under_both_names(tmp_path):
    export_weights(Tiny(TinyConfig(RAW | {"local_experts": 3})), tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == RAW | {"local_experts": 3, "experts": 3}


def test_a_model_loaded_from_another_layout_is_exported_in_that_layout(tmp_path):
    model = randomized(Tiny())
    (tmp_path / "in").mkdir()
    other = {re.sub("^model", "model.language_model", name): x.detach() for name, x in model.named_parameters()}
    save_file(other, tmp_path / "in" / SINGLE_FILE)
    loaded = Tiny()
    load_weights(loaded, tmp_path / "in")
    export_weights(loaded, tmp_path / "out")
    same_bits(read_all(tmp_path / "out"), other)
    load_weights(loaded, write_hub(model, tmp_path / "hub"))
    export_weights(loaded, tmp_path / "again")
    same_bits(read_all(tmp_path / "again"), hub_state(model))


def write_hub(model, folder):
    folder.mkdir()
    save_file({name: x.contiguous() for name, x in hub_state(model).items()}, folder / SINGLE_FILE)
    return folder


def test_a_folder_in_use_is_refused_and_not_changed(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=f"{tmp_path}: exists and is not an empty folder"):
        export_weights(Tiny(), tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


def test_an_earlier_export_is_replaced_when_the_new_one_is_complete(source, tmp_path, monkeypatch):
    """Also that of the folder that the model was loaded from."""
    for file in ("README.md", "model.bin"):
        (source / file).unlink()
    (source / "LICENSE.old").touch()
    old, new = files_of(source), randomized(Tiny())
    monkeypatch.setattr(writing.os, "fsync", lambda file: os.write(file, b""))
    with pytest.raises(CheckpointError, match="not written"):
        export_weights(new, source, source=source, overwrite=True)
    monkeypatch.undo()
    assert files_of(source) == old and read_all(source)["model.norm.weight"][0] == 0
    export_weights(new, source, overwrite=True, max_shard_size=600)
    same_bits(read_all(source), hub_state(new))
    assert files_of(source) >= {INDEX_FILE, "config.json"} and not files_of(source) & {SINGLE_FILE, "LICENSE.old"}
    assert {path.name for path in tmp_path.iterdir()} == {"source"}


@pytest.mark.parametrize(
    "extra", ["notes.txt", "checkpoints/step-1/rank.safetensors", "model.bin", "linked", ".git/HEAD"]
)
def test_a_folder_with_a_file_that_no_export_writes_is_not_replaced(tmp_path, extra):
    out = tmp_path / "out"
    export_weights(Tiny(), out, overwrite=True)
    (out / extra).parent.mkdir(parents=True, exist_ok=True)
    (out / extra).symlink_to(tmp_path) if extra == "linked" else (out / extra).touch()
    before = files_of(out)
    with pytest.raises(CheckpointError, match=f"{extra}: is no file of an export, and would be lost"):
        export_weights(Tiny(), out, overwrite=True)
    assert files_of(out) == before


def test_what_is_no_export_is_not_replaced(tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/model.safetensors").write_text("mine")
    for place in ("file", "folder"):
        with pytest.raises(CheckpointError, match=r"has no config\.json, so it is no export to overwrite"):
            export_weights(Tiny(), tmp_path / place, overwrite=True)
    assert files_of(tmp_path) == {"file", "folder/model.safetensors"}


def test_an_empty_folder_is_filled(tmp_path):
    (tmp_path / "out").mkdir()
    export_weights(Tiny(), tmp_path / "out")
    assert (tmp_path / "out" / SINGLE_FILE).exists()


def test_an_export_that_cannot_be_synced_leaves_nothing_behind(tmp_path, monkeypatch):
    def broken(descriptor):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(writing.os, "fsync", broken)
    with pytest.raises(CheckpointError, match=f"{tmp_path / 'out'}: not written: Input/output error; make room there"):
        export_weights(Tiny(), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@contextmanager
def full_disk():
    """Simulates a full disk by a limit on the size of files, which also holds for a file that pytest reports to."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("place", ["out", "new/parents/out", "empty"])
def test_a_full_disk_leaves_nothing_behind(tmp_path, place):
    """Neither the folder nor the parents created for it; files that were there before stay."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "previous").mkdir()
    (tmp_path / "previous" / SINGLE_FILE).write_text("intact")
    refusal = f"{tmp_path / place}: not written: File too large; make room there"
    with pytest.raises(CheckpointError, match=refusal), full_disk():
        export_weights(Tiny(), tmp_path / place)
    assert files_of(tmp_path) == {f"previous/{SINGLE_FILE}"}
    assert {path.name for path in tmp_path.iterdir()} == {"empty", "previous"}


def test_an_error_names_the_folder_whose_parents_cannot_be_created(tmp_path):
    (tmp_path / "file").write_text("mine")
    place = tmp_path / "file" / "new" / "out"
    with pytest.raises(CheckpointError, match=f"{place}: not written: Not a directory"):
        export_weights(Tiny(), place)
    assert files_of(tmp_path) == {"file"}


def test_an_error_names_the_folder_whose_parent_is_not_writable(tmp_path, monkeypatch):
    def denied(self, *args, **kwargs):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))

    monkeypatch.setattr(writing.Path, "mkdir", denied)  # file modes do not restrict a test that runs as root
    with pytest.raises(CheckpointError, match=f"{tmp_path / 'out'}: not written: Permission denied"):
        export_weights(Tiny(), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_an_export_succeeds_after_one_that_failed(tmp_path, monkeypatch):
    model = randomized(Tiny())
    with monkeypatch.context() as patched:
        patched.setattr(exporting, "write_config", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            export_weights(model, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    export_weights(model, tmp_path / "out")
    same_bits(read_all(tmp_path / "out"), hub_state(model))


def test_the_host_holds_at_most_one_gathered_parameter_and_one_block(tmp_path, monkeypatch):
    """Counts the gathered parameters that are alive at a time, and the sizes of the converted blocks."""
    model, alive, most = randomized(Tiny()), weakref.WeakSet(), []

    class Counted(torch.Tensor):
        __hash__ = object.__hash__

    def gathered(parameter, _):
        alive.add(copy := parameter.detach().clone().as_subclass(Counted))
        most.append(len(alive))
        return copy

    blocks, converted = [], exporting.cast_block
    monkeypatch.setattr(exporting, "full_tensor", gathered)
    monkeypatch.setattr(exporting, "cast_block", lambda *args: (blocks.append(args[1].nbytes), converted(*args))[1])
    monkeypatch.setattr(exporting, "BLOCK_BYTES", 60)
    gc.disable()
    export_weights(model, tmp_path / "out", dtype=torch.bfloat16)
    with monkeypatch.context() as patched:  # a rank that takes part in the gathers and does not write
        patched.setattr(writing, "is_first", lambda: False)
        export_weights(model, tmp_path / "none")
    gc.enable()
    assert max(most) == 1 and len(most) == 2 * len(list(model.parameters()))
    assert max(blocks) <= 60 < max(x.nbytes for x in hub_state(model).values())
    assert sum(blocks) == sum(x.nbytes for x in hub_state(model).values())
    same_bits(read_all(tmp_path / "out"), {name: x.bfloat16() for name, x in hub_state(model).items()})


def test_a_tokenizer_file_that_links_out_of_the_folder_is_refused(source, tmp_path):
    (tmp_path / "secret").write_text("secret")
    (source / "tokenizer.json").unlink()
    (source / "tokenizer.json").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: is a link"):
        export_weights(Tiny(), tmp_path / "out", source=source)
    assert not (tmp_path / "out").exists()
