"""The record formats, and the error messages that name line and field of a bad record."""

import json

import pytest

from ligermodels.errors import InputError
from ligermodels.training.data.formats.records import BadLines, Completion, Conversation, Text
from tests.training.data.source_files import (
    ANSWER,
    CALL,
    CALLED,
    PART,
    TERSE,
    TOOL,
    TURNS,
    USER,
    messages,
    read,
    read_counting,
    write,
)

ALPACA = {"instruction": "Add.", "input": "2 + 2?", "output": "4"}


def test_messages_of_openais_api_are_read(tmp_path):
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


def test_blank_strings_and_nulls_are_absence(tmp_path):
    call = CALL | {"function": {"name": "add", "arguments": " "}}
    line = messages(USER, CALLED | {"tool_calls": [call], "weight": None}, tools=" ", chat_template_kwargs="\n")
    (chat,) = read(write(tmp_path / "a.jsonl", line))
    assert (chat.tools, chat.template_kwargs) == (None, None)
    assert "weight" not in chat.messages[1]
    assert chat.messages[1]["tool_calls"] == [CALL | {"function": {"name": "add", "arguments": {}}}]


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
        (
            {"instruction": "2 + 2?", "context": "Add.", "response": "4", "category": "x"},
            [USER | {"content": "2 + 2?\nAdd."}, ANSWER],
        ),
        (
            {"instruction": "2 +", "input": "2?", "context": None, "response": "4"},
            [USER | {"content": "2 +\n2?"}, ANSWER],
        ),
        ({"prompt": "2 + 2?", "response": "4", "system": "Be terse.", "content": "x"}, [TERSE, USER, ANSWER]),
        ({"question": "2 +", "context": "2?", "answer": "4"}, [USER | {"content": "2 +\n2?"}, ANSWER]),
        ({"content": "a", "title": "b"}, Text("a", "a.jsonl:1")),
        ({"content": "b", "text": None, "answer": "a"}, Text("b", "a.jsonl:1")),
        # Formats with more fields that were read before the others were known.
        ({"instruction": "2 + 2?", "output": "4", "response": "5", "context": "x"}, [USER, ANSWER]),
        ({"prompt": "a", "completion": "b", "response": "c", "label": "good"}, Completion("a", "b", "a.jsonl:1")),
        ({"text": "a", "question": "b", "answer": "c", "chosen": "d", "rejected": "e"}, Text("a", "a.jsonl:1")),
        (messages(USER, ANSWER, prompt="x", chosen=[USER, ANSWER], rejected=[USER]), [USER, ANSWER]),
    ],
)
def test_all_fine_tuning_formats_are_read(tmp_path, monkeypatch, line, read_as):
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
        (b"[" * 100_000, ":2: JSON that cannot be decoded: maximum recursion depth"),
        (b'{"text": ' + b"1" * 5000 + b"}", ":2: JSON that cannot be decoded: Exceeds the limit"),
        (b'{"text": "\xc3\xa4\xff"}', ":2:12: byte 0xff is not UTF-8 (invalid start byte); convert the file to UTF-8"),
        (b'{"text": "a \\uD83D"}', ":2: has half of a surrogate pair"),
        ([1], ":2: is a list; must be an object"),
        (
            {"txt": "a", "id": 1},
            "question with answer or content; its fields are txt, id; name one with --text-field, or two with",
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
            messages(USER, ANSWER | {"weight": 0.5}),
            ":2: field messages[1].weight is 0.5; must be 0 (context only)",
        ),
        (messages(USER, ANSWER, tools={}), ":2: field tools is an object; must be a list of objects"),
        (messages(USER, ANSWER, tools="["), ":2: field tools is a string that is not JSON"),
        ({"conversations": []}, ":2: field conversations is an empty list; must be a list of at least one"),
        ({"conversations": [{"from": "bing", "value": "4"}]}, "[0].from is 'bing'; must be one of human, gpt, system"),
        ({"conversations": [{"from": "gpt"}]}, ":2: field conversations[0].value is null; must be a string"),
        ({"conversations": ["a"]}, ":2: field conversations[0] is a string; must be an object such as"),
        (ALPACA | {"output": 4}, ":2: field output is a number; must be a string"),
        (ALPACA | {"input": ["2"]}, ":2: field input is a list; must be a string"),
        (ALPACA | {"history": [["1 + 1?", "2"]]}, ":2: field history is not supported; give all turns as messages"),
        (messages(USER, ANSWER, videos=["a.mp4"]), ":2: has a field videos, but training reads images alone; remove"),
        ({"prompt": "a", "completion": "b", "video": "a.mp4"}, ":2: has a field video, but training reads images"),
        ({"prompt": "2", "completion": [ANSWER]}, ":2: field completion is a list; must be a string"),
        ({"prompt": [USER], "completion": "4"}, ":2: field completion is a string; must be a list of at least one"),
        ({"question": "2 + 2?", "answer": 4}, ":2: field answer is a number; must be a string"),
        ({"question": "2 + 2?", "answer": None}, ":2: field answer is null; must be a string"),
        (
            {"input": "2 + 2?", "output": "4"},
            "its fields are input, output; name them with --prompt-field input --comp",
        ),
        (USER, ":2: is a single message; a record must have all of a conversation, as"),
        (
            {"prompt": "a", "completion": "b", "label": True},
            ":2: is unpaired preference data (prompt, completion, label), which --objective kto takes",
        ),
        (
            {"prompt": "a", "completion": "b", "label": "False"},
            "with --prompt-field prompt --completion-field completion",
        ),
        (
            {"prompt": "a", "chosen": "b", "rejected": "c"},
            ":2: is preference data (chosen, rejected): --objective dpo ",
        ),
        (
            {"chosen": "b", "rejected": "c", "question": "a", "answer": "d"},
            "--prompt-field question --completion-field ch",
        ),
        (
            {"prompt": "2?", "chosen": [USER, ANSWER], "rejected": [USER]},
            "answers alone, use --text-field chosen (--allow",
        ),
        (
            {"prompt": [USER], "chosen": [ANSWER], "rejected": []},
            "alone, use --prompt-field prompt --completion-field ch",
        ),
    ],
)
def test_the_error_for_a_bad_line_names_it_and_only_allowed_ones_are_skipped(tmp_path, line, complaint):
    name = write(tmp_path / "a.jsonl", {"text": "a"}, line, {"text": "b"}, line)
    with pytest.raises(InputError) as refused:
        read(name)
    assert str(refused.value).startswith(f"{name}:2:")
    assert complaint in str(refused.value) and str(refused.value).endswith("(--allow-bad-lines 0)")
    with pytest.raises(InputError, match=r"a\.jsonl:4:.*\(--allow-bad-lines 1, 1 skipped before\)$"):
        read(name, allowed=1)
    bad = BadLines(2)
    assert read_counting(name, bad) == [
        Text("a", f"{name}:1"),
        Text("b", f"{name}:3"),
    ]
    assert bad.skipped == 2


def test_all_sources_share_one_limit_of_bad_lines(tmp_path):
    names = [write(tmp_path / f"{letter}.jsonl", {"text": letter}, b"{") for letter in "ab"]
    bad = BadLines(1)
    assert [record.text for record in read_counting(names[0], bad)] == ["a"]
    with pytest.raises(InputError, match=r"b\.jsonl:2:2: not JSON"):
        read_counting(names[1], bad)


@pytest.mark.parametrize(
    ("line", "fields", "read_as"),
    [
        ({"body": "a", "text": "b", "messages": [USER]}, {"text": "body"}, Text("a", "a.jsonl:1")),
        ({"chosen": [USER, ANSWER], "rejected": []}, {"text": "chosen"}, [USER, ANSWER]),
        (
            {"q": "2?", "a": " 4", "label": True},
            {"prompt": "q", "completion": "a"},
            Completion("2?", " 4", "a.jsonl:1"),
        ),
        ({"prompt": [USER], "chosen": [ANSWER]}, {"prompt": "prompt", "completion": "chosen"}, [USER, ANSWER]),
    ],
)
def test_fields_that_the_user_names_come_before_all_formats(tmp_path, monkeypatch, line, fields, read_as):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.jsonl", line)
    assert read("a.jsonl", **fields) == [Conversation(read_as, None, "a.jsonl:1") if type(read_as) is list else read_as]


@pytest.mark.parametrize(
    ("line", "fields", "complaint"),
    [
        (
            {"text": "a", "id": 1},
            {"text": "body"},
            "has no field body, which --text-field names; its fields are text, id",
        ),
        ({"body": 5}, {"text": "body"}, "field body is a number; must be a string"),
        ({"body": []}, {"text": "body"}, "field body is an empty list; must be a list of at least one message"),
        (
            {"q": "a"},
            {"prompt": "q", "completion": "a"},
            "has no field a, which --completion-field names; its fields are q",
        ),
        ({"q": "a", "a": None}, {"prompt": "q", "completion": "a"}, "field a is null; must be a string"),
        (
            {"q": [USER], "a": "4"},
            {"prompt": "q", "completion": "a"},
            "field a is a string; must be a list of at least one message",
        ),
    ],
)
def test_the_error_for_a_named_field_names_it_and_its_flag_and_may_be_skipped(tmp_path, line, fields, complaint):
    name = write(tmp_path / "a.jsonl", line, {"body": "a", "q": "b", "a": "c"})
    with pytest.raises(InputError) as refused:
        read(name, **fields)
    assert str(refused.value) == f"{name}:1: {complaint} (--allow-bad-lines 0)"
    assert len(read(name, 1, **fields)) == 1
