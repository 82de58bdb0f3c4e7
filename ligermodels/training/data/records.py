"""What a source of data holds: texts, or conversations of messages; checked, with the place that errors name.

    {"text": "…"}
    {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}], "tools": […]}

Messages are those of OpenAI's API, as far as they are text; "weight": 0 in one of the assistant's, as fine-tuning there
has it, makes it mere context. Other fields of a record are not looked at; one that has
both is a conversation. Knows neither files nor tokens.
"""

import difflib
import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias, TypeVar

from ligermodels.errors import InputError

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
FIELDS = ("text", "messages", "tools")
EXAMPLE = '{"text": "…"} or {"messages": [{"role": "user", "content": "…"}, …]}'


class Text(NamedTuple):
    """A document, or a piece of a long one.

    before: what stands in the document just before the text, nothing at its beginning. last: whether it ends here.
    """

    text: str
    place: str
    before: str = ""
    last: bool = True


class Conversation(NamedTuple):
    """messages: each with a role, and with a content that is a string, or None where tools are called."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None
    place: str


Record: TypeAlias = Text | Conversation
Made = TypeVar("Made")


class BadLines:
    """Counts the records of a run that cannot be used; the user allows so many."""

    def __init__(self, allowed: int) -> None:
        self.allowed, self.skipped = allowed, 0

    def attempt(self, make: Callable[..., Made], *arguments: Any) -> Made | None:
        """What is made of a record, None where it cannot be used; one more than are allowed raises InputError."""
        try:
            return make(*arguments)
        except InputError as error:
            if self.skipped < self.allowed:
                self.skipped += 1
                return None
            passed = f", {self.skipped} before it were skipped" if self.skipped else ""
            raise InputError(f"{error} (--allow-bad-lines {self.allowed}{passed})") from error


def record_of(value: Any, place: str) -> Record:
    """The record in a JSON value. Raises InputError naming the place and the field."""
    try:
        if not isinstance(value, Mapping):
            raise InputError(f"is {kind(value)}; must be an object as {EXAMPLE}")
        if value.get("messages") is not None:
            return Conversation(messages_of(value["messages"]), tools_of(value.get("tools")), place)
        if "text" not in value:
            raise InputError(
                f"has neither a field text nor messages, but {', '.join(value) or 'none'}; must be {EXAMPLE}"
            )
        return Text(string(value["text"], "text"), place)
    except InputError as error:
        raise InputError(f"{place}: {error}") from None


def messages_of(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise InputError(f"field messages is {kind(value)}; must be a list of at least one message")
    return [message_of(message, f"messages[{index}]") for index, message in enumerate(value)]


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
