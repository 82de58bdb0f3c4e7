"""Every file of examples/ runs on a CPU as its reader would run it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
DISTRIBUTED = {EXAMPLES / "fsdp2_loop.py": ["--steps", "2", "--length", "32"]}  # with their arguments
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.mark.parametrize("path", sorted(set(EXAMPLES.glob("*.py")) - DISTRIBUTED.keys()), ids=lambda path: path.name)
def test_the_example_runs(path, script_server, tmp_path):
    status, output = script_server.run(path, folder=tmp_path)
    assert status == 0, output
    assert output, "an example prints what it did"


@pytest.mark.parametrize("path", DISTRIBUTED, ids=lambda path: path.name)
def test_the_example_runs_on_two_processes(path, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(EXAMPLES.parent), "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [*TORCHRUN, path, *DISTRIBUTED[path]], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout, "an example prints what it did"
