"""Sampling: kernels beside the reference, the reference beside float64, drawn tokens beside their probabilities."""

import math

import pytest
import torch

from ligermodels.kernels.decoding.sample import BLOCK, sample, sample_reference
from ligermodels.kernels.philox import draw_bits_reference
from tests.conftest import DEVICE

OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
SETTINGS = [  # temperature, top_k, top_p, min_p
    *[(0.0, 0, 1.0, 0.0), (0.0, 3, 0.5, 0.2), (1.0, 0, 1.0, 0.0), (0.3, 0, 1.0, 0.0), (1e-5, 0, 1.0, 0.0)],
    *[(1.0, 1, 1.0, 0.0), (1.0, 7, 1.0, 0.0), (2.0, 100, 1.0, 0.0), (1.0, 10**6, 1.0, 0.0), (1.0, 600, 1.0, 0.0)],
    *[(1.0, 0, 0.9, 0.0), (0.7, 0, 0.3, 0.0), (1.0, 0, 1e-9, 0.0), (5.0, 0, 0.999, 0.0), (1.0, 0, 0.0, 0.0)],
    *[(1.0, 0, 1.0, 0.1), (1.0, 0, 1.0, 1.0), (1.3, 50, 0.8, 0.02), (1.0, 20, 0.999999, 0.0), (1.0, 0, 0.5, 0.3)],
]


def arguments(settings, seed=5):
    """The tensors of `sample` behind the logits: one row for each of `settings`, the same seed, different counters."""
    temperature, top_k, top_p, min_p = (
        torch.tensor(x, dtype=d, device=DEVICE)
        for x, d in zip(
            zip(*settings, strict=True), (torch.float32, torch.int32, torch.float32, torch.float32), strict=True
        )
    )
    row = torch.arange(len(settings), device=DEVICE)
    return temperature, top_k, top_p, min_p, torch.full_like(row, seed), torch.stack([row, 3 * row], 1)


def logits_of(kind, rows, vocabulary):
    if kind == "normal":
        return 3 * torch.randn(rows, vocabulary, device=DEVICE)
    if kind == "ties":
        return torch.randint(-3, 4, (rows, vocabulary), device=DEVICE).float()
    if kind == "equal":
        return torch.zeros(rows, vocabulary, device=DEVICE)
    logits = torch.full((rows, vocabulary), -torch.inf, device=DEVICE)
    chosen = torch.randint(vocabulary, (rows, 1 if kind == "one finite" else vocabulary // 3), device=DEVICE)
    return logits.scatter_(1, chosen, torch.randn(chosen.shape, device=DEVICE))


KINDS = "normal", "ties", "equal", "some infinite", "one finite"
CASES = [
    *[(kind, vocabulary, torch.float32) for kind in KINDS for vocabulary in (5, 17 * BLOCK + 1)],
    *[("normal", 1000, dtype) for dtype in (torch.float16, torch.bfloat16)],
]


@pytest.mark.parametrize(("kind", "vocabulary", "dtype"), CASES)
def test_kernels_draw_what_the_reference_draws(kernels, poisoned, kind, vocabulary, dtype):
    logits = logits_of(kind, len(SETTINGS), vocabulary).to(dtype)
    expected = sample_reference(logits, *arguments(SETTINGS))
    tokens, logprobs = sample(logits, *arguments(SETTINGS))
    assert tokens.tolist() == expected[0].tolist()
    torch.testing.assert_close(logprobs, expected[1], rtol=2e-6, atol=2e-6)


def distribution(logits, temperature, top_k, top_p, min_p):
    """The probabilities in float64, as Hugging Face defines them, but tokens tied with a threshold are kept."""
    if temperature == 0:
        return torch.softmax(logits.double(), -1)
    logits = logits.double() / temperature
    ranked = logits.sort(descending=True).values
    if 0 < top_k < len(logits):
        logits = logits.masked_fill(logits < ranked[top_k - 1], -torch.inf)
    if top_p < 1:
        ranked = logits.sort(descending=True).values
        preceding = ranked.softmax(-1).cumsum(-1) - ranked.softmax(-1)
        last = max(int((preceding < top_p).sum()) - 1, 0)
        logits = logits.masked_fill(logits < ranked[last], -torch.inf)
    probabilities = logits.softmax(-1)
    kept = probabilities >= min_p * probabilities.max()
    return (probabilities * kept) / probabilities[kept].sum()


@pytest.mark.parametrize("kind", ["normal", "ties", "some infinite"])
def test_the_logprob_is_that_of_the_distribution_in_float64(kind):
    logits = logits_of(kind, len(SETTINGS), 700)
    for _ in range(5):
        tokens, logprobs = sample_reference(logits, *arguments(SETTINGS, seed=_))
        for row, token, logprob, setting in zip(logits, tokens, logprobs, SETTINGS, strict=True):
            probability = distribution(row, *setting)[token].item()
            assert probability > 0, f"{setting} draws a token that is filtered out"
            assert logprob.item() == pytest.approx(math.log(probability), rel=2e-6, abs=2e-5), setting


def test_a_token_is_drawn_where_the_cumulative_mass_first_exceeds_the_uniform_number(monkeypatch):
    """Weights 1/2, 0, 1, 1/2, whose masses are exact: the boundaries lie at 1/4 and 3/4."""
    logits = torch.tensor([[-1.0, -torch.inf, 0.0, -1.0]]) * math.log(2)
    quarter = 2**60
    uniform = [0, quarter - 1, quarter, 3 * quarter - 1, 3 * quarter, 4 * quarter - 1]
    monkeypatch.setattr(
        "ligermodels.kernels.decoding.sample.draw_bits_reference",
        lambda seeds, counters: torch.tensor(uniform, device=DEVICE),
    )
    rows = arguments([tuple(OFF.values())] * len(uniform))
    tokens, logprobs = sample_reference(logits.to(DEVICE).expand(len(uniform), 4), *rows)
    assert tokens.tolist() == [0, 0, 2, 2, 3, 3]
    torch.testing.assert_close(logprobs.exp(), torch.tensor([0.25, 0.25, 0.5, 0.5, 0.25, 0.25], device=DEVICE))


def draw_many(draws, logits, **settings):
    """How often each token is drawn: one call, one seed, the counters 0 to `draws`."""
    rows = arguments([tuple((OFF | settings).values())] * draws)
    tokens, _ = sample_reference(logits.expand(draws, -1), *rows)
    return torch.bincount(tokens, minlength=logits.shape[-1]).cpu()


@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 0.6}, {"top_k": 6}, {"top_p": 0.8}, {"min_p": 0.1, "temperature": 1.5}]
)
def test_drawn_tokens_pass_a_chi_square_test(settings):
    draws, logits = 20_000, torch.linspace(-2, 2, 12, device=DEVICE)
    found = draw_many(draws, logits, **settings).double()
    expected = draws * distribution(logits.cpu(), **(OFF | settings))
    kept = expected > 0
    assert found[~kept].sum() == 0
    statistic = ((found - expected)[kept] ** 2 / expected[kept]).sum().item()
    degrees = int(kept.sum()) - 1
    assert abs(statistic - degrees) < 3.5 * math.sqrt(2 * degrees)  # a fixed seed: passes or fails for good


@pytest.mark.parametrize("function", [sample, sample_reference])
def test_a_row_alone_gives_the_bits_that_it_gives_in_a_batch(kernels, function):
    logits = logits_of("normal", len(SETTINGS), 1000)
    rows = arguments(SETTINGS)
    tokens, logprobs = function(logits, *rows)
    for row in range(len(SETTINGS)):
        one = slice(row, row + 1)
        token, logprob = function(logits[one], *(x[one] for x in rows))
        assert token.item() == tokens[row] and logprob.item() == logprobs[row]


def test_greedy_takes_the_first_of_the_highest_logits(kernels):
    logits = logits_of("ties", 8, 600)
    tokens, logprobs = sample(logits, *arguments([(0.0, 2, 0.1, 0.5)] * 8))
    assert torch.equal(tokens, logits.argmax(-1))
    torch.testing.assert_close(logprobs, logits.log_softmax(-1).amax(-1))


def test_filters_that_are_off_equal_filters_that_are_absent(kernels):
    logits = logits_of("normal", 6, 700)
    temperature, *filters, seeds, counters = arguments([tuple(OFF.values())] * 6)
    expected = sample(logits, temperature, *filters, seeds, counters)
    for present in (None, *range(3)):
        given = [x if i == present else None for i, x in enumerate(filters)]
        assert torch.equal(sample(logits, temperature, *given, seeds, counters)[0], expected[0])


def test_the_random_number_depends_on_seed_request_and_position():
    seeds = torch.tensor([0, 1, 0, 0])
    counters = torch.tensor([[0, 0], [0, 0], [1, 0], [0, 1]])
    assert len(set(draw_bits_reference(seeds, counters).tolist())) == 4


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of the interpreter
@pytest.mark.parametrize("function", [sample, sample_reference])
def test_a_row_that_is_not_a_distribution_gives_some_token_and_no_finite_logprob(kernels, function):
    for logits in (torch.full((300,), -torch.inf), torch.arange(300.0).div(0), torch.tensor([0.0] * 9 + [torch.inf])):
        tokens, logprobs = function(logits.to(DEVICE).expand(len(SETTINGS), -1), *arguments(SETTINGS))
        assert tokens.min() >= 0 and tokens.max() < len(logits)
        assert not logprobs.isfinite().any()
