"""kill -9 at random moments loses no committed checkpoint, and does not change the final weights."""

import json
import os
import tempfile
from pathlib import Path

import pytest


@pytest.fixture
def folder(tmp_path):
    """A folder in memory if possible: a killed process has not lost power, so the test need not wait for a disk."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else tmp_path) as folder:
        yield folder


def test_runs_that_are_killed_twenty_times_end_with_the_same_weights(folder, launch_server, tmp_path):
    done = launch_server.within(tmp_path).succeed(folder, 20, 0, module="tests.training.checkpoints.killing")
    outcome = json.loads(done.stdout)
    assert outcome["kills"] >= 20 and outcome["during a save"] >= 4
    assert outcome["same"]
