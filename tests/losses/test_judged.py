"""KTO, APO of single answers, and reward models: formulas in float64, gradients, extremes, refusals."""

import math

import pytest
import torch

from ligermodels import InputError
from ligermodels.losses import kto, kto_kl_sum, kto_z, reward, segment_sums
from tests.losses.sequences import sequences

BETA, Z = 0.7, 0.2
DESIRABLE = torch.tensor([True, False, True, True, False, False, True, False])
WEIGHTS = {"desirable_weight": 1.3, "undesirable_weight": 0.9}


def sigma(x):
    return 1 / (1 + math.exp(-x))


def log_ratios(data):
    return segment_sums(data.logprobs.detach() - data.reference, data.cu_seqlens).tolist()


def evaluate(data, z=Z, logprobs=None, desirable=DESIRABLE, **options):
    reference = segment_sums(data.reference, data.cu_seqlens)
    logprobs = data.logprobs if logprobs is None else logprobs
    return kto(logprobs, data.cu_seqlens, reference, desirable, z, **{"beta": BETA, **options})


def test_kto_is_its_formula():
    data = sequences()
    good = [1.3 * (1 - sigma(BETA * (r - Z))) for r, chosen in zip(log_ratios(data), DESIRABLE, strict=True) if chosen]
    bad = [
        0.9 * (1 - sigma(BETA * (Z - r))) for r, chosen in zip(log_ratios(data), DESIRABLE, strict=True) if not chosen
    ]
    result = evaluate(data, **WEIGHTS)
    assert result.loss.item() == pytest.approx(sum(good) + sum(bad), rel=1e-12)
    assert result.examples.item() == 8


def test_apo_zero_of_single_answers_is_kto_with_z_of_0():
    data = sequences()
    terms = [
        1 - sigma(BETA * r) if good else sigma(BETA * r) for r, good in zip(log_ratios(data), DESIRABLE, strict=True)
    ]
    assert evaluate(data, z=0).loss.item() == pytest.approx(sum(terms), rel=1e-12)


def test_gradients_of_kto_reach_the_log_probabilities_alone():
    data, z = sequences(), torch.tensor(Z, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda logprobs: evaluate(data, Z, logprobs, **WEIGHTS).loss, data.logprobs)
    evaluate(data, z).loss.backward()
    assert z.grad is None


def test_metrics_of_kto_are_sums_over_good_and_bad_examples():
    data = sequences()
    ratios, metrics = torch.tensor(log_ratios(data)), evaluate(data).metrics
    assert metrics["rewards/chosen"].item() == pytest.approx(BETA * ratios[DESIRABLE].sum().item(), rel=1e-6)
    assert metrics["rewards/rejected"].item() == pytest.approx(BETA * ratios[~DESIRABLE].sum().item(), rel=1e-6)
    assert (metrics["count/chosen"].item(), metrics["count/rejected"].item()) == (4, 4)
    sums = segment_sums(data.logprobs, data.cu_seqlens)
    assert metrics["logps/rejected"].item() == pytest.approx(sums[~DESIRABLE].sum().item())


def test_examples_without_tokens_add_nothing():
    data = sequences([3, 5])
    plain = evaluate(data, desirable=DESIRABLE[:2])
    holes = data._replace(cu_seqlens=torch.tensor([0, 3, 3, 3, 8], dtype=torch.int32))
    result = evaluate(holes, desirable=torch.tensor([True, True, False, False]))
    assert result[:2] == plain[:2] and result.metrics == plain.metrics


@pytest.mark.parametrize("sign", [-1, 1])
def test_log_ratios_of_10_000_are_finite(sign):
    data = sequences([2, 2], torch.float32)
    logprobs = torch.tensor([5e3, 5e3, -5e3, -5e3, 0, 0, 0]).mul(sign).requires_grad_()
    result = evaluate(data, logprobs=logprobs, desirable=DESIRABLE[:2])
    result.loss.backward()
    assert result.loss.isfinite() and logprobs.grad.isfinite().all()


@pytest.mark.parametrize(("shift", "clamped"), [(1.0, False), (-1.0, True)])
def test_z_is_the_mean_log_ratio_of_all_calls_and_not_negative(shift, clamped):
    data = sequences()
    reference = segment_sums(data.reference, data.cu_seqlens) - shift
    ratios = segment_sums(data.logprobs, data.cu_seqlens) - reference
    calls = [(data.cu_seqlens[:4], reference[:3]), (data.cu_seqlens[3:], reference[3:])]
    sums, counts = zip(*(kto_kl_sum(data.logprobs, *call) for call in calls), strict=True)
    z = kto_z(sum(sums), sum(counts))
    assert z.item() == (0 if clamped else pytest.approx(ratios.mean().item())) and not z.requires_grad


def test_z_does_not_count_answers_without_tokens():
    data = sequences([3, 5])
    offsets = torch.tensor([0, 3, 3, 8], dtype=torch.int32)
    _, answers = kto_kl_sum(data.logprobs, offsets, torch.zeros(3))
    assert answers.item() == 2 and kto_z(torch.tensor(0.0), torch.tensor(0.0)).item() == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beta": 0.0}, "beta is 0.0; it must be above 0"),
        ({"desirable_weight": -1.0}, r"desirable_weight is -1.0; it must be 0 or more"),
        ({"undesirable_weight": math.nan}, "undesirable_weight is nan; it must be 0 or more"),
        ({"desirable": DESIRABLE[:3]}, r"desirable is bool \[3\]; it must be bool \[8\]"),
        ({"desirable": DESIRABLE.float()}, r"desirable is float32 \[8\]; it must be bool \[8\]"),
    ],
)
def test_kto_refuses(options, message):
    with pytest.raises(InputError, match=message):
        evaluate(sequences(), **options)


REWARDS = [1.5, 0.2, -0.3, 0.4]


def test_reward_is_its_formula():
    margin = torch.tensor([0.5, 1.0])
    result = reward(torch.tensor(REWARDS), margin=margin, center_rewards_coefficient=0.01)
    expected = -math.log(sigma(1.3 - 0.5)) - math.log(sigma(-0.7 - 1)) + 0.01 * (1.7**2 + 0.1**2)
    assert result.loss.item() == pytest.approx(expected, rel=1e-6)
    plain = reward(torch.tensor(REWARDS))
    assert plain.loss.item() == pytest.approx(-math.log(sigma(1.3)) - math.log(sigma(-0.7)), rel=1e-6)
    assert plain.pairs.item() == 2
    shown = {name: value.item() for name, value in plain.metrics.items()}
    assert shown == pytest.approx(
        {"accuracy": 1, "margin": 0.6, "mean_reward": 0.9, "min_reward": -0.3, "max_reward": 1.5}
    )


def test_gradients_of_reward():
    rewards = torch.tensor(REWARDS, dtype=torch.float64, requires_grad=True)
    margin = torch.tensor([0.5, 1.0])
    assert torch.autograd.gradcheck(lambda r: reward(r, margin=margin, center_rewards_coefficient=0.01).loss, rewards)


def test_rewards_far_apart_are_finite_and_none_are_0():
    rewards = torch.tensor([-1e4, 1e4, 1e4, -1e4], requires_grad=True)
    result = reward(rewards)
    result.loss.backward()
    assert result.loss.item() == 2e4 and rewards.grad.tolist() == [-1, 1, 0, 0]
    nothing = reward(torch.zeros(0))
    assert (nothing.loss.item(), nothing.pairs.item(), nothing.metrics["min_reward"].item()) == (0, 0, math.inf)


def test_reward_refuses():
    with pytest.raises(InputError, match=r"rewards is float32 \[3\]; it must be a vector, chosen and rejected"):
        reward(torch.zeros(3))
    with pytest.raises(InputError, match=r"margin is float32 \[4\]; it must have one value for each of 2 pairs"):
        reward(torch.zeros(4), margin=torch.zeros(4))
    with pytest.raises(InputError, match=r"center_rewards_coefficient is -1\.0; it must be 0 or more"):
        reward(torch.zeros(4), center_rewards_coefficient=-1.0)
