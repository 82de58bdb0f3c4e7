"""kill -9 at random moments loses nothing that was committed, and changes nothing of what training comes to."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_runs_killed_fifty_times_end_as_one_that_was_not(tmp_path):
    command = [sys.executable, "-m", "tests.training.killing", str(tmp_path), "50", "0"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    outcome = json.loads(done.stdout)
    assert outcome["kills"] >= 50 and outcome["during a save"] >= 10
    assert outcome["same"]
