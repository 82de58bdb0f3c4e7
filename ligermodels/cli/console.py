"""What commands print, by --json and --quiet: text for people, records for programs, or the result alone.

A command prints text with `print`, and notes beside its result to stderr. `Console` sends both where the flags say.
"""

import argparse
import io
import json
import os
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from typing import Any, TextIO

import ligermodels
from ligermodels.errors import print_to_stderr, printable, silence_closed
from ligermodels.units import counted

PACKAGE = os.path.join(os.path.dirname(ligermodels.__file__), "")
WARNING = "warning: "  # begins a line of a run that --quiet does not leave out


def add_output_flags(parser: argparse.ArgumentParser) -> None:
    """Adds --json and --quiet, which `directed` reads."""
    parser.add_argument("--json", action="store_true", help="print a JSON object a line, and the text to stderr")
    parser.add_argument(
        "--quiet", action="store_true", help="print the result and warnings alone; with --json no text at all"
    )


class Console:
    """Where a command prints. records: the stream of --json, None without it. quiet: whether --quiet is given."""

    def __init__(self, records: TextIO | None, quiet: bool) -> None:
        self.records, self.quiet = records, quiet

    def record(self, record: Mapping[str, Any]) -> None:
        """Prints a JSON object with --json, in ASCII. Work goes on where its reader has left."""
        if self.records is not None:
            try:
                print(json.dumps(record), file=self.records, flush=True)
            except BrokenPipeError:
                silence_closed(self.records)

    def note(self, line: str) -> None:
        """Prints a line beside the result to stderr, unless --quiet is given."""
        if not self.quiet:
            print_to_stderr(printable(line))

    @contextmanager
    def progress(self) -> Iterator[None]:
        """Surrounds what prints more than a result: with --quiet only its warnings are printed."""
        with redirect_stdout(WarningsAlone() if self.quiet else sys.stdout):
            yield


@contextmanager
def directed(args: argparse.Namespace) -> Iterator[Console]:
    """The console of a command with these arguments. With --json standard output takes records alone."""
    quiet, stdout = getattr(args, "quiet", False), sys.stdout
    if not getattr(args, "json", False):
        yield Console(None, quiet)
        return
    with redirect_stdout(WarningsAlone() if quiet else sys.stderr):
        yield Console(stdout, quiet)


@contextmanager
def warnings_in_a_line() -> Iterator[None]:
    """Has this package's warnings for users printed as one line each, without the place in the code that warns. Those
    of libraries keep it."""
    original = warnings.formatwarning

    def formatted(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        if issubclass(category, UserWarning) and filename.startswith(PACKAGE):
            return printable(f"ligermodels: warning: {message}") + "\n"
        return original(message, category, filename, lineno, line)

    warnings.formatwarning = formatted
    try:
        yield
    finally:
        warnings.formatwarning = original


class WarningsAlone(io.TextIOBase):
    """Takes the place of standard output: lines that are warnings go to stderr, all others nowhere."""

    def write(self, text: str) -> int:
        for line in text.splitlines():
            if line.startswith(WARNING):
                print_to_stderr(line)
        return len(text)


class TokenCount:
    """Counts new tokens and the time they take."""

    def __init__(self) -> None:
        self.started, self.tokens = time.monotonic(), 0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def __str__(self) -> str:
        speed = self.tokens / max(self.seconds, 1e-9)
        return f"{counted(self.tokens, 'new token')} in {self.seconds:.1f} s, {speed:,.0f} tokens/s"
