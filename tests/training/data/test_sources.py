"""What is read of files, tables and patterns of them, and the line that names what cannot be."""

import gzip
import json
import random
import sys
import tracemalloc

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from ligermodels.errors import InputError
from ligermodels.training.data import json_files, progress, sources
from ligermodels.training.data.progress import Progress
from ligermodels.training.data.records import BadLines, Completion, Conversation, Text

USER, ANSWER = {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}
PART = {"type": "text", "text": "2 + "}


def write(file, *lines):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines))
    return str(file)


def read(name, allowed=0):
    return list(sources.read(str(name), BadLines(allowed), Progress("", None)))


def messages(*given, **fields):
    return {"messages": list(given), **fields}


def test_a_text_file_is_one_document_without_its_byte_order_mark_and_with_line_feeds(tmp_path):
    name = write(tmp_path / "a.txt", b"\xef\xbb\xbfone\r\n\xef\xbb\xbftwo\rthree", "ä\u2028".encode())
    assert read(name) == [Text("one\n\ufefftwo\rthree\nä\u2028".replace("\r", "\n"), f"{name}:1")]


def test_json_lines_are_texts_and_conversations_each_with_its_line(tmp_path):
    first = b'\xef\xbb\xbf{"text": "a\\r\\nb"}\r'
    text = '{"text": "\u2028\x85", "id": 1}\r'.encode()
    name = write(tmp_path / "a.jsonl", first, b"", b" \r", text, messages(USER, ANSWER, text="x"), {"text": ""}, b"")
    assert read(name) == [
        Text("a\r\nb", f"{name}:1"),
        Text("\u2028\x85", f"{name}:4"),
        Conversation([USER, ANSWER], None, f"{name}:5"),
    ]


COMPRESS = {
    "": bytes,
    ".gz": lambda data: gzip.compress(data[:9]) + gzip.compress(data[9:]),
    ".zst": lambda data: b"".join(pyarrow.compress(part, "zstd", asbytes=True) for part in (data[:9], data[9:])),
}
RECORDS = [{"text": 'ä ],"\U0001f600'}, messages(USER, ANSWER, more=[1.5e3, None]), {"text": "\n"}]
ARRAY = json.dumps(RECORDS).encode()
LINES = b"\n".join(json.dumps(record).encode() for record in RECORDS)


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


@pytest.mark.parametrize("compression", COMPRESS)
def test_a_compressed_text_is_the_text(tmp_path, compression):
    name = write(tmp_path / f"a.txt{compression}", COMPRESS[compression](b"\xef\xbb\xbfone\r\ntwo \xc3\xa4"))
    assert read(name) == [Text("one\ntwo ä", f"{name}:1")]


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


@pytest.mark.parametrize("file", ["a.jsonl.gz", "a.json.gz", "a.txt.gz", "a.jsonl.zst", "a.json.zst", "a.txt.zst"])
def test_a_damaged_archive_is_named(tmp_path, file):
    kind = "." + file.rpartition(".")[2]
    whole = COMPRESS[kind](b"[" + b'{"text": "' + bytes(range(97, 123)) * 900 + b'"}]')
    for damaged in (whole[:-9], whole[:40], b"no archive", whole + b"x"):
        with pytest.raises(InputError, match=rf"{file}: damaged or cut off: .+; bring a whole one$"):
            read(write(tmp_path / file, damaged), allowed=9)


CALL = {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"x": 2}'}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
TOOL = {"type": "function", "function": {"name": "add"}}


def test_messages_as_openais_api_has_them(tmp_path):
    parts = {"role": "user", "content": [PART, {"type": "text", "text": "2?"}]}
    plain = {"role": "assistant", "content": "4", "tool_calls": [], "reasoning_content": "hm"}
    line = messages(parts, CALLED, {"role": "tool", "content": "4", "tool_call_id": "a"}, plain, tools=[TOOL])
    name = write(tmp_path / "a.jsonl", line, messages(USER, ANSWER, tools=json.dumps([TOOL])), messages(USER, tools=[]))
    whole, quoted, without = read(name)
    assert whole.messages == [
        {"role": "user", "content": "2 + 2?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [CALL | {"function": {"name": "add", "arguments": {"x": 2}}}],
        },
        {"role": "tool", "content": "4", "tool_call_id": "a"},
        {"role": "assistant", "content": "4", "reasoning_content": "hm"},
    ]
    assert (whole.tools, quoted.tools, without.tools) == ([TOOL], [TOOL], None)


TERSE = {"role": "system", "content": "Be terse."}
TURNS = [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]
ALPACA = {"instruction": "Add.", "input": "2 + 2?", "output": "4"}


@pytest.mark.parametrize(
    ("line", "read_as"),
    [
        ({"conversations": TURNS}, [USER, ANSWER]),
        ({"conversations": TURNS, "system": "Be terse.", "tools": [TOOL]}, ([TERSE, USER, ANSWER], [TOOL])),
        ({"conversations": [{"from": "system", "value": "Be terse."}, *TURNS], "system": "x"}, [TERSE, USER, ANSWER]),
        ({"conversations": [USER, TURNS[1] | {"weight": 0}, *TURNS]}, [USER, ANSWER | {"weight": 0}, USER, ANSWER]),
        (ALPACA, [USER | {"content": "Add.\n2 + 2?"}, ANSWER]),
        (ALPACA | {"input": "", "text": "x", "history": []}, [USER | {"content": "Add."}, ANSWER]),
        ({"instruction": "2 + 2?", "output": "4", "system": "Be terse."}, [TERSE, USER, ANSWER]),
        ({"prompt": "2 + 2?", "completion": " 4", "text": "x"}, Completion("2 + 2?", " 4", "a.jsonl:1")),
        (
            {"prompt": [USER, ANSWER, USER], "completion": [ANSWER], "tools": [TOOL]},
            ([USER, ANSWER | {"weight": 0}, USER, ANSWER], [TOOL]),
        ),
        (messages(USER, ANSWER, prompt="x", completion="y", conversations=[]), [USER, ANSWER]),
        ({"prompt": "x", "text": "a"}, Text("a", "a.jsonl:1")),
    ],
)
def test_the_forms_in_which_fine_tuning_has_its_data(tmp_path, monkeypatch, line, read_as):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.jsonl", line)
    if isinstance(read_as, list):
        read_as = read_as, None
    assert read("a.jsonl") == [read_as if hasattr(read_as, "place") else Conversation(*read_as, "a.jsonl:1")]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b'{"text": "a"', ":2:13: not JSON: Expecting ',' delimiter"),
        ('{"text": "ä", x'.encode(), ":2:15: not JSON: Expecting property name"),
        (b"[" * 100_000, ":2: not JSON that is read: maximum recursion depth"),
        (b'{"text": ' + b"1" * 5000 + b"}", ":2: not JSON that is read: Exceeds the limit"),
        (b'{"text": "\xc3\xa4\xff"}', ":2:12: byte 0xff is not UTF-8 (invalid start byte)"),
        (b'{"text": "a \\uD83D"}', ":2: holds half of a surrogate pair"),
        ([1], ":2: is a list; must be an object"),
        (
            {"txt": "a", "id": 1},
            "conversations, instruction with output, prompt with completion or text, but txt, id",
        ),
        ({"text": None}, ":2: field text is null; must be a string"),
        ({"text": 5}, ":2: field text is a number; must be a string"),
        ({"messages": "a"}, ":2: field messages is a string; must be a list"),
        (messages(), ":2: field messages is an empty list"),
        (messages(USER, "a"), ":2: field messages[1] is a string; must be an object"),
        (messages(USER, {"content": "4"}), ":2: field messages[1].role is missing; must be one of system, developer"),
        (messages(USER, {"role": "asistant", "content": "4"}), "role is 'asistant'; did you mean 'assistant'?"),
        (messages(USER, {"role": "gpt", "content": "4"}), ":2: field messages[1].role is 'gpt'; must be one of"),
        (messages(USER, {"role": "assistant"}), ":2: field messages[1].content is missing; must be a string"),
        (messages(USER, {"role": "assistant", "content": None}), ":2: field messages[1].content is null; must be a"),
        (messages(USER | {"content": {}}), ":2: field messages[0].content is an object; must be a string"),
        (messages(USER | {"content": [PART, {"type": "image_url"}]}), "messages[0].content[1] is 'image_url'; must be"),
        (messages(USER | {"content": [{"type": "text"}]}), ":2: field messages[0].content[0].text is null; must be a"),
        (messages(USER, CALLED | {"tool_calls": [1]}), "messages[1].tool_calls is a list; must be a list of objects"),
        (
            messages(USER, CALLED | {"tool_calls": [{"function": {"name": "f", "arguments": "x=1"}}]}),
            ":2: field messages[1].tool_calls[0].function.arguments is a string that is not JSON: Expecting value",
        ),
        (messages(USER, ANSWER | {"weight": 0.5}), ":2: field messages[1].weight is 0.5; must be 0, for context alone"),
        (messages(USER, ANSWER, tools={}), ":2: field tools is an object; must be a list of objects"),
        (messages(USER, ANSWER, tools="["), ":2: field tools is a string that is not JSON"),
        ({"conversations": []}, ":2: field conversations is an empty list; must be a list of at least one"),
        ({"conversations": [{"from": "bing", "value": "4"}]}, "[0].from is 'bing'; must be one of human, gpt, system"),
        ({"conversations": [{"from": "gpt"}]}, ":2: field conversations[0].value is null; must be a string"),
        ({"conversations": ["a"]}, ":2: field conversations[0] is a string; must be an object as"),
        (ALPACA | {"output": 4}, ":2: field output is a number; must be a string"),
        (ALPACA | {"input": ["2"]}, ":2: field input is a list; must be a string"),
        (ALPACA | {"history": [["1 + 1?", "2"]]}, ":2: field history is not read; give all turns as messages"),
        ({"prompt": "2", "completion": [ANSWER]}, ":2: field completion is a list; must be a string"),
        ({"prompt": [USER], "completion": "4"}, ":2: field completion is a string; must be a list of at least one"),
    ],
)
def test_a_bad_line_is_named_and_skipped_only_within_the_limit(tmp_path, line, complaint):
    name = write(tmp_path / "a.jsonl", {"text": "a"}, line, {"text": "b"}, line)
    with pytest.raises(InputError) as refused:
        read(name)
    assert str(refused.value).startswith(f"{name}:2:")
    assert complaint in str(refused.value) and str(refused.value).endswith("(--allow-bad-lines 0)")
    with pytest.raises(InputError, match=r"a\.jsonl:4:.*\(--allow-bad-lines 1, 1 before it were skipped\)$"):
        read(name, allowed=1)
    bad = BadLines(2)
    assert list(sources.read(name, bad, Progress("", None))) == [Text("a", f"{name}:1"), Text("b", f"{name}:3")]
    assert bad.skipped == 2


def test_the_limit_is_one_for_all_sources(tmp_path):
    names = [write(tmp_path / f"{letter}.jsonl", {"text": letter}, b"{") for letter in "ab"]
    bad = BadLines(1)
    assert [record.text for record in sources.read(names[0], bad, Progress("", None))] == ["a"]
    with pytest.raises(InputError, match=r"b\.jsonl:2:2: not JSON"):
        list(sources.read(names[1], bad, Progress("", None)))


def test_what_is_not_utf8_in_a_text_file_has_its_line_and_column_in_any_piece(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "PIECE_CHARACTERS", 8)
    name = write(tmp_path / "a.txt", b"line", *[b"some line"] * 2000, "äö".encode() + b"\xe4 x", b"end")
    with pytest.raises(InputError, match=r"a\.txt:2002:3: byte 0xe4 is not UTF-8 \(invalid continuation byte\)"):
        read(name, allowed=9)


@pytest.mark.parametrize("content", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("file", ["a.txt", "a.jsonl"])
def test_an_empty_file_is_refused(tmp_path, file, content):
    with pytest.raises(
        InputError, match=rf"--data {write(tmp_path / file, content)}: holds no text and no conversation$"
    ):
        read(tmp_path / file)


def test_empty_texts_and_skipped_lines_are_no_data(tmp_path):
    name = write(tmp_path / "a.jsonl", {"text": ""}, b"\r", b"{")
    with pytest.raises(InputError, match=r"holds no text and no conversation; bad lines skipped: 1$"):
        read(name, allowed=1)


@pytest.mark.parametrize("file", ["a.jsonl", "a.json.gz", "a.txt.zst", "a.parquet"])
def test_a_git_lfs_pointer_is_called_one(tmp_path, file):
    name = write(tmp_path / file, b"version https://git-lfs.github.com/spec/v1", b"oid sha256:0")
    with pytest.raises(InputError, match=rf"{file}: is a Git LFS pointer"):
        read(name, allowed=9)


def test_a_line_without_end_is_refused_before_it_is_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(json_files, "MAX_BYTES", 20)
    assert len(read(write(tmp_path / "a.jsonl", b'{"text": "a2345678"}'))) == 1
    with pytest.raises(InputError, match=r"b\.jsonl:2: has more than 20 bytes"):
        read(write(tmp_path / "b.jsonl", b'{"text": "a"}', b" " * 30), allowed=9)


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
def test_a_piece_ends_before_a_line_or_else_before_a_space(text, piece):
    assert text[: sources.last_seam(text)] == piece


def test_the_pieces_of_a_long_text_are_all_of_it_each_with_its_line_and_what_is_before_it(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "PIECE_CHARACTERS", 20)
    monkeypatch.setattr(sources, "CONTEXT_CHARACTERS", 12)
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


@pytest.mark.parametrize("file", ["a.txt", "a.jsonl", "a.json", "a.jsonl.gz", "a.jsonl.zst"])
def test_large_files_are_not_held_in_memory(tmp_path, file):
    line = json.dumps({"text": "word " * 2000}).encode()
    lines = b"[" + b",\n".join([line] * 1600) + b"]" if file == "a.json" else b"\n".join([line] * 1600)  # 16 MB
    name = write(tmp_path / file, COMPRESS[(tmp_path / file).suffix if file.count(".") > 1 else ""](lines))
    tracemalloc.start()
    count = sum(len(record.text) for record in sources.read(name, BadLines(0), Progress("", None)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 1600 * len(line) + 1599 if file == "a.txt" else count == 16_000_000
    assert peak < 3_000_000


@pytest.mark.parametrize("name", ["A.TXT", "A.JSONL", "A.Json", "A.TXT.GZ"])
def test_a_files_kind_is_told_by_its_name_in_whatever_case(name, tmp_path):
    content = b"once" if "TXT" in name else b'{"text": "once"}'
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("GZ") else content)
    for given in (tmp_path, tmp_path / name):
        (record,) = read(str(given))
        assert record.texts == ["once"]


def test_a_folder_and_a_pattern_are_their_files_in_order(tmp_path):
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
    found = [str(file.relative_to(tmp_path / "data")) for file in sources.files_of(str(tmp_path / "data"))]
    assert found == ["a.jsonl", "b.txt", "d.json", "in/c.txt", "in/d.bin"]
    assert [file.name for file in sources.files_of(f"{tmp_path}/data/?.js*l")] == ["a.jsonl"]
    assert [file.name for file in sources.files_of(f"{tmp_path}/data/**/*.txt")] == ["b.txt", "c.txt"]
    assert [record.place for record in read(f"{tmp_path}/data/**/*.txt")] == [
        f"{tmp_path}/data/{file}:1" for file in ("b.txt", "in/c.txt")
    ]
    with pytest.raises(InputError, match=r"in/d\.bin: holds tokens"):
        read(tmp_path / "data" / "in")


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("no.txt", r"no\.txt: there is no such file, folder or pattern of files; \.txt, .*; also: stories, chats"),
        ("*.txt", "there is no such file, folder or pattern"),
        (
            "README.md",
            r"README\.md: is not read as data; must be \.txt, \.jsonl, \.json \(also with \.gz or \.zst\), \.parquet, ",
        ),
        ("READ*", r"README\.md: is not read as data"),
        ("empty", r"empty: no file in this folder is \.txt, \.jsonl"),
    ],
)
def test_what_is_no_source_is_refused(tmp_path, name, complaint):
    write(tmp_path / "README.md", b"a")
    write(tmp_path / "empty" / "a.jso", b"a")
    with pytest.raises(InputError, match=complaint):
        sources.files_of(str(tmp_path / name))


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("my.jsonl=0.7", ("my.jsonl", 0.7)),
        ("my.jsonl", ("my.jsonl", None)),
        ("hub:a/b:train=2", ("hub:a/b:train", 2.0)),
        ("a=b.txt", ("a=b.txt", None)),
        ("a=b=1e-2", ("a=b", 0.01)),
        ("run=3", ("run=3", None)),  # a folder of that name is there
        ("5", ("5", None)),
    ],
)
def test_a_weight_is_the_number_behind_the_last_equals_sign(tmp_path, monkeypatch, text, spec):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run=3").mkdir()
    assert sources.parse_spec(text) == spec


@pytest.mark.parametrize("text", ["a=0", "a=-1", "a=nan", "a=inf", "=2"])
def test_a_weight_must_be_above_zero(text):
    with pytest.raises(InputError, match=f"--data {text}: must be a name, or name=weight with a weight above 0"):
        sources.parse_spec(text)


def test_parquet_gives_rows_in_which_null_is_absent(tmp_path):
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


def test_parquet_of_any_form_is_read_by_its_columns(tmp_path):
    rows = [{"id": 1, "system": None, "conversations": TURNS}, {"id": 2, "system": "Be terse.", "conversations": TURNS}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert [record.messages for record in read(tmp_path / "a.parquet")] == [[USER, ANSWER], [TERSE, USER, ANSWER]]
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["2"], "completion": ["4"]}), tmp_path / "b.parquet")
    assert read(tmp_path / "b.parquet") == [Completion("2", "4", f"{tmp_path}/b.parquet: row 1")]


def test_bad_parquet_is_named(tmp_path):
    def table(file, **columns):
        pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / file)
        return str(tmp_path / file)

    with pytest.raises(InputError, match=r"a\.parquet: row 2: field text is a number"):
        read(table("a.parquet", text=[None, 5]), allowed=1)
    with pytest.raises(
        InputError,
        match=r"b\.parquet: has no column messages, conversations, instruction with output, .* or text, but x, y",
    ):
        read(table("b.parquet", x=[1], y=[2]), allowed=9)
    with pytest.raises(InputError, match=r"b\.parquet: has no column .*, but prompt, chosen"):
        read(table("b.parquet", prompt=["a"], chosen=["b"]), allowed=9)
    with pytest.raises(InputError, match=r"c\.parquet: holds no text and no conversation"):
        read(table("c.parquet", text=pyarrow.array([], pyarrow.string())))
    with pytest.raises(InputError, match=r"d\.parquet: not a parquet file that pyarrow reads: Parquet magic bytes"):
        read(write(tmp_path / "d.parquet", b"nothing of the kind"))
    whole = bytearray((tmp_path / "a.parquet").read_bytes())
    whole[4:40] = bytes(36)
    with pytest.raises(InputError, match=r"e\.parquet: not a parquet file that pyarrow reads"):
        read(write(tmp_path / "e.parquet", bytes(whole)), allowed=9)


def test_a_package_that_is_not_there_is_named(tmp_path, monkeypatch):
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a"]}), tmp_path / "a.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match=r"a\.parquet: needs pyarrow, of which Python says: .*; pip install pyarrow"):
        read(tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"a\.txt\.zst: needs pyarrow, .*; pip install pyarrow"):
        read(write(tmp_path / "a.txt.zst", b"(\xb5/\xfd"))
    with pytest.raises(InputError, match=r"hub:a/b: needs datasets, .*; pip install datasets"):
        read("hub:a/b")


def test_a_data_set_of_the_hub_is_read_by_split(tmp_path, monkeypatch):
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
    assert [record.messages for record in read(f"hub:{folder}:default:test")] == [[ANSWER]]
    assert read(f"hub:{tmp_path}/sets:sums:dev")[0].text == "2 + 2 = 4"
    with pytest.raises(InputError, match=rf'--data hub:{folder}:dev: Unknown split "dev". Should be one of'):
        read(f"hub:{folder}:dev")
    with pytest.raises(InputError, match="must be hub:NAME, hub:NAME:SPLIT or hub:NAME:CONFIGURATION:SPLIT"):
        read("hub:a:b:c:d")


def test_a_parquet_file_is_not_held_in_memory(tmp_path):
    """Its row groups are of 1 MB each, which Arrow's buffers count."""
    table = pyarrow.table({"text": [f"{number:06}" + "word " * 200 for number in range(16_000)]})
    file = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(table, file, row_group_size=1000, compression="none", use_dictionary=False)
    del table
    before = pyarrow.total_allocated_bytes()
    records = sources.read(str(file), BadLines(0), Progress("", None))
    held = [pyarrow.total_allocated_bytes() - before for _ in records]
    assert len(held) == 16_000 and file.stat().st_size > 16_000_000
    assert max(held) < 4_000_000


def test_a_very_long_text_of_json_comes_in_the_pieces_of_a_file_of_it(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "PIECE_CHARACTERS", 20)
    monkeypatch.setattr(sources, "LONG_CHARACTERS", 100)
    long, short = "\n".join(f"line {number}\r" for number in range(40)), "x" * 100
    name = write(tmp_path / "a.jsonl", json.dumps({"text": short}).encode(), json.dumps({"text": long}).encode())
    whole, *pieces = read(name)
    assert whole == Text(short, f"{name}:1")
    assert "".join(piece.text for piece in pieces) == long and {piece.place for piece in pieces} == {f"{name}:2"}
    assert max(len(piece.text) for piece in pieces) <= 40
    assert [piece.last for piece in pieces] == [False] * (len(pieces) - 1) + [True]


@pytest.mark.parametrize("file", ["a.txt", "a.jsonl", "a.json", "a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
def test_progress_counts_the_bytes_of_a_file_and_ends_with_all_of_them(tmp_path, file, monkeypatch):
    monkeypatch.setattr(progress, "SHOWN_SECONDS", 0)
    draw = random.Random(0)
    texts = [{"text": draw.randbytes(500).hex()} for _ in range(4000)]
    path = tmp_path / file
    if file == "a.parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(texts), path)
    else:
        lines = [json.dumps(text).encode() for text in texts]
        content = b"[" + b",".join(lines) + b"]" if file == "a.json" else b"\n".join(lines)
        path.write_bytes(COMPRESS[path.suffix if file.count(".") > 1 else ""](content))
    seen, size = [], path.stat().st_size
    meter = Progress("", size)
    meter.show = seen.append
    for _ in meter.over(sources.read(str(path), BadLines(0), meter)):
        pass
    assert seen == sorted(seen) and seen[-1] <= size == meter.before
    assert any(0.3 * size < done < 0.7 * size for done in seen) and seen[-1] > 0.7 * size
