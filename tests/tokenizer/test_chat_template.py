"""Conversations are rendered as transformers renders them; faulty templates and messages are refused."""

import json
import os

import jinja2
import pytest
from transformers import AutoTokenizer

from ligermodels.errors import CheckpointError, InputError
from ligermodels.tokenizer import Tokenizer
from tests.refusals import limited_memory
from tests.tokenizer.chat_templates import CHAT_TEMPLATES
from tests.tokenizer.folders import write_folder

USER = {"role": "user", "content": " What is the weather in Paris? 😀 "}
ANSWER = {"role": "assistant", "content": "\nIt's 21 degrees.  "}
SYSTEM = {"role": "system", "content": "You are a <helpful> & 'terse' assistant."}
THOUGHT = {"role": "assistant", "content": "<think>\nhm\n</think>\n\n21"}
FUNCTION = {
    "name": "get_weather",
    "description": "The weather of a <city>",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "größe": {"type": "number"}}},
    "return": None,
}
TOOLS = [{"type": "function", "function": FUNCTION}, {"type": "function", "function": FUNCTION | {"name": "f2"}}]
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Zürich"}}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "21 °C", "tool_call_id": "abcdefghi"}
PARTS = {
    "role": "user",
    "content": [{"type": "text", "text": " one "}, {"type": "image"}, {"type": "text", "text": "two"}],
}

# name -> (messages, options)
CHATS = {
    "one turn": ([USER], {}),
    "a generation prompt": ([USER], {"add_generation_prompt": True}),
    "two turns": ([USER, ANSWER, USER], {"add_generation_prompt": True}),
    "system": ([SYSTEM, USER, ANSWER], {}),
    "to be continued": ([USER, ANSWER], {"continue_final_message": True}),
    "to be continued without a space": (
        [USER, {"role": "assistant", "content": "It"}],
        {"continue_final_message": True},
    ),
    "tools": ([USER], {"tools": TOOLS}),
    "tools and system": ([SYSTEM, USER], {"tools": TOOLS, "add_generation_prompt": True}),
    "a call and its result": ([USER, CALLED, RESULT, ANSWER], {"tools": TOOLS}),
    "two results": ([USER, CALLED, RESULT, RESULT], {"tools": TOOLS, "add_generation_prompt": True}),
    "parts": ([PARTS], {"add_generation_prompt": True}),
    "parts to be continued": ([USER, ANSWER | {"content": PARTS["content"]}], {"continue_final_message": True}),
    "thought": ([USER, THOUGHT, USER, THOUGHT], {}),
    "thought apart": ([USER, {"role": "assistant", "content": "21", "reasoning": "hm\n"}], {}),
    "no thinking": ([USER], {"enable_thinking": False, "add_generation_prompt": True}),
    "documents": ([USER], {"documents": [{"title": "A", "text": "b"}, {"text": "c"}]}),
    "variables": ([USER], {"date_string": "1 May 2025", "controls": {"length": "short"}, "xml_tools": [{"a": 1}]}),
    "roles that do not alternate": ([ANSWER, USER], {}),
    "many": ([USER, ANSWER] * 4, {}),
}


@pytest.fixture
def tokenizer(tmp_path):
    return Tokenizer.from_folder(write_folder(tmp_path, "qwen"))


@pytest.mark.parametrize("family", CHAT_TEMPLATES)
def test_conversations_are_rendered_as_by_transformers(tmp_path, family):
    form, template = CHAT_TEMPLATES[family]
    folder = write_folder(tmp_path, form, template)
    ours, theirs = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    rendered = {chat for chat, (messages, options) in CHATS.items() if agree(ours, theirs, messages, options)}
    assert {"one turn", "two turns", "to be continued without a space"} <= rendered and len(rendered) >= 9


def agree(ours, theirs, messages, options):
    """Checks that text and ids are equal, or that both refuse; returns whether there was a text."""
    try:
        expected = theirs.apply_chat_template(messages, tokenize=False, **options)
    except Exception as error:
        with pytest.raises(InputError) as refused:
            ours.render_chat_template(messages, **options)
        assert not isinstance(error, jinja2.TemplateError) or str(error) in str(refused.value)
        return False
    assert ours.render_chat_template(messages, **options) == expected
    ids = theirs.apply_chat_template(messages, return_dict=False, **options)
    assert ours.apply_chat_template(messages, **options) == ids
    return True


def test_generation_blocks_give_the_assistant_mask(tmp_path):
    folder = write_folder(tmp_path, "qwen", CHAT_TEMPLATES["smollm 3"][1])
    messages = [SYSTEM, USER, ANSWER | {"content": "It's 21 degrees."}, USER, ANSWER | {"content": "Yes, Paris."}]
    theirs = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True
    )
    ids, said = Tokenizer.from_folder(folder).apply_chat_template_with_mask(messages)
    assert ids == theirs["input_ids"]
    assert said == [bool(flag) for flag in theirs["assistant_masks"]] and 0 < sum(said) < len(said)


def test_the_limits_allow_a_very_long_text(tokenizer):
    text = tokenizer.render_chat_template([USER], chat_template="{{ '😀' * 9999999 }}!")
    whole = text == "😀" * 9_999_999 + "!"
    assert whole  # pytest would compare the texts character by character


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("\n{{ raise_exception('no system\nhere') }}", "field chat_template, line 2: no system"),
        ("{% for m in %}", "field chat_template, line 1: is not a Jinja template: Expected an expression"),
        ("{{ 1 | no_such_filter }}", "line 1: is not a Jinja template: No filter named 'no_such_filter'."),
        ("a\nb{{ messages[0].x.y }}", "line 2: 'dict object' has no attribute 'x'"),
        ("{{ 1 + '1' }}", "line 1: TypeError: unsupported operand"),
        ("{{ 'x' * 10 ** 10 }}", "line 1: needs more memory than the limit"),
    ],
)
def test_an_error_names_file_field_and_line(tmp_path, template, reason):
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, "qwen", template))
    with pytest.raises(InputError) as refused:
        tokenizer.render_chat_template([USER])
    assert str(refused.value).startswith(f"{tmp_path / 'tokenizer_config.json'}: ") and reason in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("messages", "options", "reason"),
    [
        ([], {}, "messages: is empty"),
        (["hello"], {}, "messages[0]: is str; must be an object"),
        ([USER | {"content": {1, 2}}], {}, "must be plain JSON values: Object of type set"),
        ([USER], {"tools": [print]}, "must be plain JSON values: Object of type builtin_function_or_method"),
        ([USER, CALLED], {"continue_final_message": True}, "the last message has no text"),
        ([USER], {"continue_final_message": True, "add_generation_prompt": True}, "cannot both be set"),
        ([USER], {"continue_final_message": True, "chat_template": "{{ messages | length }}"}, "omits or alters"),
        ([USER], {"chat_template": "rag"}, "'rag' is neither a template's name nor a template; there is: default"),
    ],
)
def test_messages_and_options_that_cannot_be_rendered_are_refused(tmp_path, messages, options, reason):
    tokenizer = Tokenizer.from_folder(
        write_folder(tmp_path, "qwen", "{% for m in messages %}{{ m.content }}{% endfor %}")
    )
    with pytest.raises(InputError) as refused:
        tokenizer.apply_chat_template(messages, **options)
    assert reason in str(refused.value)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (CALLED, "'content'; it writes no tool calls, which messages[1] has: use a template that does"),
        ({"role": "user"}, """has no attribute 'content'; {needs}: give messages[1] one, as "content": \"\""""),
        (CALLED | {"content": [{"type": "text", "text": "a"}]}, "{needs}: write the parts of messages[1] as one"),
        ({"content": "no role"}, "line 1: 'dict object' has no attribute 'role'"),
    ],
)
def test_a_template_that_needs_texts_says_which_message_has_none(tmp_path, message, reason):
    template = "{% for m in messages %}{{ m['role'] + m['content'] }}{% endfor %}"
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, "qwen", template))
    with pytest.raises(InputError) as refused:
        tokenizer.render_chat_template([USER, message])
    assert str(refused.value).endswith(reason.replace("{needs}", "it needs a text in each message"))


def test_messages_are_not_changed(tokenizer):
    message = {"role": "user", "content": [{"type": "text", "text": "a"}], "name": None, "thinking": "b"}
    before = json.dumps(message)
    template = "{{ messages[0].content[0].text ~ messages[0].reasoning_content }}"
    assert tokenizer.render_chat_template([message], chat_template=template, continue_final_message=True) == "a"
    assert json.dumps(message) == before


NAMED = [{"name": name, "template": f"config's {name}"} for name in ("default", "tool_use", "rag")]


@pytest.mark.parametrize("place", ["config", "list", "jinja", "more jinja", "json"])
def test_templates_are_read_from_the_same_places_as_in_transformers(tmp_path, place):
    folder = write_folder(tmp_path, "qwen", {"config": "one{{ 1 }}", "list": NAMED, "json": None}.get(place, "one"))
    if "jinja" in place:
        (folder / "chat_template.jinja").write_text("the file's{{ 1 }}")
    if place == "more jinja":
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "rag.jinja").write_text("the file's rag{{ 2 }}")
    if place == "json":  # transformers reads this file for models with image input
        (folder / "chat_template.json").write_text(json.dumps({"chat_template": "json's"}))
    ours, theirs = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    if place == "json":
        assert ours.chat_template == "json's" and ours.render_chat_template([USER]) == "json's"
        return
    assert ours.chat_template == theirs.get_chat_template()
    for options in ({}, {"tools": TOOLS}, {"chat_template": "rag"}):
        if "chat_template" not in options or place in ("list", "more jinja"):
            expected = theirs.apply_chat_template([USER], tokenize=False, **options)
            assert ours.render_chat_template([USER], **options) == expected


def test_a_missing_template_is_an_error(tokenizer):
    assert tokenizer.chat_template is None
    with pytest.raises(InputError, match="has no chat template named default; there is: none"):
        tokenizer.apply_chat_template([USER])


@pytest.mark.parametrize(
    ("template", "reason"),
    [(3, "field chat_template is int"), ([{"name": "a"}], r"field chat_template\[0\] is not an object with name and")],
)
def test_templates_of_the_wrong_kind_are_refused(tmp_path, template, reason):
    with pytest.raises(CheckpointError, match=rf"tokenizer_config\.json: {reason}"):
        Tokenizer.from_folder(write_folder(tmp_path, "qwen", template))


@pytest.mark.parametrize("place", ["config", "jinja"])
def test_a_template_that_is_too_long_is_refused(tmp_path, place):
    folder = write_folder(tmp_path, "qwen", "x" * 1_000_001 if place == "config" else None)
    if place == "jinja":
        (folder / "chat_template.jinja").touch()
        os.truncate(folder / "chat_template.jinja", 10**10)
    reason = {"config": "field chat_template: has 1000001 characters", "jinja": "has more than 1000000 bytes"}[place]
    with limited_memory(64), pytest.raises(InputError, match=reason):
        Tokenizer.from_folder(folder)


def test_a_template_that_is_not_utf8_or_links_out_of_the_folder_is_refused(tmp_path):
    folder = write_folder(tmp_path / "model", "qwen")
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja: is not UTF-8 text: .*position 0"):
        Tokenizer.from_folder(folder)
    (folder / "chat_template.jinja").unlink()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "secret.jinja").write_text("secret")
    (folder / "additional_chat_templates").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"secret\.jinja: is a link that leads out of the folder"):
        Tokenizer.from_folder(folder)
