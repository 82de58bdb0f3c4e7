"""Opens data files as byte or text streams, decompresses those that end in .gz or .zst, and shows the progress.

Text is UTF-8; a byte order mark at the start of a file is dropped. A damaged or truncated file raises InputError when
reading reaches the damage. The progress is a bar on a terminal, otherwise a line from time to time. Only the first rank
prints.
"""

import codecs
import gzip
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from io import BufferedReader, TextIOWrapper
from pathlib import Path
from typing import BinaryIO, Self, TextIO, TypeVar

from tqdm import tqdm

from ligermodels.distributed import is_first
from ligermodels.errors import InputError, first_line, print_to_stderr
from ligermodels.lazy_imports import import_package
from ligermodels.units import byte_size, duration
from ligermodels.weights.reading import refuse_irregular, refuse_text

SILENT_SECONDS = 3.0  # before anything is shown
POLL_SECONDS = 0.2  # between two reads of the position
LINE_SECONDS = 60.0  # between two lines
Item = TypeVar("Item")
HEAD_BYTES = 64
REREAD_BYTES = 2**20


def print_status(line: str) -> None:
    if is_first():
        print_to_stderr(line)


class ReadingProgress:
    """A context manager that shows how many bytes have been read. total: bytes to read, None if not known."""

    def __init__(self, title: str, total: int | None) -> None:
        self.title, self.total = title, total
        self.started = time.monotonic()
        self.next_line = self.started + SILENT_SECONDS
        self.has_printed = False
        self.finished_bytes = 0
        self.position: Callable[[], int] | None = None
        hidden = not is_first() or not sys.stderr.isatty()
        self.bar = tqdm(
            desc=title, total=total, unit="B", unit_scale=True, delay=SILENT_SECONDS, disable=hidden, leave=False
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.bar.close()
        if self.has_printed and error is None:
            print_status(f"{self.title}: done in {duration(time.monotonic() - self.started)}")

    def follow(self, position: Callable[[], int]) -> None:
        """Follows the current file. position: returns how many of its bytes have been read."""
        self.position = position

    def finish(self, size: int) -> None:
        """Marks the current file, of `size` bytes, as read."""
        self.finished_bytes, self.position = self.finished_bytes + size, None

    def track(self, items: Iterable[Item]) -> Iterator[Item]:
        """Yields the items, which are read from the files that are followed, and shows the progress."""
        next_poll = self.started
        for item in items:
            if time.monotonic() >= next_poll:
                next_poll = time.monotonic() + POLL_SECONDS
                self.show(self.finished_bytes + (self.position() if self.position else 0))
            yield item

    def show(self, done: int) -> None:
        """Shows the progress. done: bytes read of all files."""
        if not self.bar.disable:
            self.bar.update(done - self.bar.n)
            return
        now = time.monotonic()
        if now >= self.next_line:
            self.next_line, self.has_printed = now + LINE_SECONDS, True
            print_status(f"{self.title}: {self.status(done, now - self.started)}")

    def status(self, done: int, seconds: float) -> str:
        """Returns a text such as: 12% of 9.3 GB, 4.1 MB/s, ETA 38:10."""
        if not self.total:
            return f"{duration(seconds)} so far"
        speed = f"{byte_size(round(done / seconds))}/s" if seconds else "starting"
        eta = f", ETA {duration((self.total - done) / done * seconds)}" if done else ""
        return f"{done / self.total:.0%} of {byte_size(self.total)}, {speed}{eta}"


# pyarrow's decompressor reads all frames of a file and detects a truncated last frame.
DECOMPRESSORS: dict[str, Callable[[BinaryIO, Path], BufferedReader]] = {
    ".gz": lambda raw, _: BufferedReader(gzip.GzipFile(fileobj=raw)),
    ".zst": lambda raw, file: BufferedReader(import_package("pyarrow", str(file)).CompressedInputStream(raw, "zstd")),
}


@contextmanager
def open_stream(file: Path, progress: ReadingProgress) -> Iterator[BufferedReader]:
    """Yields the decompressed bytes of a file.

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
    """Yields the text of a file. newline: as in `open`; None converts every line ending to \\n, "" keeps them.

    Raises InputError as `open_stream` does, and for bytes that are not UTF-8.
    """
    try:
        with open_stream(file, progress) as stream:
            yield TextIOWrapper(stream, encoding="utf-8-sig", newline=newline)
    except UnicodeDecodeError:
        raise InputError(find_invalid_utf8(file, progress)) from None


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
                return f"{file}: is not UTF-8; convert the file to UTF-8"


def describe_invalid_utf8(place: str, error: UnicodeDecodeError) -> str:
    return f"{place}: byte 0x{error.object[error.start]:02x} is not UTF-8 ({error.reason}); convert the file to UTF-8"
