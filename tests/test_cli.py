import json

import pytest
import tokenizers
import torch
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

import ligermodels
from ligermodels.cli import main
from tests.cases import LLAMA


@pytest.fixture
def folder(tmp_path):
    """A model whose words are w0 to w98."""
    folder = tmp_path / "model"
    ligermodels.export(ligermodels.create(LLAMA), folder)
    tokenizer = tokenizers.Tokenizer(WordLevel({f"w{i}": i for i in range(99)}, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_list_names_architectures_and_sizes(capsys):
    assert main(["list"]) == 0
    lines = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()}
    assert lines["gemma3"] == ["from", "a", "checkpoint"]
    assert lines["llama"] == ["tiny", "1b", "3b", "8b"] and lines["qwen2"] == ["tiny", "0.5b", "1.5b", "7b"]


def test_generate_prints_the_prompt_and_what_follows(folder, capsys):
    model = ligermodels.load(folder)
    (ids,) = ligermodels.generate(model, [[5, 6, 7]], max_new_tokens=6)
    assert main(["generate", str(folder), "--prompt", "w5 w6 w7", "--max-new-tokens", "6", "--device", "cpu"]) == 0
    words = capsys.readouterr().out
    expected = " ".join(f"w{i}" for i in ids if i != 2)
    assert words == f"w5 w6 w7{expected}\n"


BAD_CONFIGS = {
    "unknown model_type": ({"model_type": "lama"}, ["model_type", "lama", "llama"]),
    "unknown rope type": ({"rope_scaling": {"type": "xpos"}}, ["type", "xpos", "yarn"]),
    "a scaling without its factor": ({"rope_scaling": {"type": "linear"}}, ["rope_scaling", "linear", "factor"]),
    "a scaling that is no object": ({"rope_scaling": "linear"}, ["rope_scaling", "linear", "object"]),
    "unknown activation": ({"hidden_act": "relu"}, ["hidden_act", "relu"]),
    "quantised": ({"quantization_config": {"bits": 4}}, ["quantization_config"]),
    "heads that do not divide": ({"num_key_value_heads": 4}, ["num_key_value_heads", "4", "6"]),
    "a string for a number": ({"hidden_size": "48"}, ["hidden_size", "'48'", "int"]),
    "a negative size": ({"num_hidden_layers": -1}, ["num_hidden_layers", "-1", "positive"]),
    "partial rotary": ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
}


@pytest.mark.parametrize("fault", BAD_CONFIGS)
def test_a_config_that_cannot_be_used_ends_with_one_line_and_status_2(fault, folder, capsys):
    change, words = BAD_CONFIGS[fault]
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert_refused(folder, capsys, ["config.json", *words])


def test_a_missing_tensor_is_named(folder, capsys):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": 4}))
    assert_refused(folder, capsys, ["missing", "model.layers.3."])


def test_a_misshapen_tensor_is_named(folder, capsys):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"intermediate_size": 96}))
    assert_refused(folder, capsys, ["mlp.gate_proj.weight", "[80, 48]", "[96, 48]"])


def test_a_truncated_file_is_named(folder, capsys):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert_refused(folder, capsys, ["model.safetensors"])


def test_a_pickle_is_refused_and_never_opened(folder, capsys):
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")
    assert_refused(folder, capsys, ["pytorch_model.bin", "safetensors"])


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
