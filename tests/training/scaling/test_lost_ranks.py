"""One rank of two dies or hangs: the other one ends by itself within the time limit. Real processes, no torchrun, which
would end it too."""

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from tests.training.scaling.test_parallel import ROOT

LIMIT = 3  # seconds a rank waits for the others
WORKER = f"""
from datetime import timedelta
import torch
from ligermodels.training.scaling import parallel
parallel.start(timedelta(seconds={LIMIT}))
parallel.total(torch.zeros(()))
print("together", flush=True)
while True:
    parallel.total(torch.zeros(()))
"""


@pytest.fixture
def ranks():
    """Two processes that meet over and over again. The store they find each other by is ours."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    environment = os.environ | {
        "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER], cwd=ROOT, env=environment | {"RANK": str(rank)}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]  # fmt: skip
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "hangs"])
def test_the_others_end_when_a_rank(how, ranks):
    for process in ranks:
        assert process.stdout.readline() == "together\n", process.stderr.read()
    first, second = ranks
    second.send_signal(how)
    start = time.monotonic()
    _, error = first.communicate(timeout=60)
    assert first.returncode == 1 and "all_reduce" in error
    assert time.monotonic() - start < LIMIT + 10  # to unwind and leave; on a loaded machine
