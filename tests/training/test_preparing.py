"""What `prepare` does with a run's settings before any memory is allocated."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import ligermodels
from ligermodels import distributed
from ligermodels.distributed import World
from ligermodels.errors import InputError
from ligermodels.layers.checkpointing import host_memory
from ligermodels.training import TrainConfig, preparing, train
from ligermodels.training.model_weights import load_checkpoint
from ligermodels.training.objectives import Objective
from ligermodels.training.planning import plan
from ligermodels.training.planning.contradictions import refuse_unfit_offload
from ligermodels.training.planning.placement import Device, StepTime, device_rates
from ligermodels.training.preparing import make_optimizer, prepare
from ligermodels.training.settings.settings import settings
from ligermodels.units import memory_size
from tests.training.planning.configs import run_config

SETTINGS = {"model": "llama", "data": ("random",), "steps": 4, "sequence_length": 32}


def prepared(**settings):
    return prepare(TrainConfig(**SETTINGS | settings), distributed.start())


def test_the_low_memory_loss_reaches_the_head_and_the_plan():
    run, lean = (prepared(low_memory_loss=low) for low in (False, True))
    assert (run.model.lm_head.low_memory_loss, lean.model.lm_head.low_memory_loss) == (False, True)
    assert lean.plan.memory.loss == run.estimate(checkpointed_blocks=0, low_memory_loss=True).loss
    assert lean.plan.memory.loss != run.plan.memory.loss
    with pytest.raises(InputError, match="--low-memory-loss has no effect under --objective dpo"):
        prepared(low_memory_loss=True, objective="dpo")


def test_gradients_that_are_accumulated_are_counted_at_the_start_of_backward():
    one, two = (prepared(batch_size=4, micro_batch_size=size).plan.memory for size in (4, 2))
    assert (one.accumulated, two.accumulated) == (0, two.gradients)


@pytest.mark.parametrize(
    ("pairs", "tokens", "ranks", "rows"), [(1, 60, 1, 1), (2, 60, 1, 2), (2, 60, 2, 1), (9, 700, 2, 4)]
)
def test_groups_are_accumulated_unless_a_rank_has_but_one(pairs, tokens, ranks, rows):
    """The rows of a step are about as many as its tokens fill, and two where two groups may need them."""
    config = run_config("--model", "llama", "--objective", "dpo", "--sequence-length", "100", "--pairs", str(pairs))
    world = World(torch.device("cpu"), size=ranks)
    step = SimpleNamespace(config=config, world=world, takes_rows=False, tokens_per_step=tokens)
    assert Objective.micro_batches(step, 1) == rows


def test_offloaded_states_are_counted_on_the_host_and_their_ring_on_the_device():
    run, lean = prepared(optimizer="adamw"), prepared(optimizer="adamw", offload=("optimizer",))
    memory = lean.plan.memory
    optimizer = make_optimizer(lean.config, ligermodels.create("llama", size="tiny"))
    optimizer.offload_states()
    assert memory.host == len(optimizer.offloaded.memory) >= run.plan.memory.optimizer_states - 2**10
    assert memory.optimizer_states == len(optimizer.offloaded.ring) + 4 * len(optimizer.offloaded.states)
    assert memory.optimizer_states < run.plan.memory.optimizer_states
    assert lean.plan.checkpoint == pytest.approx(run.plan.checkpoint, rel=1e-3)
    assert "host memory" in lean.plan.text() and "host memory" not in run.plan.text()


def test_offloading_that_cannot_work_is_refused(monkeypatch):
    run = prepared(offload=("optimizer",))
    with pytest.raises(InputError, match="--offload optimizer: runs on one process; 2 ranks share the states already"):
        refuse_unfit_offload(run.config, World(torch.device("cpu"), size=2), run.plan.memory, 0)
    monkeypatch.setattr(host_memory, "available_host_memory", lambda: 2**20)
    with pytest.raises(InputError, match=r"--offload optimizer: takes .* of host memory, which has .* available; use"):
        prepared(offload=("optimizer",))
    assert prepared().plan.memory.host == 0


@pytest.mark.parametrize(
    ("offload", "optimizer", "remedy"),
    [
        (("optimizer",), "adamw", "use --optimizer adamw8bit, or leave it out"),
        (("optimizer",), "adamw8bit", "leave it out"),
        (("optimizer", "activations"), "adamw", "use --optimizer adamw8bit, or offload activations alone"),
        (("optimizer", "activations"), "adamw8bit", "offload activations alone"),
    ],
)
def test_of_states_without_room_on_the_host_the_advice_is_what_is_not_set_yet(offload, optimizer, remedy, monkeypatch):
    monkeypatch.setattr(host_memory, "available_host_memory", lambda: 2**20)
    monkeypatch.setattr(plan, "available_host_memory", lambda: 2**20)
    with pytest.raises(InputError) as refused:
        prepared(activation_checkpointing="full", offload=offload, optimizer=optimizer)
    given = f"--offload {' '.join(offload)}: takes "
    assert str(refused.value).startswith(given)
    assert str(refused.value).endswith(f"of host memory, which has 1.0 MiB available; {remedy}")


def test_where_the_host_has_room_for_one_of_the_two_the_advice_is_to_offload_one(monkeypatch):
    full = {"activation_checkpointing": "full"}
    states, inputs = (prepared(**full, offload=(name,)) for name in ("optimizer", "activations"))
    one = inputs.plan.memory.host // len(inputs.model.blocks)
    available = inputs.plan.checkpoint + one
    for module in (plan, host_memory):
        monkeypatch.setattr(module, "available_host_memory", lambda: available)
    for run in (states, inputs):
        prepared(**full, offload=run.config.offload)
    with pytest.raises(InputError) as refused:
        prepared(**full, offload=("optimizer", "activations"))
    assert str(refused.value) == (
        f"--offload optimizer activations: the host has {memory_size(available)} available, and beside the offloaded "
        "states and a copy of weights and optimizer states no room for the input of a block; offload one of the two, "
        "or shorten --sequence-length"
    )


def test_offloaded_inputs_are_counted_on_the_host_and_offloaded_as_far_as_it_has_room(monkeypatch):
    full = {"activation_checkpointing": "full"}
    usual, run = prepared(**full), prepared(**full, offload=("activations",))
    tokens, hidden, blocks = run.plan.micro_batch_size * 32, run.model.config.hidden_size, len(run.model.blocks)
    one = tokens * hidden * 4
    assert (run.plan.memory.host, run.plan.memory.offloads_every) == (blocks * one, 1)
    assert run.plan.memory.activations == usual.plan.memory.activations - (blocks - 1) * one  # one arrives
    assert all(block.offloaded_inputs is not None for block in run.model.blocks)
    assert all(block.offloaded_inputs is None for block in usual.model.blocks)
    assert "inputs of every checkpointed block" in run.plan.text()

    monkeypatch.setattr(plan, "available_host_memory", lambda: run.plan.checkpoint + one)
    run = prepared(**full, offload=("activations",))
    assert (run.plan.memory.host, run.plan.memory.offloads_every) == (one, blocks)
    assert [block.offloaded_inputs is not None for block in run.model.blocks] == [True] + [False] * (blocks - 1)
    assert f"inputs of one of {blocks} checkpointed blocks" in run.plan.text()
    monkeypatch.setattr(plan, "available_host_memory", lambda: run.plan.checkpoint + one - 1)
    with pytest.raises(InputError, match=r"--offload activations: the host has .* no room for the input of a block"):
        prepared(**full, offload=("activations",))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "add --activation-checkpointing full"),
        ({"activation_checkpointing": "none"}, "add --activation-checkpointing full"),
        ({"activation_checkpointing": "full", "compile": True}, "leave --compile out"),
        (
            {"activation_checkpointing": "auto"},
            "has no effect, because a step fits .* without .*; leave it out, or add --activation-checkpointing full",
        ),
    ],
)
def test_inputs_that_no_block_saves_alone_are_not_offloaded(given, words):
    with pytest.raises(InputError, match=f"--offload activations: .*{words}"):
        prepared(offload=("activations",), **given)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"activation_checkpointing": "auto"}, "every block is recomputed: add --activation-checkpointing full"),
        ({"compile": True}, "compiled blocks save other tensors; leave --compile out"),
        ({}, "the model has no weights in few bits; add --quantize nf4, or leave it out"),
    ],
)
def test_weights_that_cannot_be_offloaded_are_refused(given, words):
    with pytest.raises(InputError, match=f"^--offload weights: {words}$"):
        prepared(offload=("weights",), **{"activation_checkpointing": "full"} | given)


def test_weights_of_several_ranks_are_not_offloaded():
    run = prepared(activation_checkpointing="full")
    config = replace(run.config, offload=("weights",))
    with pytest.raises(InputError, match=r"^--offload weights: runs on one process; 2 ranks shard the weights; leave"):
        refuse_unfit_offload(config, World(torch.device("cpu"), size=2), run.plan.memory, 2)


def test_what_is_chosen_to_fit_is_a_setting_of_the_run_and_said(monkeypatch):
    def small_device(config, model, world):
        time = StepTime(model, config.sequence_length, device_rates("NVIDIA H100 80GB HBM3", "bfloat16"))
        return Device(usable=4 * 2**20, total=8 * 2**20, host=2**30, time=time)

    monkeypatch.setattr(preparing, "find_device", small_device)
    monkeypatch.setattr(TrainConfig, "is_tiny", False)
    run = prepared(batch_size=4, activation_checkpointing="auto")
    chosen = {"optimizer": "adamw8bit", "optimizer_in_backward": True, "offload": ["optimizer"]}
    assert settings(run.config).items() >= chosen.items()
    reason = "the fastest of what fits into 8.0 MiB"
    flags = ("--optimizer adamw8bit", "--optimizer-in-backward on", "--offload optimizer")
    assert [f"{flag}: {reason}" for flag in flags] == [line for line in run.plan.chosen if line.endswith(reason)]
    said = ", with 8-bit moments, the update in the backward pass, optimizer states in host memory"
    assert run.plan.line.endswith(said)
    given = prepared(batch_size=4, activation_checkpointing="auto", optimizer="adamw", offload=("none",))
    assert (given.config.optimizer, given.config.offload) == ("adamw", ())
    assert "micro_batch_size" not in settings(run.config)


def test_a_plan_for_a_gpu_that_is_not_there_knows_its_memory_and_nothing_of_its_host(monkeypatch):
    monkeypatch.setattr(plan.Plan, "disk_warnings", lambda plan: ["of this machine"])
    monkeypatch.setattr(TrainConfig, "is_tiny", False)
    config = TrainConfig(**SETTINGS | {"batch_size": 4, "activation_checkpointing": "auto"})
    one, pair, small = (preparing.plan(config, gpus) for gpus in ("h100", "2GB,2", "1100MB"))
    assert (one.world.size, one.total, one.config.dtype) == (1, round(79.1 * 2**30), "bfloat16")
    assert "of a NVIDIA H100 80GB HBM3, not all" in one.text() and "attention" not in one.text()
    assert one.placement == "" and "of this machine" not in one.warnings
    assert (pair.world.size, pair.total, pair.micro_batch_size) == (2, 2_000_000_000, 2)
    assert "= 1 batch of 2 x 32 on 2 x cuda" in pair.step and "of a GPU, not all" in pair.text()
    blocks = one.blocks  # beside the libraries nothing fits; states are not offloaded to a host that is not known
    assert small.placement == (
        f", with 8-bit moments, the update in the backward pass, {blocks} of {blocks} blocks checkpointed"
    )


@pytest.mark.parametrize("offload", [("optimizer",), ("activations",), ("optimizer", "activations")])
def test_a_plan_for_a_gpu_that_is_not_there_offloads_to_its_host_whatever_this_one_has(offload, monkeypatch):
    full = SETTINGS | {"activation_checkpointing": "full", "dtype": "float32", "offload": offload}
    here = prepared(**full).plan.memory
    for module in (plan, host_memory):
        monkeypatch.setattr(module, "available_host_memory", lambda: 1)
    there = preparing.plan(TrainConfig(**full), "24GB")
    assert there.memory.host == here.host > 0 and there.memory.offloads_every == int("activations" in offload)
    assert f"{memory_size(here.host)} that the host must have for each rank" in there.text()


def test_the_file_of_rewards_is_named_once_before_it_is_run(tmp_path, capsys):
    (tmp_path / "own.py").write_text("raise KeyError('run')\n")
    reward = [f"{tmp_path}/own.py:one", f"{tmp_path}/own.py:two", "exact"]
    with pytest.raises(InputError, match=r"own\.py:one: the file does not run: KeyError: 'run'"):
        preparing.plan(TrainConfig(model="qwen2", data=("sums",), objective="grpo", reward=reward))
    assert capsys.readouterr().out == f"--reward: runs {tmp_path}/own.py\n"


@pytest.mark.parametrize("text", ["24", "24GB,", "24GB,0", "h1000", "", "0GB", "h100,2,2"])
def test_gpus_are_a_memory_or_a_name_and_their_number(text):
    with pytest.raises(InputError, match=rf"is '{text}'; must be a memory such as 24GB or one of t4, .*h100,4"):
        distributed.planned_world(text)
    assert distributed.planned_world("A100,4").planned_for.name == "NVIDIA A100-SXM4-80GB"


def test_a_run_that_the_host_of_a_cpu_has_no_memory_for_is_refused(monkeypatch, tmp_path):
    given = SETTINGS | {"output": tmp_path / "run"}
    needed = prepared(**SETTINGS).plan.needed
    monkeypatch.setattr(plan, "available_host_memory", lambda: needed)
    assert not prepared(**SETTINGS).plan.lacking_host_memory()
    monkeypatch.setattr(plan, "available_host_memory", lambda: needed - 1)
    lacking = (
        f"the run takes {memory_size(needed)} of host memory, of which {memory_size(needed - 1)} are available; a "
        "smaller --size than tiny, use --activation-checkpointing full, use --lora-rank 16, lower --sequence-length, "
        "or take a GPU"
    )
    assert lacking in prepared(**SETTINGS).plan.warnings
    with pytest.raises(InputError, match=f"--model llama: {lacking}"):
        train(TrainConfig(**given))
    assert not (tmp_path / "run").exists()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(plan, "available_host_memory", lambda: 2 * needed - 1)
    assert prepared(**SETTINGS).plan.lacking_host_memory()
    monkeypatch.setattr(plan, "available_host_memory", lambda: 1)
    assert preparing.plan(TrainConfig(**SETTINGS), "h100").lacking_host_memory() == ""


def test_reading_a_checkpoint_runs_no_code_of_the_run(tmp_path):
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\ndef one(**_): return []\n")
    config = TrainConfig(model="qwen2", data=("sums",), objective="grpo", reward=(f"{tmp_path}/own.py:one",))
    with pytest.raises(InputError, match="is not there any more"):
        load_checkpoint(config, tmp_path, 1)
    assert not (tmp_path / "ran").exists()
