"""What multiplies the terms of a policy loss, or is added to them: importance ratios, corrections, masks, the KL
divergence, entropy.

Vectors are as in `policy.py`: [N] of tokens, [S] of completions, `cu_seqlens` [S + 1]. Weights and masks are fp32 [N]
without gradient; their product is a loss's `token_weights`.
"""

import math
from typing import TypedDict, Unpack

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.losses.segments import check_tokens, per_token, segment_means, segment_sums

SAMPLER_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
LARGEST_LOG_RATIO = 20.0  # before it is exponentiated, so that no ratio overflows


def importance_ratios(
    logprobs: Tensor, old_logprobs: Tensor | None, cu_seqlens: Tensor, importance_sampling_level: str = "token"
) -> Tensor:
    """w of each token, [N]: exp(ℓ − ℓ_old), or for the level "sequence" the geometric mean over its completion."""
    logs = log_ratios(logprobs, old_logprobs)
    if importance_sampling_level == "sequence":
        logs = per_token(segment_means(logs, cu_seqlens).to(logs.dtype), cu_seqlens, len(logs))
    elif importance_sampling_level != "token":
        raise InputError(f'importance_sampling_level is "{importance_sampling_level}"; it must be token or sequence')
    return logs.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()


def log_ratios(logprobs: Tensor, old_logprobs: Tensor | None) -> Tensor:
    """ℓ − ℓ_old of each token; without old log-probabilities ℓ minus itself, detached: 0, with the gradient of ℓ."""
    if old_logprobs is None:
        return logprobs - logprobs.detach()
    check_tokens("old_logprobs", old_logprobs, logprobs)
    return logprobs - old_logprobs.detach()


class RatioBounds(TypedDict, total=False):
    """The bounds of the sampler's correction. clip_max is 3 by default; clip_min is no bound."""

    clip_max: float | None
    clip_min: float | None


def kl_penalty(
    logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor | None, cu_seqlens: Tensor, *,
    importance_sampling_level: str = "token", use_bias_correction_kl: bool = True,
) -> Tensor:  # fmt: skip
    """Estimate of each token's KL divergence from the reference, k3 = e^d − d − 1, d = ℓ_ref − ℓ; fp32 [N].

    With `use_bias_correction_kl` (TRL's default) times the importance ratio w, whose gradient belongs to the estimate:
    at w = 1 the gradient is ℓ − ℓ_ref, that of the divergence itself; without it, it is 1 − e^d. d is at most 20.
    Times beta it is a loss's `token_penalty`; the sum over tokens, detached, over their number is the metric `kl`.
    Source: k3 by Schulman, http://joschu.net/blog/kl-approx.html; the correction arXiv 2512.02556.
    """
    check_tokens("ref_logprobs", ref_logprobs, logprobs)
    difference = (ref_logprobs.detach() - logprobs).clamp(max=LARGEST_LOG_RATIO)
    k3 = difference.expm1() - difference
    if not use_bias_correction_kl:
        return k3
    return k3 * importance_ratios(logprobs, old_logprobs, cu_seqlens, importance_sampling_level)


@torch.no_grad()
def sampler_weights(
    old_logprobs: Tensor, sampling_logprobs: Tensor, cu_seqlens: Tensor, *, mode: str = "sequence_mask",
    **bounds: Unpack[RatioBounds],
) -> Tensor:  # fmt: skip
    """Correction for a sampler whose log-probabilities differ from the policy's own: fp32 [N].

    ρ = exp(ℓ_old − ℓ_sampler) of each token, or its product over the completion. "…_truncate" limits ρ to clip_min and
    clip_max; "…_mask" puts 0 in the place of a ρ outside. A NaN in `sampling_logprobs` (the sampler has none for this
    token) counts as no difference. TRL: vllm_importance_sampling_mode, …_clip_max, …_clip_min.
    """
    log_weights = _log_weights(old_logprobs, sampling_logprobs, cu_seqlens, mode, **bounds)
    if mode.startswith("sequence"):
        log_weights = per_token(log_weights, cu_seqlens, len(old_logprobs))
    return log_weights.exp().float()


@torch.no_grad()
def sampler_log_weights(
    old_logprobs: Tensor, sampling_logprobs: Tensor, cu_seqlens: Tensor, *, mode: str = "sequence_mask",
    **bounds: Unpack[RatioBounds],
) -> Tensor:  # fmt: skip
    """The logarithm of `sampler_weights` of a whole completion, [S], which `vespo` takes: of tokens it is the sum."""
    log_weights = _log_weights(old_logprobs, sampling_logprobs, cu_seqlens, mode, **bounds)
    log_weights = log_weights.clamp(min=-LARGEST_LOG_RATIO)
    return log_weights if mode.startswith("sequence") else segment_sums(log_weights, cu_seqlens)


def _log_weights(
    old_logprobs: Tensor, sampling_logprobs: Tensor, cu_seqlens: Tensor, mode: str, clip_max: float | None = 3.0,
    clip_min: float | None = None,
) -> Tensor:  # fmt: skip
    """log ρ within its bounds, −∞ for a masked one: [S] or [N] by mode."""
    if mode not in SAMPLER_MODES:
        raise InputError(f'mode is "{mode}"; it must be one of {", ".join(SAMPLER_MODES)}')
    low, high = _logarithm(clip_min, -math.inf), _logarithm(clip_max, math.inf)
    log_weights = (old_logprobs - sampling_logprobs).nan_to_num(nan=0.0)
    if mode.startswith("sequence"):
        log_weights = segment_sums(log_weights, cu_seqlens)
    log_weights = log_weights.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    if mode.endswith("truncate"):
        return log_weights.clamp(low, high)
    return log_weights.masked_fill((log_weights < low) | (log_weights > high), -math.inf)


def _logarithm(bound: float | None, default: float) -> float:
    if bound is None:
        return default
    return math.log(bound) if bound > 0 else -math.inf


@torch.no_grad()
def off_policy_mask(
    logprobs: Tensor, sampling_logprobs: Tensor, advantages: Tensor, cu_seqlens: Tensor, threshold: float
) -> Tensor:
    """0 for the tokens of completions with A < 0 and mean(ℓ_sampler − ℓ) > threshold, else 1: fp32 [N].

    `sampling_logprobs` are the sampler's, or the old ones where the policy itself has sampled; NaN counts as no
    difference. Source: DeepSeek-V3.2, arXiv 2512.02556. TRL: off_policy_mask_threshold.
    """
    divergence = segment_means((sampling_logprobs - logprobs).nan_to_num(nan=0.0), cu_seqlens)
    return per_token(((advantages >= 0) | (divergence <= threshold)).float(), cu_seqlens, len(logprobs))


@torch.no_grad()
def top_entropy_mask(entropy: Tensor, top_entropy_quantile: float) -> Tensor:
    """1 for the share `top_entropy_quantile` of tokens with the greatest entropy, else 0: fp32 [N].

    entropy: [N], of the completions' tokens without padding. Pass those of the whole step at once, as the pass for
    `old_logprobs` yields them; otherwise the mask depends on how the step is split.
    Source: arXiv 2506.01939. TRL: top_entropy_quantile, over a micro-batch of all ranks.
    """
    if not 0 <= top_entropy_quantile <= 1:
        raise InputError(f"top_entropy_quantile is {top_entropy_quantile}; it must be a share, from 0 to 1")
    if not len(entropy):
        return entropy.float()
    return (entropy >= entropy.quantile(1 - top_entropy_quantile)).float()


def entropy_sum(entropy: Tensor, cu_seqlens: Tensor, token_mask: Tensor | None = None) -> Tensor:
    """Sum of the tokens' entropy, with gradient: the loss gets −entropy_coef times it, over its tokens in the step.

    Unit: token, of `token_mask` [N] where one is given (TRL: the one of top_entropy_quantile). TRL: entropy_coef.
    """
    masked = entropy if token_mask is None else entropy * token_mask
    return segment_sums(masked, cu_seqlens).sum().to(entropy.dtype)


def next_entropy_coef(
    entropy_coef: float, mean_entropy: float, *, entropy_target: float = 0.2, entropy_coef_delta: float = 0.005,
    entropy_coef_min: float = 0.0, entropy_coef_max: float = 1.0,
) -> float:  # fmt: skip
    """The coefficient of the next step under adaptive control: it rises where the entropy is low.

    It rises where `mean_entropy`, a step's per token, is at most the target, else it falls. The next step applies it
    only in the first case (TRL).
    Source: Skywork-OR1, arXiv 2505.22312. TRL: use_adaptive_entropy.
    """
    change = entropy_coef_delta if mean_entropy <= entropy_target else -entropy_coef_delta
    return min(max(entropy_coef + change, entropy_coef_min), entropy_coef_max)


@torch.no_grad()
def clipped_tokens(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, cu_seqlens: Tensor, *, epsilon: float = 0.2,
    epsilon_high: float | None = None, importance_sampling_level: str = "token", logarithmic: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Tokens whose gradient the clip of a loss removes: (low, high), each of 0 and 1, fp32 [N].

    Low: w < 1 − epsilon and A < 0; high: w > 1 + epsilon_high and A > 0. The level "completion" has the ratio of the
    whole completion, as `rloo`; `logarithmic` bounds log w, by −epsilon and epsilon_high, as `gmpo`.
    TRL's metrics clip_ratio/low_mean, high_mean and region_mean are means of these (region: low + high) over tokens,
    or over completions where these have one ratio; low_min and high_max are extremes of their `segment_means`.
    """
    if logarithmic:
        ratios, one = log_ratios(logprobs, old_logprobs), 0.0
    elif importance_sampling_level == "completion":
        sums = segment_sums(log_ratios(logprobs, old_logprobs), cu_seqlens)
        sums = sums.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
        ratios, one = per_token(sums.exp(), cu_seqlens, len(logprobs)), 1.0
    else:
        ratios, one = importance_ratios(logprobs, old_logprobs, cu_seqlens, importance_sampling_level), 1.0
    advantage = per_token(advantages, cu_seqlens, len(logprobs))
    high = epsilon if epsilon_high is None else epsilon_high
    return ((ratios < one - epsilon) & (advantage < 0)).float(), ((ratios > one + high) & (advantage > 0)).float()
