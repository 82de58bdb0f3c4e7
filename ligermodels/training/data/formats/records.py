"""Records, the units of a data source: texts, conversations, prompts with completions, and groups of completions.

`record_formats.py` makes them of the values in files. The messages of a conversation are in OpenAI's format as far as
they are text or images, or are ShareGPT's turns. "weight": 0 in an assistant message, as in OpenAI's fine-tuning
format, takes it out of the loss: it is context only. Errors name the field.
"""

import difflib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

from ligermodels.errors import InputError
from ligermodels.images.parts import is_image_part
from ligermodels.images.reading import ImageSource
from ligermodels.weights.reading import has_more_values

MAX_RECORD_BYTES = 2**26  # of a JSON line, decompressed; for an array element and a CSV row, characters
MAX_RECORD_VALUES = 2_000_000  # JSON values of a record; one that Python has parsed takes 50 to 250 bytes
IMAGES_BESIDE_TEXT = "has images beside a text; give them in messages, or name the text alone with --text-field"
TOKENIZATION_RECORDS = 1024  # tokenised at a time
TOKENIZATION_CHARACTERS = 2**22  # likewise; `tokenizers` needs about a hundred bytes a token
RENDER_ARGUMENTS = (
    "messages", "tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize",
)  # fmt: skip
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
    """A conversation, on whose assistant messages the loss is computed.

    messages: what `parse_messages` returns. template_kwargs: variables for the chat template. images: those of the
    image parts of messages, in order.
    """

    messages: list[dict[str, Any]]
    tools: list[Any] | None
    place: str
    template_kwargs: dict[str, Any] | None = None
    images: Sequence[ImageSource] = ()

    @property
    def texts(self) -> list[str]:
        return message_texts(self.messages)


class Completion(NamedTuple):
    """A prompt with its completion; the loss is computed on the completion only. images: of the prompt."""

    prompt: str
    completion: str
    place: str
    images: Sequence[ImageSource] = ()

    @property
    def texts(self) -> list[str]:
        return [self.prompt + self.completion]


class GroupRecord(NamedTuple):
    """A prompt with its completions, as preference data have them; all are strings, or all are lists of messages.

    completions: chosen and rejected of a pair, one that was judged, or none. value: the margin of a pair, 1 or 0 for a
    good or a bad completion; None if there is none. columns: of a prompt alone, all fields but the prompt, for reward
    functions. images: of the prompt, then of each completion; empty where there are none. A text has image tokens where
    they belong, messages have image parts.
    """

    prompt: str | list[dict[str, Any]]
    completions: tuple[str | list[dict[str, Any]], ...]
    place: str
    tools: list[Any] | None = None
    template_kwargs: dict[str, Any] | None = None
    value: float | None = None
    columns: dict[str, Any] | None = None
    images: tuple[Sequence[ImageSource], ...] = ()

    def side(self, number: int) -> "GroupRecord":
        """Returns the prompt with one of its completions."""
        images = self.images and (self.images[0], self.images[1 + number])
        return self._replace(completions=(self.completions[number],), images=images)

    @property
    def texts(self) -> list[str]:
        parts = (self.prompt, *self.completions)
        return [text for part in parts for text in ([part] if isinstance(part, str) else message_texts(part))]


class TeacherRecord(NamedTuple):
    """A record for distillation, with what a teacher said about its supervised tokens, in their order.

    teacher_ids, teacher_logprobs: for each of M tokens the k ids and log-probabilities; None where there are none.
    """

    record: Text | Conversation | Completion
    teacher_ids: list[list[int]] | None
    teacher_logprobs: list[list[float]] | None

    @property
    def texts(self) -> list[str]:
        return self.record.texts


def message_texts(messages: list[dict[str, Any]]) -> list[str]:
    """Returns the texts of messages; of a content with images, the text parts."""
    return [content_text(message["content"]) for message in messages]


def content_text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content)
    return content or ""


def empty_answers(record: "Record") -> int:
    """Returns how many supervised answers of a record have neither text nor anything else, such as tool calls."""
    match record:
        case Completion(completion=text):
            return not text.strip()
        case Conversation(messages=messages):
            return sum(map(is_empty_answer, messages))
    return 0


def is_empty_answer(message: Mapping[str, Any]) -> bool:
    others = (value for name, value in message.items() if name not in ("role", "weight", "content"))
    is_answer = message["role"] == "assistant" and bool(message.get("weight", 1))
    return is_answer and not content_text(message["content"]).strip() and not any(others)


Record: TypeAlias = Text | Conversation | Completion | GroupRecord | TeacherRecord
Made = TypeVar("Made")
OneKind = TypeVar("OneKind", Text, Completion, Conversation, GroupRecord)


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

    def usable(self, make: Callable[..., Made], calls: Iterable[tuple[Any, ...]]) -> Iterator[Made]:
        """Yields what `make` returns for the arguments of each call, as far as `attempt` returns it."""
        made = (self.attempt(make, *arguments) for arguments in calls)
        return (result for result in made if result is not None)


def record_batches(records: Iterable[OneKind]) -> Iterator[list[OneKind]]:
    """Yields batches of records to tokenise at once, on all cores."""
    batch: list[OneKind] = []
    characters = 0
    for record in records:
        new = sum(map(len, record.texts))
        if batch and (len(batch) == TOKENIZATION_RECORDS or characters + new > TOKENIZATION_CHARACTERS):
            yield batch
            batch, characters = [], 0
        batch.append(record)
        characters += new
    if batch:
        yield batch


def parse_messages(value: Any, field: str, *, images: bool = False) -> list[dict[str, Any]]:
    """Returns messages with a role each, and with a content that is a string, or None in a message with tool calls.

    images: contents with image parts are allowed, and stay lists of parts.
    """
    if not isinstance(value, list) or not value:
        raise InputError(f"field {field} is {json_type(value)}; must be a list of at least one message")
    places = [f"{field}[{index}]" for index in range(len(value))]
    turns = zip(value, places, strict=True)
    return [parse_message(from_sharegpt_turn(turn, place), place, images=images) for turn, place in turns]


def from_sharegpt_turn(turn: Any, field: str) -> Any:
    """Converts a ShareGPT turn to an OpenAI message; returns any other value unchanged."""
    if not isinstance(turn, Mapping) or "from" not in turn or "role" in turn:
        return turn
    speaker = str(turn["from"])
    if speaker not in SHAREGPT_ROLES:
        raise InputError(f"field {field}.from is {speaker!r}; must be one of {', '.join(SHAREGPT_ROLES)}")
    others = {name: value for name, value in turn.items() if name not in ("from", "value")}
    return {"role": SHAREGPT_ROLES[speaker], "content": require_string(turn.get("value"), f"{field}.value"), **others}


def parse_message(value: Any, field: str, *, images: bool) -> dict[str, Any]:
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
    if message.get("weight", 1) is None:
        del message["weight"]
    if message.get("weight", 1) not in (0, 1):
        raise InputError(f"field {field}.weight is {message['weight']!r}; must be 0 (context only) or 1")
    calls = message.pop("tool_calls", None)  # some templates treat an empty list as a list of calls
    if calls:
        message["tool_calls"] = parse_tool_calls(calls, f"{field}.tool_calls")
    if calls and message.get("content") is None:
        return message | {"content": None}
    if "content" not in message:
        raise InputError(f"field {field}.content is missing; must be a string")
    content = message["content"]
    if images and isinstance(content, list) and any(map(is_image_part, content)):
        return message
    return message | {"content": parse_content(content, f"{field}.content")}


def parse_content(value: Any, field: str) -> str:
    """Returns a string, or the joined text of a list of text parts.

    A template that expects a string would print the list.
    """
    if not isinstance(value, list):
        return require_string(value, field)
    for index, part in enumerate(value):
        if not isinstance(part, Mapping) or part.get("type") != "text":
            found = part.get("type") if isinstance(part, Mapping) else json_type(part)
            example = '{"type": "text", "text": "…"}'
            raise InputError(f"field {field}[{index}] is {found!r}; must be {example}: only text is supported here")
    return "".join(require_string(part.get("text"), f"{field}[{index}].text") for index, part in enumerate(value))


class WrittenFunction(dict[str, Any]):
    """The function of a tool call whose arguments were given as a string. written: that string. fault: why it could not
    be decoded; its arguments are then empty."""

    written: str
    fault: str | None = None


def parse_tool_calls(value: Any, field: str) -> list[dict[str, Any]]:
    """Decodes arguments given as a JSON string, as in OpenAI's API, because most templates write the JSON themselves.

    A blank string gives no arguments. One that is not JSON is left to `refuse_undecoded`: some templates only copy it.
    """
    if not isinstance(value, list) or not all(isinstance(call, Mapping) for call in value):
        raise InputError(f"field {field} is {json_type(value)}; must be a list of objects")
    calls = [dict(call) for call in value]
    for index, call in enumerate(calls):
        function = call.get("function")
        if isinstance(function, Mapping) and isinstance(function.get("arguments"), str):
            call["function"] = decode_arguments(function, f"field {field}[{index}].function.arguments")
    return calls


def decode_arguments(function: Mapping[str, Any], field: str) -> WrittenFunction:
    decoded = WrittenFunction(function)
    decoded.written = function["arguments"].strip() or "{}"
    try:
        decoded["arguments"] = parse_json_string(decoded.written, field)
    except InputError as error:
        decoded["arguments"], decoded.fault = {}, str(error)
    return decoded


def refuse_undecoded(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raises InputError for arguments of a tool call that are a string which is not JSON."""
    for call in itertools.chain.from_iterable(message.get("tool_calls") or () for message in messages):
        function = call.get("function")
        if isinstance(function, WrittenFunction) and function.fault:
            raise InputError(function.fault)


def with_written_arguments(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns messages whose tool calls have their arguments as the strings that they were given as."""
    return [
        {**message, "tool_calls": [*map(with_written_call, message["tool_calls"])]}
        if message.get("tool_calls")
        else dict(message)
        for message in messages
    ]


def with_written_call(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call.get("function")
    if not isinstance(function, WrittenFunction):
        return call
    return {**call, "function": {**function, "arguments": function.written}}


def parse_tools(value: Any) -> list[Any] | None:
    """Returns a list of JSON schemas, or a JSON string of one, as tables with columns need it.

    An empty list and a blank string become None.
    """
    tools = parse_option(value, "tools")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools)):
        raise InputError(f"field tools is {json_type(tools)}; must be a list of objects, the schemas of functions")
    return tools or None


def parse_template_kwargs(value: Any) -> dict[str, Any] | None:
    """Variables for the chat template, as an object or as a JSON string of one. Empty and blank ones become None."""
    variables = parse_option(value, "chat_template_kwargs")
    if variables is not None and not isinstance(variables, Mapping):
        raise InputError(f"field chat_template_kwargs is {json_type(variables)}; must be an object")
    for name in RENDER_ARGUMENTS:
        if name in (variables or {}):
            raise InputError(f"field chat_template_kwargs has {name}, which training sets; leave it out")
    return dict(variables) if variables else None


def parse_option(value: Any, field: str) -> Any:
    """Returns the value of a field that may be a JSON string; None for a blank one."""
    if not isinstance(value, str):
        return value
    return parse_json_string(value, f"field {field}") if value.strip() else None


def parse_json_string(text: str, field: str) -> Any:
    """Raises InputError, which begins with `field`, for a text that is not JSON or has too many values."""
    if has_more_values(text.encode("utf-8", "surrogatepass"), MAX_RECORD_VALUES):
        raise InputError(f"{field} is a string of more than {MAX_RECORD_VALUES:,} JSON values")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{field} is a string that is not JSON: {error}") from None


def require_string(value: Any, field: str) -> str:
    if not isinstance(value, str):
        raise InputError(f"field {field} is {json_type(value)}; must be a string")
    return value


def json_type(value: Any) -> str:
    """Returns a value's JSON type, for error messages; tables have bytes too."""
    names = {
        dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null", bytes: "bytes",
    }  # fmt: skip
    return names.get(type(value), "a number") if value != [] else "an empty list"
