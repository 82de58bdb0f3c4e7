"""Every fault of a model folder gives a one-line error that names file and field, in bounded time and memory.

Each entry of the table FAULTS damages a valid folder in one way, and lists the words that the error must contain, for
`load` and for the command line. Tests of what is allowed follow below the table.
"""

import json
import os
import shutil
import socket
from pathlib import Path

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from tokenizers.models import WordLevel

import ligermodels
from ligermodels.cli import main
from ligermodels.errors import InputError
from tests.cases import CASES, LLAMA
from tests.refusals import refusal_of
from tests.weights.raw_files import change_header, change_json, safetensors_bytes

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
GENERATION = "generation_config.json"
NORM = "model.norm.weight"
FAULTS = {}  # name -> (damage to a folder, words that the message must contain)


def fault(name, damage, *words):
    assert name not in FAULTS
    FAULTS[name] = damage, words


def rewrite(file, change):
    """Damage that replaces a file's bytes by those that `change` makes of them."""
    return lambda folder: (folder / file).write_bytes(change((folder / file).read_bytes()))


def header(change):
    return lambda folder: change_header(folder / WEIGHTS, change)


def entry(**fields):
    """Damage that changes the header entry of the final norm."""
    return header(lambda tensors: tensors[NORM].update(fields))


def offsets(change):
    return header(lambda tensors: tensors[NORM].update(data_offsets=change(*tensors[NORM]["data_offsets"])))


def header_bytes(text, data=b""):
    return rewrite(WEIGHTS, lambda _: safetensors_bytes(text, data))


def renamed(name):
    return header(lambda tensors: tensors.update({name: tensors.pop(NORM)}))


def config(**fields):
    return lambda folder: change_json(folder / CONFIG, **fields)


def text_in(file, text):
    """Damage that replaces a JSON file by `text`, in which {…} stands for the fields of the file."""
    return rewrite(file, lambda content: text.replace("{…}", content.decode(errors="replace").strip("{} \n")).encode())


def index(change):
    """Damage that splits the weights into shards and changes the weight_map of their index."""

    def damage(folder):
        shard(folder)
        change_json(folder / INDEX, weight_map=change(json.loads((folder / INDEX).read_text())["weight_map"]))

    return damage


def shard(folder, count=3):
    """Splits the weights into `count` files with an index."""
    tensors = load_file(folder / WEIGHTS)
    names = sorted(tensors)
    files = {f"model-{part + 1:05d}-of-{count:05d}.safetensors": names[part::count] for part in range(count)}
    for file, part in files.items():
        save_file({name: tensors[name] for name in part}, folder / file, {"format": "pt"})
    weight_map = {name: file for file, part in files.items() for name in part}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / WEIGHTS).unlink()


def in_place_of(file, make):
    """Damage that removes a file and calls `make` with its path."""

    def damage(folder):
        if file == INDEX:
            shard(folder)
        (folder / file).unlink(missing_ok=True)
        make(folder / file)

    return damage


def link_out(path):
    outside = path.parent.parent / "outside"
    outside.write_bytes(b"{}")
    path.symlink_to(outside)


def listen(path):
    there = os.getcwd()
    os.chdir(path.parent)  # the path of a socket is limited to a hundred characters
    try:
        socket.socket(socket.AF_UNIX).bind(path.name)
    finally:
        os.chdir(there)


class Bomb:
    def __reduce__(self):
        return os.abort, ()


def only_pickles(folder):
    (folder / WEIGHTS).unlink()
    torch.save(Bomb(), folder / "pytorch_model.bin")


def tensors(change):
    def damage(folder):
        stored = load_file(folder / WEIGHTS)
        change(stored)
        save_file(stored, folder / WEIGHTS, {"format": "pt"})

    return damage


def unnamed_in_the_index(folder):
    tensors(lambda stored: stored.update(x=torch.ones(1)))(folder)
    index(lambda weight_map: {name: file for name, file in weight_map.items() if name != "x"})(folder)


def stored_twice(folder):
    shard(folder)
    first, second, _ = sorted(folder.glob("model-*"))
    save_file(load_file(first) | load_file(second), first)


def tiny_tensors(count):
    return b"{" + b",".join(b'"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}' % i for i in range(count)) + b"}"


def experts_beyond_count(folder):
    shutil.rmtree(folder)
    ligermodels.export(ligermodels.create(CASES["qwen3_moe"]), folder)
    write_tokenizer(folder)
    change_json(folder / CONFIG, num_experts=4096)


LONG, NESTED = b"x" * 3_000_000, b"[" * 150 + b"]" * 150
for kept in (0, 5, 40, 5000, -1):
    fault(f"1 truncated to {kept}", rewrite(WEIGHTS, lambda content, kept=kept: content[:kept]), WEIGHTS)
fault("1 truncated shard", index(lambda weight_map: dict.fromkeys(weight_map, "a.safetensors")), INDEX, "a.safetensors")
fault("2 header of no bytes", header_bytes(b""), WEIGHTS, "not JSON")
fault("2 header of no tensors", header_bytes({}, bytes(4)), WEIGHTS, "4 bytes after the last tensor")
fault("2 no tensors at all", header_bytes({}), CONFIG, "num_hidden_layers", "0 tensors")
fault("2 header is no object", header_bytes([]), WEIGHTS, "list, not a JSON object")
fault("2 header is a number", header_bytes(b"5"), WEIGHTS, "int, not a JSON object")
fault("2 header is not UTF-8", header_bytes(b'{"\xff": 1}'), WEIGHTS, "not JSON", "position 2")
for length in (100_000_001, 2**60, 2**63, 2**64 - 1):
    damage = rewrite(WEIGHTS, lambda content, length=length: length.to_bytes(8, "little") + content[8:])
    fault(f"3 header of {length} bytes", damage, WEIGHTS, f"header of {length} bytes")
fault("3 header nested deeply", header_bytes(b'{"a":' + b"[" * 200_000), WEIGHTS, 'field "a"', "nested too deeply")
fault("3 header is nested lists", header_bytes(NESTED), f"{WEIGHTS}: is nested too deeply")
fault("3 header nested a little too deeply", header_bytes(b'{"a":' + b"[" * 101 + b"]" * 101 + b"}"), WEIGHTS, '"a"')
fault("3 header nested behind a long text", header_bytes(b'{"a":"' + LONG + b'","b":' + NESTED + b"}"), WEIGHTS, '"b"')
fault(
    "3 header of a million tiny tensors", header_bytes(tiny_tensors(200_000)), WEIGHTS, "more than 1000000 JSON values"
)
fault("4 Git LFS pointer", text_in(WEIGHTS, "version https://git-lfs.github.com/spec/v1\noid"), WEIGHTS, "git lfs pull")
fault("4 Git LFS pointer for JSON", text_in(CONFIG, "version https://git-lfs.github.com"), CONFIG, "git lfs pull")
for page in ("<!DOCTYPE html><html>", "\n<html>", '<?xml version="1.0"?><Error>'):
    fault(f"4 web page {page!r}", text_in(WEIGHTS, page), WEIGHTS, "web page")
fault("5 overlap", offsets(lambda a, b: [a - 4, b - 4]), WEIGHTS, NORM, "overlaps", "data_offsets")
fault("5 gap", offsets(lambda a, b: [a + 4, b + 4]), WEIGHTS, "gap", "data_offsets")
fault("5 beyond the end", offsets(lambda a, b: [a + 2**40, b + 2**40]), WEIGHTS, "gap", "data_offsets")
fault("5 overflow", offsets(lambda a, b: [a, b + 2**64]), WEIGHTS, f"{NORM}.data_offsets[1]", "64 bits")
fault("5 reversed", offsets(lambda a, b: [b, a]), WEIGHTS, NORM, "needs 192 bytes", "data_offsets")
fault("5 negative", offsets(lambda a, b: [-4, b]), WEIGHTS, NORM, "data_offsets [-4")
fault("5 booleans", offsets(lambda a, b: [False, True]), WEIGHTS, NORM, "data_offsets [False, True]")
fault("5 floats", offsets(lambda a, b: [float(a), float(b)]), WEIGHTS, NORM, "data_offsets")
fault("5 three offsets", offsets(lambda a, b: [a, b, b]), WEIGHTS, NORM, "data_offsets")
fault("5 ten thousand offsets", offsets(lambda a, b: [0] * 10_000), WEIGHTS, NORM, "[0, 0", "0…, 0", "0], not a begin")
fault("5 offsets are null", entry(data_offsets=None), WEIGHTS, NORM, "data_offsets None")
fault("5 huge shape", entry(shape=[2**40, 2**40]), WEIGHTS, NORM, "needs 4835703278458516698824704 bytes")
fault("5 product beyond counting", entry(shape=[2**62] * 50_000), WEIGHTS, NORM, "4611686…387904, 46", "at most 64")
fault("5 negative shape", entry(shape=[-48]), WEIGHTS, NORM, "shape [-48]")
fault("5 boolean shape", entry(shape=[True]), WEIGHTS, NORM, "shape [True]")
fault("5 shape is a number", entry(shape=48), WEIGHTS, NORM, "shape 48")
fault("5 no elements, huge shape", entry(shape=[0, 2**62], data_offsets=[0, 0]), WEIGHTS)
fault("5 unknown dtype", entry(dtype="F6"), WEIGHTS, NORM, "dtype F6", "BF16")
fault("5 dtype of the wrong kind", entry(dtype=["F32"]), WEIGHTS, NORM, "dtype ['F32']")
fault("5 entry is a number", header(lambda tensors: tensors.update({NORM: 5})), WEIGHTS, NORM, "dtype None")
fault("5 tensor named twice", header_bytes(b'{"a": 1, "a": 2}'), WEIGHTS, "field a")
fault("5 metadata of numbers", header(lambda t: t.update(__metadata__={"a": 1})), WEIGHTS, "__metadata__")
fault("5 metadata is a list", header(lambda t: t.update(__metadata__=[])), WEIGHTS, "__metadata__")
fault("5 bytes after the last", rewrite(WEIGHTS, lambda content: content + bytes(5)), WEIGHTS, "5 bytes after")
fault("5 name of several lines", renamed("a\nb\0\x1b[31m"), WEIGHTS, r"a\nb\x00\x1b[31m")
fault("5 name that turns the line", renamed("\u202egpj\ud800"), WEIGHTS, r"\u202egpj\ud800")
fault("5 name of megabytes", renamed("long " + "n" * 2_000_000), WEIGHTS, "nnn…nnn")
for path in ("../x.safetensors", "/etc/x.safetensors", "sub/x.safetensors", "..\\x.safetensors", "x", ""):
    change = lambda weight_map, path=path: weight_map | {NORM: path}  # noqa: E731
    fault(f"6 index names {path!r}", index(change), INDEX, "weight_map", repr(path))
fault("6 index names a NUL", index(lambda weight_map: {NORM: "a\0.safetensors"}), INDEX, r"a\x00.safetensors")
fault("6 index names what no system could", index(lambda _: {NORM: "a" * 5000 + ".safetensors"}), INDEX, "aaa…aaa")
fault("6 index names half a character", index(lambda _: {NORM: "\ud800.safetensors"}), INDEX, r"\ud800")
fault("6 index names a number", index(lambda weight_map: weight_map | {NORM: 1}), INDEX, "weight_map")
fault("6 index names nothing", index(lambda _: {}), INDEX, "weight_map")
fault("6 index is a list", index(lambda _: []), INDEX, "weight_map")
fault("6 index is not JSON", in_place_of(INDEX, lambda path: path.write_text("{")), INDEX, "not JSON")
for file in (WEIGHTS, INDEX, CONFIG, "generation_config.json"):
    if file != WEIGHTS:
        fault(f"7 link out of the folder: {file}", in_place_of(file, link_out), file, "leads out of the folder")
    fault(f"7 link to itself: {file}", in_place_of(file, lambda p: p.symlink_to(p.name)), file, "broken link")
    fault(f"7 link to nothing: {file}", in_place_of(file, lambda p: p.symlink_to("gone")), file, "broken link")
    fault(f"7 pipe: {file}", in_place_of(file, os.mkfifo), file, "not a regular file")
    fault(f"7 folder: {file}", in_place_of(file, os.mkdir), file, "not a regular file")
    fault(f"7 socket: {file}", in_place_of(file, listen), file, "not a regular file")
    fault(f"7 device: {file}", in_place_of(file, lambda p: p.symlink_to("/dev/zero")), file, "not a regular file")
fault(
    "8 shards that are not there",
    index(lambda weight_map: {name: f"{i:03}.safetensors" for i, name in enumerate(weight_map)}),
    INDEX,
    *(f"{i:03}.safetensors" for i in range(30)),
)
fault("8 a shard that lacks its tensor", index(lambda m: m | {"b": m[NORM]}), INDEX, "do not hold b;")
fault("9 missing", tensors(lambda stored: stored.pop(NORM)), "1 missing: " + NORM)
fault("9 missing layers", config(num_hidden_layers=4), "9 missing: model.layers.3.")
fault("9 weights missing altogether", lambda folder: (folder / WEIGHTS).unlink(), WEIGHTS, INDEX)
fault("10 unexpected", tensors(lambda stored: stored.update(x=torch.ones(1))), "1 unexpected: x (model.safetensors)")
fault("10 unexpected, its index silent", unnamed_in_the_index, "1 unexpected: x (model-00001-of-00003.safetensors)")
fault("10 tensor in two shards", stored_twice, INDEX, "model-00001-of-00003", "both hold tensor model.")
fault("11 wrong shape", config(intermediate_size=96), WEIGHTS, "mlp.gate_proj.weight is [80, 48] instead of [96, 48]")
fault("11 quantised", tensors(lambda t: t.update({NORM: t[NORM].char()})), WEIGHTS, NORM, "quantized", "torch.int8")
fault("11 not finite", tensors(lambda t: t[NORM].fill_(torch.nan)), WEIGHTS, NORM, "not finite in float32")
fault("12 pickles", only_pickles, "pytorch_model.bin", "convert to safetensors")
fault("13 remote code", config(model_type="evil", auto_map={"AutoModel": "evil.Model"}), CONFIG, "model_type", "'evil'")
DEEP = "[" * 200_000 + "]" * 200_000
for text, *words in (
    ("{", "not JSON", "line 1 column 2"),
    ("", "not JSON", "line 1 column 1"),
    ("[1]", "list, not a JSON object"),
    ("\ufeff{}", "BOM"),
    ('{"rope_theta": NaN, {…}}', "field rope_theta"),
    ('{"rope_scaling": {"factor": -Infinity}, {…}}', "field rope_scaling.factor"),
    ('{"layer_types": [1, 1e999], {…}}', "field layer_types[1]"),
    ('{"rms": 9223372036854775808, {…}}', "field rms", "64 bits"),
    ('{"rms": -' + "9" * 5000 + ", {…}}", "field rms", "64 bits"),
    ('{"hidden_size": 1, {…}}', "field hidden_size", "more than once"),
    ('{"a": {"b": "c"}, "rope_scaling": ' + DEEP + ", {…}}", 'field "rope_scaling"', "nested too deeply"),
    ('{"rope_scaling": ' + '{"x": ' * 200_000 + "}", 'field "rope_scaling"', "nested too deeply"),
    ('{"a": "' + LONG.decode() + '", "b": ' + NESTED.decode() + ", {…}}", 'field "b"', "nested too deeply"),
    ('{"a": [' + "0," * 1_000_000 + "0], {…}}", "more than 1000000 JSON values"),
):
    fault(f"14 config.json {text[:40]!r}", text_in(CONFIG, text), CONFIG, *words)
fault("14 config.json in UTF-16", rewrite(CONFIG, lambda text: text.decode().encode("utf-16")), CONFIG, "position 0")
fault("14 config.json without end", rewrite(CONFIG, lambda _: b"{" + b" " * 100_000_000), CONFIG, "100000000 bytes")
fault("14 generation_config.json", lambda folder: (folder / "generation_config.json").write_text("{"), "generation_con")
for end in ([[1]], {"a": 1}, [1, None], "2", 1.5, True, -1, [2, -1]):
    fault(f"16 eos_token_id {end}", config(eos_token_id=end), CONFIG, f"eos_token_id is {end!r}; must be a token id")
    damage = lambda folder, end=end: (folder / GENERATION).write_text(json.dumps({"eos_token_id": end}))  # noqa: E731
    fault(f"16 eos_token_id {end} to generate with", damage, GENERATION, f"eos_token_id is {end!r}; must be a token id")
for fields, *words in (
    ({"model_type": "lama"}, "model_type", "'lama'", "did you mean 'llama'?", "`ligermodels list` shows all"),
    ({"model_type": None}, "model_type", "None"),
    ({"model_type": ["llama"]}, "model_type", "['llama']"),
    ({"model_type": "a\n" * 1_000_000}, "model_type", r"a\na\n"),
    ({"rope_scaling": {"type": "yarm"}}, "rope_scaling", "type", "'yarm'", "did you mean 'yarn'?", "llama3"),
    ({"rope_scaling": {"type": ["yarn"]}}, "rope_scaling", "type", "['yarn']"),
    ({"rope_scaling": {"type": "linear"}}, "rope_scaling", "linear", "lacks factor"),
    ({"rope_scaling": "linear"}, "rope_scaling", "linear", "object"),
):
    fault(f"15 {str(fields)[:60]}", config(**fields), CONFIG, *words)
for fields, *words in (
    ({"num_key_value_heads": 4}, "num_key_value_heads 4", "must divide", "num_attention_heads 6"),
    ({"num_attention_heads": 7, "num_key_value_heads": 7}, "num_attention_heads 7", "must divide", "hidden_size 48"),
    ({"head_dim": 7}, "head_dim 7", "even"),
    ({"hidden_size": "48"}, "hidden_size", "'48'", "must be int"),
    ({"hidden_size": 48.0}, "hidden_size", "48.0", "must be int"),
    ({"hidden_size": True}, "hidden_size", "True", "must be int"),
    ({"hidden_size": None}, "hidden_size", "None", "must be int"),
    ({"hidden_size": [48]}, "hidden_size", "[48]", "must be int"),
    ({"hidden_size": 10**12}, "hidden_size", "must be at most"),
    ({"head_dim": 10**12}, "head_dim", "must be at most"),
    ({"num_hidden_layers": -1}, "num_hidden_layers", "-1", "must be positive"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers", "must be at most 512"),
    ({"num_hidden_layers": 512}, "num_hidden_layers", "512", "30 tensors"),
    ({"intermediate_size": 0}, "intermediate_size", "0", "must be positive"),
    ({"vocab_size": 2**25}, "vocab_size", "33554432", "must be at most"),
    ({"pad_token_id": 99}, "pad_token_id 99", "less than vocab_size 99"),
    ({"rope_theta": -1}, "rope_theta", "-1", "must be positive"),
    ({"attention_dropout": -0.5}, "attention_dropout", "-0.5", "must not be negative"),
    ({"rope_theta": 1.0, "rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_scaling", "'yarn'", "not finite"),
    ({"hidden_act": "relu"}, "hidden_act", "'relu'"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor", "0.5"),
    ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config", "load the original"),
    ({"dtype": "int4"}, "dtype", "'int4'", "bfloat16"),
    ({"dtype": ["float32"]}, "dtype", "['float32']"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings", "'yes'", "must be bool"),
):
    fault(f"16 {str(fields)[:60]}", config(**fields), CONFIG, *words)
fault("16 experts beyond count", experts_beyond_count, CONFIG, "number of experts")


def write_tokenizer(folder):
    tokenizers.Tokenizer(WordLevel({f"w{i}": i for i in range(99)}, unk_token="w0")).save(
        str(folder / "tokenizer.json")
    )


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("healthy") / "model"
    ligermodels.export(ligermodels.create(LLAMA), folder)
    write_tokenizer(folder)
    ligermodels.load(folder)  # so that the one-time costs of the first load are not counted
    return folder


@pytest.fixture
def folder(healthy, tmp_path):
    return shutil.copytree(healthy, tmp_path / "model")


@pytest.mark.parametrize("name", FAULTS)
def test_a_damaged_folder_is_refused(name, folder, capsys):
    damage, words = FAULTS[name]
    damage(folder)
    before = sorted(folder.rglob("*"))
    message = refusal_of(folder)
    for word in words:
        assert word in message, message
    assert main(["generate", str(folder), "--prompt", "w5", "--device", "cpu"]) == 2
    out, err = capsys.readouterr()
    assert not out and err == f"ligermodels: {message}\n"
    assert sorted(folder.rglob("*")) == before


def test_a_file_name_that_no_system_has_is_refused_without_weights_too(folder, capsys):
    index(lambda _: {NORM: "a" * 5000 + ".safetensors"})(folder)
    assert main(["info", str(folder)]) == 2
    out, err = capsys.readouterr()
    assert not out and f"{INDEX}: weight_map names 'aaa" in err


def test_names_in_files_cannot_control_the_terminal(folder, capsys):
    """In the output of a command and in warnings; errors are tested above."""
    index(lambda weight_map: weight_map | {"x": "\x1b[2J\r\n.safetensors"})(folder)
    assert main(["info", str(folder)]) == 2
    _, err = capsys.readouterr()
    assert r"\x1b[2J\r\n.safetensors" in err and err.replace("\n", "").isprintable()
    save_file({"\x1b[2J": torch.ones(1)}, folder / "x.safetensors")
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    del weight_map["x"]
    change_json(folder / INDEX, weight_map=weight_map | {"\x1b[2J": "x.safetensors"})
    with pytest.warns(UserWarning, match=r"has no place for them: \\x1b\[2J$"):
        ligermodels.load(folder, allow_unexpected=True)


def test_unexpected_tensors_are_ignored_if_that_is_allowed(folder, healthy):
    shard(folder)
    save_file({"x": torch.ones(1)}, folder / "x.safetensors")
    change_json(
        folder / INDEX, weight_map=json.loads((folder / INDEX).read_text())["weight_map"] | {"x": "x.safetensors"}
    )
    assert "allow_unexpected=True" in refusal_of(folder)
    with pytest.warns(UserWarning, match=r"model: ignored, the model has no place for them: x$"):
        model = ligermodels.load(folder, allow_unexpected=True)
    assert_same(model, ligermodels.load(healthy))
    tensors_missing = json.loads((folder / INDEX).read_text())["weight_map"]
    (folder / tensors_missing[NORM]).unlink()
    refusal_of(folder, allow_unexpected=True)


def test_the_single_file_is_used_if_there_is_an_index_too(folder, healthy):
    (folder / INDEX).write_text("not even JSON")
    assert_same(ligermodels.load(folder), ligermodels.load(healthy))


def test_a_tensor_that_the_index_does_not_list_is_read_from_its_shard(folder, healthy):
    index(lambda weight_map: {name: file for name, file in weight_map.items() if name != NORM})(folder)
    assert_same(ligermodels.load(folder), ligermodels.load(healthy))


def test_remote_code_of_a_known_family_is_not_run(folder, healthy):
    change_json(folder / CONFIG, auto_map={"AutoModelForCausalLM": "evil.Model"}, trust_remote_code=True)
    (folder / "evil.py").write_text("raise SystemExit('remote code was run')")
    assert_same(ligermodels.load(folder), ligermodels.load(healthy))


def test_an_error_names_a_file_that_the_system_cannot_read(folder, monkeypatch):
    def denied(path, *args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(InputError, match=r"config\.json: cannot be read: Permission denied"):
        ligermodels.load(folder)


def test_a_huge_configuration_is_refused_before_the_model_is_built():
    with pytest.raises(InputError, match=r"num_hidden_layers is 1000000000; must be at most 512"):
        ligermodels.create(LLAMA | {"num_hidden_layers": 10**9}, device="meta")


def assert_same(model, other):
    for (name, ours), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
