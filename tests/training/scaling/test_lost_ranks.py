"""One rank of two dies or hangs: the other one ends within the timeout, and sooner after a SIGTERM from torchrun.

Real processes, without torchrun.
"""

import os
import re
import signal
import subprocess
import sys

import pytest
import torch.distributed as dist

from tests.training.scaling.test_fsdp import ROOT

LIMIT = 15  # seconds a rank waits for the others, also for the first meeting on a busy machine
WORKER = f"""
import sys
from datetime import timedelta
import torch
from ligermodels import distributed
print("ready", flush=True)
sys.stdin.readline()
distributed.start(timedelta(seconds={LIMIT}))
distributed.total(torch.zeros(()))
print("together", flush=True)
while True:
    distributed.total(torch.zeros(()))
"""
STOPPING_WORKER = """
import signal, sys, threading
import torch
from ligermodels.training.runs import stopping
from ligermodels import distributed
print("ready", flush=True)
sys.stdin.readline()
asked, ask = threading.Semaphore(0), signal.pthread_kill
signal.pthread_kill = lambda *what: (asked.release(), ask(*what))
stopping.PATIENCE = 2
distributed.start()
for _ in range(2):
    with stopping.signals() as stop:
        distributed.total(torch.zeros(()))
        print("together", flush=True)
        while not distributed.total(torch.tensor(float(stop.requested))):
            pass
        if stop.requested:
            asked.acquire(), asked.acquire()
        print("saved", flush=True)
"""


@pytest.fixture
def launch():
    """Starts two processes that run the same script, and meet when both are ready: one must not wait for the other's
    imports. The rendezvous store is in this process."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    environment = os.environ | {
        "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    processes = []

    def launch(script):
        for rank in range(2):
            command, own = [sys.executable, "-c", script], environment | {"RANK": str(rank)}
            pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE) | {"text": True}
            processes.append(subprocess.Popen(command, cwd=ROOT, env=own, **pipes))
        for process in processes:
            assert process.stdout.readline() == "ready\n", process.stderr.read()
        for process in processes:
            process.stdin.write("\n")
            process.stdin.flush()
        for process in processes:
            assert process.stdout.readline() == "together\n", process.stderr.read()
        return processes

    yield launch
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "hangs"])
def test_the_other_rank_ends_when_one(how, launch):
    first, second = launch(WORKER)
    second.send_signal(how)
    _, error = first.communicate()
    assert first.returncode == 1 and "all_reduce" in error
    assert how == signal.SIGKILL or re.search(rf"[Tt]imed out .*{LIMIT}000 ?ms", error), error


def test_after_sigterm_a_rank_finishes_its_step_but_does_not_wait_for_a_lost_rank(launch):
    first, second = launch(STOPPING_WORKER)
    first.send_signal(signal.SIGTERM)
    for process in (first, second):
        assert [process.stdout.readline() for _ in range(2)] == ["saved\n", "together\n"]
    second.send_signal(signal.SIGSTOP)
    first.send_signal(signal.SIGTERM)
    _, error = first.communicate()
    assert first.returncode == 1
    lost = "rank 0: signalled to stop, and still waiting for other ranks after 2 s: one of them is lost"
    assert f"{lost}; --resume continues from the last checkpoint\n" in error and "Traceback" not in error
