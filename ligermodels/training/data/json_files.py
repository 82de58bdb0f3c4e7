"""Records from files of JSON: an object a line, or one array of objects, whichever a file begins with.

Neither is read whole: lines come one by one, and of an array no more is held than its longest element takes. A line
that is not JSON is one bad line; in an array nothing behind such a place can be told apart. Knows no tokens.
"""

import codecs
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from ligermodels.errors import InputError, first_line
from ligermodels.training.data.progress import Progress
from ligermodels.training.data.records import BadLines, Record, record_of
from ligermodels.training.data.streams import not_utf8, opened, opened_text, refuse_no_data

MAX_BYTES = 2**28  # of a line; of an element, characters
CHUNK_CHARACTERS = 2**16
DECODER = json.JSONDecoder()
SPACE = re.compile(r"[ \t\n\r]*")
SURROGATE_ESCAPE, SURROGATE = re.compile(r"\\u[dD][89a-fA-F]"), re.compile("[\ud800-\udfff]")
LAYOUTS = "must be an object a line, or one array of objects"


def json_file(file: Path, bad: BadLines, progress: Progress) -> Iterator[Record]:
    with opened(file, progress) as stream:
        refuse_no_data(file, stream)
        array = stream.peek().removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")
    return (json_array if array else json_lines)(file, bad, progress)


def json_lines(file: Path, bad: BadLines, progress: Progress) -> Iterator[Record]:
    for number, line in numbered_lines(file, progress):
        record = bad.attempt(parse_line, line, f"{file}:{number}")
        if record is not None:
            yield record


def numbered_lines(file: Path, progress: Progress) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, from 1."""
    with opened(file, progress) as stream:
        number = 0
        while line := stream.readline(MAX_BYTES + 1):
            number += 1
            if len(line) > MAX_BYTES:
                raise InputError(f"{file}:{number}: has more than {MAX_BYTES:,} bytes; {LAYOUTS}")
            line = (line.removeprefix(codecs.BOM_UTF8) if number == 1 else line).rstrip()
            if line:
                yield number, line


def parse_line(line: bytes, place: str) -> Record:
    try:
        text = line.decode()
        value = json.loads(text)
    except UnicodeDecodeError as error:
        raise InputError(not_utf8(place, line, error)) from None
    except json.JSONDecodeError as error:
        raise InputError(f"{place}:{error.colno}: not JSON: {error.msg}; {LAYOUTS}") from None
    except (ValueError, RecursionError) as error:
        raise not_read(place, error) from None
    return checked(value, text, place)


def json_array(file: Path, bad: BadLines, progress: Progress) -> Iterator[Record]:
    with opened_text(file, progress) as stream:
        text = Ahead(stream)
        text.take()  # the [
        following = text.take() if text.peek() == "]" else ","
        number = 0
        while following == ",":
            number += 1
            place = f"{file}: element {number}"
            record = bad.attempt(checked, *text.value(place), place)
            if record is not None:
                yield record
            following = text.take()
        if following != "]":
            found = f"followed by {following!r}, not by , or ]" if following else "the last, but no ] follows; cut off"
            raise InputError(f"{file}: element {number} is {found}")
        if text.peek():
            raise InputError(f"{file}: goes on with {text.peek()!r} behind the array; {LAYOUTS}")


class Ahead:
    """The characters of a stream, of which those that are not taken yet are held."""

    def __init__(self, stream: TextIO) -> None:
        self.stream, self.held, self.at = stream, "", 0

    def more(self) -> bool:
        """Reads as much as is left, or a chunk; False at the end."""
        new = self.stream.read(max(CHUNK_CHARACTERS, len(self.held) - self.at))
        if new:
            self.held, self.at = self.held[self.at :] + new, 0
        return bool(new)

    def peek(self) -> str:
        """The next character that is no space; empty at the end."""
        while True:
            self.at = SPACE.match(self.held, self.at).end()  # type: ignore[union-attr]
            if self.at < len(self.held) or not self.more():
                return self.held[self.at : self.at + 1]

    def take(self) -> str:
        character = self.peek()
        self.at += len(character)
        return character

    def value(self, place: str) -> tuple[Any, str]:
        """The next value of JSON, and its text. Raises InputError naming the place.

        What is not JSON may become it by what follows; also a number, unless something does that is none of it.
        """
        self.peek()
        while True:
            fault, value, end = decoded(self.held, self.at, place)
            whole = fault is None and end < len(self.held)
            if whole or len(self.held) - self.at > MAX_BYTES or not self.more():
                break
        if fault:
            where = f"at its character {fault.pos - self.at + 1}"
            raise InputError(f"{place}: not JSON {where}: {fault.msg}; nothing behind it can be read")
        text, self.at = self.held[self.at : end], end
        return value, text


def decoded(text: str, at: int, place: str) -> tuple[json.JSONDecodeError | None, Any, int]:
    """What is wrong with the value that begins there, else the value and its end."""
    try:
        return None, *DECODER.raw_decode(text, at)
    except json.JSONDecodeError as error:
        return error, None, at
    except (ValueError, RecursionError) as error:
        raise not_read(place, error) from None


def not_read(place: str, error: Exception) -> InputError:
    """For a number of thousands of digits, and for lists in lists."""
    return InputError(f"{place}: not JSON that is read: {first_line(error)}")


def checked(value: Any, text: str, place: str) -> Record:
    """text: the value's own."""
    if SURROGATE_ESCAPE.search(text) and SURROGATE.search(json.dumps(value, ensure_ascii=False)):
        raise InputError(f"{place}: holds half of a surrogate pair, as \\ud83d alone, which is no text")
    return record_of(value, place)
