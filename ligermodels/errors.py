"""The one family of errors that mean "what was given cannot be used": a single line with file, field and remedy.

Command lines print such an error and exit with status 2; anything else is a bug and keeps its traceback.
"""

import difflib
import os
import sys
from collections.abc import Iterable

PIPE_CLOSED = 141  # the exit status that a shell reports for SIGPIPE
# Characters; a name on the Hub has less than 100, a list of files some 7000.
LONGEST_WORD, LONGEST = 400, 10_000


class InputError(ValueError):
    """The base of them all.

    Files say what part of a message is. It is one line all the same: what does not print is escaped, and what is too
    long to be read loses its middle.
    """

    def __init__(self, message: str) -> None:
        text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in cut(message, LONGEST))
        super().__init__(" ".join(cut(word, LONGEST_WORD) for word in text.split(" ")))


class ConfigError(InputError):
    """A config.json that names something unsupported or contradicts itself."""


class CheckpointError(InputError):
    """Files that are not the safetensors checkpoint the config describes."""


class HubError(InputError):
    """A name for which there is no model to be had."""


def reader_left() -> int:
    """After a BrokenPipeError of stdout, of which Python's own flush at its end would complain too: the exit status."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return PIPE_CLOSED


def cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit // 2]}…{text[-limit // 2 + 1 :]}"


def first_line(error: BaseException | str) -> str:
    """What a library says, for a message of one line."""
    return next(iter(str(error).strip().splitlines()), "")


def hint(wrong: str, right: Iterable[str]) -> str:
    """For the end of a message: the nearest of what there is, if one is near, and all of it."""
    right = sorted(right)
    return f"{nearest(wrong, right)}; there is: {', '.join(right)}"


def nearest(wrong: str, right: Iterable[str]) -> str:
    """For the end of a message: the nearest of what there is, if one is near; else nothing."""
    names = {name.lstrip("-"): name for name in right}  # dashes would bring all flags nearer to each other
    near = difflib.get_close_matches(wrong[:LONGEST_WORD].lstrip("-"), names, n=1)
    return f"; did you mean {names[near[0]]!r}?" if near else ""
