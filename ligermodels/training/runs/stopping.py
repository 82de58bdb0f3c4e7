"""Being told to stop: SIGTERM, Ctrl-C and a closed terminal (SIGHUP) are taken note of, so that a run saves and leaves
after the step it is in.

torchrun passes each on to every rank, and kills 30 seconds later; a scheduler may tell one rank alone. So the note is
this rank's, and ranks add theirs up. torchrun also tells those that are left when one is lost: they wait for it inside
a library, where Python's handlers do not run, and would end unheard.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import FrameType

from ligermodels.distributed import is_first, rank, under_torchrun

PATIENCE = 20  # seconds that a rank may spend in one call once it has been told to stop: torchrun kills after 30
OVER = 0  # no signal has this number


@dataclass
class Stop:
    """Whether this rank has been told to stop."""

    requested: bool = False


@contextmanager
def signals() -> Iterator[Stop]:
    """Takes note of SIGTERM, SIGINT and SIGHUP, in the main thread; a second SIGINT ends the process at once.

    SIGHUP stays ignored where it is, as under nohup. One of several ranks also ends, with status 1, when it then waits
    for others longer than PATIENCE.
    """
    stop, awake = Stop(), threading.Event()
    terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]

    def note(number: int, frame: FrameType | None) -> None:
        awake.set()
        if stop.requested and number == signal.SIGTERM:
            return
        stop.requested = True
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # the system's own, which ends a wait inside a library too
        if number == signal.SIGHUP:
            silence(terminals)
        if is_first():
            again = "; Ctrl-C again leaves at once" if number == signal.SIGINT else ""
            os.write(2, f"\n{signal.Signals(number).name}: stopping after this step{again}\n".encode())

    noted = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        noted.append(signal.SIGHUP)
    before = {number: signal.signal(number, note) for number in noted}
    try:
        with ending_when_stuck(noted, awake) if under_torchrun() else nullcontext():
            yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def ending_when_stuck(noted: list[signal.Signals], awake: threading.Event) -> Iterator[None]:
    """From the first signal on, a thread sends SIGTERM to the main one again and again, whose handler must set `awake`.
    Where it does not within PATIENCE, what the main thread waits for will not come, and the process ends."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    before, main, over = signal.set_wakeup_fd(write), threading.get_ident(), threading.Event()

    def watch() -> None:
        while os.read(read, 1)[0] not in (*noted, OVER):  # written without the main thread
            pass
        while not over.wait(1):
            awake.clear()
            signal.pthread_kill(main, signal.SIGTERM)
            if not awake.wait(PATIENCE):
                lost = f"still waiting for other ranks {PATIENCE} s later: one of them is lost"
                remedy = "--resume goes on from the last checkpoint"
                os.write(2, f"rank {rank()}: told to stop, and {lost}; {remedy}\n".encode())
                os._exit(1)  # a wait inside a library can be left in no other way

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        signal.set_wakeup_fd(before)
        os.write(write, bytes([OVER]))
        thread.join()
        os.close(read)
        os.close(write)


def silence(descriptors: list[int]) -> None:
    """What is written to a terminal that is gone is an error, of which the run would die before it has saved."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in descriptors:
        os.dup2(nowhere, descriptor)
    os.close(nowhere)
