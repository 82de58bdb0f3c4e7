"""What all losses of pairs share: the two sides of packed sequences, the sums that are returned, metrics; the loss of
reward models.

The sequences of pairs alternate: chosen, rejected, chosen, rejected. A pair of which a side has no token adds 0 to the
loss and to the number of pairs.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.losses.segments import check_not_negative, dtype_and_shape, result_dtype, segment_sums


class PairLoss(NamedTuple):
    """Sums over the pairs given, and over the tokens of their chosen sides.

    The loss of a step is `loss / pairs + nll / tokens`, each of the four summed over the step's micro-batches and ranks
    before the division. All are scalars, fp32 (fp64 for fp64 log-probabilities); all but `loss` and `nll` are detached.
    """

    loss: Tensor
    pairs: Tensor  # number of pairs
    nll: Tensor  # negative log-likelihood of the chosen sides, times its weight; 0 where the objective has none
    tokens: Tensor  # number of tokens of the chosen sides
    metrics: dict[str, Tensor]  # sums over the pairs; `nll_loss` is a sum over the tokens


def by_pair(values: Tensor) -> Tensor:
    """[2 P] of sequences as [P, 2]: chosen, rejected."""
    return values.reshape(-1, 2)


def margins(sides: Tensor) -> Tensor:
    """Chosen minus rejected, [P], of [P, 2]."""
    return sides[:, 0] - sides[:, 1]


def pair_sums(logprobs: Tensor, cu_seqlens: Tensor, ld_alpha: float | None = None) -> Tensor:
    """The log-probability of each sequence, float64 [2 P]. logprobs: [N] of tokens; cu_seqlens: int32 [2 P + 1].

    With `ld_alpha`, tokens beyond the length of the pair's shorter side count `ld_alpha` (LD-DPO, arXiv 2409.06411).
    """
    if ld_alpha is None:
        return segment_sums(logprobs, cu_seqlens)
    starts = by_pair(cu_seqlens[:-1])
    shared = by_pair(cu_seqlens.diff()).amin(1, keepdim=True)
    split = torch.cat([torch.stack([starts, starts + shared], 2).flatten(), cu_seqlens[-1:]])
    common, beyond = segment_sums(logprobs, split).view(-1, 2).unbind(1)
    return common + ld_alpha * beyond


def preference_metrics(rewards: Tensor, logps: Tensor) -> dict[str, Tensor]:
    """TRL's metrics of pairs, each [P]. rewards: β times the log-ratio or log-probability of a side, [P, 2]."""
    return {
        "rewards/chosen": rewards[:, 0],
        "rewards/rejected": rewards[:, 1],
        "rewards/accuracies": margins(rewards) > 0,
        "rewards/margins": margins(rewards),
        "logps/chosen": logps[:, 0],
        "logps/rejected": logps[:, 1],
    }


def sum_over_pairs(
    losses: Tensor, nll: Tensor, nll_weight: Tensor | float, lengths: Tensor, metrics: dict[str, Tensor],
    dtype: torch.dtype,
) -> PairLoss:  # fmt: skip
    """Adds up losses, nll and each metric, [P]. lengths are the tokens of both sides, [P, 2]."""
    absent = lengths.amin(1) == 0
    summed = {name: values.detach().masked_fill(absent, 0).sum().to(dtype) for name, values in metrics.items()}
    return PairLoss(
        losses.masked_fill(absent, 0).sum().to(dtype),
        absent.logical_not().sum().to(dtype),
        (nll_weight * nll).sum().to(dtype),
        lengths[:, 0].sum().to(dtype),
        summed | {"nll_loss": nll.detach().sum().to(dtype)},
    )


class RewardLoss(NamedTuple):
    """Sums over the pairs given: the loss of a step is `loss / pairs`, each summed over the step before.

    Scalars, fp32 (fp64 for fp64 rewards); all but `loss` are detached.
    """

    loss: Tensor
    pairs: Tensor
    metrics: dict[str, Tensor]  # sums over the pairs; `min_reward` and `max_reward` are over their sides


def reward(
    rewards: Tensor, *, margin: Tensor | None = None, center_rewards_coefficient: float | None = None
) -> RewardLoss:
    """Bradley-Terry loss of a reward model: −log σ(R_w − R_l − margin) + c (R_w + R_l)².

    rewards: [2 P], chosen and rejected alternating. margin: by how much the chosen side should win, [P] (arXiv
    2307.09288). center_rewards_coefficient: c, which keeps rewards around 0 (arXiv 2312.09244; 0.01 there).

    Returns sums over pairs: the caller divides (see `RewardLoss`). Raises InputError where an argument is out of range.
    """
    if rewards.dim() != 1 or len(rewards) % 2:
        raise InputError(f"rewards is {dtype_and_shape(rewards)}; it must be a vector, chosen and rejected alternating")
    if margin is not None and margin.shape != (len(rewards) // 2,):
        raise InputError(
            f"margin is {dtype_and_shape(margin)}; it must have one value for each of {len(rewards) // 2} pairs"
        )
    sides = by_pair(rewards.double())
    gaps = margins(sides)
    losses = -F.logsigmoid(gaps if margin is None else gaps - margin)
    if center_rewards_coefficient is not None:
        check_not_negative("center_rewards_coefficient", center_rewards_coefficient)
        losses = losses + center_rewards_coefficient * sides.sum(1).square()

    dtype, shown = result_dtype(rewards), sides.detach()
    metrics = {
        "accuracy": (margins(shown) > 0).sum(),
        "margin": margins(shown).sum(),
        "mean_reward": shown.sum() / 2,
        "min_reward": F.pad(shown.flatten(), (0, 1), value=math.inf).min(),  # no pairs: the identity of min
        "max_reward": F.pad(shown.flatten(), (0, 1), value=-math.inf).max(),
    }
    pairs = rewards.new_full((), len(gaps), dtype=dtype)  # without a copy from the host
    return RewardLoss(losses.sum().to(dtype), pairs, {name: value.to(dtype) for name, value in metrics.items()})
