"""From what --data names to records: files of text, JSON lines and parquet, folders and patterns of them, the Hub.

A text file is one document. Files are UTF-8; a byte order mark at their beginning is not text. In a text file every
kind of line end is read as \\n; in JSON, what stands in the strings is kept. Nothing is read whole: a long text file
comes in pieces, JSON line by line, tables (`tables.py`) batch by batch. Knows no tokens.
"""

import codecs
import glob
import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from ligermodels.errors import InputError, first_line
from ligermodels.training.data.records import BadLines, Record, Text, record_of
from ligermodels.training.data.tables import HUB, hub_dataset, parquet
from ligermodels.weights.files import refuse_text

EMBEDDED = ("stories", "chats", "random")
TOKEN_SUFFIXES = (".bin", ".npy")
PIECE_CHARACTERS = 2**18
CONTEXT_CHARACTERS = 64  # of the text before a piece: more than a token or two
MAX_LINE_BYTES = 2**28
SURROGATE_ESCAPE, SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]"), re.compile("[\ud800-\udfff]")


class Spec(NamedTuple):
    """weight: the source's share of a mixture, None where none is given."""

    name: str
    weight: float | None


def parse_spec(text: str) -> Spec:
    """NAME or NAME=WEIGHT; what exists under the whole of it, and what ends in no number after an =, is a NAME."""
    name, equals, number = text.rpartition("=")
    try:
        weight = float(number)
    except ValueError:
        return Spec(text, None)
    if not equals or Path(text).exists():
        return Spec(text, None)
    if not name or not 0 < weight < math.inf:
        raise InputError(f"--data {text}: must be a name, or name=weight with a weight above 0, as my.jsonl=0.7")
    return Spec(name, weight)


def files_of(name: str) -> list[Path]:
    """The file; the files of known kinds in a folder and those in it; or those that a pattern matches: in order.

    Raises InputError where there are none, and for a file of another kind that is named or matched.
    """
    path = Path(name)
    if path.is_dir():
        files = [file for file in path.rglob("*") if file.suffix in SUFFIXES and not hidden(file.relative_to(path))]
    else:
        files = [path] if path.exists() else [Path(match) for match in glob.glob(name, recursive=True)]
    files = sorted(file for file in files if file.is_file())
    if not files:
        what = "no file in this folder is" if path.is_dir() else "there is no such file, folder or pattern of files;"
        raise InputError(f"--data {name}: {what} {' or '.join(SUFFIXES)}; also: {', '.join(EMBEDDED)}, {HUB}NAME")
    for file in files:
        if file.suffix not in SUFFIXES:
            raise InputError(f"{file}: is not read as data; must be {' or '.join(SUFFIXES)}")
    return files


def hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def read(name: str, bad: BadLines) -> Iterator[Record]:
    """The records of a file, folder, pattern, or hub:name[:configuration][:split]; an empty text is none.

    bad: counts what cannot be used. Raises InputError naming place and field, and where there is not one record.
    """
    records = (
        hub_dataset(name, bad) if name.startswith(HUB) else (r for file in files_of(name) for r in read_file(file, bad))
    )
    empty = True
    for record in records:
        if not isinstance(record, Text) or record.text:
            empty = False
            yield record
    if empty:
        skipped = f"; bad lines skipped: {bad.skipped}" if bad.skipped else ""
        raise InputError(f"--data {name}: holds no text and no messages{skipped}")


def read_file(file: Path, bad: BadLines) -> Iterator[Record]:
    if file.suffix not in READERS:
        raise InputError(f"{file}: holds tokens; text was expected")
    return READERS[file.suffix](file, bad)


def text_file(file: Path, bad: BadLines) -> Iterator[Record]:
    """Pieces of the one document, cut where a line begins. No limit skips what is not UTF-8."""
    before, line = "", 1
    try:
        with file.open(encoding="utf-8-sig") as stream:
            text = stream.read(PIECE_CHARACTERS)
            while following := stream.read(PIECE_CHARACTERS):
                cut = last_seam(text)
                yield Text(text[:cut], f"{file}:{line}", before, last=False)
                before, line = (before + text[:cut])[-CONTEXT_CHARACTERS:], line + text.count("\n", 0, cut)
                text = text[cut:] + following
            yield Text(text, f"{file}:{line}", before)
    except UnicodeDecodeError:
        raise InputError(f"{first_not_utf8(file)}; convert the file") from None
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {error.strerror}") from error


def last_seam(text: str) -> int:
    """The last place where tokens surely meet: a line's first character, unless it is space; else before a space."""
    place = len(text) - 1
    while (place := text.rfind("\n", 0, place)) >= 0:
        if not text[place + 1].isspace():
            return place + 1
    space = text.rfind(" ")
    return space if space > 0 else len(text)


def first_not_utf8(file: Path) -> str:
    """The place and the byte, in a file that has one."""
    with file.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                return not_utf8(f"{file}:{number}", line, error)
    return f"{file}: is not UTF-8"


def not_utf8(place: str, line: bytes, error: UnicodeDecodeError) -> str:
    column = len(line[: error.start].decode()) + 1
    return f"{place}:{column}: byte 0x{line[error.start]:02x} is not UTF-8 ({error.reason})"


def json_lines(file: Path, bad: BadLines) -> Iterator[Record]:
    for number, line in numbered_lines(file):
        record = bad.attempt(parse_line, line, f"{file}:{number}")
        if record is not None:
            yield record


def numbered_lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, from 1."""
    try:
        with file.open("rb") as stream:
            refuse_text(file, stream.peek(64)[:64])
            number = 0
            while line := stream.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(line) > MAX_LINE_BYTES:
                    raise InputError(
                        f"{file}:{number}: has more than {MAX_LINE_BYTES:,} bytes; must be JSON, an object a line"
                    )
                line = (line.removeprefix(codecs.BOM_UTF8) if number == 1 else line).rstrip()
                if line:
                    yield number, line
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {error.strerror}") from error


def parse_line(line: bytes, place: str) -> Record:
    try:
        value = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise InputError(not_utf8(place, line, error)) from None
    except json.JSONDecodeError as error:
        raise InputError(f"{place}:{error.colno}: not JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, lists in lists
        raise InputError(f"{place}: not JSON that is read: {first_line(error)}") from None
    if SURROGATE_ESCAPE.search(line) and SURROGATE.search(json.dumps(value, ensure_ascii=False)):
        raise InputError(f"{place}: holds half of a surrogate pair, as \\ud83d alone, which is no text")
    return record_of(value, place)


READERS: dict[str, Callable[[Path, BadLines], Iterator[Record]]] = {
    ".txt": text_file,
    ".jsonl": json_lines,
    ".parquet": parquet,
}
SUFFIXES = (*READERS, *TOKEN_SUFFIXES)
