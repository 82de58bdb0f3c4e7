"""The formats of records: which fields a record may have, and the text, conversation or completion that they make.

    {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}], "tools": […]}     OpenAI
    {"conversations": [{"from": "human", "value": "…"}, {"from": "gpt", "value": "…"}]}                     ShareGPT
    {"instruction": "…", "input": "…", "output": "…"}                                                         Alpaca
    {"prompt": "…", "completion": "…"}                                TRL; both may also be lists of OpenAI messages
    {"text": "…"}
    {"instruction": "…", "context": "…", "response": "…"}                                                      Dolly
    {"prompt": "…", "response": "…"}
    {"question": "…", "answer": "…"}
    {"content": "…"}                                                                                the same as text

Beside messages may be "images", of which each {"type": "image"} in their contents takes the next (TRL); with "image" or
"images", the mark <image> in a text means the same (LLaVA, LLaMA-Factory). Beside a prompt and a completion they are of
the prompt, for models whose prompts are prefixes. `images/parts.py` says what an image may be.

A record has the first of these formats whose fields are all present and not null; its other fields are ignored. A
completion continues its prompt as raw text; an output, a response or an answer is a message of the assistant. Fields
that the user names come before all formats. Preference data is refused, with the flags that train on the better
answers. Errors name the field.
"""

import functools
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias, cast

from ligermodels.errors import InputError, at_place
from ligermodels.images.parts import IMAGE_PART, is_image_part, parse_source, take_images
from ligermodels.images.reading import ImageSource
from ligermodels.training.data.formats.records import (
    IMAGES_BESIDE_TEXT,
    BadLines,
    Completion,
    Conversation,
    Record,
    Text,
    json_type,
    parse_messages,
    parse_template_kwargs,
    parse_tools,
    require_string,
)
from ligermodels.training.data.formats.streams import ReadingProgress

RECORD_EXAMPLE = '{"text": "…"} or {"messages": [{"role": "user", "content": "…"}, …]}'
# Names that are often those of a prompt and of its completion: only to suggest flags.
LIKE_PROMPTS = ("prompt", "instruction", "question", "query", "input", "problem")
LIKE_COMPLETIONS = ("completion", "response", "answer", "output", "solution", "target")

RecordFields: TypeAlias = Mapping[str, Any]
FormatParser: TypeAlias = Callable[[RecordFields, str], Record]


class RecordFormats(Protocol):
    """The formats that a reader of files looks for."""

    def has_record(self, names: Collection[str]) -> bool:
        """Returns whether these names of fields or columns are enough for a record."""

    def refuse_missing(self, names: Collection[str], kind: str) -> None:
        """Raises InputError if these names are not enough for a record. kind: what they are of, "field" or "column"."""

    def columns(self, names: Collection[str]) -> list[str]:
        """Returns those of the names that records are made of."""

    def parse(self, value: RecordFields, place: str) -> Record:
        """Returns the record of an object. Raises InputError naming the field."""


class FieldNames(NamedTuple):
    """The formats of supervised training, or the fields that the user names: the text, or the prompt and its
    completion; None where none is named."""

    text: str | None = None
    prompt: str | None = None
    completion: str | None = None

    @property
    def flags(self) -> dict[str, str]:
        """The flag that names each field."""
        return {name: f"--{role}-field" for role, name in self._asdict().items() if name is not None}

    def has_record(self, names: Collection[str]) -> bool:
        there = set(names)
        needed = [tuple(self.flags)] if self.flags else RECORD_FORMATS
        return any(there.issuperset(format_fields) for format_fields in needed)

    def refuse_missing(self, names: Collection[str], kind: str) -> None:
        if self.has_record(names):
            return
        listed = f"its {kind}s are {', '.join(names) or 'none'}"
        for name, flag in self.flags.items():
            if name not in names:
                raise InputError(f"has no {kind} {name}, which {flag} names; {listed}")
        raise InputError(f"has no {kind} {ACCEPTED_FIELDS}; {listed}{suggest_flags(names)}")

    def columns(self, names: Collection[str]) -> list[str]:
        used = (*self.flags, *OPTIONS_OF_CHATS) if self.flags else RECORD_FIELDS
        return [name for name in used if name in names]

    def parse(self, value: RecordFields, place: str) -> Record:
        return self.find_format(value)(value, place)

    def find_format(self, value: RecordFields) -> FormatParser:
        """Raises InputError if the fields of `value` are not enough for any format."""
        if self.flags:
            self.refuse_missing(value, "field")
            return named_format(self)
        given = {field for field, content in value.items() if content is not None}
        for names, parse in RECORD_FORMATS.items():
            if given.issuperset(names):
                return parse
        self.refuse_missing(value, "field")
        # All fields of a format are there, but one is null: its parser says which.
        return next(parse for names, parse in RECORD_FORMATS.items() if value.keys() >= set(names))


KNOWN_FIELDS = FieldNames()


class Reading(NamedTuple):
    """How a source is read. bad_lines: counts records that cannot be used. progress: follows the files."""

    formats: RecordFormats
    bad_lines: BadLines
    progress: ReadingProgress


def parse_record(value: Any, place: str, formats: RecordFormats = KNOWN_FIELDS) -> Record:
    """Returns the record in a JSON value. Raises InputError naming the place and the field."""
    with at_place(f"{place}:"):
        if not isinstance(value, Mapping):
            raise InputError(f"is {json_type(value)}; must be an object such as {RECORD_EXAMPLE}")
        return formats.parse(value, place)


def named_format(fields: FieldNames) -> FormatParser:
    if fields.text is not None:
        return functools.partial(from_text_field, field=fields.text)
    prompt, completion = cast(tuple[str, str], fields[1:])
    return functools.partial(from_prompt_completion, prompt=prompt, completion=completion)


def suggest_flags(names: Collection[str]) -> str:
    """Returns the end of a message about fields that are not known; empty if there are none."""
    lower = {name.lower(): name for name in names}
    if not lower:
        return ""
    prompts = [lower[name] for name in LIKE_PROMPTS if name in lower]
    completions = [lower[name] for name in LIKE_COMPLETIONS if name in lower]
    if len(prompts) == len(completions) == 1:
        return f"; name them with --prompt-field {prompts[0]} --completion-field {completions[0]}"
    return "; name one with --text-field, or two with --prompt-field and --completion-field"


def conversation(value: RecordFields, messages: list[dict[str, Any]], place: str) -> Conversation:
    """Returns messages with the record's images, tools and variables for the chat template."""
    kwargs = parse_template_kwargs(value.get("chat_template_kwargs"))
    beside = record_images(value)
    images: list[ImageSource] = []
    if beside or has_image_parts(messages):
        messages, images = take_images(with_image_parts(messages, len(beside)), beside)
    return Conversation(messages, parse_tools(value.get("tools")), place, kwargs, tuple(images))


def record_images(value: RecordFields) -> list[Any]:
    """Returns the images beside the messages, in the field images or, as in LLaVA's files, image; one or a list.

    Raises InputError for videos or sound, which would be left out without a word.
    """
    for name in OTHER_MEDIA:
        if value.get(name):
            raise InputError(f"has a field {name}, but training reads images alone; remove such records, or the field")
    given = [value[name] for name in IMAGE_FIELDS if value.get(name) is not None]
    if len(given) > 1:
        raise InputError(f"has both fields {' and '.join(IMAGE_FIELDS)}; leave one of them")
    return [image for images in given for image in (images if isinstance(images, list) else [images])]


def with_image_parts(messages: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """Returns the messages with parts for so many images beside them.

    The parts are their own, else at the marks <image>, else before the first text of the user.
    """
    if not count:
        return messages
    marked = with_marked_images(messages)
    return marked if has_image_parts(marked) else with_images_first(marked, count)


def with_marked_images(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns messages with the marks <image> of LLaVA's files as image parts, if none has image parts yet."""
    if any(isinstance(message["content"], list) for message in messages):
        return messages
    return [message | {"content": marked_parts(message["content"])} for message in messages]


def has_image_parts(messages: Sequence[Mapping[str, Any]]) -> bool:
    contents = (message["content"] for message in messages)
    return any(isinstance(content, list) and any(map(is_image_part, content)) for content in contents)


def with_images_first(messages: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """Returns the messages with so many image parts before the text of the first one of the user."""
    index = next((number for number, message in enumerate(messages) if message["role"] == "user"), None)
    if index is None:
        raise InputError("field images is beside messages of which none is the user's; give them as image parts")
    content = [*[dict(IMAGE_PART)] * count, {"type": "text", "text": messages[index]["content"] or ""}]
    return [*messages[:index], messages[index] | {"content": content}, *messages[index + 1 :]]


def marked_parts(text: str | None) -> str | list[dict[str, Any]] | None:
    """A text without marks stays a string.

    A line break beside a mark at the start or end of the text goes with it.
    """
    if text is None or IMAGE_MARK not in text:
        return text
    pieces = text.split(IMAGE_MARK)
    pieces[0], pieces[-1] = pieces[0].removesuffix("\n"), pieces[-1].removeprefix("\n")
    texts = [[{"type": "text", "text": piece}] if piece else [] for piece in pieces]
    return [*texts[0], *itertools.chain(*([dict(IMAGE_PART), *part] for part in texts[1:]))]


def from_openai(value: RecordFields, place: str) -> Record:
    return conversation(value, parse_messages(value["messages"], "messages", images=True), place)


def from_sharegpt(value: RecordFields, place: str) -> Record:
    messages = parse_messages(value["conversations"], "conversations", images=True)
    has_system = messages[0]["role"] == "system"
    messages = messages if has_system else [*system_message(value), *messages]
    return conversation(value, messages, place)


def from_question(value: RecordFields, place: str, *, question: str, details: tuple[str, ...], answer: str) -> Record:
    """One turn. details: fields that follow the question on new lines, as in LLaMA-Factory, and may be absent."""
    if value.get("history"):
        raise InputError("field history is not supported; give all turns as messages")
    parts = [require_string(value[question], question)]
    parts += [require_string(value.get(field) or "", field) for field in details]
    text = "\n".join(filter(None, parts))
    user = {"role": "user", "content": text}
    assistant = {"role": "assistant", "content": require_string(value[answer], answer)}
    return conversation(value, [*system_message(value), user, assistant], place)


def system_message(value: RecordFields) -> list[dict[str, Any]]:
    """Returns the field `system`, which LLaMA-Factory allows beside the turns, as a list of no or one message."""
    text = require_string(value.get("system") or "", "system")
    return [{"role": "system", "content": text}] if text else []


def from_prompt_completion(
    value: RecordFields, place: str, *, prompt: str = "prompt", completion: str = "completion"
) -> Record:
    """Takes two strings or two lists of messages. Assistant messages of the prompt are context only."""
    if not isinstance(value[prompt], list):
        images = tuple(parse_source(image, f"images[{number}]") for number, image in enumerate(record_images(value)))
        return Completion(
            require_string(value[prompt], prompt), require_string(value[completion], completion), place, images
        )
    context = [
        message | {"weight": 0} if message["role"] == "assistant" else message
        for message in parse_messages(value[prompt], prompt, images=True)
    ]
    messages = [*context, *parse_messages(value[completion], completion, images=True)]
    return conversation(value, messages, place)


def from_known_prompt(value: RecordFields, place: str) -> Record:
    if str(value.get("label")).lower() in ("true", "false"):  # in CSV it is text
        flags = "--prompt-field prompt --completion-field completion"
        raise InputError(
            "is unpaired preference data (prompt, completion, label), which --objective kto takes; to train on the "
            f"completions as they are, keep the records with a true label, or take all of them with {flags}"
        )
    return from_prompt_completion(value, place)


def from_text(value: RecordFields, place: str) -> Record:
    if record_images(value):  # only messages say where they belong
        raise InputError(IMAGES_BESIDE_TEXT)
    return Text(require_string(value["text"], "text"), place)


def from_text_field(value: RecordFields, place: str, *, field: str) -> Record:
    """A field that the user names may also be a list of messages."""
    if isinstance(value[field], list):
        return conversation(value, parse_messages(value[field], field, images=True), place)
    return Text(require_string(value[field], field), place)


def from_content(value: RecordFields, place: str) -> Record:
    if value.get("role") is not None:
        raise InputError('is a single message; a record must have all of a conversation, as {"messages": […]}')
    return Text(require_string(value["content"], "content"), place)


def refuse_preference(value: RecordFields, place: str) -> Record:
    """Raises InputError. The prompt may be within the chosen answer: then their types differ, or there is no prompt."""
    prompt = next((name for name in LIKE_PROMPTS if isinstance(value.get(name), type(value["chosen"]))), None)
    flags = f"--prompt-field {prompt} --completion-field chosen" if prompt else "--text-field chosen"
    raise InputError(
        "is preference data (chosen, rejected): --objective dpo trains on pairs; to train on the chosen answers alone, "
        f"use {flags}"
    )


# In the order in which they are tried.
RECORD_FORMATS: dict[tuple[str, ...], FormatParser] = {
    ("messages",): from_openai,
    ("conversations",): from_sharegpt,
    ("instruction", "output"): functools.partial(
        from_question, question="instruction", details=("input",), answer="output"
    ),
    ("prompt", "completion"): from_known_prompt,
    ("text",): from_text,
    ("chosen", "rejected"): refuse_preference,
    ("instruction", "response"): functools.partial(
        from_question, question="instruction", details=("input", "context"), answer="response"
    ),
    ("prompt", "response"): functools.partial(
        from_question, question="prompt", details=("context",), answer="response"
    ),
    ("question", "answer"): functools.partial(
        from_question, question="question", details=("context",), answer="answer"
    ),
    ("content",): from_content,
}  # fmt: skip
IMAGE_FIELDS, IMAGE_MARK = ("images", "image"), "<image>"
OTHER_MEDIA = ("videos", "video", "audios", "audio")
OPTIONS_OF_CHATS = ("tools", "chat_template_kwargs", *IMAGE_FIELDS, *OTHER_MEDIA)
OPTIONAL_FIELDS = ("input", "context", "history", "system", "label", "role", *OPTIONS_OF_CHATS)
RECORD_FIELDS = tuple(dict.fromkeys([*itertools.chain(*RECORD_FORMATS), *OPTIONAL_FIELDS]))
ACCEPTED_FORMATS = [" with ".join(fields) for fields, parse in RECORD_FORMATS.items() if parse is not refuse_preference]
ACCEPTED_FIELDS = f"{', '.join(ACCEPTED_FORMATS[:-1])} or {ACCEPTED_FORMATS[-1]}"
