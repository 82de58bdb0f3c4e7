"""Progress of reading data: a bar on a terminal, otherwise a line from time to time.

Only the first rank prints. This module knows nothing about files or records.
"""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Self, TypeVar

from tqdm import tqdm

from ligermodels.distributed import is_first
from ligermodels.errors import print_to_stderr
from ligermodels.units import byte_size, duration

SILENT_SECONDS = 3.0  # before anything is shown
POLL_SECONDS = 0.2  # between two reads of the position
LINE_SECONDS = 60.0  # between two lines
Item = TypeVar("Item")


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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.close()
        if self.has_printed and error is None:
            print_status(f"{self.title}: done in {duration(time.monotonic() - self.started)}")

    def follow(self, position: Callable[[], int]) -> None:
        """position: returns how many bytes of the current file have been read."""
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
        """done: bytes read of all files."""
        if not self.bar.disable:
            self.bar.update(done - self.bar.n)
            return
        now = time.monotonic()
        if now >= self.next_line:
            self.next_line, self.has_printed = now + LINE_SECONDS, True
            print_status(f"{self.title}: {self.status(done, now - self.started)}")

    def status(self, done: int, seconds: float) -> str:
        """For example: 12% of 9.3 GB, 4.1 MB/s, ETA 38:10."""
        if not self.total:
            return f"{duration(seconds)} so far"
        speed = f"{byte_size(round(done / seconds))}/s" if seconds else "starting"
        eta = f", ETA {duration((self.total - done) / done * seconds)}" if done else ""
        return f"{done / self.total:.0%} of {byte_size(self.total)}, {speed}{eta}"
