"""The heartbeat of a run's ranks: where one stops answering, the others end within about a minute.

Collectives end after their timeout alone, and torchrun notices only a process that has ended, not one that is stopped.
So each rank counts up a key of torch's rendezvous store, from a thread: it goes on whatever the rank computes or waits
for, and stops with its process. Each rank looks at the next one's key. Silence is counted in looks: a rank that was
itself stopped, as by a scheduler that suspends a job, has not looked.
"""

import itertools
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist

from ligermodels import distributed
from ligermodels.training.run.stopping import tell

LOOK_EVERY = 5.0  # seconds
SILENT_LOOKS = 12  # looks without an answer
LEFT = 2**40  # added to the key of a rank that leaves the run
calls = itertools.count()  # by which the keys of a process group's runs differ


@contextmanager
def heartbeat() -> Iterator[None]:
    """Ends the process with status 1 where another rank does not answer, in the block. Every rank calls."""
    if not distributed.under_torchrun() or distributed.world_size() == 1:
        yield
        return
    beating = Heartbeat(next(calls))
    targets = [beating.beat, beating.watch_host] if beating.needs_first_rank else [beating.beat]
    threads = [threading.Thread(target=target, daemon=True) for target in targets]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        beating.over.set()
        for thread in threads:
            thread.join(LOOK_EVERY)  # a store that does not answer holds nobody


class Heartbeat:
    """What the threads of a rank share. over: set to end them. unanswered: looks since the store last answered."""

    def __init__(self, call: int) -> None:
        # A connection of its own: torch's waits in the store block all others over the same one.
        store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
        self.store = dist.PrefixStore(f"heartbeat/{call}", store)
        self.rank = distributed.rank()
        # torchrun has the store in its own process; without it rank 0 has it, and stops it when it is stopped.
        self.needs_first_rank = self.rank > 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        self.over = threading.Event()
        self.unanswered = 0
        self.store.add(str(self.rank), 1)  # who does not answer from here on is lost; who never came is not

    def beat(self) -> None:
        """Counts up this rank's key, and looks at that of the next rank, until the run is over."""
        watched, seen, silent = (self.rank + 1) % distributed.world_size(), 0, 0
        with suppress(dist.DistError):  # the store is gone, and who had it
            while not self.over.wait(LOOK_EVERY):
                self.store.add(str(self.rank), 1)
                if self.store.add("lost", 0):  # and the rank that found it has said so
                    os._exit(1)  # nothing else ends a wait inside a library
                beats = self.store.add(str(watched), 0)
                silent = silent + 1 if beats == seen and 0 < beats < LEFT else 0
                self.unanswered, seen = 0, beats
                if silent == SILENT_LOOKS and self.store.add("lost", 1) == 1:
                    self.tell_of(watched)
            self.store.add(str(self.rank), LEFT)

    def watch_host(self) -> None:
        """Looks whether rank 0 answers for the store, until the run is over."""
        while not self.over.wait(LOOK_EVERY):
            self.unanswered += 1
            if self.unanswered > SILENT_LOOKS:
                self.tell_of(0)
                os._exit(1)

    def tell_of(self, lost: int) -> None:
        seconds = SILENT_LOOKS * LOOK_EVERY
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - seconds))
        silence = f"rank {lost} has not answered for {seconds:g} s, since {since}: it is stopped, or its host is lost"
        tell(f"rank {self.rank}: {silence}; --resume continues from the last checkpoint\n")
