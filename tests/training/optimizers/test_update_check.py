"""Updates that vanish or drown in the rounding of bf16 parameters are measured, and warned of once."""

import json

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from ligermodels.training import TrainConfig, train
from ligermodels.training.optimizers import OPTIMIZERS, OptimizerInBackward, build_optimizer, set_learning_rate
from ligermodels.training.optimizers.adamw import AdamW
from ligermodels.training.optimizers.update_check import CHANGED, CHANGED_EXACTLY, RUN, RUNS, SIZE, STEPS, UpdateCheck
from tests.conftest import DEVICE
from tests.suites import quick
from tests.training.optimizers.test_in_backward import IDS, new_run, steps_in_backward, usual_steps

MODES = {
    "float32": (torch.float32, "exact"),
    "exact": (torch.bfloat16, "exact"),
    "nearest": (torch.bfloat16, "nearest"),
    "stochastic": (torch.bfloat16, "stochastic"),
}


def checked_run(optimizer, dtype, rounding, *, learning_rate=1e-5, in_backward=False, offloaded=False):
    """The metrics of a model's first updates, and their warnings."""
    model, _ = new_run(optimizer)
    model.to(dtype)
    made = build_optimizer(model, optimizer, param_rounding=rounding)
    set_learning_rate(made, learning_rate)
    if offloaded:
        made.offload_states()
    made.check = check = UpdateCheck({p: p for p in model.parameters()}, warmup=0, steps=STEPS + 1)
    assert all(check.begins(step) for step in range(len(IDS))) and not check.begins(STEPS)
    if in_backward:
        steps_in_backward(model, OptimizerInBackward(made), IDS)
    else:
        usual_steps(model, made, IDS)
    sums = {name: value.item() for name, value in check.sums(STEPS).items()}
    metrics = check.metrics(sums)
    lossy = None if dtype == torch.float32 or rounding == "exact" else rounding
    assert not sums and not check.sums(STEPS + 1)
    return metrics, check.warnings(STEPS, metrics, lossy)


@pytest.mark.parametrize("mode", ["float32", "exact"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_nothing_is_lost_of_fp32_and_exact_parameters(optimizer, mode):
    metrics, warnings = checked_run(optimizer, *MODES[mode])
    assert metrics[CHANGED] == pytest.approx(metrics[CHANGED_EXACTLY], rel=0.01) and metrics[CHANGED_EXACTLY] > 0.4
    assert metrics[SIZE] == pytest.approx(1, rel=2e-3) and not warnings


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_updates_that_vanish_are_warned_of(optimizer):
    metrics, (warning,) = checked_run(optimizer, *MODES["nearest"])
    assert metrics[CHANGED] < 0.15 * metrics[CHANGED_EXACTLY] and metrics[SIZE] < 0.5
    assert "--param-rounding nearest loses small updates; use --param-rounding exact" in warning
    assert f"{metrics[CHANGED_EXACTLY]:.1%}" in warning and f"{metrics[CHANGED]:.1%}" in warning


@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit"])
def test_updates_that_drown_in_noise_are_warned_of(optimizer):
    metrics, (warning,) = checked_run(optimizer, *MODES["stochastic"])
    assert metrics[SIZE] > 3 and "--param-rounding stochastic loses small updates" in warning


def test_updates_that_are_too_small_for_float32_are_warned_of():
    metrics, (warning,) = checked_run("adamw", *MODES["float32"], learning_rate=1e-10)
    assert metrics[CHANGED] < 0.5 * metrics[CHANGED_EXACTLY] and "raise --learning-rate" in warning


def test_updates_that_are_large_enough_for_bf16_are_not_warned_of():
    _, warnings = checked_run("adamw", *MODES["nearest"], learning_rate=1e-3)
    assert not warnings


@pytest.mark.parametrize("options", [{"in_backward": True}, {"offloaded": True}])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_check_sees_the_same_in_backward_and_of_offloaded_states(optimizer, options):
    usual, _ = checked_run(optimizer, *MODES["nearest"])
    metrics, _ = checked_run(optimizer, *MODES["nearest"], **options)
    assert metrics == pytest.approx(usual, rel=1e-5)  # sums in another order


def test_the_check_does_not_change_the_run():
    runs = [new_run("adamw8bit") for _ in range(2)]
    runs[0][1].check = UpdateCheck({p: p for p in runs[0][0].parameters()}, warmup=0, steps=STEPS + 1)
    for model, made in runs:
        usual_steps(model, made, IDS)
    assert all(map(torch.equal, runs[0][0].parameters(), runs[1][0].parameters()))


def test_shards_are_sampled_and_one_without_elements_is_not(rank_of_four):
    """Nine rows on four ranks: the last one has none."""
    weight, gradient = (torch.randn(9, 512, device=DEVICE).bfloat16() for _ in range(2))
    sampled = []
    for rank in range(4):
        mesh = rank_of_four(rank)

        def to_shards(x, mesh=mesh):
            return distribute_tensor(x.clone(), mesh, [Shard(0)], src_data_rank=None)

        p = nn.Parameter(to_shards(weight))
        made = AdamW([p], lr=1e-5, betas=(0.9, 0.95), weight_decay=0.1, param_rounding="nearest")
        made.check = check = UpdateCheck({p: p.to_local()}, warmup=0, steps=STEPS + 1)
        assert check.begins(0)
        p.grad = to_shards(gradient)
        made.step()
        sampled.append(check.sums(1)["updates/sum_sampled"].item())
    assert sampled == [RUN, RUN, RUN, 0]


def test_at_most_a_run_of_each_parameter_is_sampled():
    shards = {nn.Parameter(torch.zeros(size)): torch.zeros(size) for size in (100_000, 3000, 100, 64, 5000, 0)}
    runs = UpdateCheck(shards, warmup=0, steps=STEPS + 1).runs
    assert next(iter(shards)) in runs and len(runs) <= RUNS
    for p, run in runs.items():
        assert run.start % RUN == 0 and run.start < run.stop == min(run.start + RUN, p.numel())


RUN_SETTINGS = {
    "model": "qwen2", "data": ("random",), "steps": STEPS + 3, "warmup": 1, "batch_size": 2, "sequence_length": 32,
    "learning_rate": 1e-6, "dtype": "bfloat16", "param_dtype": "bfloat16", "no_export": True, "eval_every": 100,
}  # fmt: skip


def warnings_of_run(tmp_path, **changes):
    train(TrainConfig(**RUN_SETTINGS | {"output": tmp_path / "run"} | changes))
    warnings = [warning["text"] for warning in json.loads((tmp_path / "run/run.json").read_text())["warnings"]]
    return [text for text in warnings if "updates changed" in text]


@pytest.mark.parametrize(("steps", "warmup", "checked"), [(10, 1, 8), (10, 10, 1), (2, 0, 1)])
def test_a_short_run_says_at_its_last_step_that_its_updates_vanish(steps, warmup, checked, tmp_path):
    (text,) = warnings_of_run(tmp_path, steps=steps, warmup=warmup, param_rounding="nearest")
    assert text.startswith(f"the last {checked} updates changed")


@pytest.mark.parametrize("changes", [{}, {"lora_rank": 4}, {"learning_rate": 1e-3, "param_rounding": "nearest"}])
def test_a_short_run_whose_updates_arrive_does_not(changes, tmp_path):
    assert not warnings_of_run(tmp_path, steps=2, **changes)


@pytest.mark.parametrize("rounding", quick(["exact", "nearest"], ["nearest"]))
def test_a_run_says_within_its_first_steps_that_its_updates_vanish(rounding, tmp_path):
    result = train(TrainConfig(**RUN_SETTINGS, param_rounding=rounding, output=tmp_path / "run"))
    checked = {record["step"]: record for record in result.metrics if CHANGED in record}
    assert set(checked) == set(range(3, STEPS + 3))  # of the updates behind the warm-up, with the next step's totals
    last = checked[STEPS + 2]
    warnings = [warning["text"] for warning in json.loads((tmp_path / "run/run.json").read_text())["warnings"]]
    about_updates = [text for text in warnings if "updates changed" in text]
    assert len(about_updates) == (rounding == "nearest")
    assert (last[CHANGED] > 0.95 * last[CHANGED_EXACTLY]) == (rounding == "exact")
