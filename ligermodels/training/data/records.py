"""What a source of data holds: texts, conversations, prompts with completions; checked, with the place errors name.

    {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}], "tools": […]}
    {"conversations": [{"from": "human", "value": "…"}, {"from": "gpt", "value": "…"}]}            as ShareGPT has them
    {"instruction": "…", "input": "…", "output": "…"}                                               as Alpaca has them
    {"prompt": "…", "completion": "…"}                                    as TRL has them; also lists of messages, both
    {"text": "…"}

A record is the first of these that it has the fields of; others of its fields are not looked at. Knows neither files
nor tokens.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias, TypeVar

from ligermodels.errors import InputError
from ligermodels.training.data.messages import kind, messages_of, string, tools_of

EXAMPLE = '{"text": "…"} or {"messages": [{"role": "user", "content": "…"}, …]}'


class Text(NamedTuple):
    """A document, or a piece of a long one.

    before: what stands in the document just before the text, nothing at its beginning. last: whether it ends here.
    """

    text: str
    place: str
    before: str = ""
    last: bool = True

    @property
    def texts(self) -> list[str]:
        return [self.text]


class Conversation(NamedTuple):
    """messages: as `messages_of` gives them."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None
    place: str

    @property
    def texts(self) -> list[str]:
        return [message["content"] or "" for message in self.messages]


class Completion(NamedTuple):
    """A text of which only what follows the prompt is learned."""

    prompt: str
    completion: str
    place: str

    @property
    def texts(self) -> list[str]:
        return [self.prompt + self.completion]


Record: TypeAlias = Text | Conversation | Completion
Fields: TypeAlias = Mapping[str, Any]
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
        given = {field for field, content in value.items() if content is not None}
        for fields, make in FORMS.items():
            if given.issuperset(fields):
                return make(value, place)
        if "text" in value:
            return Text(string(value["text"], "text"), place)
        raise InputError(f"has no field {ACCEPTED}, but {', '.join(value) or 'none'}")
    except InputError as error:
        raise InputError(f"{place}: {error}") from None


def from_messages(value: Fields, place: str) -> Record:
    return Conversation(messages_of(value["messages"], "messages"), tools_of(value.get("tools")), place)


def from_sharegpt(value: Fields, place: str) -> Record:
    turns = messages_of(value["conversations"], "conversations")
    begun = turns[0]["role"] == "system"
    return Conversation(turns if begun else [*system_of(value), *turns], tools_of(value.get("tools")), place)


def from_alpaca(value: Fields, place: str) -> Record:
    """An input stands in the line behind the instruction, as LLaMA-Factory has it."""
    if value.get("history"):
        raise InputError("field history is not read; give all turns as messages")
    given = string(value["instruction"], "instruction"), string(value.get("input") or "", "input")
    asked = {"role": "user", "content": "\n".join(filter(None, given))}
    said = {"role": "assistant", "content": string(value["output"], "output")}
    return Conversation([*system_of(value), asked, said], None, place)


def system_of(value: Fields) -> list[dict[str, Any]]:
    """What LLaMA-Factory has beside the turns."""
    text = string(value.get("system") or "", "system")
    return [{"role": "system", "content": text}] if text else []


def from_prompt(value: Fields, place: str) -> Record:
    """Both strings, or both lists of messages, of which those of the prompt are mere context."""
    prompt, completion = value["prompt"], value["completion"]
    if not isinstance(prompt, list):
        return Completion(string(prompt, "prompt"), string(completion, "completion"), place)
    context = [
        message | {"weight": 0} if message["role"] == "assistant" else message
        for message in messages_of(prompt, "prompt")
    ]
    return Conversation([*context, *messages_of(completion, "completion")], tools_of(value.get("tools")), place)


FORMS: dict[tuple[str, ...], Callable[[Fields, str], Record]] = {
    ("messages",): from_messages,
    ("conversations",): from_sharegpt,
    ("instruction", "output"): from_alpaca,
    ("prompt", "completion"): from_prompt,
}
FIELDS = (*(field for form in FORMS for field in form), "text", "input", "history", "system", "tools")
ACCEPTED = ", ".join(" with ".join(form) for form in FORMS) + " or text"
