"""Records, the units of a data source: texts, conversations, and prompts with completions.

`record_formats.py` makes them of the values in files. This module knows nothing about files or tokens.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias, TypeVar

from ligermodels.errors import InputError

MAX_RECORD_BYTES = 2**26  # of a JSON line, decompressed; for an array element and a CSV row, characters
MAX_RECORD_VALUES = 2_000_000  # JSON values of a record; one that Python has parsed takes 50 to 250 bytes


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
