"""A rank that meets the others again and again, until one of them is lost.

Usage: lost_ranks.py SECONDS, which it waits for the others; without a number it takes steps, and stops by a signal.
"""

import os
import signal
import sys
import threading
from datetime import timedelta

import torch

from ligermodels import distributed
from ligermodels.training.run import stopping


def meet_for_ever(seconds):
    distributed.start(timedelta(seconds=seconds))
    distributed.total(torch.zeros(()))
    print("together", flush=True)
    while True:
        distributed.total(torch.zeros(()))


def take_two_steps():
    """Each takes until a rank is signalled to stop; that rank leaves it when it has been asked twice more. Rank 1 hangs
    in the second."""
    asked, ask = threading.Semaphore(0), signal.pthread_kill
    signal.pthread_kill = lambda *what: (asked.release(), ask(*what))
    stopping.PATIENCE = 2
    distributed.start()
    for step in range(2):
        with stopping.signals() as stop:
            stop.takes_steps = True
            distributed.total(torch.zeros(()))
            print("together", flush=True)
            if step == 1 and os.environ["RANK"] == "1":
                os.kill(os.getpid(), signal.SIGSTOP)
            while not distributed.total(torch.tensor(float(stop.requested))):
                pass
            if stop.requested:
                asked.acquire(), asked.acquire()
            print("saved", flush=True)


if __name__ == "__main__":
    if sys.argv[1:]:
        meet_for_ever(float(sys.argv[1]))
    take_two_steps()
