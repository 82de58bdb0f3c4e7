"""JSON by lines and by arrays, and the place that names what is wrong with it."""

import json

import pytest

from ligermodels.errors import InputError
from ligermodels.training.data import json_files, sources
from ligermodels.training.data.progress import Progress
from ligermodels.training.data.records import BadLines, Conversation, Text
from tests.training.data.source_files import ANSWER, COMPRESS, USER, messages, read, write

RECORDS = [{"text": 'ä ],"\U0001f600'}, messages(USER, ANSWER, more=[1.5e3, None]), {"text": "\n"}]
ARRAY = json.dumps(RECORDS).encode()
LINES = b"\n".join(json.dumps(record).encode() for record in RECORDS)


def test_json_lines_are_texts_and_conversations_each_with_its_line(tmp_path):
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
def test_json_is_an_array_or_an_object_a_line_compressed_or_not(tmp_path, monkeypatch, suffix, compression):
    def records(content, between):
        name = write(tmp_path / f"a{suffix}{compression}", COMPRESS[compression](content))
        text, conversation, line_feed = read(name)
        assert (text.text, conversation.messages, line_feed.text) == (RECORDS[0]["text"], [USER, ANSWER], "\n")
        assert [r.place for r in (text, conversation, line_feed)] == [f"{name}:{between}{n}" for n in (1, 2, 3)]

    records(LINES, "")
    for chunk in (1, 2, 50, 2**16):
        monkeypatch.setattr(json_files, "CHUNK_CHARACTERS", chunk)
        records(ARRAY, " element ")
        records(b"\xef\xbb\xbf \n" + json.dumps(RECORDS, indent=3, ensure_ascii=False).encode() + b"\r\n", " element ")


def test_an_empty_array_holds_nothing_and_an_element_that_is_no_record_is_a_bad_line(tmp_path, monkeypatch):
    monkeypatch.setattr(json_files, "CHUNK_CHARACTERS", 1)
    with pytest.raises(InputError, match=r"holds no text and no conversation$"):
        read(write(tmp_path / "a.json", b" [ ]\n"))
    name = write(tmp_path / "b.json", [{"text": "a"}, 51, {"text": "b \ud83d"}, {"text": "c"}])
    bad = BadLines(2)
    assert list(sources.read(name, bad, Progress("", None))) == [
        Text("a", f"{name}: element 1"),
        Text("c", f"{name}: element 4"),
    ]
    assert bad.skipped == 2
    with pytest.raises(InputError, match=r"b\.json: element 2: is a number; must be an object as"):
        read(name)
    with pytest.raises(
        InputError, match=r"b\.json: element 3: holds half of a surrogate pair.*1 before it were skipped"
    ):
        read(name, allowed=1)


@pytest.mark.parametrize("chunk", [1, 2**16])
@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b'[{"text": "a"}, {"text": "b', ": element 2: not JSON at its character 10: Unterminated string"),
        (
            b'[{"text": "a"}, {"text" "b"}, {"text": "c"}]',
            ": element 2: not JSON at its character 9: Expecting ':' delimiter;",
        ),
        (b'[{"text": "a"},', ": element 2: not JSON at its character 1: Expecting value;"),
        (b'[{"text": "a"},]', ": element 2: not JSON at its character 1: Expecting value;"),
        (b"[", ": element 1: not JSON at its character 1: Expecting value;"),
        (b'[{"text": "a"}, {"text": "b"}', ": element 2 is the last, but no ] follows; cut off"),
        (b'[{"text": "a"} {"text": "b"}]', ": element 1 is followed by '{', not by , or ]"),
        (b'[{"text": "a"}]\n[{"text": "b"}]', ": goes on with '[' behind the array; must be an object a line, or one"),
        (b'[{"text": "a"},\n{"text": "\xff"}]', ":2:11: byte 0xff is not UTF-8 (invalid start byte); convert the file"),
        (b'[{"text": "a"}, ' + b"[" * 100_000, ": element 2: not JSON that is read: maximum recursion depth"),
        (b'[{"text": ' + b"1" * 5000 + b"}]", ": element 1: not JSON that is read: Exceeds the limit"),
        (
            b'{\n"text": "a"}',
            ":1:2: not JSON: Expecting property name enclosed in double quotes; must be an object a line",
        ),
    ],
)
def test_json_that_is_cut_off_or_wrong_is_named_by_its_element(tmp_path, monkeypatch, content, complaint, chunk):
    monkeypatch.setattr(json_files, "CHUNK_CHARACTERS", chunk)
    name = write(tmp_path / "a.json", content)
    with pytest.raises(InputError) as refused:
        read(name, allowed=0 if complaint.startswith(":1") else 9)
    assert str(refused.value).startswith(f"{name}{complaint}")


def test_a_line_without_end_is_refused_before_it_is_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(json_files, "MAX_BYTES", 20)
    assert len(read(write(tmp_path / "a.jsonl", b'{"text": "a2345678"}'))) == 1
    with pytest.raises(InputError, match=r"b\.jsonl:2: has more than 20 bytes"):
        read(write(tmp_path / "b.jsonl", b'{"text": "a"}', b" " * 30), allowed=9)
