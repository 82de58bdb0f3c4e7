"""Checks that every error for an unusable folder is one readable line, raised in little time and memory."""

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import ligermodels
from ligermodels.errors import MAX_MESSAGE_CHARACTERS, InputError

SECONDS, MIB = 1.0, 256  # for a file of the maximum size


def refusal_of(folder: Path, **options: Any) -> str:
    """The message of the error that `ligermodels.load` raises for the folder, after the checks common to all."""
    with limited_to(SECONDS, MIB), pytest.raises(InputError) as caught:
        ligermodels.load(folder, **options)
    message = str(caught.value)
    assert message.isprintable() and len(message) <= 2 * MAX_MESSAGE_CHARACTERS, message
    return message


@contextmanager
def limited_to(seconds: float, mib: float) -> Iterator[None]:
    """Fails if the body takes more time or memory.

    seconds: CPU time of this process; wall-clock time would include other load on the machine.
    mib: peak memory above that at the start.
    """
    gc.freeze()  # garbage collection of what earlier tests left can take a second
    try:
        before, started = reset_peak(), time.process_time()
        yield
        spent, grown = time.process_time() - started, peak() - before
    finally:
        gc.unfreeze()
    assert spent <= seconds and grown <= mib, f"{spent:.2f} s of {seconds}, {grown:.0f} MiB of {mib}"


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
