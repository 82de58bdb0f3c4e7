"""ORPO, CPO and SimPO: each formula in float64, gradients, extremes, refusals."""

import math

import pytest
import torch

from ligermodels import InputError
from ligermodels.losses import cpo, orpo, segment_means, segment_sums, simpo
from tests.losses.sequences import LENGTHS, sequences

BETA = 0.7


def log_sigma(x):
    return -math.log1p(math.exp(-x))


def cdpo(x, epsilon):
    return -(1 - epsilon) * log_sigma(x) - epsilon * log_sigma(-x)


def log_odds(mean):
    return math.log(math.exp(mean) / (1 - math.exp(mean)))


def power(mean, alpha):
    return (1 - math.exp(mean) ** -alpha) / alpha


ORPO = (orpo, {"beta": BETA}, "means", lambda c, r: -BETA * log_sigma(log_odds(c) - log_odds(r)), 1)
CASES = {
    "orpo": ORPO,
    "cpo": (cpo, {"beta": BETA, "label_smoothing": 0.1}, "sums", lambda c, r: cdpo(BETA * (c - r), 0.1), 1),
    "cpo hinge": (cpo, {"loss_type": "hinge", "beta": BETA}, "sums", lambda c, r: max(0, 1 - BETA * (c - r)), 1),
    "cpo ipo": (cpo, {"loss_type": "ipo", "beta": BETA}, "means", lambda c, r: (c - r - 0.5 / BETA) ** 2, 1),
    "simpo": (simpo, {"label_smoothing": 0.1}, "means", lambda c, r: cdpo(2 * (c - r) - 0.5, 0.1), 0),
    "alphapo": (
        *(simpo, {"beta": BETA, "gamma": 0.3, "alpha": 0.25, "nll_weight": 0.5}, "means"),
        *(lambda c, r: -log_sigma(BETA * (power(c, 0.25) - power(r, 0.25)) - 0.3), 0.5),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_sums_are_the_formula(name):
    loss, options, reads, formula, nll_weight = CASES[name]
    data = sequences()
    read = {"sums": segment_sums, "means": segment_means}[reads](data.logprobs, data.cu_seqlens).view(-1, 2).tolist()
    chosen = segment_sums(data.logprobs, data.cu_seqlens)[::2].sum().item()
    result = loss(data.logprobs, data.cu_seqlens, **options)
    assert result.loss.item() == pytest.approx(sum(formula(*pair) for pair in read), rel=1e-12)
    assert result.nll.item() == pytest.approx(-nll_weight * chosen, rel=1e-12)
    assert (result.pairs.item(), result.tokens.item()) == (4, sum(LENGTHS[::2]))
    assert result.metrics["nll_loss"].item() == pytest.approx(-chosen)
    assert result.metrics["logps/chosen"].item() == pytest.approx(sum(pair[0] for pair in read))


@pytest.mark.parametrize("name", CASES)
def test_gradients(name):
    loss, options, *_ = CASES[name]
    data = sequences(seed=1)

    def total(logprobs):
        result = loss(logprobs, data.cu_seqlens, **options)
        return result.loss + result.nll

    assert torch.autograd.gradcheck(total, data.logprobs)


@pytest.mark.parametrize("value", [-1e4, -1e-30, 0.0])
@pytest.mark.parametrize("name", CASES)
def test_hopeless_and_sure_answers_are_finite(name, value):
    loss, options, *_ = CASES[name]
    for logprobs in ([value] * 4, [value, value, -1.0, -1.0], [-1.0, -1.0, value, value]):
        logprobs = torch.tensor(logprobs, requires_grad=True)
        result = loss(logprobs, torch.tensor([0, 2, 4]), **options)
        (result.loss + result.nll).backward()
        assert result.loss.isfinite() and logprobs.grad.isfinite().all()


def test_a_sure_answer_has_no_gradient_in_orpo():
    logprobs = torch.tensor([-1e-9, -1.0], requires_grad=True)
    result = orpo(logprobs, torch.tensor([0, 1, 2]), beta=1.0)
    result.loss.backward()
    sure, other = -math.log(-math.expm1(-(2.0**-20))) - 2.0**-20, log_odds(-1.0)
    assert result.metrics["log_odds_chosen"].item() == pytest.approx(sure - other)
    assert logprobs.grad[0] == 0 and logprobs.grad[1] > 0


@pytest.mark.parametrize("name", CASES)
def test_pairs_with_an_empty_side_add_nothing(name):
    loss, options, *_ = CASES[name]
    data = sequences([3, 5, 4, 1])
    plain = loss(data.logprobs, data.cu_seqlens, **options)
    result = loss(data.logprobs, torch.tensor([0, 3, 8, 8, 8, 12, 13, 13, 15]), **options)
    assert result[:4] == plain[:4]


def test_alphapo_near_0_is_simpo():
    data = sequences()
    near = simpo(data.logprobs, data.cu_seqlens, alpha=2e-6)
    assert near.loss.item() == pytest.approx(simpo(data.logprobs, data.cu_seqlens).loss.item(), rel=1e-5)


@pytest.mark.parametrize(
    ("loss", "options", "message"),
    [
        (orpo, {"beta": 0.0}, "beta is 0.0; it must be above 0"),
        (cpo, {"beta": -1.0}, "beta is -1.0; it must be above 0"),
        (cpo, {"nll_weight": -1.0}, "nll_weight is -1.0; it must be 0 or more"),
        (cpo, {"loss_type": "simpo"}, "loss_type 'simpo' is unknown"),
        (cpo, {"loss_type": "ipo", "label_smoothing": 0.1}, "label_smoothing has no effect on loss_type ipo"),
        (simpo, {"label_smoothing": 0.5}, "label_smoothing is 0.5; it must be at least 0 and below 0.5"),
        (simpo, {"gamma": -0.5}, "gamma is -0.5; it must be 0 or more"),
        (simpo, {"alpha": math.inf}, "alpha is inf; it must be a finite number"),
    ],
)
def test_options_out_of_range_are_refused(loss, options, message):
    data = sequences()
    with pytest.raises(InputError, match=message):
        loss(data.logprobs, data.cu_seqlens, **options)
