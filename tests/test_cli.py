"""The commands list, info, generate, export and verify: output, exit status and error messages."""

import io
import json
import mmap
import os
import re
import shutil
import subprocess
import sys
import warnings
from unittest.mock import Mock

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

import ligermodels
from ligermodels.cli import generate_text, info, info_report, main
from ligermodels.hub.description import architecture_lines
from ligermodels.memory.model import training_memory
from ligermodels.units import memory_size
from ligermodels.weights.files import tensor_hashes
from tests.cases import LLAMA
from tests.suites import slow

LONG = 5000 * "x"


@pytest.fixture
def folder(tmp_path):
    """A tiny model; the words of its tokenizer are w0 to w98."""
    folder = tmp_path / "model"
    ligermodels.export(ligermodels.create(LLAMA), folder)
    save_words("w", folder)
    return folder


def save_words(letter, folder):
    tokenizer = tokenizers.Tokenizer(WordLevel({f"{letter}{i}": i for i in range(99)}, unk_token=f"{letter}0"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))


def test_list_names_architectures_and_sizes(capsys):
    assert main(["list"]) == 0
    lines = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()}
    assert lines["gemma4"] == ["from", "a", "checkpoint"]
    assert " ".join(lines["qwen2"]) == "tiny (1.1M), 0.5b (494.0M), 1.5b (1.5B), 7b (7.6B)"


def test_generate_prints_the_prompt_and_the_continuation(folder, capsys):
    model = ligermodels.load(folder)
    (ids,) = ligermodels.generate(model, [[5, 6, 7]], max_new_tokens=6)
    assert main(["generate", str(folder), "--prompt", "w5 w6 w7", "--max-new-tokens", "6", "--device", "cpu"]) == 0
    words = capsys.readouterr().out
    assert words == " ".join(["w5 w6 w7", *(f"w{i}" for i in ids if i != 2)]) + "\n"


@pytest.fixture
def adapted(folder, tmp_path):
    """The model with LoRA that changes its output, and the adapter's folder."""
    model = ligermodels.load(folder)
    ligermodels.add_lora(model, rank=2, dropout=0.9)
    for name, parameter in model.named_parameters():
        if name.endswith("lora_B"):
            torch.nn.init.normal_(parameter)
    ligermodels.export_adapter(model, tmp_path / "adapter")
    return model, tmp_path / "adapter"


def test_generate_with_an_adapter_prints_the_output_of_the_merged_model(folder, adapted, tmp_path, capsys):
    """The adapter's dropout is not active."""
    model, adapter = adapted
    ligermodels.export(model, tmp_path / "merged")
    shutil.copy(folder / "tokenizer.json", tmp_path / "merged")
    outputs = []
    for flags in ([str(tmp_path / "merged")], [str(folder), "--adapter", str(adapter)], [str(adapter)], [str(folder)]):
        assert main(["generate", *flags, "--prompt", "w5 w6 w7", "--max-new-tokens", "8", "--device", "cpu"]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] == outputs[2] != outputs[3]


def test_an_adapter_without_a_tokenizer_has_that_of_its_base(adapted, capsys):
    _, adapter = adapted
    (adapter / "tokenizer.json").unlink()
    assert main(["generate", str(adapter), "--prompt", "w5", "--max-new-tokens", "2", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.startswith("w5 ")


def test_an_adapter_of_another_base_is_loaded_with_a_line_that_says_so(folder, adapted, tmp_path, capsys):
    """A copy of its base, or a folder of that name, is no other base."""
    _, adapter = adapted
    copy, other = tmp_path / "copy", tmp_path / "other"
    shutil.copytree(folder, copy)
    shutil.copytree(folder, other)
    ligermodels.export(ligermodels.create(LLAMA, seed=1), other, overwrite=True)
    save_words("w", other)

    def warned(base, named=folder, recorded=False):
        if not recorded:  # as PEFT writes it
            save_file(load_file(adapter / "adapter_model.safetensors"), adapter / "adapter_model.safetensors")
        config = json.loads((adapter / "adapter_config.json").read_text())
        (adapter / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": str(named)}))
        flags = ["--adapter", str(adapter), "--prompt", "w5", "--max-new-tokens", "2", "--device", "cpu", "--quiet"]
        assert main(["generate", str(base), *flags]) == 0
        return capsys.readouterr().err

    worse = "on another model its answers are worse\n"
    assert warned(other, recorded=True) == (
        f"ligermodels: warning: {adapter}: was trained on other weights than {other} has: {worse}"
    )
    assert [warned(base, "org/Large-7B", recorded=True) for base in (folder, copy)] == [""] * 2
    line = f"ligermodels: warning: {{}}: was trained on {{}}, which is not known to be {{}}: {worse}"
    assert warned(other) == line.format(adapter, folder, other)
    assert warned(folder, "org/Large-7B") == line.format(adapter, "org/Large-7B", folder)
    assert [warned(folder), warned(copy), warned(folder, "org/Model"), warned(folder, "")] == [""] * 4


def test_generate_on_a_cpu_computes_in_float32(folder, tmp_path, capsys, monkeypatch):
    half = tmp_path / "half"
    ligermodels.export(ligermodels.load(folder), half, dtype="bfloat16")
    save_words("w", half)
    dtypes = []
    load = generate_text.load_with_adapter

    def loaded(*args, **options):
        model = load(*args, **options)
        dtypes.append(model.dtype)
        return model

    monkeypatch.setattr(generate_text, "load_with_adapter", loaded)
    flags = ["--prompt", "w5", "--max-new-tokens", "2", "--device", "cpu"]
    for source, more in ((half, []), (half, ["--dtype", "bfloat16"]), (folder, [])):
        assert main(["generate", str(source), *flags, *more]) == 0
    assert dtypes == [torch.float32, torch.bfloat16, torch.float32]
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 3 and all(re.fullmatch(r"2 new tokens in \d+\.\d s, [\d,]+ tokens/s", line) for line in told)


@pytest.mark.parametrize(
    ("base", "reason"),
    [
        (None, "is None; it names no model"),
        ("runs/gone/model", "is 'runs/gone/model'; there is no such folder"),
        ("/gone/model", "is '/gone/model'; there is no such folder"),
        ("..", "is '..'; there is no model, which has a config.json"),
        ("/etc", "is '/etc'; there is no model, which has a config.json"),
        ("{adapter}", "is '{adapter}'; there is no model, which has a config.json"),
        ("llama", "is 'llama'; llama: is an architecture and has no weights to load"),
    ],
)
def test_an_adapter_whose_base_is_not_found_is_refused_with_the_command_that_names_it(base, reason, adapted, capsys):
    _, adapter = adapted
    base, reason = base and base.format(adapter=adapter), reason.format(adapter=adapter)
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": base}))
    error = error_line(["generate", str(adapter), "--prompt", "w5"], capsys)
    assert error.startswith(f"ligermodels: {adapter / 'adapter_config.json'}: base_model_name_or_path {reason}")
    assert error.endswith(f"; name its base: ligermodels generate BASE --adapter {adapter}\n")
    error = error_line(["export", str(adapter), "out", "--adapter", str(adapter)], capsys)
    assert "is an adapter itself, beside the adapter" in error


def test_generate_and_export_use_the_tokenizer_of_the_adapter(folder, adapted, tmp_path, capsys):
    """The adapter was trained with its own tokenizer files, so none of the base's is mixed with them."""
    _, adapter = adapted
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    (folder / "LICENSE").write_text("of the base")
    save_words("v", adapter)
    ends = {"eos_token_id": [2, 98]}
    (adapter / "generation_config.json").write_text(json.dumps(ends))
    merged = tmp_path / "merged"
    assert main(["export", str(folder), str(merged), "--adapter", str(adapter)]) == 0
    capsys.readouterr()
    for flags in ([str(folder), "--adapter", str(adapter)], [str(merged)]):
        assert main(["generate", *flags, "--prompt", "v5 v6 v7", "--max-new-tokens", "8", "--device", "cpu"]) == 0
    one, other = capsys.readouterr().out.splitlines()
    assert one == other and one.startswith("v5 v6 v7 v")
    assert ligermodels.load(merged).generation_config == ends
    left = {"config.json", "model.safetensors", "tokenizer.json", "generation_config.json", "LICENSE"}
    assert {file.name for file in merged.iterdir()} == left
    words = {f"v{i}": i for i in range(100)}  # one more than the model's vocabulary
    tokenizers.Tokenizer(WordLevel(words, unk_token="v0")).save(str(adapter / "tokenizer.json"))
    assert "tokenizer.json" in error_line(
        ["generate", str(folder), "--adapter", str(adapter), "--prompt", "v5"], capsys
    )


CHAT_TEMPLATE = "{% for m in messages %}{{ m.role | replace('user', 'w11') | replace('assistant', 'w12') }} "
CHAT_TEMPLATE += "{{ m.content }} {% endfor %}{% if add_generation_prompt %}w12{% endif %}"


def test_a_conversation_is_rendered_by_the_chat_template_turn_by_turn(folder, capsys, monkeypatch):
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    model = ligermodels.load(folder)

    def answer(*prompt):
        (ids,) = ligermodels.generate(model, [prompt], max_new_tokens=4)
        return [i for i in ids if i != 2]

    def text(ids):
        return " ".join(f"w{i}" for i in ids)

    chat = ["generate", str(folder), "--chat", "--max-new-tokens", "4", "--device", "cpu"]
    first = answer(11, 5, 12)
    assert main([*chat, "--prompt", "w5"]) == 0
    assert capsys.readouterr().out == text(first) + "\n"
    assert main([*chat, "--prompt", "w5", "--system", "w9"]) == 0  # the role system is not in the vocabulary: w0
    assert capsys.readouterr().out == text(answer(0, 9, 11, 5, 12)) + "\n"

    typed = iter(["w5", "", "w6"])
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda prompt: next_line(typed))
    assert main(chat) == 0
    assert capsys.readouterr().out == f"{text(first)}\n{text(answer(11, 5, 12, *first, 11, 6, 12))}\n\n"


def next_line(lines):
    try:
        return next(lines)
    except StopIteration:
        raise EOFError from None


@pytest.fixture
def pipe(monkeypatch):
    """Gives a command its standard input."""
    return lambda content: monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), encoding="utf-8"))


def test_a_prompt_is_read_from_a_pipe(folder, capsys, pipe):
    generate = ["generate", str(folder), "--max-new-tokens", "6", "--device", "cpu", "--quiet"]
    printed = []
    for flags, content in (
        (["--prompt", "w5 w6\nw7"], b"unread"),
        ([], b"w5 w6\nw7\n"),
        (["--prompt", "-"], b"w5 w6\nw7"),
    ):
        pipe(content)
        assert main([*generate, *flags]) == 0
        printed.append(capsys.readouterr())
    assert printed[0].out.startswith("w5 w6\nw7 w") and printed == [printed[0]] * 3
    for flags, content, reason in (
        ([], b"", "standard input is empty"),
        (["--prompt", "-"], b"\n", "standard input is empty"),
        ([], b"\xff", "standard input: is not text in utf-8"),
    ):
        pipe(content)
        assert reason in error_line([*generate, *flags], capsys)


def test_each_line_of_a_pipe_is_a_message_of_the_conversation(folder, capsys, pipe):
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    chat = ["generate", str(folder), "--chat", "--max-new-tokens", "4", "--device", "cpu"]
    printed = []
    for content in (b"w5\n", b"w5\n\nw6", b""):
        pipe(content)
        assert main(chat) == 0
        printed.append(capsys.readouterr().out)
    first, both, none = printed
    assert both.startswith(first) and [text.count("\n") for text in printed] == [1, 2, 0] and none == ""
    pipe(b"w5\nw6\n")
    assert main([*chat, "--prompt", "-"]) == 0  # the whole input is one message
    assert capsys.readouterr().out not in printed


def test_a_text_beyond_the_trained_length_is_one_warning_after_it(folder, capsys, monkeypatch):
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    set_config(folder, max_position_embeddings=8)
    generate = ["generate", str(folder), "--max-new-tokens", "6", "--device", "cpu", "--quiet"]
    assert main([*generate, "--prompt", "w5 w6 w7"]) == 0
    assert capsys.readouterr().err == ""
    warning = "ligermodels: warning: the text is longer than the 8 tokens that the model was trained for"
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        typed = iter(["w5 w6 w7 w8", "w9"])
        monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
        monkeypatch.setattr("builtins.input", lambda prompt: next_line(typed))
        assert main([*generate, "--chat"]) == 0
    out, err = capsys.readouterr()
    assert err.startswith(warning) and err.count("\n") == 1 and out.count("\n") == 3


def records(capsys):
    """The JSON objects on standard output, and the text on stderr."""
    out, err = capsys.readouterr()
    return [json.loads(line) for line in out.splitlines()], err


def test_with_json_generate_prints_an_object_for_each_sample_and_one_at_the_end(folder, capsys):
    flags = ["generate", str(folder), "--prompt", "w5 w6", "--max-new-tokens", "3", "--device", "cpu"]
    assert main(flags) == 0
    text = capsys.readouterr().out
    assert main([*flags, "--json"]) == 0
    (sample, end), err = records(capsys)
    assert sample == {"prompt": "w5 w6", "completion": text.removeprefix("w5 w6").removesuffix("\n")}
    assert end["new_tokens"] == 3 and end["seconds"] > 0 and err.startswith(text)
    assert main([*flags, "--json", "--quiet", "--num-samples", "2", "--temperature", "1"]) == 0
    (first, second, end), err = records(capsys)
    assert (first["sample"], second["sample"], end["new_tokens"]) == (0, 1, 6) and err == ""


def test_with_json_info_prints_numbers(capsys):
    assert main(["info", "qwen2:tiny", "--json", "--quiet"]) == 0
    ((record,), err) = records(capsys)
    assert err == "" and record["family"] == "qwen2" and record["parameters"]["total"] == 1050752
    assert record["memory"]["generate"]["weights"] == 4 * 1050752 and record["files"] == {}


def test_info_of_a_checkpoint_in_nf4_is_of_weights_that_stay_so(tmp_path, capsys):
    dense, stored = tmp_path / "dense", tmp_path / "stored"
    ligermodels.export(ligermodels.create("qwen2"), dense)
    ligermodels.export(ligermodels.load(dense, quantize="nf4"), stored)
    loaded = ligermodels.load(stored)
    size = sum(tensor.nbytes for tensor in {id(t): t for t in loaded.state_dict().values()}.values())
    (of_dense, of_stored) = (info_record(folder, "--for-gpu", "24GB", capsys=capsys) for folder in (dense, stored))
    assert of_stored["memory"]["QLoRA"] == of_dense["memory"]["QLoRA"]
    assert of_stored["memory"].keys() == {"QLoRA", "generate"} and of_stored["for_gpu"].keys() == {"step", "QLoRA"}
    assert of_stored["memory"]["generate"]["weights"] == size < of_dense["memory"]["generate"]["weights"]


def info_record(folder, *flags, capsys):
    assert main(["info", str(folder), *flags, "--json", "--quiet"]) == 0
    ((record,), _) = records(capsys)
    return record


def test_a_warning_is_one_line_without_the_place_in_the_code(capsys, monkeypatch):
    def listing():
        places = (UserWarning, info.__file__), (UserWarning, "a.py"), (DeprecationWarning, info.__file__)
        return "".join(warnings.formatwarning("not\nfound", *place, 3, "f(") for place in places)

    monkeypatch.setattr(info, "architecture_list", listing)
    assert main(["list"]) == 0
    text = "ligermodels: warning: not\\nfound\na.py:3: UserWarning: not\nfound\n  f(\n"
    text += f"{info.__file__}:3: DeprecationWarning: not\nfound\n  f(\n"
    assert capsys.readouterr().out == text
    assert info.__file__ in warnings.formatwarning("text", UserWarning, info.__file__, 3)


def set_config(folder, **fields):
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | fields))


def test_a_missing_prompt_or_template_is_refused(folder, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    assert "--prompt is missing" in error_line(["generate", str(folder)], capsys)
    assert "--chat" in error_line(["generate", str(folder), "--prompt", "w5", "--system", "w9"], capsys)
    assert "no chat template" in error_line(["generate", str(folder), "--prompt", "w5", "--chat"], capsys)
    assert "a prompt is empty" in error_line(["generate", str(folder), "--prompt", "", "--device", "cpu"], capsys)


def test_info_shows_parameters_files_and_memory_from_config_json_alone(folder, capsys):
    for file in folder.glob("*.safetensors"):
        file.unlink()
    assert main(["info", str(folder), "--batch-size", "2", "--sequence-length", "16", "--dtype", "bfloat16"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    model = ligermodels.create(LLAMA, device="meta")
    count = sum(parameter.numel() for parameter in model.parameters())
    assert f" {count:,}, {99 * 48:,} of them embeddings" in lines["parameters"] and "none" in lines["files"]
    weights = f"{2 * count / 1024:.1f} KiB"
    assert lines["generate"].split("= ")[1].startswith(f"weights {weights} + cache")
    peak = training_memory(model.bfloat16(), 2, 16, torch.bfloat16).peak
    assert lines["train"].split("=")[0].split() == ["train", *memory_size(peak).split()]
    assert lines["LoRA"].split("=")[0] != lines["train"].split("=")[0]


def test_info_says_what_computes_attention_and_what_would_be_faster(capsys, monkeypatch):
    def attention():
        assert main(["info", "gemma2:2b"]) == 0
        return next(line for line in capsys.readouterr().out.splitlines() if "attention" in line)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert attention() == "  attention    in training, float32 on cpu: SDPA, one document after the other"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda gpu: (9, 0))
    monkeypatch.setattr("ligermodels.kernels.attention.attention.head_dims", lambda gpu: ())
    faster = "FlexAttention; the extra `flash` is faster: pip install 'ligermodels[flash]'"
    assert attention() == f"  attention    in training, bfloat16 on cuda: {faster}"


def test_info_of_a_preset_and_of_files(folder, capsys):
    assert main(["info", "qwen3_moe:30b-a3b"]) == 0
    assert "30,532,122,624, 3,353,032,704 active" in capsys.readouterr().out
    assert main(["info", str(folder)]) == 0
    size = (folder / "model.safetensors").stat().st_size
    assert f"model.safetensors  {size / 1000:.1f} KB" in capsys.readouterr().out
    assert main(["info", "qwen2"]) == 0 and "1,050,752" in capsys.readouterr().out  # the smallest


def overlapping(folder):
    file = folder / "model.safetensors"
    header = {name: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} for name in ("a", "b")}
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))


def without_a_tensor(folder):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.norm.weight"]
    save_file(tensors, file)


def replaced(make):
    def damage(folder):
        (folder / "model.safetensors").unlink()
        make(folder / "model.safetensors")

    return damage


DAMAGES = {
    "empty": lambda folder: (folder / "model.safetensors").write_bytes(b""),
    "not a header": lambda folder: (folder / "model.safetensors").write_bytes(bytes([5, *bytes(7)]) + b"hello"),
    "a header of 2^63 bytes": lambda folder: (folder / "model.safetensors").write_bytes(bytes(7) + b"\x80" + b"{}"),
    "overlapping tensors": overlapping,
    "a missing tensor": without_a_tensor,
    "a link to itself": replaced(lambda file: file.symlink_to(file)),
    "a pipe": replaced(os.mkfifo),
    "a missing shard": replaced(
        lambda file: file.with_suffix(".safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    ),
    "too many layers": lambda folder: set_config(folder, num_hidden_layers=500),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_info_refuses_weights_that_cannot_be_loaded_as_generate_does(folder, capsys, damage):
    DAMAGES[damage](folder)
    error = error_line(["info", str(folder)], capsys)
    assert error == error_line(["generate", str(folder), "--prompt", "w5", "--device", "cpu"], capsys)
    assert error.startswith(f"ligermodels: {folder}") and error.count("\n") == 1


def test_info_of_an_adapter_says_what_it_is(tmp_path, capsys):
    (tmp_path / "adapter_config.json").write_text("{}")
    error = error_line(["info", str(tmp_path)], capsys)
    assert error.startswith(f"ligermodels: {tmp_path}: contains an adapter and no model: load its base model")


def test_export_writes_another_dtype_smaller_shards_and_a_merged_adapter(folder, adapted, tmp_path, capsys):
    model, adapter = adapted
    assert main(["export", str(folder), str(tmp_path / "same")]) == 0
    assert capsys.readouterr().out.endswith(" of weights in 1 file\n")
    sizes = ["--dtype", "float16", "--max-shard-size", "100KB"]
    assert main(["export", str(folder), str(tmp_path / "out"), *sizes, "--adapter", str(adapter)]) == 0
    files = list((tmp_path / "out").glob("model-*.safetensors"))
    assert len(files) > 1 and f"in {len(files)} files" in capsys.readouterr().out
    ligermodels.export(model, tmp_path / "merged", dtype=torch.float16)
    assert tensor_hashes(tmp_path / "out") == tensor_hashes(tmp_path / "merged")
    assert tensor_hashes(tmp_path / "out") != tensor_hashes(folder)
    assert main(["export", str(adapter), str(tmp_path / "by-adapter"), "--dtype", "float16"]) == 0
    assert tensor_hashes(tmp_path / "by-adapter") == tensor_hashes(tmp_path / "merged")
    assert str(tmp_path / "out") in error_line(["export", str(folder), str(tmp_path / "out")], capsys)
    assert main(["export", str(folder), str(tmp_path / "out"), "--overwrite"]) == 0
    assert tensor_hashes(tmp_path / "out") == tensor_hashes(folder)
    (tmp_path / "out/notes.txt").touch()
    assert "out/notes.txt" in error_line(["export", str(folder), str(tmp_path / "out"), "--overwrite"], capsys)


@slow
def test_list_prints_what_the_presets_have(capsys):
    """`hub/architectures.txt` is written from `architecture_lines()`."""
    assert main(["list"]) == 0
    assert capsys.readouterr().out.splitlines() == list(architecture_lines())


def test_python_m_ligermodels_is_the_command_and_list_waits_for_no_torch():
    """A `torch` that cannot be imported stands in the way of whatever imports it."""
    code = "import runpy, sys; sys.modules['torch'] = None; sys.argv[1:] = ['list']; runpy.run_module('ligermodels')"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "") and run.stdout.startswith("cohere2 ")


def test_version_is_that_of_the_package(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert (end.value.code, capsys.readouterr().out) == (0, f"ligermodels {ligermodels.__version__}\n")


def test_a_device_that_is_not_there_is_one_line(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert "sees 0 GPUs; use cpu" in error_line(["generate", "x", "--prompt", "y", "--device", "cuda"], capsys)
    assert "must be cpu, cuda or cuda:NUMBER" in error_line(["verify", "x", "--device", "tpu9000"], capsys)


@pytest.mark.parametrize("command", ["list", "info", "generate", "export", "verify"])
def test_help_shows_an_example_and_defaults(command, capsys):
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    out = capsys.readouterr().out
    assert end.value.code == 0 and f"example: ligermodels {command}" in out and "(default: None)" not in out
    shown = {
        "generate": ["(default: 128)", "(default: 0.0)"],
        "export": ["(default: 5GB)"],
        "verify": ["(default: 32)"],
    }
    assert all(default in " ".join(out.split()) for default in shown.get(command, []))


def test_an_interrupt_is_one_line_and_exits_with_130(folder, capsys, monkeypatch):
    def interrupted(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(generate_text, "engine_for", interrupted)
    assert main(["generate", str(folder), "--prompt", "w5", "--device", "cpu"]) == 130
    assert capsys.readouterr().err == "ligermodels: interrupted\n"


def test_a_closed_pipe_ends_the_command_without_a_traceback(monkeypatch, capsys):
    """As in `ligermodels info qwen2:tiny | true`."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as unread:
        monkeypatch.setattr(sys, "stdout", unread)
        assert main(["info", "qwen2:tiny"]) == 141
    assert capsys.readouterr().err == ""  # closing the pipe, as Python does at exit, raised nothing


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "--model", "qwen2", "--dry-run", "--data", LONG],
        ["train", "--model", "qwen2", "--dry-run", "--data", "random", "--output", LONG],
        ["train", "--model", "qwen2", "--dry-run", "--data", "chats", "--chat-template", LONG],
        ["board", LONG],
    ],
)
def test_a_name_that_no_file_can_have_is_one_line(arguments, capsys):
    assert main(arguments) == 2
    told = capsys.readouterr().err
    assert re.fullmatch(r"ligermodels: \S*xxx…xxx\S*: is longer than a path can be; shorten it\n", told)


@pytest.mark.parametrize("buffering", [-1, 0])
def test_a_full_disk_behind_standard_output_is_one_line(monkeypatch, capsys, buffering):
    """As in `ligermodels info qwen2:tiny > /dev/full`; without a buffer, as with PYTHONUNBUFFERED=1."""
    with io.TextIOWrapper(open("/dev/full", "wb", buffering), write_through=not buffering) as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["info", "qwen2:tiny"]) == 2
    assert capsys.readouterr().err == (
        "ligermodels: standard output: not written: No space left on device; make room there\n"
    )


def test_characters_that_the_encoding_of_standard_output_lacks_are_escaped(monkeypatch):
    """As with PYTHONIOENCODING=ascii."""
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding="ascii"))
    assert main(["info", "qwen2:tiny"]) == 0
    assert b"for 1 \\xd7 2048 tokens" in printed.getvalue()


def test_an_error_that_nobody_can_read_still_has_its_exit_status(monkeypatch):
    monkeypatch.setattr(sys.stderr, "write", lambda _: os.write(-1, b""))
    assert main(["info", "qwen2:tinny"]) == 2


CLOSING = "import os, sys; os.closerange(0, 3); os.execvp(sys.argv[1], sys.argv[1:])"


@pytest.mark.slow
def test_closed_standard_streams_change_nothing_else(tmp_path):
    """As in `ligermodels export … <&- >&- 2>&-`: no file gets one of their descriptors, nor what is printed."""
    source, out = tmp_path / "source", tmp_path / "out"
    ligermodels.export(ligermodels.create(LLAMA), source)
    command = [sys.executable, "-c", CLOSING, sys.executable, "-m", "ligermodels", "export"]
    assert subprocess.run([*command, str(source), str(out)]).returncode == 0
    assert tensor_hashes(out) == tensor_hashes(source) and {path.name for path in tmp_path.iterdir()} == {
        "source", "out",
    }  # fmt: skip
    assert subprocess.run([*command, str(tmp_path / "missing"), str(out)]).returncode == 2


OUT_OF_MEMORY = {
    "torch's allocator": lambda: torch.empty(2**58),
    "Python's allocator": lambda: bytearray(2**60),
    "C++": lambda: (_ for _ in ()).throw(RuntimeError("std::bad_alloc")),
    "the system": lambda: mmap.mmap(-1, 2**60),
}


@pytest.mark.parametrize("allocate", OUT_OF_MEMORY.values(), ids=OUT_OF_MEMORY)
def test_host_memory_that_the_system_does_not_give_is_one_line(allocate, monkeypatch, capsys):
    def describe(*_, **__):
        next(allocate())

    monkeypatch.setattr(info_report, "describe", describe)
    error = error_line(["info", "qwen2:tiny"], capsys)
    assert error.startswith("ligermodels: out of memory on the host; take a smaller batch, prompt or dtype; ")


def test_another_error_is_a_bug_and_keeps_its_traceback(monkeypatch):
    for error in (RuntimeError("broken"), OSError(13, "Permission denied")):
        monkeypatch.setattr(info_report, "describe", Mock(side_effect=error))
        with pytest.raises(type(error)):
            main(["info", "qwen2:tiny"])


def error_line(arguments, capsys):
    """The one line on stderr of a command that ends with status 2."""
    capsys.readouterr()
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1, error
    return error


def test_the_folder_of_a_run_stands_for_its_export(folder, adapted, tmp_path, capsys):
    run = tmp_path / "run"
    run.mkdir()
    (run / "train.toml").touch()
    for command in (["info"], ["generate", "--prompt", "w5"], ["export", "out"], ["verify"]):
        assert error_line([command[0], str(run), *command[1:]], capsys) == (
            f"ligermodels: {run}: is a run without an export; "
            f"ligermodels train --resume {run} --no-export off makes it\n"
        )
    flags = ["--prompt", "w5 w6", "--max-new-tokens", "6", "--device", "cpu"]
    told = {}
    for exported in (tmp_path / "adapter", folder):
        shutil.copytree(exported, run / exported.name)
        for source in (exported, run):
            assert main(["generate", str(source), *flags]) == 0
            told[source, exported] = capsys.readouterr().out
        assert told[run, exported] == told[exported, exported]
    assert told[run, tmp_path / "adapter"] != told[run, folder]
    assert main(["info", str(run)]) == 0
    assert main(["export", str(run), str(tmp_path / "again")]) == 0
    assert tensor_hashes(tmp_path / "again") == tensor_hashes(folder)


def test_a_folder_without_a_tokenizer_is_refused(folder, capsys):
    (folder / "tokenizer.json").unlink()
    assert_refused(folder, capsys, ["tokenizer.json"])


def assert_refused(folder, capsys, words):
    before = sorted(folder.rglob("*"))
    assert main(["generate", str(folder), "--prompt", "w5", "--device", "cpu"]) == 2
    out, err = capsys.readouterr()
    assert err.count("\n") == 1 and not out.strip("w5"), (out, err)
    for word in words:
        assert word in err, err
    assert sorted(folder.rglob("*")) == before
