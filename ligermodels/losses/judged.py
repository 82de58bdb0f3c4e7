"""KTO and APO: losses of single answers that were judged good or bad, with a reference model."""

from typing import NamedTuple

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.losses.segments import (
    check_not_negative,
    check_positive,
    check_reference,
    check_sequences,
    dtype_and_shape,
    result_dtype,
    segment_sums,
)


class JudgedLoss(NamedTuple):
    """Sums over the examples given: the loss of a step is `loss / examples`, each summed over the step before.

    Scalars, fp32 (fp64 for fp64 log-probabilities); all but `loss` are detached.
    """

    loss: Tensor
    examples: Tensor
    metrics: dict[str, Tensor]  # sums over the good ("chosen") or bad ("rejected") examples, and their "count/…"


def kto(
    logprobs: Tensor, cu_seqlens: Tensor, ref_sums: Tensor, desirable: Tensor, z: Tensor | float, *, beta: float = 0.1,
    desirable_weight: float = 1.0, undesirable_weight: float = 1.0,
) -> JudgedLoss:  # fmt: skip
    """KTO (arXiv 2402.01306): w_D (1 − σ(β (r − z))) of a good answer, w_U (1 − σ(β (z − r))) of a bad one.

    logprobs: log-probabilities of the supervised tokens, [N]. cu_seqlens: offsets of the examples in it, int32 [E + 1].
    ref_sums: `segment_sums` of the reference model's, [E]; r is the difference. desirable: whether the answer is good,
    bool [E]. z: `kto_z` of the step, a scalar without a gradient; 0 is APO-zero for single answers (arXiv 2408.06266;
    TRL: `loss_type="apo_zero_unpaired"`).

    Returns sums over examples: the caller divides (see `JudgedLoss`). An example without tokens adds 0 to all of them.
    Raises InputError where an argument is out of range.
    """
    check_sequences(logprobs, cu_seqlens)
    check_reference(ref_sums, cu_seqlens, "segment_sums(ref_logprobs, cu_seqlens)")
    if desirable.shape != ref_sums.shape or desirable.dtype != torch.bool:
        raise InputError(
            f"desirable is {dtype_and_shape(desirable)}; it must be bool {list(ref_sums.shape)}, one an example"
        )
    check_positive("beta", beta)
    check_not_negative("desirable_weight", desirable_weight)
    check_not_negative("undesirable_weight", undesirable_weight)
    sums = segment_sums(logprobs, cu_seqlens)
    ratios = sums - ref_sums.detach().double()
    z = z.detach() if isinstance(z, Tensor) else z
    gains = torch.where(desirable, ratios - z, z - ratios)
    regrets = torch.sigmoid(-beta * gains)  # 1 − σ(β gain)
    losses = torch.where(desirable, desirable_weight * regrets, undesirable_weight * regrets)
    present = cu_seqlens.diff() > 0

    dtype = result_dtype(logprobs)
    rewards, logps = beta * ratios.detach(), sums.detach()
    metrics = {}
    for side, chosen in (("chosen", desirable & present), ("rejected", ~desirable & present)):
        metrics[f"rewards/{side}"] = rewards.masked_fill(~chosen, 0).sum().to(dtype)
        metrics[f"logps/{side}"] = logps.masked_fill(~chosen, 0).sum().to(dtype)
        metrics[f"count/{side}"] = chosen.sum().to(dtype)
    return JudgedLoss(losses.masked_fill(~present, 0).sum().to(dtype), present.sum().to(dtype), metrics)


def kto_kl_sum(logprobs: Tensor, cu_seqlens: Tensor, ref_sums: Tensor) -> tuple[Tensor, Tensor]:
    """Σ (s − s_ref) over answers beside prompts of *other* examples, and the number of answers; float64, detached.

    Arguments as in `kto`, of the mismatched sequences: prompt of an example, answer of another. An answer without
    tokens is not counted. Sum both results over the micro-batches and ranks of the step for `kto_z`.
    """
    check_sequences(logprobs, cu_seqlens)
    check_reference(ref_sums, cu_seqlens, "segment_sums(ref_logprobs, cu_seqlens)")
    present = cu_seqlens.diff() > 0
    ratios = segment_sums(logprobs.detach(), cu_seqlens) - ref_sums.detach().double()
    return ratios.masked_fill(~present, 0).sum(), present.sum().double()


def kto_z(kl_sum: Tensor, answers: Tensor) -> Tensor:
    """z = max(0, mean of s − s_ref), KTO's estimate of the KL divergence from the reference, of `kto_kl_sum`'s sums."""
    return (kl_sum / answers.clamp(min=1)).clamp(min=0)
