"""Log-probabilities of targets, entropy and more of logits that exist already, in plain PyTorch.

The reference implementation of `linear_logprobs`, and what a head that was replaced is given to: it takes several times
the logits' memory.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ligermodels.kernels.dispatch import widen

EXTRAS = ("entropy", "log_sum_squares", "mean_logit", "greedy")


class LogProbs(NamedTuple):
    """Results of `linear_logprobs`, each [...]; None where not required. All are 0 for an ignored target."""

    logprobs: Tensor  # fp32; minus infinity for a target outside the vocabulary
    entropy: Tensor | None = None  # fp32, in nats
    log_sum_squares: Tensor | None = None  # fp32, log Σ p²
    mean_logit: Tensor | None = None  # fp32, over the vocabulary
    greedy: Tensor | None = None  # bool: the target is the first class of the highest logit

    def map(self, function: Callable[[Tensor], Tensor]) -> "LogProbs":
        """The function's values of those fields that are not None."""
        return LogProbs(function(self.logprobs), *(None if x is None else function(x) for x in self[1:]))


def logprobs_of_logits(
    logits: Tensor, targets: Tensor, *, temperature: float = 1.0, softcap: float | None = None,
    logit_scale: float = 1.0, entropy: bool = False, extras: Sequence[str] = (), ignore_index: int = -100,
) -> LogProbs:  # fmt: skip
    """`linear_logprobs` of logits [..., V] that exist already, in plain PyTorch: takes several times their memory."""
    check_logprob_options(extras, temperature)
    logits = widen(logits)
    if logit_scale != 1.0:
        logits = logits * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if temperature != 1.0:
        logits = logits / temperature
    supervised = targets != ignore_index
    valid = supervised & (targets >= 0) & (targets < logits.shape[-1])
    index = torch.where(valid, targets, 0)[..., None]
    gap = logits.scatter(-1, index, -torch.inf).logsumexp(-1) - logits.gather(-1, index).squeeze(-1)
    logprobs = -torch.logaddexp(gap, torch.zeros_like(gap))
    results: dict[str, Tensor] = {"logprobs": torch.where(valid, logprobs, torch.where(supervised, -torch.inf, 0.0))}
    if entropy or "entropy" in extras:
        log_p = logits.log_softmax(-1)
        log_p = log_p.clamp_min(torch.finfo(log_p.dtype).min)  # so that 0 log 0 is 0, and its gradient too
        value = torch.where(valid, -(log_p.exp() * log_p).sum(-1), 0.0)
        results["entropy"] = value if entropy else value.detach()
    logits = logits.detach()
    if "log_sum_squares" in extras:
        results["log_sum_squares"] = torch.where(valid, (2 * logits.log_softmax(-1)).logsumexp(-1), 0.0)
    if "mean_logit" in extras:
        results["mean_logit"] = torch.where(valid, logits.mean(-1), 0.0)
    if "greedy" in extras:
        results["greedy"] = valid & (logits.argmax(-1) == targets)
    return LogProbs(**results)


def check_logprob_options(extras: Sequence[str], temperature: float) -> None:
    """Raises ValueError for an unknown extra and for a temperature that is not positive."""
    if unknown := [name for name in extras if name not in EXTRAS]:
        raise ValueError(f"linear_logprobs: unknown extra {unknown[0]!r}; supported: {', '.join(EXTRAS)}")
    if not temperature > 0:
        raise ValueError(f"linear_logprobs: temperature is {temperature}; a positive number is needed")
