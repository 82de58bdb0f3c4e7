import pytest
import tokenizers
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
