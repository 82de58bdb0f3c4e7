"""Records, the units of a data source: texts, conversations, and prompts with completions; parsed and validated.

    {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}], "tools": […]}     OpenAI
    {"conversations": [{"from": "human", "value": "…"}, {"from": "gpt", "value": "…"}]}                     ShareGPT
    {"instruction": "…", "input": "…", "output": "…"}                                                         Alpaca
    {"prompt": "…", "completion": "…"}                                TRL; both may also be lists of OpenAI messages
    {"text": "…"}

A record has the first of these formats whose fields are all present; its other fields are ignored. Messages are those
of OpenAI's API, as far as they are text. "weight": 0 in an assistant message, as in OpenAI's fine-tuning format, takes
it out of the loss: it is context only. Errors name the field. This module knows nothing about files or tokens.
"""

import difflib
import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias, TypeVar

from ligermodels.errors import InputError
from ligermodels.weights.reading import has_more_values

RECORD_EXAMPLE = '{"text": "…"} or {"messages": [{"role": "user", "content": "…"}, …]}'
MAX_RECORD_VALUES = 2_000_000  # JSON values of a record; one that Python has parsed takes 50 to 250 bytes
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"} | {r: r for r in ("system", "user", "assistant", "tool")}


class Text(NamedTuple):
    """A document, or a piece of a long one.

    before: the end of the document's text before this piece, empty at its start. last: whether the document ends here.
    """

    text: str
    place: str
    before: str = ""
    last: bool = True

    @property
    def texts(self) -> list[str]:
        return [self.text]


class Conversation(NamedTuple):
    """messages: as `parse_messages` returns them."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None
    place: str

    @property
    def texts(self) -> list[str]:
        return [message["content"] or "" for message in self.messages]


class Completion(NamedTuple):
    """A prompt with its completion; the loss is computed on the completion only."""

    prompt: str
    completion: str
    place: str

    @property
    def texts(self) -> list[str]:
        return [self.prompt + self.completion]


Record: TypeAlias = Text | Conversation | Completion
RecordFields: TypeAlias = Mapping[str, Any]
Made = TypeVar("Made")


class BadLines:
    """Counts the records of a run that cannot be used. allowed: how many may be skipped."""

    def __init__(self, allowed: int) -> None:
        self.allowed, self.skipped = allowed, 0

    def attempt(self, make: Callable[..., Made], *arguments: Any) -> Made | None:
        """Calls `make`; returns None for a record that cannot be used. Raises InputError beyond the allowed number."""
        try:
            return make(*arguments)
        except InputError as error:
            if self.skipped < self.allowed:
                self.skipped += 1
                return None
            earlier = f", {self.skipped} skipped before" if self.skipped else ""
            raise InputError(f"{error} (--allow-bad-lines {self.allowed}{earlier})") from error


def parse_record(value: Any, place: str) -> Record:
    """The record in a JSON value. Raises InputError naming the place and the field."""
    try:
        if not isinstance(value, Mapping):
            raise InputError(f"is {json_type(value)}; must be an object such as {RECORD_EXAMPLE}")
        given = {field for field, content in value.items() if content is not None}
        for fields, parse in RECORD_FORMATS.items():
            if given.issuperset(fields):
                return parse(value, place)
        if "text" in value:
            return Text(require_string(value["text"], "text"), place)
        raise InputError(f"has no field {ACCEPTED_FIELDS}; its fields are {', '.join(value) or 'none'}")
    except InputError as error:
        raise InputError(f"{place}: {error}") from None


def from_openai(value: RecordFields, place: str) -> Record:
    return Conversation(parse_messages(value["messages"], "messages"), parse_tools(value.get("tools")), place)


def from_sharegpt(value: RecordFields, place: str) -> Record:
    messages = parse_messages(value["conversations"], "conversations")
    has_system = messages[0]["role"] == "system"
    messages = messages if has_system else [*system_message(value), *messages]
    return Conversation(messages, parse_tools(value.get("tools")), place)


def from_alpaca(value: RecordFields, place: str) -> Record:
    """The input follows the instruction on a new line, as in LLaMA-Factory."""
    if value.get("history"):
        raise InputError("field history is not supported; give all turns as messages")
    parts = require_string(value["instruction"], "instruction"), require_string(value.get("input") or "", "input")
    user = {"role": "user", "content": "\n".join(filter(None, parts))}
    assistant = {"role": "assistant", "content": require_string(value["output"], "output")}
    return Conversation([*system_message(value), user, assistant], None, place)


def system_message(value: RecordFields) -> list[dict[str, Any]]:
    """The field `system`, which LLaMA-Factory allows beside the turns, as a list of no or one message."""
    text = require_string(value.get("system") or "", "system")
    return [{"role": "system", "content": text}] if text else []


def from_prompt_completion(value: RecordFields, place: str) -> Record:
    """Both fields are strings, or both are lists of messages. Assistant messages of the prompt are context only."""
    prompt, completion = value["prompt"], value["completion"]
    if not isinstance(prompt, list):
        return Completion(require_string(prompt, "prompt"), require_string(completion, "completion"), place)
    context = [
        message | {"weight": 0} if message["role"] == "assistant" else message
        for message in parse_messages(prompt, "prompt")
    ]
    messages = [*context, *parse_messages(completion, "completion")]
    return Conversation(messages, parse_tools(value.get("tools")), place)


RECORD_FORMATS: dict[tuple[str, ...], Callable[[RecordFields, str], Record]] = {
    ("messages",): from_openai,
    ("conversations",): from_sharegpt,
    ("instruction", "output"): from_alpaca,
    ("prompt", "completion"): from_prompt_completion,
}
RECORD_FIELDS = (
    *(field for fields in RECORD_FORMATS for field in fields),
    *("text", "input", "history", "system", "tools"),
)
ACCEPTED_FIELDS = ", ".join(" with ".join(fields) for fields in RECORD_FORMATS) + " or text"


def parse_messages(value: Any, field: str) -> list[dict[str, Any]]:
    """Messages with a role each, and with a content that is a string, or None in a message with tool calls."""
    if not isinstance(value, list) or not value:
        raise InputError(f"field {field} is {json_type(value)}; must be a list of at least one message")
    places = [f"{field}[{index}]" for index in range(len(value))]
    return [parse_message(from_sharegpt_turn(turn, place), place) for turn, place in zip(value, places, strict=True)]


def from_sharegpt_turn(turn: Any, field: str) -> Any:
    """Converts a ShareGPT turn to an OpenAI message; returns any other value unchanged."""
    if not isinstance(turn, Mapping) or "from" not in turn or "role" in turn:
        return turn
    speaker = str(turn["from"])
    if speaker not in SHAREGPT_ROLES:
        raise InputError(f"field {field}.from is {speaker!r}; must be one of {', '.join(SHAREGPT_ROLES)}")
    others = {name: value for name, value in turn.items() if name not in ("from", "value")}
    return {"role": SHAREGPT_ROLES[speaker], "content": require_string(turn.get("value"), f"{field}.value"), **others}


def parse_message(value: Any, field: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        example = '{"role": "user", "content": "…"}'
        raise InputError(f"field {field} is {json_type(value)}; must be an object such as {example}")
    message = dict(value)
    if "role" not in message:
        raise InputError(f"field {field}.role is missing; must be one of {', '.join(ROLES)}")
    if message["role"] not in ROLES:
        near = difflib.get_close_matches(str(message["role"]), ROLES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise InputError(f"field {field}.role is {message['role']!r}{hint}; must be one of {', '.join(ROLES)}")
    if message.get("weight", 1) not in (0, 1):
        raise InputError(f"field {field}.weight is {message['weight']!r}; must be 0 (context only) or 1")
    calls = message.pop("tool_calls", None)  # some templates treat an empty list as a list of calls
    if calls:
        message["tool_calls"] = parse_tool_calls(calls, f"{field}.tool_calls")
    if calls and message.get("content") is None:
        return message | {"content": None}
    if "content" not in message:
        raise InputError(f"field {field}.content is missing; must be a string")
    return message | {"content": parse_content(message["content"], f"{field}.content")}


def parse_content(value: Any, field: str) -> str:
    """A string, or the joined text of a list of text parts: a template that expects a string would print the list."""
    if not isinstance(value, list):
        return require_string(value, field)
    for index, part in enumerate(value):
        if not isinstance(part, Mapping) or part.get("type") != "text":
            found = part.get("type") if isinstance(part, Mapping) else json_type(part)
            example = '{"type": "text", "text": "…"}'
            raise InputError(f"field {field}[{index}] is {found!r}; must be {example}: only text is supported")
    return "".join(require_string(part.get("text"), f"{field}[{index}].text") for index, part in enumerate(value))


def parse_tool_calls(value: Any, field: str) -> list[dict[str, Any]]:
    """Decodes arguments given as a JSON string, as in OpenAI's API, because templates write the JSON themselves."""
    if not isinstance(value, list) or not all(isinstance(call, Mapping) for call in value):
        raise InputError(f"field {field} is {json_type(value)}; must be a list of objects")
    calls = [dict(call) for call in value]
    for index, call in enumerate(calls):
        function = call.get("function")
        if isinstance(function, Mapping) and isinstance(function.get("arguments"), str):
            arguments = parse_json_string(function["arguments"], f"{field}[{index}].function.arguments")
            call["function"] = {**function, "arguments": arguments}
    return calls


def parse_tools(value: Any) -> list[Any] | None:
    """A list of JSON schemas, or a JSON string of one, as tables with columns need it. An empty list becomes None."""
    tools = parse_json_string(value, "tools") if isinstance(value, str) else value
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools)):
        raise InputError(f"field tools is {json_type(tools)}; must be a list of objects, the schemas of functions")
    return tools or None


def parse_json_string(text: str, field: str) -> Any:
    if has_more_values(text.encode("utf-8", "surrogatepass"), MAX_RECORD_VALUES):
        raise InputError(f"field {field} is a string of more than {MAX_RECORD_VALUES:,} JSON values")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"field {field} is a string that is not JSON: {error}") from None


def require_string(value: Any, field: str) -> str:
    if not isinstance(value, str):
        raise InputError(f"field {field} is {json_type(value)}; must be a string")
    return value


def json_type(value: Any) -> str:
    """A value's JSON type, for error messages."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number") if value != [] else "an empty list"
