"""ORPO, CPO and SimPO: losses of pairs without a reference model."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.errors import InputError, suggest
from ligermodels.losses.pairs import PairLoss, by_pair, margins, preference_metrics, sum_over_pairs
from ligermodels.losses.preference import hinge, logistic, power_score, squared
from ligermodels.losses.segments import (
    check_finite,
    check_label_smoothing,
    check_not_negative,
    check_pairs,
    check_positive,
    result_dtype,
    segment_sums,
)

CPO_LOSS_TYPES = {"sigmoid", "hinge", "ipo"}
SURE = -(2.0**-20)  # a mean log-probability above it has infinite odds in fp32; it counts as this, without a gradient


def orpo(logprobs: Tensor, cu_seqlens: Tensor, *, beta: float = 0.1) -> PairLoss:
    """ORPO (arXiv 2403.07691): −β log σ(o) and the negative log-likelihood of the chosen side.

    o = log odds(s̄_w) − log odds(s̄_l), where s̄ is a side's mean log-probability and log odds(s̄) = s̄ − log(1 − e^s̄).
    logprobs: log-probabilities of the supervised tokens, [N]. cu_seqlens: offsets of the sequences in it, chosen and
    rejected alternating, int32 [2 P + 1]. beta: λ in the paper.

    Returns sums over pairs, and over tokens for the likelihood: the caller divides (see `PairLoss`). Raises InputError
    where an argument is out of range.
    """
    check_pairs(logprobs, cu_seqlens)
    check_positive("beta", beta)
    sums, means, lengths = sides(logprobs, cu_seqlens)
    sure = means.clamp(max=SURE)
    log_odds = margins(sure - torch.log(-torch.expm1(sure)))  # in float64: without cancellation near 0
    log_ratio = F.logsigmoid(log_odds)
    metrics = preference_metrics(beta * means, means) | {"log_odds_ratio": log_ratio, "log_odds_chosen": log_odds}
    return sum_over_pairs(-beta * log_ratio, -sums[:, 0], 1.0, lengths, metrics, result_dtype(logprobs))


def cpo(
    logprobs: Tensor, cu_seqlens: Tensor, *, loss_type: str = "sigmoid", beta: float = 0.1,
    label_smoothing: float = 0.0, nll_weight: float = 1.0,
) -> PairLoss:  # fmt: skip
    """CPO (arXiv 2401.08417): DPO's loss of x = β (s_w − s_l), and the negative log-likelihood of the chosen side.

    logprobs: log-probabilities of the supervised tokens, [N]. cu_seqlens: offsets of the sequences in it, chosen and
    rejected alternating, int32 [2 P + 1]. loss_type: "sigmoid", "hinge", or "ipo", which reads means over tokens in
    place of the sums s. nll_weight: `cpo_alpha` in TRL.

    Returns sums over pairs, and over tokens for the likelihood: the caller divides (see `PairLoss`). Raises InputError
    where an argument is out of range or has no effect.
    """
    check_pairs(logprobs, cu_seqlens)
    check_positive("beta", beta)
    check_label_smoothing(label_smoothing)
    check_not_negative("nll_weight", nll_weight)
    if loss_type not in CPO_LOSS_TYPES:
        raise InputError(f"loss_type {loss_type!r} is unknown{suggest(loss_type, CPO_LOSS_TYPES)}")
    if label_smoothing and loss_type != "sigmoid":
        raise InputError(f"label_smoothing has no effect on loss_type {loss_type}; leave it at 0")
    sums, means, lengths = sides(logprobs, cu_seqlens)
    if loss_type == "sigmoid":
        rewards, losses = sums, logistic(beta * margins(sums), label_smoothing)
    elif loss_type == "hinge":
        rewards, losses = sums, hinge(beta * margins(sums))
    else:
        rewards, losses = means, squared(margins(means), beta)
    metrics = preference_metrics(beta * rewards, rewards)
    return sum_over_pairs(losses, -sums[:, 0], nll_weight, lengths, metrics, result_dtype(logprobs))


def simpo(
    logprobs: Tensor, cu_seqlens: Tensor, *, beta: float = 2.0, gamma: float = 0.5, alpha: float = 0.0,
    label_smoothing: float = 0.0, nll_weight: float = 0.0,
) -> PairLoss:  # fmt: skip
    """SimPO (arXiv 2405.14734): DPO's loss of x = β (s̄_w − s̄_l) − γ, where s̄ is a mean log-probability.

    logprobs: log-probabilities of the supervised tokens, [N]. cu_seqlens: offsets of the sequences in it, chosen and
    rejected alternating, int32 [2 P + 1]. alpha: other than 0, (1 − e^(−α s̄)) / α takes the place of s̄ (AlphaPO, arXiv
    2501.03884). nll_weight: of the chosen side's negative log-likelihood, 0 as in the paper (TRL: `cpo_alpha`, 1).

    Returns sums over pairs, and over tokens for the likelihood: the caller divides (see `PairLoss`). Raises InputError
    where an argument is out of range.
    """
    check_pairs(logprobs, cu_seqlens)
    check_positive("beta", beta)
    check_not_negative("gamma", gamma)
    check_finite("alpha", alpha)
    check_label_smoothing(label_smoothing)
    check_not_negative("nll_weight", nll_weight)
    sums, means, lengths = sides(logprobs, cu_seqlens)
    rewards = power_score(means, -alpha)
    losses = logistic(beta * margins(rewards) - gamma, label_smoothing)
    metrics = preference_metrics(beta * rewards, means)
    return sum_over_pairs(losses, -sums[:, 0], nll_weight, lengths, metrics, result_dtype(logprobs))


def sides(logprobs: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of the sides, their means over tokens, and the numbers of tokens, each [P, 2]."""
    sums, lengths = by_pair(segment_sums(logprobs, cu_seqlens)), by_pair(cu_seqlens.diff())
    return sums, sums / lengths.clamp(min=1), lengths
