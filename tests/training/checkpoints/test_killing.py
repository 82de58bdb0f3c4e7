"""kill -9 at random moments loses no committed checkpoint, and does not change the final weights."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture
def folder(tmp_path):
    """A folder in memory if possible: a killed process has not lost power, so the test need not wait for a disk."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else tmp_path) as folder:
        yield folder


def test_runs_that_are_killed_fifty_times_end_with_the_same_weights(folder):
    command = [sys.executable, "-m", "tests.training.checkpoints.killing", folder, "50", "0"]
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "TRITON_INTERPRET": "0",
    }
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    outcome = json.loads(done.stdout)
    assert outcome["kills"] >= 50 and outcome["during a save"] >= 10
    assert outcome["same"]
