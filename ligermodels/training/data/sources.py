"""From what --data names to records: files of text, JSON and parquet, folders and patterns of them, the Hub.

A text file is one document, in which every kind of line end is read as \\n. Nothing is read whole: a long text file
comes in pieces, JSON (`json_files.py`) by lines or elements, tables (`tables.py`) batch by batch. Knows no tokens.
"""

import glob
import io
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TextIO

from ligermodels.errors import InputError
from ligermodels.training.data.json_files import json_file
from ligermodels.training.data.progress import Progress
from ligermodels.training.data.records import BadLines, Conversation, Record, Text
from ligermodels.training.data.streams import DECOMPRESS, opened_text
from ligermodels.training.data.tables import HUB, hub_dataset, parquet

WITHOUT_FILES = ("stories", "chats", "random")  # of embedded.py
TOKEN_SUFFIXES = (".bin", ".npy")
PIECE_CHARACTERS = 2**18
LONG_CHARACTERS = 2**22  # of a text that comes in pieces
CONTEXT_CHARACTERS = 64  # of the text before a piece: more than a token or two


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

    Raises InputError where there are none, and for a file of another kind that is named or matched. What a .json says
    of a file of tokens beside it is no data.
    """
    path = Path(name)
    if path.is_dir():
        found = [file for file in path.rglob("*") if suffix_of(file) and not hidden(file.relative_to(path))]
    else:
        found = [Path(match) for match in glob.glob(name, recursive=True)]
    several = sorted(file for file in found if file.is_file() and not describes_tokens(file))
    files = [path] if path.is_file() else several
    if not files:
        what = "no file in this folder is" if path.is_dir() else "there is no such file, folder or pattern of files;"
        raise InputError(f"--data {name}: {what} {KINDS}; also: {', '.join(WITHOUT_FILES)}, {HUB}NAME")
    for file in files:
        if not suffix_of(file):
            raise InputError(f"{file}: is not read as data; must be {KINDS}")
    return files


def suffix_of(file: Path) -> str:
    """The kind of file, of those that are read, in whatever case; else empty."""
    return next((suffix for suffix in SUFFIXES if file.name.lower().endswith(suffix)), "")


def describes_tokens(file: Path) -> bool:
    return file.suffix == ".json" and any(file.with_suffix(suffix).exists() for suffix in TOKEN_SUFFIXES)


def hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def read(name: str, bad: BadLines, progress: Progress) -> Iterator[Record]:
    """The records of a file, folder, pattern, or hub:name[:configuration][:split]; an empty text is none.

    bad: counts what cannot be used. Raises InputError naming place and field, and where there is not one record.
    """
    records = hub_dataset(name, bad, progress) if name.startswith(HUB) else read_files(files_of(name), bad, progress)
    empty = True
    for record in records:
        if isinstance(record, Conversation) or any(record.texts):
            empty = False
            yield from in_pieces(record) if isinstance(record, Text) else [record]
    if empty:
        skipped = f"; bad lines skipped: {bad.skipped}" if bad.skipped else ""
        raise InputError(f"--data {name}: holds no text and no conversation{skipped}")


def in_pieces(text: Text) -> Iterator[Text]:
    """Itself, unless it is very long: to tokenise takes a hundred times the memory of the text."""
    if len(text.text) <= LONG_CHARACTERS:
        yield text
    else:
        yield from (piece._replace(place=text.place) for piece in pieces(io.StringIO(text.text)))


def read_files(files: Sequence[Path], bad: BadLines, progress: Progress) -> Iterator[Record]:
    for file in files:
        if suffix_of(file) in TOKEN_SUFFIXES:
            raise InputError(f"{file}: holds tokens; text was expected")
        yield from READERS[suffix_of(file)](file, bad, progress)
        progress.finish(file.stat().st_size)


def text_file(file: Path, bad: BadLines, progress: Progress) -> Iterator[Record]:
    """Pieces of the one document, cut where a line begins. No limit skips what is not UTF-8."""
    line = 1
    with opened_text(file, progress) as stream:
        for piece in pieces(stream):
            yield piece._replace(place=f"{file}:{line}")
            line += piece.text.count("\n")


def pieces(stream: TextIO) -> Iterator[Text]:
    """Of one document, cut where a line begins; without their places."""
    before, text = "", stream.read(PIECE_CHARACTERS)
    while following := stream.read(PIECE_CHARACTERS):
        cut = last_seam(text)
        yield Text(text[:cut], "", before, last=False)
        before = (before + text[:cut])[-CONTEXT_CHARACTERS:]
        text = text[cut:] + following
    yield Text(text, "", before)


def last_seam(text: str) -> int:
    """The last place where tokens surely meet: a line's first character, unless it is space; else before a space."""
    place = len(text) - 1
    while (place := text.rfind("\n", 0, place)) >= 0:
        if not text[place + 1].isspace():
            return place + 1
    space = text.rfind(" ")
    return space if space > 0 else len(text)


STREAMED: dict[str, Callable[[Path, BadLines, Progress], Iterator[Record]]] = {
    ".txt": text_file,
    ".jsonl": json_file,
    ".json": json_file,
}
COMPRESSED = {f"{kind}{packed}": reader for kind, reader in STREAMED.items() for packed in DECOMPRESS}
READERS = STREAMED | COMPRESSED | {".parquet": parquet}
SUFFIXES = (*READERS, *TOKEN_SUFFIXES)
KINDS = f"{', '.join(STREAMED)} (also with {' or '.join(DECOMPRESS)}), .parquet, {' or '.join(TOKEN_SUFFIXES)}"
