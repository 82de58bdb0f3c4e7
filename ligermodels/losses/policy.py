"""Losses of reinforcement learning on sampled completions: GRPO and its descendants.

All losses read the same vectors: `logprobs` and `old_logprobs` fp32 [N], the log-probabilities ℓ and ℓ_old of the
completions' tokens under the policy that is trained and under the one that the update began with, both at the
temperature of sampling; `advantages` [S], the A of each completion (`advantages.py`); `cu_seqlens` [S + 1], the offsets
of the completions; padding behind the last offset must be finite. `old_logprobs=None` says that there is one update for
a batch: ℓ_old is ℓ, detached.

w = exp(ℓ − ℓ_old) is the importance ratio of a token; `importance_sampling_level="sequence"` has the geometric mean of
a completion's ratios instead, for each of its tokens (GSPO, arXiv 2507.18071). Log ratios are limited to ±20, so that
no ratio overflows.

Two vectors of [N] fit every loss. `token_weights`, without gradient, are multiplied into the policy's term of a token:
a product of `sampler_weights`, `off_policy_mask` and `top_entropy_mask` (`policy_weights.py`). `token_penalty` is added
after that: beta times `kl_penalty`.

A loss is a sum, fp32, and its docstring names the unit: divide by the number of units in the whole step, over all
micro-batches and ranks. An empty completion contributes 0 and is no unit. The arguments have TRL's names and defaults;
docs/losses.md lists where TRL computes something else.
"""

from typing import TypedDict, Unpack

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.losses.policy_weights import LARGEST_LOG_RATIO, importance_ratios, log_ratios
from ligermodels.losses.segments import (
    check_positive,
    check_sequences,
    check_tokens,
    dtype_and_shape,
    per_token,
    result_dtype,
    segment_means,
    segment_sums,
)


class Added(TypedDict, total=False):
    """What every loss takes: vectors [N] that change the terms of tokens."""

    token_weights: Tensor | None
    token_penalty: Tensor | None


class Clipping(Added, total=False):
    """What the clipped losses take. By default epsilon is 0.2, epsilon_high is epsilon, and delta is no bound."""

    epsilon: float
    epsilon_high: float | None
    delta: float | None


def grpo(
    logprobs: Tensor, old_logprobs: Tensor | None, advantages: Tensor, cu_seqlens: Tensor, *,
    importance_sampling_level: str = "token", **options: Unpack[Clipping],
) -> Tensor:  # fmt: skip
    """Sum over completions of the mean of −min(min(w, delta) A, clip(w, 1 − epsilon, 1 + epsilon_high) A).

    Unit: completion. epsilon_high is epsilon by default; `delta`, above 1 + epsilon_high, bounds the ratio where A < 0
    (arXiv 2505.07291). With the sequence's ratio this is GSPO, whose paper has epsilon 3e-4 and epsilon_high 4e-4.
    Source: arXiv 2402.03300. TRL: loss_type="grpo".
    """
    ratios = importance_ratios(logprobs, old_logprobs, cu_seqlens, importance_sampling_level)
    return _sum_of_means(_clipped_terms(ratios, advantages, cu_seqlens, **options), cu_seqlens)


def dapo(
    logprobs: Tensor, old_logprobs: Tensor | None, advantages: Tensor, cu_seqlens: Tensor, *,
    importance_sampling_level: str = "token", **options: Unpack[Clipping],
) -> Tensor:  # fmt: skip
    """Sum over tokens of the terms of `grpo`.

    Unit: token, for `dapo` and `bnpo`. For `dr_grpo`: completion, times the greatest length of a completion. DAPO's
    paper has epsilon_high 0.28.
    Source: arXiv 2503.14476; Dr. GRPO 2503.20783. TRL: loss_type="dapo" (its default), "bnpo", "dr_grpo".
    """
    ratios = importance_ratios(logprobs, old_logprobs, cu_seqlens, importance_sampling_level)
    return _sum(_clipped_terms(ratios, advantages, cu_seqlens, **options), cu_seqlens)


# The same sum. TRL's bnpo divides by the tokens of a rank's micro-batch, which makes the loss depend on how a step is
# split; over the tokens of the step it is dapo. dr_grpo has another divisor.
bnpo = dr_grpo = dapo


def luspo(
    logprobs: Tensor, old_logprobs: Tensor | None, advantages: Tensor, cu_seqlens: Tensor, *,
    importance_sampling_level: str = "sequence", **options: Unpack[Clipping],
) -> Tensor:  # fmt: skip
    """The sum of `dapo`, by default with the sequence's ratio: GSPO's loss times the completion's length.

    Unit: completion. Source: arXiv 2602.05261. TRL: loss_type="luspo", whose importance_sampling_level stays "token"
    unless it is set.
    """
    level = importance_sampling_level
    return dapo(logprobs, old_logprobs, advantages, cu_seqlens, importance_sampling_level=level, **options)


def cispo(
    logprobs: Tensor, old_logprobs: Tensor | None, advantages: Tensor, cu_seqlens: Tensor, *, epsilon_high: float = 5.0,
    importance_sampling_level: str = "token", **added: Unpack[Added],
) -> Tensor:  # fmt: skip
    """Sum over tokens of −min(w, epsilon_high) A ℓ, the ratio without gradient: no token's gradient is cut off.

    Unit: token. epsilon_high is the bound itself, not its distance from 1.
    Source: arXiv 2506.13585. TRL: loss_type="cispo", whose epsilon_high is 0.2 unless it is set.
    """
    check_positive("epsilon_high", epsilon_high)
    ratios = importance_ratios(logprobs, old_logprobs, cu_seqlens, importance_sampling_level).detach()
    terms = -ratios.clamp(max=epsilon_high) * _of_tokens(advantages, cu_seqlens, ratios) * logprobs
    return _sum(_total(terms, **added), cu_seqlens)


def sapo(
    logprobs: Tensor, old_logprobs: Tensor | None, advantages: Tensor, cu_seqlens: Tensor, *,
    sapo_temperature_pos: float = 1.0, sapo_temperature_neg: float = 1.05, importance_sampling_level: str = "token",
    **added: Unpack[Added],
) -> Tensor:  # fmt: skip
    """Sum over completions of the mean of −A σ(τ (w − 1)) 4 / τ: a soft gate in place of the clip.

    τ is sapo_temperature_pos where A > 0, else sapo_temperature_neg. Unit: completion.
    Source: arXiv 2511.20347. TRL: loss_type="sapo".
    """
    check_positive("sapo_temperature_pos", sapo_temperature_pos)
    check_positive("sapo_temperature_neg", sapo_temperature_neg)
    ratios = importance_ratios(logprobs, old_logprobs, cu_seqlens, importance_sampling_level)
    advantage = _of_tokens(advantages, cu_seqlens, ratios)
    temperature = torch.where(advantage > 0, sapo_temperature_pos, sapo_temperature_neg).to(ratios.dtype)
    terms = -advantage * torch.sigmoid(temperature * (ratios - 1)) * 4 / temperature
    return _sum_of_means(_total(terms, **added), cu_seqlens)


def vespo(
    logprobs: Tensor, old_logprobs: Tensor | None, advantages: Tensor, cu_seqlens: Tensor, *, vespo_k_pos: float = 2.0,
    vespo_lambda_pos: float = 3.0, vespo_k_neg: float = 3.0, vespo_lambda_neg: float = 2.0,
    sampler_log_weights: Tensor | None = None, **added: Unpack[Added],
) -> Tensor:  # fmt: skip
    """Sum over tokens of −φ(W) A ℓ, φ(W) = exp(λ + k log W − λ W) without gradient, so that φ(1) = 1.

    W is the ratio of the whole completion, the product of its tokens'. (k, λ) are the ones of pos where A ≥ 0, else of
    neg. `sampler_log_weights` [S] are added to log W: the sampler's correction belongs there, not in token_weights.
    Unit: token. Source: arXiv 2602.10693. TRL: loss_type="vespo".
    """
    _check_advantages(advantages, cu_seqlens)
    logs = log_ratios(logprobs, old_logprobs).detach().clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    log_weights = segment_sums(logs, cu_seqlens)
    if sampler_log_weights is not None:
        log_weights = log_weights + sampler_log_weights
    log_weights = log_weights.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    k = torch.where(advantages >= 0, vespo_k_pos, vespo_k_neg)
    decay = torch.where(advantages >= 0, vespo_lambda_pos, vespo_lambda_neg)
    phi = (decay + k * log_weights - decay * log_weights.exp()).exp()
    terms = -_of_tokens(phi * advantages, cu_seqlens, logprobs) * logprobs
    return _sum(_total(terms, **added), cu_seqlens)


def gmpo(
    logprobs: Tensor, old_logprobs: Tensor | None, advantages: Tensor, cu_seqlens: Tensor, *, epsilon: float = 0.4,
    epsilon_high: float | None = None, token_mask: Tensor | None = None, **added: Unpack[Added],
) -> Tensor:  # fmt: skip
    """Sum over completions of −A times the geometric mean of their clipped ratios.

    A log ratio is at most epsilon_high where A > 0, else at least −epsilon. `token_mask` [N] of 0 and 1 says which
    tokens the geometric mean reads: pass `top_entropy_mask` here. `token_weights` act as their mean over a completion.
    Unit: completion. Source: arXiv 2507.20673. TRL: GMPOTrainer.
    """
    logs = log_ratios(logprobs, old_logprobs)
    epsilon_high = epsilon if epsilon_high is None else epsilon_high
    check_positive("epsilon", epsilon)
    check_positive("epsilon_high", epsilon_high)
    positive = _of_tokens(advantages, cu_seqlens, logprobs) > 0
    clipped = torch.where(positive, logs.clamp(max=epsilon_high), logs.clamp(min=-epsilon))
    if token_mask is None:
        means = segment_means(clipped, cu_seqlens)
    else:
        check_tokens("token_mask", token_mask, logprobs)
        means = segment_sums(clipped * token_mask, cu_seqlens) / segment_sums(token_mask, cu_seqlens).clamp(min=1)
    ratios = means.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()
    terms = _of_tokens(-ratios * advantages, cu_seqlens, logprobs)
    return _sum_of_means(_total(terms, **added), cu_seqlens)


def rloo(
    logprobs: Tensor, old_logprobs: Tensor | None, advantages: Tensor, cu_seqlens: Tensor, *, epsilon: float = 0.2,
    epsilon_high: float | None = None, **added: Unpack[Added],
) -> Tensor:  # fmt: skip
    """Sum over completions of −min(W A, clip(W, 1 − epsilon, 1 + epsilon_high) A), W the ratio of the whole completion.

    Without updates in between its gradient is REINFORCE's, A times that of the completion's log-probability. The
    advantages are those of `rloo_advantages`. `token_weights` act as their mean over a completion.
    Unit: completion. Source: arXiv 2402.14740. TRL: RLOOTrainer.
    """
    _check_advantages(advantages, cu_seqlens)
    logs = segment_sums(log_ratios(logprobs, old_logprobs), cu_seqlens)
    ratios = logs.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()
    terms = _of_tokens(_clipped(ratios, advantages, epsilon, epsilon_high, None), cu_seqlens, logprobs)
    return _sum_of_means(_total(terms, **added), cu_seqlens)


def _clipped(
    ratios: Tensor, advantages: Tensor, epsilon: float, epsilon_high: float | None, delta: float | None
) -> Tensor:
    """The clipped surrogate of PPO, of tokens or of sequences."""
    epsilon_high = epsilon if epsilon_high is None else epsilon_high
    check_positive("epsilon", epsilon)
    check_positive("epsilon_high", epsilon_high)
    high = 1 + epsilon_high
    if delta is not None and delta <= high:
        raise InputError(f"delta is {delta}; it must be above 1 + epsilon_high, {high:g}, or it takes the clip's place")
    bounded = ratios if delta is None else ratios.clamp(max=delta)
    return -torch.minimum(bounded * advantages, ratios.clamp(1 - epsilon, high) * advantages)


def _of_tokens(values: Tensor, cu_seqlens: Tensor, like: Tensor) -> Tensor:
    """Values [S] at each token, in the shape and dtype of `like` [N]."""
    check_sequences(like, cu_seqlens)
    _check_advantages(values, cu_seqlens)
    return per_token(values.to(like.dtype), cu_seqlens, len(like))


def _check_advantages(advantages: Tensor, cu_seqlens: Tensor) -> None:
    if advantages.shape != (len(cu_seqlens) - 1,):
        raise InputError(
            f"advantages is {dtype_and_shape(advantages)}; it must have one value for each of {len(cu_seqlens) - 1} "
            "sequences"
        )


def _clipped_terms(
    ratios: Tensor, advantages: Tensor, cu_seqlens: Tensor, epsilon: float = 0.2, epsilon_high: float | None = None,
    delta: float | None = None, **added: Unpack[Added],
) -> Tensor:  # fmt: skip
    terms = _clipped(ratios, _of_tokens(advantages, cu_seqlens, ratios), epsilon, epsilon_high, delta)
    return _total(terms, **added)


def _total(terms: Tensor, token_weights: Tensor | None = None, token_penalty: Tensor | None = None) -> Tensor:
    if token_weights is not None:
        check_tokens("token_weights", token_weights, terms)
        terms = terms * token_weights.detach()
    if token_penalty is not None:
        check_tokens("token_penalty", token_penalty, terms)
        terms = terms + token_penalty
    return terms


def _sum(terms: Tensor, cu_seqlens: Tensor) -> Tensor:
    return segment_sums(terms, cu_seqlens).sum().to(result_dtype(terms))


def _sum_of_means(terms: Tensor, cu_seqlens: Tensor) -> Tensor:
    return segment_means(terms, cu_seqlens).sum().to(result_dtype(terms))
