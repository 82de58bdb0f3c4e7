"""A panic of the `tokenizers` library becomes our one error, which names the file."""

import re

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

import ligermodels
from ligermodels.cli import main
from ligermodels.errors import CheckpointError
from ligermodels.tokenizer import Tokenizer
from tests.cases.llama import LLAMA

# Oniguruma gives up after ten million steps of backtracking, and the library panics.
SLOW, LONG = tokenizers.Regex("(a|a)*$"), "a" * 60 + "b"
FAULT = "Onig: Regex search error: retry-limit-in-match over"


@pytest.fixture
def folder(tmp_path):
    tokenizer = tokenizers.Tokenizer(models.WordLevel({"a": 0, LONG: 1}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(SLOW, behavior="isolated")
    tokenizer.decoder = decoders.Replace(SLOW, "")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.fixture
def tokenizer(folder):
    return Tokenizer.from_folder(folder)


CALLS = {
    "encode": lambda tokenizer: tokenizer.encode(LONG),
    "encode_batch": lambda tokenizer: tokenizer.encode_batch([LONG] * 3),
    "encode_with_offsets": lambda tokenizer: tokenizer.encode_with_offsets([LONG] * 3),
    "decode": lambda tokenizer: tokenizer.decode([1]),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_panic_at_a_call_is_an_error(call, tokenizer):
    with pytest.raises(CheckpointError, match=rf"tokenizer\.json: cannot (en|de)code .*: {FAULT}$"):
        CALLS[call](tokenizer)


def test_a_panic_at_loading_is_an_error(folder):
    file = folder / "tokenizer.json"
    bpe = '{"type":"BPE","continuing_subword_prefix":"long","vocab":{"a":0,"b":1,"ab":2},"merges":[["a","b"]]}'
    file.write_text(re.sub(r'(?s)"model": \{.*\}', f'"model": {bpe}}}', file.read_text()))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not a tokenizer that `tokenizers` can read: "):
        Tokenizer.from_folder(folder)


def test_a_panic_ends_a_command_with_one_line(folder, capfd):
    ligermodels.export(ligermodels.create(LLAMA), folder / "model")
    (folder / "tokenizer.json").rename(folder / "model" / "tokenizer.json")
    assert main(["generate", str(folder / "model"), "--prompt", LONG]) == 2
    line = f"ligermodels: {folder}/model/tokenizer.json: cannot encode this text: {FAULT}\n"
    assert capfd.readouterr().err.endswith(f"\n{line}")
