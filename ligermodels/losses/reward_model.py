"""The loss of a reward model, which scores chosen and rejected answers."""

import math
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.losses.pairs import by_pair, margins
from ligermodels.losses.segments import check_not_negative, dtype_and_shape, result_dtype


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
