"""DPO and its relatives: each formula in float64, gradients, options, extremes, invariances, refusals."""

import math

import pytest
import torch

from ligermodels import InputError
from ligermodels.losses import dpo, pair_sums
from ligermodels.losses.preference import LOSS_TYPES, PAIR_LOSSES, SORTED
from tests.losses.sequences import LENGTHS, sequences

BETA, EPSILON = 0.7, 0.1
SMOOTHING = dict.fromkeys(("sigmoid", "sigmoid_norm", "exo_pair", "robust", "aot", "aot_unpaired"), EPSILON)


def sigma(x):
    return 1 / (1 + math.exp(-x))


def log_sigma(x):
    return math.log(sigma(x))


def cdpo(x):
    return -(1 - EPSILON) * log_sigma(x) - EPSILON * log_sigma(-x)


def exo(q):
    return q * (math.log(q) - math.log(1 - EPSILON)) + (1 - q) * (math.log(1 - q) - math.log(EPSILON))


def discopop(x, tau=0.05):
    m = sigma(x / tau)
    return (1 - m) * -log_sigma(x) + m * math.exp(-x)


# Of the log-ratios c and r of chosen and rejected, and of their lengths n and m: the formulas as the papers print them.
FORMULAS = {
    "sigmoid": lambda c, r, n, m: cdpo(BETA * (c - r)),
    "hinge": lambda c, r, n, m: max(0, 1 - BETA * (c - r)),
    "ipo": lambda c, r, n, m: (c / n - r / m - 1 / (2 * BETA)) ** 2,
    "exo_pair": lambda c, r, n, m: exo(sigma(BETA * (c - r))),
    "nca_pair": lambda c, r, n, m: -log_sigma(BETA * c) - log_sigma(-BETA * c) / 2 - log_sigma(-BETA * r) / 2,
    "robust": lambda c, r, n, m: (
        (-(1 - EPSILON) * log_sigma(BETA * (c - r)) + EPSILON * log_sigma(BETA * (r - c))) / (1 - 2 * EPSILON)
    ),
    "bco_pair": lambda c, r, n, m: -log_sigma(BETA * c) - log_sigma(-BETA * r),
    "sppo_hard": lambda c, r, n, m: (c - 1 / (2 * BETA)) ** 2 + (r + 1 / (2 * BETA)) ** 2,
    "apo_zero": lambda c, r, n, m: 1 - sigma(BETA * c) + sigma(BETA * r),
    "apo_down": lambda c, r, n, m: sigma(BETA * c) + 1 - sigma(BETA * (c - r)),
    "discopop": lambda c, r, n, m: discopop(BETA * (c - r)),
    "sigmoid_norm": lambda c, r, n, m: cdpo(BETA * (c / n - r / m)),
}


def log_ratios(data):
    ratios = pair_sums(data.logprobs.detach() - data.reference, data.cu_seqlens).view(-1, 2)
    lengths = data.cu_seqlens.diff().view(-1, 2)
    return [(*pair, *tokens) for pair, tokens in zip(ratios.tolist(), lengths.tolist(), strict=True)]


def evaluate(data, name="sigmoid", logprobs=None, **options):
    options = {"beta": BETA, "label_smoothing": SMOOTHING.get(str(name), 0.0)} | options
    reference = pair_sums(data.reference, data.cu_seqlens, options.get("ld_alpha"))
    return dpo(data.logprobs if logprobs is None else logprobs, data.cu_seqlens, reference, loss_type=name, **options)


def test_every_loss_has_a_formula_here():
    assert {*FORMULAS, *SORTED} == {*PAIR_LOSSES}


@pytest.mark.parametrize("name", FORMULAS)
def test_the_sum_over_pairs_is_the_formula(name):
    data = sequences()
    result = evaluate(data, name)
    assert result.loss.item() == pytest.approx(sum(FORMULAS[name](*pair) for pair in log_ratios(data)), rel=1e-12)
    assert (result.pairs.item(), result.tokens.item(), result.nll.item()) == (4, sum(LENGTHS[::2]), 0)


@pytest.mark.parametrize("name", sorted(LOSS_TYPES))
def test_gradients(name):
    data = sequences(seed=1)

    def loss(logprobs):
        result = evaluate(data, name, logprobs)
        return result.loss + result.nll

    assert torch.autograd.gradcheck(loss, data.logprobs)


def ranked(left, right):
    return zip(sorted(left.tolist()), sorted(right.tolist()), strict=True)


def test_optimal_transport_compares_sorted_values():
    data = sequences()
    policy, reference = (pair_sums(v.detach(), data.cu_seqlens).view(-1, 2) for v in data[:2])
    gaps = ranked(policy[:, 0] - policy[:, 1], reference[:, 0] - reference[:, 1])
    assert evaluate(data, "aot").loss.item() == pytest.approx(sum(cdpo(BETA * (a - b)) for a, b in gaps))
    ratios = policy - reference
    gaps = ranked(*ratios.unbind(1))
    assert evaluate(data, "aot_unpaired").loss.item() == pytest.approx(sum(cdpo(BETA * (a - b)) for a, b in gaps))


@pytest.mark.parametrize(
    ("kind", "score"),
    [
        ("forward_kl", lambda r: 1 - math.exp(-r)),
        ("js_divergence", lambda r: math.log(2) + log_sigma(r)),
        ("alpha_divergence", lambda r: (math.exp(-0.7 * r) - 1) / -0.7),
    ],
)
@pytest.mark.parametrize("name", ["sigmoid", "ipo", "sigmoid_norm"])
def test_f_divergences(kind, score, name):
    data = sequences()
    options = {"f_divergence_type": kind, "f_alpha_divergence_coef": 0.3}
    expected = sum(FORMULAS[name](score(c), score(r), n, m) for c, r, n, m in log_ratios(data))
    assert evaluate(data, name, **options).loss.item() == pytest.approx(expected, rel=1e-12)
    assert torch.autograd.gradcheck(lambda logprobs: evaluate(data, name, logprobs, **options).loss, data.logprobs)


def test_the_alpha_divergence_near_1_is_reverse_kl():
    data = sequences()
    near = evaluate(data, f_divergence_type="alpha_divergence", f_alpha_divergence_coef=1 + 2e-6)
    assert near.loss.item() == pytest.approx(evaluate(data).loss.item(), rel=1e-5)


def test_ld_alpha_weights_the_tokens_beyond_the_shorter_side():
    data = sequences([3, 5, 4, 1])
    weights = torch.tensor([1, 1, 1, 1, 1, 1, 0.3, 0.3, 1, 0.3, 0.3, 0.3, 1] + [0] * 3, dtype=torch.float64)
    weighted = data._replace(logprobs=data.logprobs * weights, reference=data.reference * weights)
    assert evaluate(data, ld_alpha=0.3).loss.item() == pytest.approx(evaluate(weighted).loss.item(), rel=1e-12)
    assert evaluate(data, ld_alpha=1).loss.item() == evaluate(data).loss.item()
    likelihood = -(data.logprobs[:3].sum() + data.logprobs[8:12].sum()).item()
    assert evaluate(data, "sft", ld_alpha=0.3).nll.item() == pytest.approx(likelihood)


def test_wpo_weights_pairs_by_the_policy_without_a_gradient():
    data = sequences([3, 5])
    squares = -torch.rand(11, dtype=torch.float64)
    gaps = (data.logprobs - squares).detach()
    weight = torch.exp(gaps[:3].mean() + gaps[3:8].mean()).item()
    plain, weighted = evaluate(data, ["sigmoid", "sft"]), evaluate(data, ["sigmoid", "sft"], log_sum_squares=squares)
    assert weighted.loss.item() == pytest.approx(weight * plain.loss.item(), rel=1e-12)
    assert weighted.nll.item() == pytest.approx(weight * plain.nll.item(), rel=1e-12)
    gradients = [torch.autograd.grad(result.loss, data.logprobs)[0] for result in (plain, weighted)]
    torch.testing.assert_close(gradients[1], weight * gradients[0])


def test_several_losses_are_added_with_their_weights():
    data = sequences()
    mixed = evaluate(data, ["hinge", "bco_pair", "sft"], loss_weights=[0.8, 0.2, 0.5])
    parts = 0.8 * evaluate(data, "hinge").loss + 0.2 * evaluate(data, "bco_pair").loss
    assert mixed.loss.item() == pytest.approx(parts.item(), rel=1e-12)
    assert mixed.nll.item() == pytest.approx(0.5 * mixed.metrics["nll_loss"].item(), rel=1e-12)


def test_a_policy_that_is_the_reference_has_the_loss_ln_2_to_the_bit():
    data = sequences([900, 700], torch.float32, scale=8.0)
    result = dpo(data.reference, data.cu_seqlens, pair_sums(data.reference, data.cu_seqlens))
    assert result.loss.dtype == torch.float32
    assert result.loss.item() == torch.tensor(2.0).log().item()
    assert result.metrics["rewards/margins"].item() == 0


def test_metrics_are_sums_over_pairs():
    data = sequences()
    ratios = log_ratios(data)
    metrics = evaluate(data).metrics
    assert not any(value.requires_grad for value in metrics.values())
    shown = {name.removeprefix("rewards/"): value.item() for name, value in metrics.items()}
    assert shown["chosen"] == pytest.approx(BETA * sum(w for w, *_ in ratios))
    assert shown["margins"] == pytest.approx(BETA * sum(c - r for c, r, *_ in ratios))
    assert shown["accuracies"] == sum(c > r for c, r, *_ in ratios)
    assert shown["logps/rejected"] == pytest.approx(pair_sums(data.logprobs, data.cu_seqlens)[1::2].sum().item())


@pytest.mark.parametrize("name", sorted(PAIR_LOSSES))
@pytest.mark.parametrize("sign", [-1, 1])
def test_log_ratios_of_10_000_are_finite(name, sign):
    data = sequences([2, 2, 2, 2], torch.float32)
    far = torch.tensor([5e3, 5e3, -5e3, -5e3] * 2 + [0] * 3) * sign
    logprobs = far.requires_grad_()
    result = evaluate(data, name, logprobs, beta=1.0)
    result.loss.backward()
    assert result.loss.isfinite() and logprobs.grad.isfinite().all()


@pytest.mark.parametrize("kind", ["forward_kl", "js_divergence", "alpha_divergence"])
def test_f_divergences_of_log_ratios_of_10_000_are_finite(kind):
    data = sequences([2, 2], torch.float32)
    logprobs = torch.tensor([-5e3, -5e3, 5e3, 5e3, 0, 0, 0], requires_grad=True)
    result = evaluate(data, logprobs=logprobs, f_divergence_type=kind)
    result.loss.backward()
    assert result.loss.isfinite() and logprobs.grad.isfinite().all()


@pytest.mark.parametrize("name", sorted(LOSS_TYPES))
def test_pairs_with_an_empty_side_and_padding_add_nothing(name):
    data = sequences([3, 5, 4, 1])
    # Two pairs without a token in the middle, and one whose rejected side alone has tokens, at the end.
    with_holes = data._replace(cu_seqlens=torch.tensor([0, 3, 8, 8, 8, 8, 8, 12, 13, 13, 15], dtype=torch.int32))
    plain, result = evaluate(data, name), evaluate(with_holes, name)
    assert result[:4] == plain[:4]
    gradients = [torch.autograd.grad(r.loss + r.nll, data.logprobs)[0] for r in (plain, result)]
    assert gradients[0].equal(gradients[1]) and gradients[0][13:].eq(0).all()
    none = dpo(data.logprobs, torch.zeros(1, dtype=torch.int32), torch.zeros(0))
    assert [value.item() for value in none[:4]] == [0, 0, 0, 0]


def test_calls_over_parts_of_a_step_add_up():
    whole = sequences([3, 5, 4, 1])
    first, second = whole.cu_seqlens[:3], whole.cu_seqlens[2:]
    for name in FORMULAS:
        parts = [evaluate(whole._replace(cu_seqlens=offsets), name) for offsets in (first, second)]
        assert sum(part.loss for part in parts).item() == pytest.approx(evaluate(whole, name).loss.item(), rel=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beta": 0.0}, "beta is 0.0; it must be above 0"),
        ({"beta": math.nan}, "beta is nan; it must be above 0"),
        ({"loss_type": "sigmod"}, "loss_type 'sigmod' is unknown; did you mean 'sigmoid'?"),
        ({"loss_type": []}, "loss_type is empty"),
        ({"loss_type": ["ipo", "sft"], "loss_weights": [1.0]}, "loss_weights has 1 values for 2 losses"),
        (
            {"loss_type": "robust", "label_smoothing": 0.5},
            "label_smoothing is 0.5; it must be at least 0 and below",
        ),
        ({"loss_type": "hinge", "label_smoothing": 0.1}, "label_smoothing has no effect on loss_type hinge"),
        ({"loss_type": "exo_pair"}, "label_smoothing is 0, but loss_type exo_pair"),
        ({"loss_type": "aot", "f_divergence_type": "forward_kl"}, "forward_kl does not fit loss_type aot"),
        ({"f_divergence_type": "kl"}, "f_divergence_type 'kl' is unknown"),
        ({"loss_type": "discopop", "discopop_tau": 0.0}, "discopop_tau is 0.0; it must be above 0"),
        ({"f_alpha_divergence_coef": math.inf}, "f_alpha_divergence_coef is inf; it must be a finite number"),
        ({"ld_alpha": 1.5}, "ld_alpha is 1.5; it must be between 0 and 1"),
        ({"loss_type": "aot", "log_sum_squares": torch.zeros(29)}, "log_sum_squares weights pairs"),
    ],
)
def test_options_that_contradict_are_refused(options, message):
    data = sequences()
    with pytest.raises(InputError, match=message.replace("?", r"\?")):
        dpo(data.logprobs, data.cu_seqlens, pair_sums(data.reference, data.cu_seqlens), **options)


def test_tensors_that_do_not_fit_are_refused():
    data = sequences()
    with pytest.raises(InputError, match=r"ref_sums is float64 \[29\]; .* pass pair_sums\(ref_logprobs, cu_seqlens\)"):
        dpo(data.logprobs, data.cu_seqlens, data.reference)
    with pytest.raises(InputError, match="cu_seqlens has 3 sequences; pairs need chosen and rejected alternating"):
        dpo(data.logprobs, data.cu_seqlens[:4], torch.zeros(3))
    with pytest.raises(InputError, match=r"log_sum_squares is float32 \[1\]; it must have one value for each of 29"):
        dpo(data.logprobs, data.cu_seqlens, torch.zeros(8), log_sum_squares=torch.zeros(1))
    with pytest.raises(InputError, match=r"cu_seqlens is float32 \[9\]"):
        dpo(data.logprobs, data.cu_seqlens.float(), torch.zeros(8))
    with pytest.raises(InputError, match=r"logprobs is float64 \[1, 29\]"):
        dpo(data.logprobs[None], data.cu_seqlens, torch.zeros(8))
