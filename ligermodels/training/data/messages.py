"""The messages of a conversation, checked: those of OpenAI's API, as far as they are text, and ShareGPT's turns.

    {"role": "user", "content": "…"}        {"from": "human", "value": "…"}

"weight": 0 in one of the assistant's, as OpenAI's fine-tuning has it, makes it mere context. Errors name the field.
"""

import difflib
import json
from collections.abc import Mapping
from typing import Any

from ligermodels.errors import InputError

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
SPEAKERS = {"human": "user", "gpt": "assistant"} | {role: role for role in ("system", "user", "assistant", "tool")}


def messages_of(value: Any, field: str) -> list[dict[str, Any]]:
    """Each with a role, and with a content that is a string, or None where tools are called."""
    if not isinstance(value, list) or not value:
        raise InputError(f"field {field} is {kind(value)}; must be a list of at least one message")
    places = [f"{field}[{index}]" for index in range(len(value))]
    return [message_of(as_message(turn, place), place) for turn, place in zip(value, places, strict=True)]


def as_message(turn: Any, field: str) -> Any:
    """One of ShareGPT's turns in OpenAI's words; anything else is left as it is."""
    if not isinstance(turn, Mapping) or "from" not in turn or "role" in turn:
        return turn
    speaker = str(turn["from"])
    if speaker not in SPEAKERS:
        raise InputError(f"field {field}.from is {speaker!r}; must be one of {', '.join(SPEAKERS)}")
    others = {name: value for name, value in turn.items() if name not in ("from", "value")}
    return {"role": SPEAKERS[speaker], "content": string(turn.get("value"), f"{field}.value"), **others}


def message_of(value: Any, field: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise InputError(f'field {field} is {kind(value)}; must be an object as {{"role": "user", "content": "…"}}')
    message = dict(value)
    if "role" not in message:
        raise InputError(f"field {field}.role is missing; must be one of {', '.join(ROLES)}")
    if message["role"] not in ROLES:
        near = difflib.get_close_matches(str(message["role"]), ROLES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise InputError(f"field {field}.role is {message['role']!r}{hint}; must be one of {', '.join(ROLES)}")
    if message.get("weight", 1) not in (0, 1):
        raise InputError(f"field {field}.weight is {message['weight']!r}; must be 0, for context alone, or 1")
    calls = message.pop("tool_calls", None)  # an empty list would tell some templates that there are calls
    if calls:
        message["tool_calls"] = calls_of(calls, f"{field}.tool_calls")
    if calls and message.get("content") is None:
        return message | {"content": None}
    if "content" not in message:
        raise InputError(f"field {field}.content is missing; must be a string")
    return message | {"content": content_of(message["content"], f"{field}.content")}


def content_of(value: Any, field: str) -> str:
    """A string, or a list of parts of text, which are joined: templates for strings alone would print the list."""
    if not isinstance(value, list):
        return string(value, field)
    for index, part in enumerate(value):
        if not isinstance(part, Mapping) or part.get("type") != "text":
            found = part.get("type") if isinstance(part, Mapping) else kind(part)
            raise InputError(
                f'field {field}[{index}] is {found!r}; must be {{"type": "text", "text": "…"}}: only text is trained on'
            )
    return "".join(string(part.get("text"), f"{field}[{index}].text") for index, part in enumerate(value))


def calls_of(value: Any, field: str) -> list[dict[str, Any]]:
    """Arguments that are JSON in a string, as OpenAI's API has them, become the object: templates write the JSON."""
    if not isinstance(value, list) or not all(isinstance(call, Mapping) for call in value):
        raise InputError(f"field {field} is {kind(value)}; must be a list of objects")
    calls = [dict(call) for call in value]
    for index, call in enumerate(calls):
        function = call.get("function")
        if isinstance(function, Mapping) and isinstance(function.get("arguments"), str):
            arguments = parsed(function["arguments"], f"{field}[{index}].function.arguments")
            call["function"] = {**function, "arguments": arguments}
    return calls


def tools_of(value: Any) -> list[Any] | None:
    """A list of JSON schemas, or the JSON of one, as tables of columns need it. An empty one is none."""
    tools = parsed(value, "tools") if isinstance(value, str) else value
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools)):
        raise InputError(f"field tools is {kind(tools)}; must be a list of objects, the schemas of functions")
    return tools or None


def parsed(text: str, field: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"field {field} is a string that is not JSON: {error}") from None


def string(value: Any, field: str) -> str:
    if not isinstance(value, str):
        raise InputError(f"field {field} is {kind(value)}; must be a string")
    return value


def kind(value: Any) -> str:
    """A value's type as JSON calls it."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number") if value != [] else "an empty list"
