"""Records, the units of a data source: texts, conversations, prompts with completions, and groups of completions.

`record_formats.py` makes them of the values in files. This module knows nothing about files or tokens.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

from ligermodels.errors import InputError
from ligermodels.images.reading import ImageSource

MAX_RECORD_BYTES = 2**26  # of a JSON line, decompressed; for an array element and a CSV row, characters
MAX_RECORD_VALUES = 2_000_000  # JSON values of a record; one that Python has parsed takes 50 to 250 bytes
IMAGES_BESIDE_TEXT = "has images beside a text; give them in messages, or name the text alone with --text-field"


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
    """messages: as `parse_messages` returns them. template_kwargs: variables for the chat template. images: of the
    image parts of messages, in order."""

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
        """The prompt with one of its completions."""
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
    """The texts of messages; of a content with images, the text parts."""
    return [content_text(message["content"]) for message in messages]


def content_text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content)
    return content or ""


Record: TypeAlias = Text | Conversation | Completion | GroupRecord | TeacherRecord
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
