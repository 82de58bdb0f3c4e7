"""Ranks that share routed experts train as one process does."""

import signal

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import ligermodels
from ligermodels.distributed import World
from ligermodels.errors import InputError
from ligermodels.memory.model import training_memory
from ligermodels.training import TrainConfig
from ligermodels.training.preparing import prepare
from tests.training.launching import losses
from tests.training.parallel.test_context_parallel import BALANCED, BOUND, OFFSETS, SINKS
from tests.training.parallel.test_fsdp import LATENTS, assert_same_run, config, forked
from tests.training.parallel.worker import train

CPU = torch.device("cpu")
EXPERTS = 8 * 3 * 48 * 32  # elements of a block
MIXTRAL = {"model": config("mixtral", False) | BALANCED, "steps": 2}
RUNS = {  # name: (settings of both runs, further settings of the run on two ranks)
    "balanced": (MIXTRAL, {}),
    "checkpointed, shared expert": ({"model": config("deepseek_v3", False) | LATENTS}, {"checkpointed_blocks": 2}),
    "biases, kept gathered": ({"model": config("gpt_oss", False) | SINKS}, {"reshard_after_forward": False}),
    "LoRA beside frozen experts": (MIXTRAL | {"lora": "float32"}, {}),
    "LoRA of the experts": (
        MIXTRAL | {"lora": "float32", "targets": ("all-linear", "experts"), "steps": 3}, {"checkpointed_blocks": 1}
    ),
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


LENGTH = ["--steps", "14", "--batch-size", "4", "--sequence-length", "32", "--eval-every", "14", "--warmup", "2"]
RUN = ["--data", "own.txt", *LENGTH, "--learning-rate", "1e-3", "--checkpoint-every", "14"]


def test_a_run_from_a_folder_resumes_on_one_rank_and_writes_what_one_rank_writes(launcher):
    launcher.succeed("--model", "mixtral", "--data", "own.txt", *LENGTH, "--steps", "1", "--output", "of-experts")
    run = ["--model", "of-experts/model", *RUN]
    launcher.succeed(*run, "--output", "experts-of-one")
    pair = launcher.start(*run, "--output", "experts-of-two", "--expert-parallel", "2", ranks=2)
    pair.read_until("step 2/")
    assert pair.kill(signal.SIGTERM).wait().statuses == [143, 143]
    folder, straight = launcher.folder / "experts-of-two", launcher.folder / "experts-of-one"
    (checkpoint,) = sorted((folder / "checkpoints").glob("step-*"))[-1:]
    with safe_open(checkpoint / "rank-00001.safetensors", "pt") as file:
        assert file.get_slice("weights.model.layers.0.mlp.experts.down_proj").get_shape()[0] == 2
    launcher.succeed("--resume", "experts-of-two", "--expert-parallel", "1")
    torch.testing.assert_close(losses(folder), losses(straight), rtol=2e-6, atol=0)
    assert {file.name for file in (folder / "model").iterdir()} == {f.name for f in (straight / "model").iterdir()}
    one, other = (load_file(each / "model/model.safetensors") for each in (folder, straight))
    assert one.keys() == other.keys()
    for name, weight in other.items():
        torch.testing.assert_close(one[name], weight, rtol=1e-4, atol=1e-4)


def test_a_rank_needs_memory_for_its_experts_and_for_the_rows_that_it_receives():
    model = ligermodels.create(config("mixtral", False), dtype=torch.bfloat16, device="meta")
    sizes = {"batch_size": 1, "sequence_length": 64, "dtype": torch.bfloat16}
    alone, shared = (training_memory(model, **sizes, shards=4, expert_ranks=ranks) for ranks in (1, 2))
    more = 2 * EXPERTS * (1 / 2 - 1 / 4)  # of both blocks
    assert shared.weights - alone.weights == shared.gradients - alone.gradients == 2 * more
    assert shared.optimizer_states - alone.optimizer_states == 6 * more  # bf16 moments and 16 low bits of the weight
    slots = 2 * 64 * 2  # of both blocks
    assert shared.activations - alone.activations == slots * (32 * 2 + 20)
    assert alone.unsharded_at_end - shared.unsharded_at_end == (2 + 2) * 2 * EXPERTS
    ligermodels.add_lora(model, rank=2, targets=("experts",))  # sharded over all ranks in any case
    alone, shared = (training_memory(model, **sizes, shards=4, expert_ranks=ranks) for ranks in (1, 2))
    assert (shared.weights - alone.weights, shared.gradients) == (2 * more, alone.gradients)


REFUSED = {
    "experts": ({"model": "mixtral", "expert_parallel": 3}, 3, "3 does not divide the model's 4 experts"),
    "ranks": ({"model": "mixtral", "expert_parallel": 2}, 3, "2 does not divide the number of ranks, 3: lower it"),
    "no experts": ({"model": "llama", "expert_parallel": 2}, 2, "2: the model has no routed experts"),
    "compiled": ({"model": "mixtral", "expert_parallel": 2, "compile": True}, 2, "not under --compile: leave one out"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_experts_that_cannot_be_distributed_are_refused_in_one_line(name):
    settings, ranks, complaint = REFUSED[name]
    with pytest.raises(InputError, match=f"^--expert-parallel .*{complaint}"):
        prepare(TrainConfig(data=("random",), **settings), World(CPU, 0, ranks))
