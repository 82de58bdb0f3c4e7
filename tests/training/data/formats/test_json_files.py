"""JSON lines and JSON arrays, and the error messages that name the place of a bad record."""

import json
import sys

import pytest

from ligermodels.errors import InputError
from ligermodels.training.data.formats import text_files
from ligermodels.training.data.formats.records import BadLines, Conversation, Text
from tests.training.data.source_files import ANSWER, COMPRESS, USER, messages, read, read_counting, write

RECORDS = [{"text": 'ä ],"\U0001f600'}, messages(USER, ANSWER, more=[1.5e3, None]), {"text": "\n"}]
ARRAY = json.dumps(RECORDS).encode()
LINES = b"\n".join(json.dumps(record).encode() for record in RECORDS)


def test_json_lines_give_records_with_their_line_numbers(tmp_path):
    first = b'\xef\xbb\xbf{"text": "a\\r\\nb"}\r'
    text = '{"text": "\u2028\x85", "id": 1}\r'.encode()
    name = write(tmp_path / "a.jsonl", first, b"", b" \r", text, messages(USER, ANSWER, text="x"), {"text": ""}, b"")
    assert read(name) == [
        Text("a\r\nb", f"{name}:1"),
        Text("\u2028\x85", f"{name}:4"),
        Conversation([USER, ANSWER], None, f"{name}:5"),
    ]


@pytest.mark.parametrize("compression", COMPRESS)
@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_json_may_be_an_array_or_lines_compressed_or_not(tmp_path, monkeypatch, suffix, compression):
    def records(content, between):
        name = write(tmp_path / f"a{suffix}{compression}", COMPRESS[compression](content))
        text, conversation, line_feed = read(name)
        assert (text.text, conversation.messages, line_feed.text) == (RECORDS[0]["text"], [USER, ANSWER], "\n")
        assert [r.place for r in (text, conversation, line_feed)] == [f"{name}:{between}{n}" for n in (1, 2, 3)]

    records(LINES, "")
    for chunk in (1, 2, 50, 2**16):
        monkeypatch.setattr(text_files, "CHUNK_CHARACTERS", chunk)
        records(ARRAY, " element ")
        records(b"\xef\xbb\xbf \n" + json.dumps(RECORDS, indent=3, ensure_ascii=False).encode() + b"\r\n", " element ")


def test_an_empty_array_has_no_record_and_a_wrong_element_is_a_bad_line(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "CHUNK_CHARACTERS", 1)
    with pytest.raises(InputError, match=r"contains no text and no conversation$"):
        read(write(tmp_path / "a.json", b" [ ]\n"))
    name = write(tmp_path / "b.json", [{"text": "a"}, 51, {"text": "b \ud83d"}, {"text": "c"}])
    bad = BadLines(2)
    assert read_counting(name, bad) == [
        Text("a", f"{name}: element 1"),
        Text("c", f"{name}: element 4"),
    ]
    assert bad.skipped == 2
    with pytest.raises(InputError, match=r"b\.json: element 2: is a number; must be an object such as"):
        read(name)
    with pytest.raises(InputError, match=r"b\.json: element 3: has half of a surrogate pair.*1 skipped before"):
        read(name, allowed=1)


@pytest.mark.parametrize("chunk", [1, 2**16])
@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b'[{"text": "a"}, {"text": "b', ": element 2: not JSON at character 10: Unterminated string"),
        (
            b'[{"text": "a"}, {"text" "b"}, {"text": "c"}]',
            ": element 2: not JSON at character 9: Expecting ':' delimiter;",
        ),
        (b'[{"text": "a"},', ": element 2: not JSON at character 1: Expecting value;"),
        (b'[{"text": "a"},]', ": element 2: not JSON at character 1: Expecting value;"),
        (b"[", ": element 1: not JSON at character 1: Expecting value;"),
        (
            b'[{"text": "a"}, {"text": "b"}',
            ": element 2 is the last, and the ] is missing; the file is",
        ),
        (b'[{"text": "a"} {"text": "b"}]', ": element 1 is followed by '{' instead of , or ]"),
        (
            b'[{"text": "a"}]\n[{"text": "b"}]',
            ": has '[' after the end of the array; the file must have",
        ),
        (
            b'[{"text": "a"},\n{"text": "\xff"}]',
            ":2:11: byte 0xff is not UTF-8 (invalid start byte); convert the file",
        ),
        (b'[{"text": "a"}, ' + b"[" * 100_000, ": element 2: JSON that cannot be decoded: maximum recursion depth"),
        (b'[{"text": ' + b"1" * 5000 + b"}]", ": element 1: JSON that cannot be decoded: Exceeds the limit"),
        (
            b'{\n"text": "a"}',
            ":1:2: not JSON: Expecting property name enclosed in double quotes; the file must have one object per line",
        ),
    ],
)
def test_the_error_for_truncated_or_invalid_json_names_the_element(tmp_path, monkeypatch, content, complaint, chunk):
    monkeypatch.setattr(text_files, "CHUNK_CHARACTERS", chunk)
    name = write(tmp_path / "a.json", content)
    with pytest.raises(InputError) as refused:
        read(name, allowed=0 if complaint.startswith(":1") else 9)
    assert str(refused.value).startswith(f"{name}{complaint}")


def test_endless_blank_lines_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "MAX_BLANK_LINES", 3)
    name = write(tmp_path / "a.jsonl", {"text": "a"}, b"", b" ", b"", {"text": "b"})
    assert [record.place for record in read(name)] == [f"{name}:1", f"{name}:5"]
    name = write(tmp_path / "b.jsonl", {"text": "a"}, b"", b" ", b"", b"", {"text": "b"})
    with pytest.raises(InputError, match=rf"^{name}:2: more than 3 blank lines in a row; remove them$"):
        read(name)


def test_a_line_that_is_too_long_is_refused_before_it_is_read_as_a_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "MAX_RECORD_BYTES", 20)
    assert len(read(write(tmp_path / "a.jsonl", b'{"text": "a2345678"}'))) == 1
    with pytest.raises(InputError, match=r"b\.jsonl:2: has more than 20 bytes"):
        read(write(tmp_path / "b.jsonl", b'{"text": "a"}', b" " * 30), allowed=9)


def test_a_json_value_of_too_many_values_is_refused_before_it_is_parsed(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "MAX_RECORD_VALUES", 50)
    monkeypatch.setattr(text_files, "CHUNK_CHARACTERS", 20)
    commas = {"text": "[{,\\" * 100}
    assert len(read(write(tmp_path / "a.jsonl", commas))) == len(read(write(tmp_path / "a.json", [commas]))) == 1
    for many in ([[]] * 60, [{}] * 60, [0] * 60, [""] * 200, {f"{i}": 0 for i in range(60)}):
        record = {"text": "a", "more": many}
        monkeypatch.setattr(text_files.json, "loads", None)
        with pytest.raises(InputError, match=r"b\.jsonl:2: has more than 50 JSON values"):
            read(write(tmp_path / "b.jsonl", b"", record))
        monkeypatch.undo()
        monkeypatch.setattr(text_files, "MAX_RECORD_VALUES", 50)
        monkeypatch.setattr(text_files, "CHUNK_CHARACTERS", 20)
        with pytest.raises(InputError, match=r"b\.json: element 2: has more than 50 JSON values"):
            read(write(tmp_path / "b.json", [{"text": "a"}, record]))


def test_an_array_element_that_is_too_long_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "MAX_RECORD_BYTES", 100)
    monkeypatch.setattr(text_files, "CHUNK_CHARACTERS", 20)
    assert len(read(write(tmp_path / "a.json", [{"text": "a" * 50}] * 9))) == 9
    with pytest.raises(InputError, match=r"b\.json: element 2: has more than 100 characters"):
        read(write(tmp_path / "b.json", [{"text": "a"}, {"text": "a" * 200}]), allowed=9)


def test_nesting_that_python_can_decode_and_not_encode_is_a_bad_line(tmp_path):
    """Which of the two fails depends on the depth of the stack, so that a range of depths is tried."""
    depths = range(sys.getrecursionlimit() - 300, sys.getrecursionlimit() + 10, 7)
    lines = [b'{"text": "\\ud83d\\ude00", "more": ' + b"[" * depth + b"]" * depth + b"}" for depth in depths]
    bad_lines = BadLines(len(lines))
    read_counting(write(tmp_path / "a.jsonl", b'{"text": "a"}', *lines), bad_lines)
    assert 0 < bad_lines.skipped < len(lines)
