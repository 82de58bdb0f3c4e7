"""Every file of examples/ runs on a CPU as its reader would run it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
ARGUMENTS = {"fsdp2_loop.py": ["--steps", "2", "--length", "32"]}  # by file name; {tmp} is an empty folder
DISTRIBUTED = {"fsdp2_loop.py"}  # run by torchrun on two processes
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_the_example_runs(path, tmp_path):
    arguments = [argument.format(tmp=tmp_path) for argument in ARGUMENTS.get(path.name, [])]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(EXAMPLES.parent), "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    launcher = TORCHRUN if path.name in DISTRIBUTED else []
    done = subprocess.run(
        [sys.executable, *launcher, path, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout, "an example prints what it did"
