"""The errors that mean "the input cannot be used": one line with file, field and remedy.

Command lines print such an error and exit with status 2, and do the same where memory runs out. Any other exception is
a bug and keeps its traceback.
"""

import difflib
import errno
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

SIGPIPE_EXIT_STATUS = 141  # what a shell reports for a process that SIGPIPE ended
# A name on the Hub has less than 100 characters; a list of files has about 7,000.
MAX_WORD_CHARACTERS, MAX_MESSAGE_CHARACTERS = 400, 10_000
# Libraries raise a RuntimeError with one of these where the system gives no memory; threads fail for want of a stack.
HOST_MEMORY_ERRORS = ("DefaultCPUAllocator", "bad_alloc", os.strerror(errno.ENOMEM), "can't start new thread")


class InputError(ValueError):
    """Base class of all errors about unusable input.

    Parts of a message may come from a file. The message is still one readable line: characters that do not print are
    escaped, and a message or word that is too long is shortened in the middle.
    """

    def __init__(self, message: str) -> None:
        words = printable(shorten(message, MAX_MESSAGE_CHARACTERS)).split(" ")
        super().__init__(" ".join(shorten(word, MAX_WORD_CHARACTERS) for word in words))


@contextmanager
def at_place(place: str) -> Iterator[None]:
    """Begins the message of an InputError that is raised inside with the place."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{place} {error}") from None


class ConfigError(InputError):
    """A config.json that asks for something unsupported or contradicts itself."""


class CheckpointError(InputError):
    """Files that are not the safetensors checkpoint that the config describes."""


class HubError(InputError):
    """A name for which no model can be obtained."""


def exhausted_memory(error: BaseException) -> str | None:
    """Says where memory ran out, "GPU" or "host", if that is what the error means."""
    if isinstance(error, RuntimeError) and type(error).__name__ == "OutOfMemoryError":  # torch's; not imported for it
        return "GPU"
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return "host"
    told = isinstance(error, RuntimeError) and any(text in str(error) for text in HOST_MEMORY_ERRORS)
    return "host" if told else None


def silence_closed(stream: TextIO) -> int:
    """Call this after a BrokenPipeError on a stream, as stdout; returns the exit status of the process. Redirects it to
    /dev/null: otherwise Python's own flush at exit fails too and prints an error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return SIGPIPE_EXIT_STATUS


def print_to_stderr(line: str) -> None:
    """Prints a line to stderr. Work goes on where nobody can read it: its reader has left, or its disk is full."""
    with suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def printable(text: str) -> str:
    """`text` with line breaks, terminal controls and other characters that do not print escaped, as \x1b."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shorten(text: str, limit: int) -> str:
    """`text` with its middle replaced by "…" if it has more than `limit` characters."""
    return text if len(text) <= limit else f"{text[: limit // 2]}…{text[-limit // 2 + 1 :]}"


def first_line(error: BaseException | str) -> str:
    """The first line of an error of another library, to quote in a one-line message; its class if it has no text."""
    return next(iter(str(error).strip().splitlines()), "" if isinstance(error, str) else type(error).__name__)


def suggest(wrong: str, choices: Iterable[str]) -> str:
    """The end of a message about an unknown name: the closest choice, if one is close, and the list of all choices."""
    choices = sorted(choices)
    return f"{suggest_closest(wrong, choices)}; choose from: {', '.join(choices)}"


def suggest_closest(wrong: str, choices: Iterable[str]) -> str:
    """The end of a message about an unknown name: the closest choice, or an empty string if none is close."""
    names = {name.lstrip("-"): name for name in choices}  # leading dashes would make all flags similar to each other
    close = difflib.get_close_matches(wrong[:MAX_WORD_CHARACTERS].lstrip("-"), names, n=1)
    return f"; did you mean {names[close[0]]!r}?" if close else ""
