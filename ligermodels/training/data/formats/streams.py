"""Opens data files as byte or text streams, and decompresses them if their names end in .gz or .zst.

Text is UTF-8; a byte order mark at the start of a file is dropped. A damaged or truncated file raises InputError when
reading reaches the damage. This module knows nothing about records.
"""

import codecs
import gzip
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BufferedReader, TextIOWrapper
from pathlib import Path
from typing import BinaryIO, TextIO

from ligermodels.errors import InputError, first_line
from ligermodels.optional_packages import import_package
from ligermodels.training.data.formats.progress import ReadingProgress
from ligermodels.weights.reading import refuse_irregular, refuse_text

HEAD_BYTES = 64
REREAD_BYTES = 2**20


def gunzip(raw: BinaryIO, file: Path) -> BufferedReader:
    return BufferedReader(gzip.GzipFile(fileobj=raw))


def unzstd(raw: BinaryIO, file: Path) -> BufferedReader:
    """Uses pyarrow's decompressor: it reads all frames of a file and detects a truncated last frame."""
    return BufferedReader(import_package("pyarrow", str(file)).CompressedInputStream(raw, "zstd"))


DECOMPRESSORS: dict[str, Callable[[BinaryIO, Path], BufferedReader]] = {".gz": gunzip, ".zst": unzstd}


@contextmanager
def open_stream(file: Path, progress: ReadingProgress) -> Iterator[BufferedReader]:
    """The decompressed bytes of a file.

    Raises InputError if the file cannot be opened, or if reading it fails inside the context.
    """
    decompress = DECOMPRESSORS.get(file.suffix.lower())
    refuse_irregular(file)
    try:
        with file.open("rb") as raw:
            progress.follow(raw.tell)
            if decompress is None:
                yield raw
                return
            refuse_placeholder(file, raw)
            with decompress(raw, file) as stream:
                yield stream
    except (OSError, EOFError, zlib.error) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise InputError(f"{file}: cannot be read: {error.strerror}") from error
        raise InputError(f"{file}: damaged or truncated: {first_line(error)}; provide a complete file") from error


def refuse_placeholder(file: Path, stream: BufferedReader) -> None:
    """Raises InputError if the file is a Git LFS pointer or a web page instead of data."""
    refuse_text(file, stream.peek(HEAD_BYTES)[:HEAD_BYTES])


@contextmanager
def open_text_stream(file: Path, progress: ReadingProgress, newline: str | None = None) -> Iterator[TextIO]:
    """The text of a file. newline: as in `open`; None converts every line ending to \\n, "" keeps them.

    Raises InputError as `open_stream` does, and for bytes that are not UTF-8.
    """
    try:
        with open_stream(file, progress) as stream:
            yield TextIOWrapper(stream, encoding="utf-8-sig", newline=newline)
    except UnicodeDecodeError:
        raise InputError(f"{find_invalid_utf8(file, progress)}; convert the file to UTF-8") from None


def find_invalid_utf8(file: Path, progress: ReadingProgress) -> str:
    """Reads a file again, and describes the first byte that is not UTF-8 with its line and column."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    line, column = 1, 1
    with open_stream(file, progress) as stream:
        while True:
            block = stream.read(REREAD_BYTES)
            try:
                valid, found = decoder.decode(block, final=not block), None
            except UnicodeDecodeError as error:
                valid, found = error.object[: error.start].decode(), error
            before, newline, last = valid.rpartition("\n")
            if newline:
                line, column = line + before.count("\n") + 1, 1
            column += len(last)
            if found:
                return describe_invalid_utf8(f"{file}:{line}:{column}", found)
            if not block:
                return f"{file}: is not UTF-8"


def describe_invalid_utf8(place: str, error: UnicodeDecodeError) -> str:
    return f"{place}: byte 0x{error.object[error.start]:02x} is not UTF-8 ({error.reason})"
