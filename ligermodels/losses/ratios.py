"""Importance ratios of a policy and the one that it is compared with. Must not know the losses that read them.

Vectors are as in `policy.py`. Log ratios are limited to ±20 before they are exponentiated, so that no ratio overflows.
"""

from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.losses.checks import check_tokens
from ligermodels.losses.per_token import per_token
from ligermodels.losses.segments import segment_means

LARGEST_LOG_RATIO = 20.0


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
