"""Checks that every error for an unusable folder is one readable line, raised in little memory.

Time is measured by benchmarks/refusals.py.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import ligermodels
from ligermodels.errors import MAX_MESSAGE_CHARACTERS, InputError

MIB = 256  # for a file of the maximum size


def refusal_of(folder: Path, **options: Any) -> str:
    """The message of the error that `ligermodels.load` raises for the folder, after the checks common to all."""
    with limited_memory(MIB), pytest.raises(InputError) as caught:
        ligermodels.load(folder, **options)
    message = str(caught.value)
    assert message.isprintable() and len(message) <= 2 * MAX_MESSAGE_CHARACTERS, message
    return message


@contextmanager
def limited_memory(mib: float) -> Iterator[None]:
    """Fails if the peak of memory in the body is more than so much above that at the start."""
    before = reset_peak()
    yield
    grown = peak() - before
    assert grown <= mib, f"{grown:.0f} MiB of {mib}"


def reset_peak() -> float:
    """Resets the peak that `peak` returns; returns the memory in use, in MiB."""
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def peak() -> float:
    """The peak of resident memory since `reset_peak`, in MiB."""
    return status("VmHWM")


def status(field: str) -> float:
    """A field of /proc/self/status, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))
