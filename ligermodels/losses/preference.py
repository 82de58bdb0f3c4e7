"""DPO and its relatives: losses of pairs with a reference model.

A loss of a pair is a function of one number, the margin x by which the chosen side is ahead, or of both sides. In the
first case it returns a tensor of the shape of x, is finite for |x| ≤ 10⁴, and has the gradient of the formula there.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.errors import InputError, suggest
from ligermodels.losses.pairs import PairLoss, by_pair, margins, pair_sums, preference_metrics, sum_over_pairs
from ligermodels.losses.segments import (
    check_finite,
    check_label_smoothing,
    check_pairs,
    check_positive,
    check_reference,
    check_tokens,
    result_dtype,
    segment_means,
    segment_sums,
)

LARGEST_EXPONENT = 80.0  # e⁸⁰ is finite in fp32; beyond it exponentials stay constant, without a gradient


def logistic(x: Tensor, label_smoothing: float) -> Tensor:
    """−(1 − ε) log σ(x) − ε log σ(−x), where a label is wrong with probability ε (cDPO)."""
    return -(1 - label_smoothing) * F.logsigmoid(x) - label_smoothing * F.logsigmoid(-x)


def robust_logistic(x: Tensor, label_smoothing: float) -> Tensor:
    """(−(1 − ε) log σ(x) + ε log σ(−x)) / (1 − 2 ε): the unbiased loss where labels are wrong with probability ε."""
    return logistic(x, -label_smoothing / (1 - 2 * label_smoothing))


def hinge(x: Tensor) -> Tensor:
    """max(0, 1 − x)."""
    return F.relu(1 - x)


def squared(delta: Tensor, beta: float) -> Tensor:
    """(δ − 1 / (2 β))² of a margin δ that is not multiplied by β (IPO)."""
    return (delta - 1 / (2 * beta)).square()


def exo(x: Tensor, label_smoothing: float) -> Tensor:
    """KL divergence of (q, 1 − q) from (1 − ε, ε), where q = σ(x) (EXO)."""
    log_target = math.log1p(-label_smoothing), math.log(label_smoothing)
    chosen = torch.sigmoid(x) * (F.logsigmoid(x) - log_target[0])
    return chosen + torch.sigmoid(-x) * (F.logsigmoid(-x) - log_target[1])


def discopop(x: Tensor, tau: float) -> Tensor:
    """(1 − m) (−log σ(x)) + m e⁻ˣ, where m = σ(x / τ). m e⁻ˣ is one exponential: e⁻ˣ alone overflows."""
    exponential = (F.logsigmoid(x / tau) - x).clamp(max=LARGEST_EXPONENT).exp()
    return exponential - torch.sigmoid(-x / tau) * F.logsigmoid(x)


def power_score(ratios: Tensor, exponent: float) -> Tensor:
    """(e^(k r) − 1) / k; r for k → 0. The score of f-DPO and of AlphaPO: not a loss, but what a margin is taken of."""
    if abs(exponent) < 1e-6:
        return ratios
    return torch.expm1((exponent * ratios).clamp(max=LARGEST_EXPONENT)) / exponent


class Pairs(NamedTuple):
    """What the losses below read, in float64."""

    policy: Tensor  # s, log-probabilities of the sides, [P, 2]
    reference: Tensor  # s_ref
    scores: Tensor  # φ(r) of the log-ratios r = s − s_ref; r itself for reverse KL
    lengths: Tensor  # n, tokens of the sides
    beta: float
    label_smoothing: float
    discopop_tau: float

    @property
    def rewards(self) -> Tensor:
        """β r, [P, 2]."""
        return self.beta * (self.policy - self.reference)

    @property
    def x(self) -> Tensor:
        """β (φ(r_w) − φ(r_l)), [P]."""
        return self.beta * margins(self.scores)

    @property
    def mean_delta(self) -> Tensor:
        """φ(r_w) / n_w − φ(r_l) / n_l, [P]."""
        return margins(self.scores / self.lengths.clamp(min=1))


def nca_pair(pairs: Pairs) -> Tensor:
    chosen, rejected = pairs.rewards.unbind(1)
    return -F.logsigmoid(chosen) - 0.5 * F.logsigmoid(-chosen) - 0.5 * F.logsigmoid(-rejected)


def bco_pair(pairs: Pairs) -> Tensor:
    chosen, rejected = pairs.rewards.unbind(1)
    return -F.logsigmoid(chosen) - F.logsigmoid(-rejected)


def sppo_hard(pairs: Pairs) -> Tensor:
    chosen, rejected = (pairs.policy - pairs.reference).unbind(1)
    return (chosen - 0.5 / pairs.beta).square() + (rejected + 0.5 / pairs.beta).square()


def aot(pairs: Pairs) -> Tensor:
    delta = sorted_margins(margins(pairs.policy), margins(pairs.reference), pairs.lengths)
    return logistic(pairs.beta * delta, pairs.label_smoothing)


def aot_unpaired(pairs: Pairs) -> Tensor:
    chosen, rejected = (pairs.policy - pairs.reference).unbind(1)
    return logistic(pairs.beta * sorted_margins(chosen, rejected, pairs.lengths), pairs.label_smoothing)


def sorted_margins(left: Tensor, right: Tensor, lengths: Tensor) -> Tensor:
    """Sorted `left` minus sorted `right`, each difference at the pair that `left` comes from, [P].

    Pairs of which a side is empty are sorted behind all others.
    """
    absent, last = lengths.amin(1) == 0, torch.finfo(left.dtype).max
    ranked, order = left.masked_fill(absent, last).sort(stable=True)
    delta = ranked - right.masked_fill(absent, last).sort(stable=True).values
    return torch.zeros_like(delta).scatter(0, order, delta)


def apo_zero(pairs: Pairs) -> Tensor:
    chosen, rejected = pairs.rewards.unbind(1)
    return torch.sigmoid(-chosen) + torch.sigmoid(rejected)


def apo_down(pairs: Pairs) -> Tensor:
    return torch.sigmoid(pairs.rewards[:, 0]) + torch.sigmoid(-margins(pairs.rewards))


# TRL's names. "sft", the negative log-likelihood of the chosen sides, is a sum over tokens: see `dpo`.
PAIR_LOSSES: dict[str, Callable[[Pairs], Tensor]] = {
    "sigmoid": lambda pairs: logistic(pairs.x, pairs.label_smoothing),
    "hinge": lambda pairs: hinge(pairs.x),
    "ipo": lambda pairs: squared(pairs.mean_delta, pairs.beta),
    "exo_pair": lambda pairs: exo(pairs.x, pairs.label_smoothing),
    "nca_pair": nca_pair,
    "robust": lambda pairs: robust_logistic(pairs.x, pairs.label_smoothing),
    "bco_pair": bco_pair,
    "sppo_hard": sppo_hard,
    "aot": aot,
    "aot_unpaired": aot_unpaired,
    "apo_zero": apo_zero,
    "apo_down": apo_down,
    "discopop": lambda pairs: discopop(pairs.x, pairs.discopop_tau),
    "sigmoid_norm": lambda pairs: logistic(pairs.beta * pairs.mean_delta, pairs.label_smoothing),
}
LOSS_TYPES = {*PAIR_LOSSES, "sft"}
F_DIVERGENCES = {"reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"}
# Of these, β log Z(x) of another divergence cancels: they read the difference of the two sides alone.
READ_A_DIFFERENCE = {"sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop", "sft"}
SMOOTHED = {"sigmoid", "sigmoid_norm", "exo_pair", "robust", "aot", "aot_unpaired"}
SORTED = {"aot", "aot_unpaired"}


def dpo(
    logprobs: Tensor,
    cu_seqlens: Tensor,
    ref_sums: Tensor,
    *,
    loss_type: str | Sequence[str] = "sigmoid",
    loss_weights: Sequence[float] | None = None,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    f_divergence_type: str = "reverse_kl",
    f_alpha_divergence_coef: float = 0.5,
    discopop_tau: float = 0.05,
    ld_alpha: float | None = None,
    log_sum_squares: Tensor | None = None,
) -> PairLoss:
    """DPO (arXiv 2305.18290) and its relatives; docs/losses.md has the formula and source of each `loss_type`.

    logprobs: log-probabilities of the supervised tokens, [N]. cu_seqlens: offsets of the sequences in it, chosen and
    rejected alternating, int32 [2 P + 1]. ref_sums: `pair_sums` of the reference model's log-probabilities, with the
    same `ld_alpha`, [2 P]; store them in float64, as they come.

    loss_type: one name, or several that are added with `loss_weights` (default 1 each).
    f_divergence_type: "reverse_kl", "forward_kl", "js_divergence" or "alpha_divergence" (arXiv 2309.16240).
    ld_alpha: weight of the tokens beyond the length of the pair's shorter side (LD-DPO, arXiv 2409.06411).
    log_sum_squares: log Σ p² over the vocabulary at each token, [N]; given, pairs are weighted by how probable their
    tokens are under the policy (WPO, arXiv 2406.11827; TRL: `use_weighting=True`).

    Returns sums over pairs; for "sft" over tokens: the caller divides (see `PairLoss`). "aot" and "aot_unpaired" sort
    the pairs of this call, so that their sum over a step depends on how the step is divided into calls.

    Raises InputError where an argument is out of range or has no effect, or where losses and options contradict.
    """
    names = [loss_type] if isinstance(loss_type, str) else list(loss_type)
    weights = [1.0] * len(names) if loss_weights is None else list(loss_weights)
    check_pairs(logprobs, cu_seqlens)
    check_reference(ref_sums, cu_seqlens, "pair_sums(ref_logprobs, cu_seqlens)")
    if log_sum_squares is not None:
        check_tokens("log_sum_squares", log_sum_squares, logprobs)
    check_losses(names, weights)
    options = beta, label_smoothing, f_divergence_type, f_alpha_divergence_coef, discopop_tau, ld_alpha
    check_options(names, *options, log_sum_squares)

    policy, reference = by_pair(pair_sums(logprobs, cu_seqlens, ld_alpha)), by_pair(ref_sums.detach().double())
    lengths = by_pair(cu_seqlens.diff())
    scores = divergence_scores(policy - reference, f_divergence_type, f_alpha_divergence_coef)
    pairs = Pairs(policy, reference, scores, lengths, beta, label_smoothing, discopop_tau)
    trust = 1.0 if log_sum_squares is None else wpo_weights(logprobs, log_sum_squares, cu_seqlens)

    losses = torch.zeros_like(policy[:, 0])
    nll_weight = 0.0
    for name, weight in zip(names, weights, strict=True):
        if name == "sft":
            nll_weight += weight
        else:
            losses = losses + weight * trust * PAIR_LOSSES[name](pairs)
    totals = policy if ld_alpha is None else by_pair(segment_sums(logprobs, cu_seqlens))
    metrics = preference_metrics(pairs.rewards, policy)
    return sum_over_pairs(losses, -totals[:, 0], nll_weight * trust, lengths, metrics, result_dtype(logprobs))


def divergence_scores(ratios: Tensor, f_divergence_type: str, alpha: float) -> Tensor:
    """φ(r) = f′(eʳ) of the f-divergence, which f-DPO has in place of the log-ratio r."""
    if f_divergence_type == "js_divergence":
        return math.log(2) + F.logsigmoid(ratios)
    exponent = {"reverse_kl": 0.0, "forward_kl": -1.0, "alpha_divergence": alpha - 1}[f_divergence_type]
    return power_score(ratios, exponent)


def wpo_weights(logprobs: Tensor, log_sum_squares: Tensor, cu_seqlens: Tensor) -> Tensor:
    """exp(mean over tokens of ℓ − log Σ p²), of both sides multiplied, [P]; without a gradient."""
    means = segment_means((logprobs - log_sum_squares).detach(), cu_seqlens)
    return by_pair(means).sum(1).exp()


def check_losses(names: Sequence[str], weights: Sequence[float]) -> None:
    if not names:
        raise InputError("loss_type is empty; give at least one loss")
    for name in names:
        if name not in LOSS_TYPES:
            raise InputError(f"loss_type {name!r} is unknown{suggest(name, LOSS_TYPES)}")
    if len(weights) != len(names):
        raise InputError(f"loss_weights has {len(weights)} values for {len(names)} losses; give one for each")


def check_options(
    names: Sequence[str],
    beta: float,
    label_smoothing: float,
    f_divergence_type: str,
    f_alpha_divergence_coef: float,
    discopop_tau: float,
    ld_alpha: float | None,
    log_sum_squares: Tensor | None,
) -> None:
    check_positive("beta", beta)
    check_label_smoothing(label_smoothing)
    if label_smoothing and not SMOOTHED & set(names):
        raise InputError(f"label_smoothing has no effect on loss_type {', '.join(names)}; leave it at 0")
    if "exo_pair" in names and label_smoothing == 0:
        raise InputError("label_smoothing is 0, but loss_type exo_pair divides by it; the paper takes 1e-3")
    if f_divergence_type not in F_DIVERGENCES:
        raise InputError(
            f"f_divergence_type {f_divergence_type!r} is unknown{suggest(f_divergence_type, F_DIVERGENCES)}"
        )
    read_more = [name for name in names if name not in READ_A_DIFFERENCE]
    if f_divergence_type != "reverse_kl" and read_more:
        raise InputError(
            f"f_divergence_type {f_divergence_type} does not fit loss_type {read_more[0]}, in which β log Z(x) stays; "
            "use reverse_kl"
        )
    check_finite("f_alpha_divergence_coef", f_alpha_divergence_coef)
    check_positive("discopop_tau", discopop_tau)
    if ld_alpha is not None and not 0 <= ld_alpha <= 1:
        raise InputError(f"ld_alpha is {ld_alpha}; it must be between 0 and 1")
    if log_sum_squares is not None and SORTED & set(names):
        raise InputError("log_sum_squares weights pairs, but loss_type aot does not keep them; leave one out")
