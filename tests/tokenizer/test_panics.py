"""A panic of the `tokenizers` library is an exception and prints nothing; nothing else that is printed is lost."""

import os
import re

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

import ligermodels
from ligermodels.cli import main
from ligermodels.errors import CheckpointError
from ligermodels.tokenizer import Tokenizer
from ligermodels.tokenizer.panics import PANICS
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


def panic(tokenizer):
    with pytest.raises(CheckpointError, match=FAULT):
        tokenizer.encode(LONG)


CALLS = {
    "encode": lambda tokenizer: tokenizer.encode(LONG),
    "encode_batch": lambda tokenizer: tokenizer.encode_batch([LONG] * 3),
    "encode_with_offsets": lambda tokenizer: tokenizer.encode_with_offsets([LONG] * 3),
    "decode": lambda tokenizer: tokenizer.decode([1]),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_panic_at_a_call_prints_nothing(call, tokenizer, capfd):
    with pytest.raises(CheckpointError, match=rf"tokenizer\.json: cannot (en|de)code .*: {FAULT}$"):
        CALLS[call](tokenizer)
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "after\n"


def test_a_panic_at_loading_prints_nothing(folder, capfd):
    file = folder / "tokenizer.json"
    bpe = '{"type":"BPE","continuing_subword_prefix":"long","vocab":{"a":0,"b":1,"ab":2},"merges":[["a","b"]]}'
    file.write_text(re.sub(r'(?s)"model": \{.*\}', f'"model": {bpe}}}', file.read_text()))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not a tokenizer that `tokenizers` can read: "):
        Tokenizer.from_folder(folder)
    assert capfd.readouterr().err == ""


def test_a_panic_is_one_line_of_a_command(folder, capfd):
    ligermodels.export(ligermodels.create(LLAMA), folder / "model")
    (folder / "tokenizer.json").rename(folder / "model" / "tokenizer.json")
    assert main(["generate", str(folder / "model"), "--prompt", LONG]) == 2
    assert capfd.readouterr().err == (f"ligermodels: {folder}/model/tokenizer.json: cannot encode this text: {FAULT}\n")


def test_what_others_print_during_a_call_comes_in_order_and_panics_of_overlapping_calls_do_not(tokenizer, capfd):
    with PANICS:
        os.write(2, b"one\n")
        panic(tokenizer)
        assert capfd.readouterr().err == "one\n"
        os.write(2, b"two\nthread 'of mine' has ended\n")
        panic(tokenizer)
        assert capfd.readouterr().err == "two\n"
        os.write(2, b"three")
    os.write(2, b", four")
    assert capfd.readouterr().err == "thread 'of mine' has ended\nthree, four"


def test_a_long_text_is_passed_on_and_its_memory_freed(capfd):
    text = b"x" * 2**16 + b"\n"
    for _ in range(2):
        with PANICS:
            for _ in range(20):
                os.write(2, text)
        assert capfd.readouterr().err == 20 * text.decode() and PANICS.file == -1


def test_the_child_of_a_fork_during_a_call_prints_to_standard_error(tokenizer, capfd):
    with PANICS:
        child = os.fork()
        if child == 0:
            panic(tokenizer)
            os.write(2, b"child\n")
            os._exit(PANICS.calls)
        assert os.waitpid(child, 0)[1] == 0
        assert capfd.readouterr().err == "child\n"


def test_a_closed_standard_error_stays_closed(tokenizer):
    kept = os.dup(2)
    os.close(2)
    try:
        panic(tokenizer)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(2)
    finally:
        os.dup2(kept, 2)
        os.close(kept)
    assert tokenizer.encode("a") == [0]
