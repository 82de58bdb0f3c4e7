"""Conversations as transformers renders them, and templates that would harm held to their limits."""

import json
import os
import sys
import threading
import time

import jinja2
import pytest
from transformers import AutoTokenizer

from ligermodels import template_process
from ligermodels.errors import CheckpointError, InputError
from ligermodels.tokenizer import Tokenizer
from tests.chat_templates import CHAT_TEMPLATES
from tests.tokenizer_folders import write_folder

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
PARTS = {"role": "user", "content": [{"type": "text", "text": " one "}, {"type": "image"}, {"type": "text", "text": "two"}]}

# name -> (messages, options)
CHATS = {
    "one turn": ([USER], {}),
    "a generation prompt": ([USER], {"add_generation_prompt": True}),
    "two turns": ([USER, ANSWER, USER], {"add_generation_prompt": True}),
    "system": ([SYSTEM, USER, ANSWER], {}),
    "to be continued": ([USER, ANSWER], {"continue_final_message": True}),
    "to be continued without a space": ([USER, {"role": "assistant", "content": "It"}], {"continue_final_message": True}),
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
def test_conversations_are_those_of_transformers(tmp_path, family):
    form, template = CHAT_TEMPLATES[family]
    folder = write_folder(tmp_path, form, template)
    ours, theirs = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    rendered = {chat for chat, (messages, options) in CHATS.items() if agree(ours, theirs, messages, options)}
    assert {"one turn", "two turns", "to be continued without a space"} <= rendered and len(rendered) >= 9


def agree(ours, theirs, messages, options):
    """Text and ids are equal, and so are refusals; whether there was a text."""
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
