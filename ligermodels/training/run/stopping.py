"""Signals that stop a run: after SIGTERM, Ctrl-C or a closed terminal (SIGHUP) it finishes its step, saves and exits.
Before its first step there is nothing to save, and it ends at once.

torchrun passes a signal on to every rank and kills them 30 seconds later; a scheduler may signal one rank alone. So
each rank records its own signal, and the ranks sum them up. torchrun also signals the remaining ranks when one is lost:
they then wait for it inside a library, where Python's handlers do not run, and a watcher thread has to end them.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn

from ligermodels.distributed import is_first, rank, under_torchrun

PATIENCE = 20  # seconds that a signalled rank may spend in one library call: torchrun kills it after 30
SIGNALLED = 128  # added to a signal's number, the exit status that a shell reports for it
OVER = 0  # written to the watcher to end it; no signal has this number


@dataclass
class Stop:
    """Says which signal told this rank to stop, the first one; 0 for none. takes_steps: whether the run has a state to
    save, or ends at once."""

    signal: int = 0
    takes_steps: bool = False

    @property
    def requested(self) -> bool:
        return self.signal > 0


@contextmanager
def signals() -> Iterator[Stop]:
    """Records SIGTERM, SIGINT and SIGHUP, in the main thread. A second SIGINT ends the process at once.

    Before the run takes steps, SIGINT raises KeyboardInterrupt, and the others SystemExit with the status of a shell.

    A SIGHUP that is ignored stays ignored, as under nohup. Under torchrun, a signalled rank that waits longer than
    PATIENCE for the others ends with status 1.
    """
    stop, awake = Stop(), threading.Event()
    terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]

    def record(number: int, frame: FrameType | None) -> None:
        awake.set()
        if stop.requested and number == signal.SIGTERM:
            return
        stop.signal = stop.signal or number
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # the default handler also ends a wait inside a library
        if number == signal.SIGHUP:
            redirect_to_devnull(terminals)
        if not stop.takes_steps:
            end_at_once(number)
        if is_first():
            again = "; press Ctrl-C again to exit at once" if number == signal.SIGINT else ""
            tell(f"\n{signal.Signals(number).name}: stopping after this step{again}\n")

    recorded = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        recorded.append(signal.SIGHUP)
    before = {number: signal.signal(number, record) for number in recorded}
    try:
        with ending_when_stuck(recorded, awake) if under_torchrun() else nullcontext():
            yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_at_once(number: int) -> NoReturn:
    """Ends the process by an exception, so that temporary files are removed and other processes ended."""
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    if is_first():
        tell(f"ligermodels: {signal.Signals(number).name}: ended before the first step\n")
    raise SystemExit(SIGNALLED + number)


@contextmanager
def ending_when_stuck(recorded: list[signal.Signals], awake: threading.Event) -> Iterator[None]:
    """After the first signal, a watcher thread sends SIGTERM to the main thread every second.

    The handler sets `awake`. Where it does not run within PATIENCE, the main thread waits for a lost rank, and the
    process is ended.
    """
    read, write = os.pipe()
    os.set_blocking(write, False)
    before, main, over = signal.set_wakeup_fd(write), threading.get_ident(), threading.Event()

    def watch() -> None:
        while os.read(read, 1)[0] not in (*recorded, OVER):  # the wakeup descriptor is written without the main thread
            pass
        while not over.wait(1):
            awake.clear()
            signal.pthread_kill(main, signal.SIGTERM)
            if not awake.wait(PATIENCE):
                lost = f"still waiting for other ranks after {PATIENCE} s: one of them is lost"
                remedy = "--resume continues from the last checkpoint"
                tell(f"rank {rank()}: signalled to stop, and {lost}; {remedy}\n")
                os._exit(1)  # nothing else ends a wait inside a library

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


def tell(text: str) -> None:
    """Writes to stderr, past Python's buffer, which the signal may have interrupted.

    Ctrl-C also ends the process that reads a pipe, such as `tee`: the run saves its state nevertheless.
    """
    with suppress(OSError):
        os.write(2, text.encode())


def redirect_to_devnull(descriptors: list[int]) -> None:
    """Writing to a terminal that is closed raises, which would end the run before it has saved."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    for descriptor in descriptors:
        os.dup2(devnull, descriptor)
    os.close(devnull)
