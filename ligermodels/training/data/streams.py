"""Files as streams of bytes and of text, decompressed where their names end in .gz or .zst.

Text is UTF-8; a byte order mark at its beginning is not text. What is damaged or cut off is refused where reading comes
to it. Knows no records.
"""

import gzip
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BufferedReader, TextIOWrapper
from pathlib import Path
from typing import BinaryIO, TextIO

from ligermodels.errors import InputError, first_line
from ligermodels.training.data.progress import Progress
from ligermodels.training.packages import import_package
from ligermodels.weights.files import refuse_text

HEAD_BYTES = 64


def gunzip(raw: BinaryIO, file: Path) -> BufferedReader:
    return BufferedReader(gzip.GzipFile(fileobj=raw))


def unzstd(raw: BinaryIO, file: Path) -> BufferedReader:
    """pyarrow's, which goes on from frame to frame and tells when the last is cut off."""
    return BufferedReader(import_package("pyarrow", str(file)).CompressedInputStream(raw, "zstd"))


DECOMPRESS: dict[str, Callable[[BinaryIO, Path], BufferedReader]] = {".gz": gunzip, ".zst": unzstd}


@contextmanager
def opened(file: Path, progress: Progress) -> Iterator[BufferedReader]:
    """A file's content. Raises InputError where it cannot be read, now or within the context."""
    decompress = DECOMPRESS.get(file.suffix.lower())
    try:
        with file.open("rb") as raw:
            progress.follow(raw.tell)
            if decompress is None:
                yield raw
                return
            refuse_no_data(file, raw)
            with decompress(raw, file) as stream:
                yield stream
    except (OSError, EOFError, zlib.error) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise InputError(f"{file}: cannot be read: {error.strerror}") from error
        raise InputError(f"{file}: damaged or cut off: {first_line(error)}; bring a whole one") from error


def refuse_no_data(file: Path, stream: BufferedReader) -> None:
    """Where there is a Git LFS pointer or a web page in place of what is neither."""
    refuse_text(file, stream.peek(HEAD_BYTES)[:HEAD_BYTES])


@contextmanager
def opened_text(file: Path, progress: Progress) -> Iterator[TextIO]:
    """A file's text, whose lines end in \\n alone. Raises InputError as `opened`, and for what is not UTF-8."""
    try:
        with opened(file, progress) as stream:
            yield TextIOWrapper(stream, encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise InputError(f"{first_not_utf8(file, progress)}; convert the file") from None


def first_not_utf8(file: Path, progress: Progress) -> str:
    """The place and the byte, in a file that has one."""
    with opened(file, progress) as stream:
        for number, line in enumerate(stream, 1):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                return not_utf8(f"{file}:{number}", line, error)
    return f"{file}: is not UTF-8"


def not_utf8(place: str, line: bytes, error: UnicodeDecodeError) -> str:
    column = len(line[: error.start].decode()) + 1
    return f"{place}:{column}: byte 0x{line[error.start]:02x} is not UTF-8 ({error.reason})"
