"""Ranks that share routed experts train as one process does."""

import pytest
import torch

import ligermodels
from ligermodels.distributed import World
from ligermodels.errors import InputError
from ligermodels.training import TrainConfig
from ligermodels.training.runs.preparing import prepare
from ligermodels.training.scaling.expert_parallel import refuse_unfit_experts
from tests.training.scaling.test_context_parallel import BALANCED, BOUND, OFFSETS, SINKS
from tests.training.scaling.test_fsdp import LATENTS, assert_same_run, config, forked, on_cpu
from tests.training.scaling.worker import train

__all__ = ["on_cpu"]
CPU = torch.device("cpu")
MIXTRAL = {"model": config("mixtral", False) | BALANCED, "steps": 2}
RUNS = {  # name: (settings of both runs, further settings of the run on two ranks)
    "balanced": (MIXTRAL, {}),
    "checkpointed, shared expert": ({"model": config("deepseek_v3", False) | LATENTS}, {"checkpointed_blocks": 2}),
    "biases, kept gathered": ({"model": config("gpt_oss", False) | SINKS}, {"reshard_after_forward": False}),
    "LoRA beside frozen experts": (MIXTRAL | {"lora": "float32"}, {}),
    "8-bit moments": (MIXTRAL | {"name": "adamw8bit"}, {}),
    "Muon": (MIXTRAL | {"name": "muon"}, {}),
}  # fmt: skip


def test_two_ranks_that_share_experts_train_like_one_process(launcher, tmp_path, on_cpu):
    shared = [{"steps": 2, "batch_size": 2} | common | only | {"experts": 2} for common, only in RUNS.values()]
    for (name, (common, _)), got in zip(RUNS.items(), forked(launcher, 2, tmp_path, shared), strict=True):
        alone = train(**{"steps": 2, "batch_size": 2, "accumulate": 2} | common)
        assert_same_run(got, alone, name, BOUND)


def test_four_ranks_with_two_replicas_of_the_experts_train_like_one_process(launcher, tmp_path, on_cpu):
    """Two micro-batches each; then two and two share rows, and all of them the experts."""
    replicas = {"batch_size": 1, "accumulate": 2, "experts": 2}
    rows = {"batch_size": 4, "offsets": OFFSETS, "context": 2, "experts": 4}
    got = forked(launcher, 4, tmp_path, [MIXTRAL | replicas, MIXTRAL | rows])
    assert_same_run(got[0], train(**MIXTRAL, batch_size=1, accumulate=8), "replicas", BOUND)
    assert_same_run(got[1], train(**MIXTRAL, offsets=OFFSETS, accumulate=2), "rows", BOUND)
