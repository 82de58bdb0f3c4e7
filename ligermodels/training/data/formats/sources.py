"""Sources: what --data names (files, folders, glob patterns, data sets), read as records.

A text file is one document; every kind of line ending is read as \\n. No file is read into memory as a whole: a long
text file is split into pieces, JSON is read by lines or array elements, CSV by rows, and tables are read in batches.
This module knows nothing about tokens.
"""

import functools
import glob
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TextIO, TypeAlias

from ligermodels.errors import InputError
from ligermodels.training.data.formats.csv_files import read_csv, read_tsv
from ligermodels.training.data.formats.hub_datasets import HUB_PREFIX, read_hub_dataset
from ligermodels.training.data.formats.image_paths import with_image_paths
from ligermodels.training.data.formats.json_files import read_json_file
from ligermodels.training.data.formats.parquet import read_parquet
from ligermodels.training.data.formats.progress import ReadingProgress
from ligermodels.training.data.formats.record_formats import KNOWN_FIELDS, RecordFormats
from ligermodels.training.data.formats.records import BadLines, Conversation, GroupRecord, Record, Text
from ligermodels.training.data.formats.saved_datasets import read_arrow, saved_dataset_files
from ligermodels.training.data.formats.specs import BUILT_IN_SOURCES
from ligermodels.training.data.formats.streams import DECOMPRESSORS, open_text_stream

TOKEN_SUFFIXES = (".bin", ".npy")
PIECE_CHARACTERS = 2**18  # of one piece of a long text
LONG_CHARACTERS = 2**22  # a longer text in a record is split into pieces
CONTEXT_CHARACTERS = 64  # of the text before a piece; more than a token or two


def find_files(name: str) -> list[Path]:
    """The files that a name stands for, in sorted order.

    name: a file; a folder, whose files with a known suffix are found recursively; a folder of save_to_disk, with :SPLIT
    or without; or a glob pattern. A .json file that describes a token file beside it is skipped. Raises InputError if
    no file is found, and for a named or matched file with an unknown suffix.
    """
    saved = saved_dataset_files(name)
    if saved is not None:
        return saved
    path = Path(name)
    if path.is_dir():
        found = [file for file in path.rglob("*") if suffix_of(file) and not is_hidden(file.relative_to(path))]
    else:
        found = [Path(match) for match in glob.glob(name, recursive=True)]
    matches = sorted(file for file in found if file.is_file() and not describes_tokens(file))
    files = [path] if path.is_file() else matches
    if not files:
        problem = "this folder has no data file" if path.is_dir() else "no file, folder or glob pattern matches"
        others = f"{', '.join(BUILT_IN_SOURCES)} or {HUB_PREFIX}NAME"
        raise InputError(f"--data {name}: {problem}; data files are {FILE_KINDS}; or give {others}")
    for file in files:
        if not suffix_of(file):
            raise InputError(f"{file}: not a data file; must be {FILE_KINDS}")
    return files


def suffix_of(file: Path) -> str:
    """The known suffix of a file, in lower case; empty if the file is of no known kind."""
    return next((suffix for suffix in SUFFIXES if file.name.lower().endswith(suffix)), "")


def describes_tokens(file: Path) -> bool:
    """Whether this is the .json file that belongs to a token file."""
    return file.suffix == ".json" and any(file.with_suffix(suffix).exists() for suffix in TOKEN_SUFFIXES)


def is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def read_records(
    name: str, bad_lines: BadLines, progress: ReadingProgress, fields: RecordFormats = KNOWN_FIELDS
) -> Iterator[Record]:
    """The records of a file, folder[:split], glob pattern, or hub:name[:configuration][:split].

    Empty texts are dropped. fields: those that the user names. bad_lines: counts records that cannot be used. Raises
    InputError naming the place and the field, and if the source has no record at all.
    """
    if name.startswith(HUB_PREFIX):
        read = read_hub_dataset(name, fields, bad_lines, progress)
        records = attempt_all(read, lambda record: with_image_paths(record, None), bad_lines)
    else:
        records = read_files(find_files(name), fields, bad_lines, progress)
    empty = True
    for record in records:
        if isinstance(record, (Conversation, GroupRecord)) or any(record.texts):
            empty = False
            yield from split_long_text(record) if isinstance(record, Text) else [record]
    if empty:
        skipped = f"; bad lines skipped: {bad_lines.skipped}" if bad_lines.skipped else ""
        raise InputError(f"--data {name}: contains no text and no conversation{skipped}")


def split_long_text(text: Text) -> Iterator[Text]:
    """The text itself, or its pieces if it is very long: tokenising needs a hundred times the memory of the text."""
    if len(text.text) <= LONG_CHARACTERS:
        yield text
    else:
        yield from (piece._replace(place=text.place) for piece in text_pieces(io.StringIO(text.text)))


def read_files(
    files: Sequence[Path], fields: RecordFormats, bad_lines: BadLines, progress: ReadingProgress
) -> Iterator[Record]:
    for file in files:
        if suffix_of(file) in TOKEN_SUFFIXES:
            raise InputError(f"{file}: contains token ids, but text is expected; do not mix the two in one source")
        records = READERS[suffix_of(file)](file, fields, bad_lines, progress)
        yield from attempt_all(records, functools.partial(with_image_paths, folder=file.parent), bad_lines)
        progress.finish(file.stat().st_size)


def attempt_all(records: Iterable[Record], change: Callable[[Record], Record], bad_lines: BadLines) -> Iterator[Record]:
    """The changed records, without those for which `change` raises InputError, as far as they may be skipped."""
    for record in records:
        changed = bad_lines.attempt(change, record)
        if changed is not None:
            yield changed


def read_text_file(
    file: Path, fields: RecordFormats, bad_lines: BadLines, progress: ReadingProgress
) -> Iterator[Record]:
    """The pieces of one document. Bytes that are not UTF-8 are always an error; `bad_lines` does not apply to them."""
    line = 1
    with open_text_stream(file, progress) as stream:
        for piece in text_pieces(stream):
            yield piece._replace(place=f"{file}:{line}")
            line += piece.text.count("\n")


def text_pieces(stream: TextIO) -> Iterator[Text]:
    """Splits one document into pieces, if possible at line starts. Their `place` is left empty."""
    before, text = "", stream.read(PIECE_CHARACTERS)
    while following := stream.read(PIECE_CHARACTERS):
        end = last_split_point(text)
        yield Text(text[:end], "", before, last=False)
        before = (before + text[:end])[-CONTEXT_CHARACTERS:]
        text = text[end:] + following
    yield Text(text, "", before)


def last_split_point(text: str) -> int:
    """The last place that is certainly between two tokens.

    This is the first character of a line, unless that character is whitespace; if there is none, the last space.
    """
    place = len(text) - 1
    while (place := text.rfind("\n", 0, place)) >= 0:
        if not text[place + 1].isspace():
            return place + 1
    space = text.rfind(" ")
    return space if space > 0 else len(text)


Reader: TypeAlias = Callable[[Path, RecordFormats, BadLines, ReadingProgress], Iterator[Record]]
STREAMED: dict[str, Reader] = {
    ".txt": read_text_file,
    ".jsonl": read_json_file,
    ".json": read_json_file,
    ".csv": read_csv,
    ".tsv": read_tsv,
}
COMPRESSED = {f"{kind}{suffix}": reader for kind, reader in STREAMED.items() for suffix in DECOMPRESSORS}
TABLES: dict[str, Reader] = {".parquet": read_parquet, ".arrow": read_arrow}
READERS = STREAMED | COMPRESSED | TABLES
NO_RECORD_SUFFIXES = (*TOKEN_SUFFIXES, *(suffix for suffix, reader in READERS.items() if reader is read_text_file))
SUFFIXES = (*READERS, *TOKEN_SUFFIXES)
FILE_KINDS = (
    f"{', '.join(STREAMED)} (also with {' or '.join(DECOMPRESSORS)}), "
    f"{', '.join(TABLES)}, {' or '.join(TOKEN_SUFFIXES)}"
)
