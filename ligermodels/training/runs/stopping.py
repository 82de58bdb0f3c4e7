"""Being told to stop: SIGTERM, Ctrl-C and a closed terminal (SIGHUP) are taken note of, so that a run saves and leaves
after the step it is in.

torchrun passes each on to every rank, and kills 30 seconds later; a scheduler may tell one rank alone. So the note is
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
    """Takes note of SIGTERM, SIGINT and SIGHUP, in the main thread; a second SIGINT ends the process at once.

    SIGHUP stays ignored where it is, as under nohup.
    """
    stop = Stop()
    terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]

    def note(number: int, frame: FrameType | None) -> None:
        stop.requested = True
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # the system's own, which ends a wait inside a library too
        if number == signal.SIGHUP:
            silence(terminals)
        if os.environ.get("RANK", "0") == "0":
            again = "; Ctrl-C again leaves at once" if number == signal.SIGINT else ""
            os.write(2, f"\n{signal.Signals(number).name}: stopping after this step{again}\n".encode())

    noted = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        noted.append(signal.SIGHUP)
    before = {number: signal.signal(number, note) for number in noted}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def silence(descriptors: list[int]) -> None:
    """What is written to a terminal that is gone is an error, of which the run would die before it has saved."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in descriptors:
        os.dup2(nowhere, descriptor)
    os.close(nowhere)
