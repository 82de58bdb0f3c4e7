"""Keeps what the `tokenizers` library prints when it panics off standard error: the exception says the same.

Rust prints a panic to file descriptor 2, with a backtrace, before it becomes a Python exception, and has no switch for
it. While the library runs, the descriptor therefore leads to a file in memory. After each call everything in it is
written to standard error, except the lines of that panic: other threads may have printed meanwhile. Must not know
tokenizers.
"""

import os
import re
import threading
from contextlib import suppress
from types import TracebackType

STDERR = 2
KEPT_BYTES = 2**20  # of the file; a larger one is replaced
BEGINNING = b"thread '"
PANIC = rb"(?m)^\n?thread '.*panicked at .*:\n%b\n(?:stack backtrace:\n(?: .*\n)*)?(?:note: .*\n)?"


class PanicFilter:
    """A context manager around each call of the library; calls of several threads may overlap.

    Does nothing where standard error is closed.
    """

    def __init__(self) -> None:
        self.reset()
        os.register_at_fork(after_in_child=self.forget)

    def reset(self) -> None:
        self.lock = threading.Lock()
        self.calls = 0  # that run now
        self.stderr = -1  # a descriptor of standard error, while calls run
        self.file = -1  # the file in memory
        self.position = 0  # the bytes of the file that have been read
        self.text = b""  # what has been read of it, and not been written yet
        self.panics: set[bytes] = set()  # the messages of the panics of these calls

    def __enter__(self) -> None:
        with self.lock:
            if self.calls == 0:
                self.divert()
            self.calls += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self.lock:
            self.calls -= 1
            if kind is not None and kind.__name__ == "PanicException":
                self.panics.add(str(error).encode(errors="replace"))
            if self.stderr < 0:
                return
            if self.calls == 0:
                os.dup2(self.stderr, STDERR)
            self.write()
            if self.calls == 0:
                self.end()

    def divert(self) -> None:
        with suppress(OSError):  # it is closed
            self.stderr = os.dup(STDERR)
            if self.file < 0:
                self.file, self.position = os.memfd_create("standard error"), 0
            os.dup2(self.file, STDERR)

    def write(self) -> None:
        """Writes what has been printed, without the known panics. What may belong to that of another call waits."""
        while block := os.pread(self.file, 2**16, self.position):
            self.position += len(block)
            self.text += block
        for message in self.panics:
            self.text = re.sub(PANIC % re.escape(message), b"", self.text)
        begins = self.text.find(BEGINNING) if self.calls else -1
        ready = self.text if begins < 0 else self.text[:begins]
        self.text = self.text[len(ready) :]
        with suppress(OSError):  # nobody can read it
            while ready:
                ready = ready[os.write(self.stderr, ready) :]

    def end(self) -> None:
        os.close(self.stderr)
        self.stderr = -1
        self.panics.clear()
        if self.position > KEPT_BYTES:
            os.close(self.file)
            self.file = -1

    def forget(self) -> None:
        """Called in the child after a fork: the calls and the file are the parent's."""
        if self.stderr >= 0:
            os.dup2(self.stderr, STDERR)
        for descriptor in (self.stderr, self.file):
            if descriptor >= 0:
                os.close(descriptor)
        self.reset()


PANICS = PanicFilter()
