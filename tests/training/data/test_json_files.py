"""JSON lines, JSON arrays, parquet and Hub datasets, and the error messages that name the place of a bad record."""

import json
import sys

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from ligermodels.errors import InputError
from ligermodels.training.data import json_files as formats
from ligermodels.training.data import parquet, sources, tables
from ligermodels.training.data.progress import ReadingProgress
from ligermodels.training.data.record_formats import KNOWN_FIELDS
from ligermodels.training.data.records import BadLines, Completion, Conversation, Text
from tests.training.data.source_files import (
    ANSWER,
    CALLED,
    COMPRESS,
    TERSE,
    TOOL,
    TURNS,
    USER,
    messages,
    read,
    read_counting,
    write,
)

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
        monkeypatch.setattr(formats, "CHUNK_CHARACTERS", chunk)
        records(ARRAY, " element ")
        records(b"\xef\xbb\xbf \n" + json.dumps(RECORDS, indent=3, ensure_ascii=False).encode() + b"\r\n", " element ")


def test_an_empty_array_has_no_record_and_a_wrong_element_is_a_bad_line(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "CHUNK_CHARACTERS", 1)
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
    monkeypatch.setattr(formats, "CHUNK_CHARACTERS", chunk)
    name = write(tmp_path / "a.json", content)
    with pytest.raises(InputError) as refused:
        read(name, allowed=0 if complaint.startswith(":1") else 9)
    assert str(refused.value).startswith(f"{name}{complaint}")


def test_a_line_that_is_too_long_is_refused_before_it_is_read_as_a_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "MAX_RECORD_BYTES", 20)
    assert len(read(write(tmp_path / "a.jsonl", b'{"text": "a2345678"}'))) == 1
    with pytest.raises(InputError, match=r"b\.jsonl:2: has more than 20 bytes"):
        read(write(tmp_path / "b.jsonl", b'{"text": "a"}', b" " * 30), allowed=9)


def test_a_json_value_of_too_many_values_is_refused_before_it_is_parsed(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "MAX_RECORD_VALUES", 50)
    monkeypatch.setattr(formats, "CHUNK_CHARACTERS", 20)
    commas = {"text": "[{,\\" * 100}
    assert len(read(write(tmp_path / "a.jsonl", commas))) == len(read(write(tmp_path / "a.json", [commas]))) == 1
    for many in ([[]] * 60, [{}] * 60, [0] * 60, [""] * 200, {f"{i}": 0 for i in range(60)}):
        record = {"text": "a", "more": many}
        monkeypatch.setattr(formats.json, "loads", None)
        with pytest.raises(InputError, match=r"b\.jsonl:2: has more than 50 JSON values"):
            read(write(tmp_path / "b.jsonl", b"", record))
        monkeypatch.undo()
        monkeypatch.setattr(formats, "MAX_RECORD_VALUES", 50)
        monkeypatch.setattr(formats, "CHUNK_CHARACTERS", 20)
        with pytest.raises(InputError, match=r"b\.json: element 2: has more than 50 JSON values"):
            read(write(tmp_path / "b.json", [{"text": "a"}, record]))


def test_an_array_element_that_is_too_long_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "MAX_RECORD_BYTES", 100)
    monkeypatch.setattr(formats, "CHUNK_CHARACTERS", 20)
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


def test_the_rows_of_a_parquet_dictionary_are_decoded_a_few_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "MAX_BATCH_BYTES", 100_000)
    one = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 50, pyarrow.int32()), pyarrow.array(["x" * 30_000]))
    pyarrow.parquet.write_table(pyarrow.table({"text": one}), tmp_path / "a.parquet", store_schema=False)
    assert (tmp_path / "a.parquet").stat().st_size < 30_000
    held = []
    for batch in parquet.parquet_batches(tmp_path / "a.parquet", KNOWN_FIELDS, ReadingProgress("", None)):
        held.append(len(batch))
        assert all(row == {"text": "x" * 30_000} for row in batch)
    assert sum(held) == 50 and max(held) == 3
    assert [record.place for record in read(tmp_path / "a.parquet")][-1] == f"{tmp_path}/a.parquet: row 50"
    monkeypatch.setattr(tables, "MAX_BATCH_BYTES", 20_000)
    with pytest.raises(InputError, match=r"a\.parquet: row 1: has more than 20,000 bytes"):
        read(tmp_path / "a.parquet")


def test_strings_within_lists_count_towards_the_size_of_a_parquet_row(tmp_path, monkeypatch):
    rows = [messages(USER, ANSWER), messages(*[USER, ANSWER | {"content": "x" * 1000}] * 20)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    monkeypatch.setattr(tables, "MAX_BATCH_BYTES", 30_000)
    assert len(read(tmp_path / "a.parquet")) == 2
    monkeypatch.setattr(tables, "MAX_BATCH_BYTES", 15_000)
    with pytest.raises(InputError, match=r"a\.parquet: row 2: has more than 15,000 bytes"):
        read(tmp_path / "a.parquet")


def test_null_fields_of_parquet_rows_are_dropped(tmp_path):
    rows = [messages(USER, CALLED), messages(USER | {"name": "Ada"}, ANSWER, tools=[TOOL]), {"text": "c"}, {"text": ""}]
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([{"id": 1, "tools": None, "text": None} | r for r in rows]),
        tmp_path / "a.parquet",
        row_group_size=1,
    )
    name = str(tmp_path / "a.parquet")
    called, plain, text = read(name)
    assert called.messages[0] == USER and set(called.messages[1]) == {"role", "content", "tool_calls"}
    assert called.messages[1]["tool_calls"][0]["function"]["arguments"] == {"x": 2}
    assert plain == Conversation([USER | {"name": "Ada"}, ANSWER], [TOOL], f"{name}: row 2")
    assert text == Text("c", f"{name}: row 3")


def test_the_record_format_of_parquet_follows_from_its_columns(tmp_path):
    rows = [{"id": 1, "system": None, "conversations": TURNS}, {"id": 2, "system": "Be terse.", "conversations": TURNS}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert [record.messages for record in read(tmp_path / "a.parquet")] == [[USER, ANSWER], [TERSE, USER, ANSWER]]
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["2"], "completion": ["4"]}), tmp_path / "b.parquet")
    assert read(tmp_path / "b.parquet") == [Completion("2", "4", f"{tmp_path}/b.parquet: row 1")]


def test_the_error_for_bad_parquet_names_the_file(tmp_path):
    def table(file, **columns):
        pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / file)
        return str(tmp_path / file)

    with pytest.raises(InputError, match=r"a\.parquet: row 2: field text is a number"):
        read(table("a.parquet", text=[None, 5]), allowed=1)
    with pytest.raises(
        InputError,
        match=r"b\.parquet: has no column messages, conversations, .* or text; its columns are x, y",
    ):
        read(table("b.parquet", x=[1], y=[2]), allowed=9)
    with pytest.raises(InputError, match=r"b\.parquet: has no column .*; its columns are prompt, chosen"):
        read(table("b.parquet", prompt=["a"], chosen=["b"]), allowed=9)
    with pytest.raises(InputError, match=r"c\.parquet: contains no text and no conversation"):
        read(table("c.parquet", text=pyarrow.array([], pyarrow.string())))
    with pytest.raises(InputError, match=r"d\.parquet: not a parquet file that pyarrow can read: Parquet magic bytes"):
        read(write(tmp_path / "d.parquet", b"nothing of the kind"))
    whole = bytearray((tmp_path / "a.parquet").read_bytes())
    whole[4:40] = bytes(36)
    with pytest.raises(InputError, match=r"e\.parquet: not a parquet file that pyarrow can read"):
        read(write(tmp_path / "e.parquet", bytes(whole)), allowed=9)


def test_a_parquet_file_is_not_held_in_memory(tmp_path):
    """Counts Arrow's buffers; the row groups of the file have 1 MB each."""
    table = pyarrow.table({"text": [f"{number:06}" + "word " * 200 for number in range(16_000)]})
    file = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(table, file, row_group_size=1000, compression="none", use_dictionary=False)
    del table
    before = pyarrow.total_allocated_bytes()
    records = sources.read_records(str(file), BadLines(0), ReadingProgress("", None))
    held = [pyarrow.total_allocated_bytes() - before for _ in records]
    assert len(held) == 16_000 and file.stat().st_size > 16_000_000
    assert max(held) < 4_000_000


def test_a_hub_dataset_is_read_by_split(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "set"
    write(folder / "train.jsonl", messages(USER, ANSWER), messages(USER, ANSWER | {"name": "Ada"}))
    write(folder / "test.jsonl", messages(ANSWER))
    sums = b"- {config_name: sums, data_files: [{split: dev, path: sums.txt}]}"
    write(tmp_path / "sets" / "README.md", b"---", b"configs:", sums, sums.replace(b"sums", b"more"), b"---")
    write(tmp_path / "sets" / "sums.txt", b"2 + 2 = 4")
    train = [
        Conversation([USER, ANSWER], None, f"hub:{folder}: row 1"),
        Conversation([USER, ANSWER | {"name": "Ada"}], None, f"hub:{folder}: row 2"),
    ]
    assert read(f"hub:{folder}") == train
    assert [record.messages for record in read(f"hub:{folder}:default:train[1:]")] == [train[1].messages]
    assert [record.messages for record in read(f"hub:{folder}:default:test")] == [[ANSWER]]
    assert read(f"hub:{tmp_path}/sets:sums:dev")[0].text == "2 + 2 = 4"
    with pytest.raises(InputError, match=rf'--data hub:{folder}:dev: Unknown split "dev". Should be one of'):
        read(f"hub:{folder}:dev")
    with pytest.raises(InputError, match="must be hub:NAME, hub:NAME:SPLIT or hub:NAME:CONFIGURATION:SPLIT"):
        read("hub:a:b:c:d")


def test_the_error_for_a_missing_package_names_it(tmp_path, monkeypatch):
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a"]}), tmp_path / "a.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match=r"a\.parquet: needs pyarrow, but cannot import it: .*; pip install pyarrow"):
        read(tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"a\.txt\.zst: needs pyarrow, .*; pip install pyarrow"):
        read(write(tmp_path / "a.txt.zst", b"(\xb5/\xfd"))
    with pytest.raises(InputError, match=r"hub:a/b: needs datasets, .*; pip install datasets"):
        read("hub:a/b")
