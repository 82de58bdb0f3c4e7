"""Being told to stop: SIGTERM and Ctrl-C are taken note of, so that a run saves and leaves after the step it is in.

torchrun passes either on to every rank, and kills 30 seconds later; a scheduler may tell one rank alone. So the note is
this rank's, and ranks add theirs up.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


@dataclass
class Stop:
    """Whether this rank has been told to stop."""

    requested: bool = False


@contextmanager
def signals() -> Iterator[Stop]:
    """Takes note of SIGTERM and SIGINT, in the main thread; a second SIGINT ends the process at once."""
    stop = Stop()

    def note(number: int, frame: FrameType | None) -> None:
        stop.requested = True
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # the system's own, which ends a wait inside a library too
        if os.environ.get("RANK", "0") == "0":
            again = "; Ctrl-C again leaves at once" if number == signal.SIGINT else ""
            os.write(2, f"\n{signal.Signals(number).name}: stopping after this step{again}\n".encode())

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
