"""What every refusal of a folder has in common: one line that can be read, in little time and memory."""

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import ligermodels
from ligermodels.errors import MAX_MESSAGE_CHARACTERS, InputError

SECONDS, MIB = 1.0, 256  # where a file is as large as they may be


def refusal_of(folder: Path, **options: Any) -> str:
    """The message with which `ligermodels.load` refuses the folder, after checking what all of them must be."""
    with measured(SECONDS, MIB), pytest.raises(InputError) as caught:
        ligermodels.load(folder, **options)
    message = str(caught.value)
    assert message.isprintable() and len(message) <= 2 * MAX_MESSAGE_CHARACTERS, message
    return message


@contextmanager
def measured(seconds: float, mib: float) -> Iterator[None]:
    """Fails where what is done within takes more time or memory. seconds: of this process's CPUs, as the wall clock
    also counts what else the machine does. mib: more than before, at the worst moment."""
    gc.freeze()  # what earlier tests left is not looked through now: a second, where there is much of it
    try:
        before, started = forget_peak(), time.process_time()
        yield
        spent, grown = time.process_time() - started, peak() - before
    finally:
        gc.unfreeze()
    assert spent <= seconds and grown <= mib, f"{spent:.2f} s of {seconds}, {grown:.0f} MiB of {mib}"


def forget_peak() -> float:
    """MiB of memory in use; `peak` counts from here on."""
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def peak() -> float:
    return status("VmHWM")


def status(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))
