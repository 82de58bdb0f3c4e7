"""How far the reading of data has come: a bar, or a line now and then where there is no terminal.

Of several ranks the first one speaks. Knows neither files nor records.
"""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Self, TypeVar

from tqdm import tqdm

from ligermodels.distributed import is_first
from ligermodels.units import byte_size, duration

SILENT_SECONDS = 3.0  # before anything is shown
SHOWN_SECONDS = 0.2  # from one look at where it is to the next
LINE_SECONDS = 60.0  # from line to line
Item = TypeVar("Item")


def say(line: str) -> None:
    if is_first():
        print(line, file=sys.stderr, flush=True)


class Progress:
    """A context manager. total: bytes to read, where that is known."""

    def __init__(self, title: str, total: int | None) -> None:
        self.title, self.total = title, total
        self.begun = time.monotonic()
        self.due = self.begun + SILENT_SECONDS
        self.said = False
        self.before = 0
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
        if self.said and error is None:
            say(f"{self.title}: done in {duration(time.monotonic() - self.begun)}")

    def follow(self, position: Callable[[], int]) -> None:
        """position: how many bytes have been read of the file that is being read."""
        self.position = position

    def finish(self, size: int) -> None:
        """A file of that size has been read."""
        self.before, self.position = self.before + size, None

    def over(self, items: Iterable[Item]) -> Iterator[Item]:
        """The items, which come of the files that are followed."""
        following = self.begun
        for item in items:
            if time.monotonic() >= following:
                following = time.monotonic() + SHOWN_SECONDS
                self.show(self.before + (self.position() if self.position else 0))
            yield item

    def show(self, done: int) -> None:
        """done: bytes, of all files."""
        if not self.bar.disable:
            self.bar.update(done - self.bar.n)
            return
        now = time.monotonic()
        if now >= self.due:
            self.due, self.said = now + LINE_SECONDS, True
            say(f"{self.title}: {self.status(done, now - self.begun)}")

    def status(self, done: int, seconds: float) -> str:
        """12 % of 9.3 GB, 4.1 MB/s, ETA 38:10."""
        if not self.total:
            return f"{duration(seconds)} so far"
        speed = f"{byte_size(round(done / seconds))}/s" if seconds else "begins"
        left = f", ETA {duration((self.total - done) / done * seconds)}" if done else ""
        return f"{done / self.total:.0%} of {byte_size(self.total)}, {speed}{left}"
