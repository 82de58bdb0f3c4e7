"""Two GPUs have the losses and metrics of one, in fp32: NCCL, and the kernels that GPUs have."""

import os
import subprocess
import sys

import pytest
import torch

from tests.training.launching import ROOT, TRAIN, records
from tests.training.objectives.test_ranks import KINDS, RUN, assert_same_records, write_data


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("kind", ["precomputed", "model", "images", "kto", "grpo"])
def test_two_gpus_have_the_losses_and_metrics_of_one(kind, tmp_path):
    write_data(tmp_path)
    for ranks in (1, 2):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", TRAIN]
        settings = (*RUN, *KINDS[kind], "--dtype", "float32", "--output", f"gpus-{ranks}")
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        environment |= {"XDG_CACHE_HOME": str(tmp_path / f"cache-{ranks}")}
        done = subprocess.run([*command, *settings], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-4000:]
    assert_same_records(*(records(tmp_path / f"gpus-{ranks}") for ranks in (1, 2)))
