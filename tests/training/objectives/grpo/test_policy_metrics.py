"""Metrics of policy losses have TRL's names and TRL's values."""

from types import SimpleNamespace

import pytest
import torch

from ligermodels.training.objectives.grpo.judging import RewardedGeneration, RewardedGroup, generation_metrics
from ligermodels.training.objectives.grpo.policy import PolicyOptions, metric_sums, step_metrics
from ligermodels.training.objectives.grpo.reward_worker import RewardFunction
from tests.losses.test_policy import ADVANTAGES, CU_SEQLENS, padded, trl_loss, vectors


def clip_ratios(name, advantages=ADVANTAGES, **options):
    """The metrics of a step of one micro-batch."""
    logprobs, old, _, _, entropy = vectors()
    row = SimpleNamespace(
        batch=SimpleNamespace(completions=CU_SEQLENS), old_logprobs=old, ref_logprobs=None, sampling_logprobs=old,
        advantages=advantages, token_mask=None,
    )  # fmt: skip
    found = SimpleNamespace(logprobs=logprobs, entropy=entropy)
    metrics = step_metrics(*metric_sums(PolicyOptions(name=name, longest=9, **options), row, found))
    return {name: float(value) for name, value in metrics.items() if name.startswith("clip_ratio")}


@pytest.mark.parametrize(
    "name, options, theirs",
    [
        ("dapo", {}, {}),
        ("grpo", {"epsilon": 0.1, "importance_sampling_level": "sequence"}, {"epsilon_low": 0.1, "epsilon_high": 0.1}),
        ("luspo", {"epsilon": 0.1}, {"epsilon_low": 0.1, "epsilon_high": 0.1, "importance_sampling_level": "sequence"}),
        ("gmpo", {}, {"epsilon_low": 0.4, "epsilon_high": 0.4}),
    ],
)
def test_clip_ratios_are_those_of_trl(name, options, theirs):
    logprobs, old, *_ = vectors()
    if "importance_sampling_level" in options:
        theirs = theirs | {"importance_sampling_level": "sequence"}
    _, metrics = trl_loss(name, logprobs, old, **theirs)
    expected = {key: value for key, value in metrics.items() if key.startswith("clip_ratio")}
    assert expected["clip_ratio/region_mean"] > 0
    assert clip_ratios(name, **options) == pytest.approx(expected)


def test_clip_ratios_of_rloo_are_those_of_whole_completions():
    logprobs, old, *_ = vectors()
    ratios = padded((logprobs - old).detach()).sum(1).exp()
    low, high = (ratios < 0.8) & (-ADVANTAGES < 0), (ratios > 1.2) & (-ADVANTAGES > 0)
    assert (low | high).any()
    assert clip_ratios("rloo", -ADVANTAGES) == pytest.approx({
        "clip_ratio/low_mean": low.double().mean().item(), "clip_ratio/low_min": low.double().min().item(),
        "clip_ratio/high_mean": high.double().mean().item(), "clip_ratio/high_max": high.double().max().item(),
        "clip_ratio/region_mean": (low | high).double().mean().item(),
    })  # fmt: skip


def test_the_deviation_of_rewards_is_that_of_the_batch():
    """TRL 1.16: of all completions, not the mean of the groups'."""
    samples = [SimpleNamespace(ids=[1], finish_reason="stop")] * 2
    groups = [RewardedGroup(None, samples, [values], {}) for values in ([1.0, 1.0], [0.0, None], [0.0, 3.0])]
    metrics = generation_metrics(RewardedGeneration(groups, {}), [RewardFunction("f", "f", None)])
    assert metrics["reward_std"] == pytest.approx(torch.tensor([1.0, 1.0, 0.0, 0.0, 3.0]).std().item())
