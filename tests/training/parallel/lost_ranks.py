"""A rank that meets the others again and again, until one of them is lost.

Usage: lost_ranks.py SECONDS, which it waits for the others; `heartbeat HOW`, with which it notices one that is stopped;
without arguments it takes steps, and stops by a signal.
"""

import os
import signal
import sys
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from ligermodels import distributed
from ligermodels.training.run import heartbeat, stopping


def meet_for_ever(seconds):
    distributed.start(timedelta(seconds=seconds))
    distributed.total(torch.zeros(()))
    print("together", flush=True)
    while True:
        distributed.total(torch.zeros(()))


def meet_with_a_heartbeat(how):
    """how: "agent", or the "first" rank, has the store; "slow", where rank 1 works, or has left, for long."""
    heartbeat.LOOK_EVERY = 0.05
    if how == "first":
        start_with_the_store_in_rank_0()
    distributed.start()
    with heartbeat.heartbeat():
        distributed.total(torch.zeros(()))
        print("together", flush=True)
        if how == "slow" and distributed.rank() == 1:
            compute_for_long()
        distributed.total(torch.zeros(()))
        while how != "slow":
            distributed.total(torch.zeros(()))
        if distributed.rank() == 0:
            compute_for_long()
    distributed.total(torch.zeros(()))
    print("done", flush=True)


def compute_for_long():
    end = time.monotonic() + 3 * heartbeat.SILENT_LOOKS * heartbeat.LOOK_EVERY
    while time.monotonic() < end:
        torch.ones(300, 300) @ torch.ones(300, 300)


def start_with_the_store_in_rank_0():
    """As without torchrun."""
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    port = dist.TCPStore("localhost", int(os.environ["MASTER_PORT"]))
    rank = distributed.rank()
    if rank == 0:
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        port.set("port", str(store.port))
    else:
        store = dist.TCPStore("localhost", int(port.get("port")))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)


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
    match sys.argv[1:]:
        case []:
            take_two_steps()
        case ["heartbeat", how]:
            meet_with_a_heartbeat(how)
        case [seconds]:
            meet_for_ever(float(seconds))
