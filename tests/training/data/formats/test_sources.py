"""What --data names: text files and the pieces of long ones, folders, glob patterns, weights."""

import gzip
import json

import pytest

from ligermodels.errors import InputError
from ligermodels.tokenizer import tokenizer
from ligermodels.training.data.formats import sources, specs, text_files
from ligermodels.training.data.formats.records import Completion, Text
from tests.training.data.source_files import read, write


def test_a_text_file_is_one_document_without_byte_order_mark_and_with_line_feeds(tmp_path):
    name = write(tmp_path / "a.txt", b"\xef\xbb\xbfone\r\n\xef\xbb\xbftwo\rthree", "ä\u2028".encode())
    assert read(name) == [Text("one\n\ufefftwo\rthree\nä\u2028".replace("\r", "\n"), f"{name}:1")]


@pytest.mark.parametrize("content", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("file", ["a.txt", "a.jsonl"])
def test_an_empty_file_is_refused(tmp_path, file, content):
    with pytest.raises(
        InputError, match=rf"--data {write(tmp_path / file, content)}: contains no text and no conversation$"
    ):
        read(tmp_path / file)


def test_a_source_with_only_empty_texts_and_bad_lines_is_refused(tmp_path):
    name = write(tmp_path / "a.jsonl", {"text": ""}, b"\r", b"{")
    with pytest.raises(InputError, match=r"contains no text and no conversation; bad lines skipped: 1$"):
        read(name, allowed=1)


@pytest.mark.parametrize(
    ("text", "piece"),
    [
        ("one\ntwo\nthree", "one\ntwo\n"),
        ("one\ntwo\n\n", "one\n"),
        ("one\ntwo\n  three\n", "one\n"),
        ("one two three", "one two"),
        ("\none", "\n"),
        (" one", " one"),
        ("one", "one"),
    ],
)
def test_a_long_text_is_split_before_a_line_otherwise_before_a_space(text, piece):
    assert text[: text_files.last_split_point(text)] == piece


def test_the_pieces_of_a_long_text_contain_all_of_it_with_their_lines_and_the_text_before(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "PIECE_CHARACTERS", 20)
    monkeypatch.setattr(text_files, "CONTEXT_CHARACTERS", 12)
    lines = [f"line {number}" for number in range(1, 40)]
    name = write(tmp_path / "a.txt", *map(str.encode, lines))
    pieces = read(name)
    assert "".join(piece.text for piece in pieces) == "\n".join(lines) and len(pieces) > 5
    assert [piece.last for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    read_so_far = ""
    for piece in pieces:
        assert piece.before == read_so_far[-12:]
        assert piece.place == f"{name}:{int(piece.text.split()[1])}"
        read_so_far += piece.text


@pytest.mark.parametrize("name", ["A.TXT", "A.JSONL", "A.Json", "A.TXT.GZ"])
def test_the_suffix_of_a_file_is_case_insensitive(name, tmp_path):
    content = b"once" if "TXT" in name else b'{"text": "once"}'
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("GZ") else content)
    for given in (tmp_path, tmp_path / name):
        (record,) = read(str(given))
        assert record.texts == ["once"]


def test_a_folder_and_a_glob_pattern_give_their_files_in_order(tmp_path):
    for name in [
        "b.txt",
        "a.jsonl",
        "in/c.txt",
        "in/d.bin",
        ".git/e.txt",
        "in/.f.txt",
        "README.md",
        "in/d.json",
        "d.json",
    ]:
        write(tmp_path / "data" / name, {"text": name})
    found = [str(file.relative_to(tmp_path / "data")) for file in sources.find_files(str(tmp_path / "data"))]
    assert found == ["a.jsonl", "b.txt", "d.json", "in/c.txt", "in/d.bin"]
    assert [file.name for file in sources.find_files(f"{tmp_path}/data/?.js*l")] == ["a.jsonl"]
    assert [file.name for file in sources.find_files(f"{tmp_path}/data/**/*.txt")] == ["b.txt", "c.txt"]
    assert [record.place for record in read(f"{tmp_path}/data/**/*.txt")] == [
        f"{tmp_path}/data/{file}:1" for file in ("b.txt", "in/c.txt")
    ]
    with pytest.raises(InputError, match=r"in/d\.bin: contains token ids"):
        read(tmp_path / "data" / "in")


@pytest.mark.parametrize(
    ("files", "training", "validation", "test"),
    [
        (["train.jsonl", "test.jsonl"], ["train.jsonl"], [], ["test.jsonl"]),
        (["train.bin", "val.bin"], ["train.bin"], ["val.bin"], []),
        (
            ["data/train-00000-of-00002.json", "data/train-00001-of-00002.json", "data/dev-0.json", "infos.json"],
            ["data/train-00000-of-00002.json", "data/train-00001-of-00002.json"], ["data/dev-0.json"], [],
        ),
        (["train/a.csv", "valid/a.csv", "Test/a.csv"], ["train/a.csv"], ["valid/a.csv"], ["Test/a.csv"]),
        (["gsm8k_train.jsonl", "gsm8k_test.jsonl"], ["gsm8k_train.jsonl"], [], ["gsm8k_test.jsonl"]),
        (["split=train/a.jsonl", "split=test/a.jsonl"], ["split=train/a.jsonl"], [], ["split=test/a.jsonl"]),
        (["chats.jsonl", "eval.jsonl.gz"], ["chats.jsonl"], [], ["eval.jsonl.gz"]),
        (["extra.csv", "holdout.csv", "train.csv"], ["train.csv"], [], ["holdout.csv"]),
        (["train.txt", "more.txt"], ["more.txt", "train.txt"], [], []),
        (["test.txt", "dev.txt"], ["dev.txt", "test.txt"], [], []),
        (["latest.txt", "our_test_notes.txt"], ["latest.txt", "our_test_notes.txt"], [], []),
    ],
)  # fmt: skip
def test_a_folder_whose_files_are_named_after_splits_trains_on_those_for_training(
    tmp_path, files, training, validation, test
):
    folder = tmp_path / "test"  # the name of the folder itself says nothing
    for file in files:
        write(folder / file, {"text": file})

    def found(name):
        return [str(file.relative_to(folder)) for file in sources.find_files(name)]

    assert found(str(folder)) == found(f"{folder}:train") == training
    for split, expected in (("validation", validation), ("test", test)):
        if expected:
            assert found(f"{folder}:{split}") == expected
        else:
            with pytest.raises(InputError, match="has no data file"):
                found(f"{folder}:{split}")


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        (
            "no.txt",
            r"no\.txt: no file, folder or glob pattern matches; .* \.txt, .*; or give stories, chats",
        ),
        ("*.txt", "no file, folder or glob pattern matches"),
        (
            "README.md",
            r"\.md: not a data file; must be \.txt, \.jsonl, \.json, \.csv, \.tsv \(also with \.gz or \.zst\), \.par",
        ),
        ("READ*", r"README\.md: not a data file"),
        ("empty", r"empty: this folder has no data file; data files are \.txt, \.jsonl"),
    ],
)
def test_a_name_that_is_no_source_is_refused(tmp_path, name, complaint):
    write(tmp_path / "README.md", b"a")
    write(tmp_path / "empty" / "a.jso", b"a")
    with pytest.raises(InputError, match=complaint):
        sources.find_files(str(tmp_path / name))


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("my.jsonl=0.7", ("my.jsonl", 0.7)),
        ("my.jsonl", ("my.jsonl", None)),
        ("hub:a/b:train=2", ("hub:a/b:train", 2.0)),
        ("a=b.txt", ("a=b.txt", None)),
        ("a=b=1e-2", ("a=b", 0.01)),
        ("run=3", ("run=3", None)),  # a folder of that name exists
        ("5", ("5", None)),
    ],
)
def test_a_weight_is_the_number_after_the_last_equals_sign(tmp_path, monkeypatch, text, spec):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run=3").mkdir()
    assert specs.parse_spec(text) == spec


@pytest.mark.parametrize("text", ["a=0", "a=-1", "a=nan", "a=inf", "=2"])
def test_a_weight_must_be_above_zero(text):
    with pytest.raises(InputError, match=f"--data {text}: must be NAME, or NAME=WEIGHT with a weight above 0"):
        specs.parse_spec(text)


LONG = "long " * 30
LONG_RECORDS = {
    "a prompt": {"prompt": LONG, "completion": "c"},
    "an answer": {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": LONG}]},
    "many messages": {"messages": [{"role": "user", "content": "long "}] * 30},
    "of few characters": {"prompt": "é" * 60, "completion": "c"},
}


@pytest.mark.parametrize("kind", LONG_RECORDS)
def test_a_record_of_which_tokens_would_fill_the_memory_is_a_bad_line(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer, "MAX_TEXT_BYTES", 100)
    lines = [{"prompt": "p" * 99, "completion": "c"}, LONG_RECORDS[kind]]
    name = write(tmp_path / "a.jsonl", *lines)
    with pytest.raises(InputError, match=rf"^{name}:2: has a text of more than 100 bytes; make it shorter \(--allow"):
        read(name)
    assert read(name, allowed=1) == [Completion("p" * 99, "c", f"{name}:1")]


def test_a_very_long_text_in_json_is_split_like_a_text_file(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "PIECE_CHARACTERS", 20)
    monkeypatch.setattr(tokenizer, "MAX_TEXT_BYTES", 100)
    long, short = "\n".join(f"line {number}\r" for number in range(40)), "x" * 100
    name = write(tmp_path / "a.jsonl", json.dumps({"text": short}).encode(), json.dumps({"text": long}).encode())
    whole, *pieces = read(name)
    assert whole == Text(short, f"{name}:1")
    assert "".join(piece.text for piece in pieces) == long and {piece.place for piece in pieces} == {f"{name}:2"}
    assert max(len(piece.text) for piece in pieces) <= 40
    assert [piece.last for piece in pieces] == [False] * (len(pieces) - 1) + [True]
