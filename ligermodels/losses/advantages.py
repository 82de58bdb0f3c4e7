"""Advantages of sampled completions: rewards, compared within the group of completions of one prompt.

Rewards are few and come from functions on the host, so this is arithmetic in float64 on small tensors. An absent reward
(a function that returned None) is NaN: it takes no part in means and standard deviations. A completion without any
reward has the advantage 0. Where all rewards of a group are equal, its advantages are exactly 0.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ligermodels.errors import InputError

EPSILON = 1e-4  # TRL's; added to standard deviations, which have n - 1 in the denominator


def reward_table(rewards: Sequence[Sequence[float | None]]) -> Tensor:
    """What K reward functions returned for B completions, as float64 [B, K] with NaN in the place of None.

    Raises InputError where the functions returned different numbers of rewards, or NaN or an infinite number.
    """
    lengths = [len(values) for values in rewards]
    if len(set(lengths)) != 1:
        raise InputError(f"rewards has {lengths} values by function; every function must return one a completion")
    absent = torch.tensor([[value is None for value in values] for values in rewards])
    table = torch.tensor(
        [[0.0 if value is None else value for value in values] for values in rewards], dtype=torch.float64
    )
    if not table.isfinite().all():
        function, completion = (~table.isfinite()).nonzero()[0].tolist()
        value = rewards[function][completion]
        raise InputError(f"rewards has {value} of function {function} for completion {completion}; None means absent")
    return table.masked_fill(absent, torch.nan).T


def group_advantages(
    rewards: Tensor, num_generations: int, *, reward_weights: Sequence[float] | None = None,
    scale_rewards: str = "group", multi_objective_aggregation: str = "sum_then_normalize",
) -> Tensor:  # fmt: skip
    """Advantages of GRPO and its descendants: fp32 [B].

    rewards: [B] or [B, K] of K functions, NaN where absent; `num_generations` (G) completions of a prompt follow one
    another. reward_weights: one weight a function, 1 by default.

    `sum_then_normalize`: R = Σ_k weight_k reward_k, A = (R − mean of the group) / (s + 1e-4), where s is by
    `scale_rewards` the standard deviation of the "group" (GRPO, arXiv 2402.03300) or of the "batch" (arXiv 2508.08221);
    with "none" nothing is divided (Dr. GRPO, arXiv 2503.20783).

    `normalize_then_sum` (GDPO, arXiv 2601.05242): each function's rewards are normalised by their group, then summed
    with their weights, then normalised over the batch. `scale_rewards` has no effect there and must be "group".
    """
    table = _table(rewards, num_generations, reward_weights)
    if multi_objective_aggregation == "normalize_then_sum":
        if scale_rewards != "group":
            raise InputError(
                f'scale_rewards is "{scale_rewards}", which has no effect with normalize_then_sum; leave it out'
            )
        grouped = table.unflatten(0, (-1, num_generations))
        normalised = (_deviations(grouped, 1) / (_std(grouped, 1) + EPSILON)).flatten(0, 1)
        total = _weighted_sum(normalised, reward_weights)
        return _without_absent(_deviations(total, 0) / (_std(total, 0) + EPSILON))
    if multi_objective_aggregation != "sum_then_normalize":
        raise InputError(
            f'multi_objective_aggregation is "{multi_objective_aggregation}"; it must be sum_then_normalize or '
            "normalize_then_sum"
        )
    total = _weighted_sum(table, reward_weights)
    groups = total.unflatten(0, (-1, num_generations))
    advantages = _deviations(groups, 1)
    if scale_rewards == "group":
        advantages = advantages / (_std(groups, 1) + EPSILON)
    elif scale_rewards == "batch":
        advantages = advantages / (_std(total, 0) + EPSILON)
    elif scale_rewards != "none":
        raise InputError(f'scale_rewards is "{scale_rewards}"; it must be group, batch or none')
    return _without_absent(advantages.flatten())


def rloo_advantages(
    rewards: Tensor,
    num_generations: int,
    *,
    reward_weights: Sequence[float] | None = None,
    normalize_advantages: bool = False,
) -> Tensor:
    """Advantages of RLOO: a completion's reward minus the mean of the others' of its group; fp32 [B].

    Equal to the deviation from the group's mean times n / (n − 1), n the completions of the group that have a reward;
    0 where n is 1. `normalize_advantages` then subtracts the batch's mean and divides by its standard deviation + 1e-4.
    The other arguments are those of `group_advantages`. RLOO has its KL divergence in the reward: subtract
    beta * segment_sums(old_logprobs - ref_logprobs, cu_seqlens) from the rewards first. Source: arXiv 2402.14740.
    """
    total = _weighted_sum(_table(rewards, num_generations, reward_weights), reward_weights)
    groups = total.unflatten(0, (-1, num_generations))
    present = (~groups.isnan()).sum(1, keepdim=True)
    advantages = (_deviations(groups, 1) * (present / (present - 1).clamp(min=1))).flatten()
    if normalize_advantages:
        advantages = _deviations(advantages, 0) / (_std(advantages, 0) + EPSILON)
    return _without_absent(advantages)


def _table(rewards: Tensor, num_generations: int, reward_weights: Sequence[float] | None) -> Tensor:
    """Rewards as float64 [B, K], checked."""
    table = rewards.double()
    table = table[:, None] if table.ndim == 1 else table
    if num_generations < 2:
        raise InputError(f"num_generations is {num_generations}; a group needs two completions to compare")
    if table.shape[0] % num_generations:
        raise InputError(
            f"rewards has {table.shape[0]} completions; it must have a multiple of num_generations, {num_generations}"
        )
    if reward_weights is not None and len(reward_weights) != table.shape[1]:
        raise InputError(
            f"reward_weights has {len(reward_weights)} weights; it must have one for each of {table.shape[1]} functions"
        )
    return table


def _weighted_sum(table: Tensor, reward_weights: Sequence[float] | None) -> Tensor:
    """Weighted sum of the rewards that are present: [B], NaN where none is."""
    weights = torch.ones(table.shape[1]) if reward_weights is None else torch.tensor(reward_weights)
    total = (table.masked_fill(table.isnan(), 0) * weights.to(table)).sum(1)
    return total.masked_fill(table.isnan().all(1), torch.nan)


def _deviations(values: Tensor, dim: int) -> Tensor:
    """Differences to the mean of what is present. Shifted by the least value first, so that equal values give 0."""
    shifted = values - values.masked_fill(values.isnan(), torch.inf).amin(dim, keepdim=True)
    return shifted - shifted.nanmean(dim, keepdim=True)


def _std(values: Tensor, dim: int) -> Tensor:
    """Standard deviation of what is present, with n - 1; 0 of a single value."""
    freedom = (~values.isnan()).sum(dim, keepdim=True) - 1
    return (_deviations(values, dim).square().nansum(dim, keepdim=True) / freedom.clamp(min=1)).sqrt()


def _without_absent(advantages: Tensor) -> Tensor:
    return advantages.masked_fill(advantages.isnan(), 0).float()
