"""What every refusal of a folder has in common: one line that can be read, in little time and memory."""

import time
from pathlib import Path

import pytest

import ligermodels
from ligermodels.errors import LONGEST, InputError

SECONDS = 1.0  # of this process's CPUs: the wall clock also counts what else the machine does
MIB = 64  # more than before, at the worst moment


def refusal_of(folder: Path, seconds: float = SECONDS, mib: float = MIB, **options) -> str:
    """The message with which `ligermodels.load` refuses the folder, after checking what all of them must be."""
    before, started = forget_peak(), time.process_time()
    with pytest.raises(InputError) as caught:
        ligermodels.load(folder, **options)
    spent, grown = time.process_time() - started, peak() - before
    message = str(caught.value)
    assert message.isprintable() and len(message) <= 2 * LONGEST, message
    assert spent <= seconds and grown <= mib, f"{spent:.2f} s of {seconds}, {grown:.0f} MiB of {mib}: {message}"
    return message


def forget_peak() -> float:
    """MiB of memory in use; `peak` counts from here on."""
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def peak() -> float:
    return status("VmHWM")


def status(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))
