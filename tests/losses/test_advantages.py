"""Advantages beside their formulas, with absent rewards and equal ones."""

import math

import pytest
import torch

from ligermodels.errors import InputError
from ligermodels.losses import group_advantages, reward_table, rloo_advantages

NAN = math.nan
# Two functions on two groups of four completions.
REWARDS = reward_table([[1.0, None, 0.5, 0.25, None, 2.0, 3.0, 7.0], [0.0, 2.0, None, 1.0, None, 1.0, 1.0, 0.5]])
WEIGHTS = [2.0, 0.5]
# Their weighted sums; the fifth completion has no reward.
SUMS = torch.tensor([[2.0, 1.0, 1.0, 1.0], [NAN, 4.5, 6.5, 14.25]], dtype=torch.float64)


def expected(values):
    return torch.as_tensor(values).nan_to_num(nan=0.0).flatten().float()


def test_a_table_has_nan_where_a_function_returned_none():
    assert REWARDS.shape == (8, 2) and REWARDS.isnan().sum() == 4
    assert REWARDS[3].tolist() == [0.25, 1.0]
    with pytest.raises(InputError, match=r"^rewards has inf of function 1 for completion 0; None means absent$"):
        reward_table([[1.0, 2.0], [math.inf, 2.0]])
    with pytest.raises(InputError, match=r"^rewards has \[2, 1\] values by function"):
        reward_table([[1.0, 2.0], [2.0]])


def test_advantages_are_deviations_from_the_mean_of_the_group():
    means = SUMS.nanmean(1, keepdim=True)
    options = {"reward_weights": WEIGHTS}
    advantages = group_advantages(REWARDS, 4, scale_rewards="none", **options)
    assert advantages.dtype == torch.float32
    torch.testing.assert_close(advantages, expected(SUMS - means))
    stds = torch.stack([SUMS[0].std(), SUMS[1, 1:].std()])[:, None]
    torch.testing.assert_close(group_advantages(REWARDS, 4, **options), expected((SUMS - means) / (stds + 1e-4)))
    std = SUMS[~SUMS.isnan()].std()
    advantages = group_advantages(REWARDS, 4, scale_rewards="batch", **options)
    torch.testing.assert_close(advantages, expected((SUMS - means) / (std + 1e-4)))


def test_gdpo_normalises_each_function_before_the_sum():
    total = torch.zeros(8, dtype=torch.float64)
    for function, weight in enumerate(WEIGHTS):
        for start in (0, 4):
            values = REWARDS[start : start + 4, function]
            present = values[~values.isnan()]
            total[start : start + 4] += weight * ((values - present.mean()) / (present.std() + 1e-4)).nan_to_num(nan=0)
    total[4] = NAN
    present = total[~total.isnan()]
    advantages = group_advantages(REWARDS, 4, reward_weights=WEIGHTS, multi_objective_aggregation="normalize_then_sum")
    torch.testing.assert_close(advantages, expected((total - present.mean()) / (present.std() + 1e-4)))


def test_rloo_subtracts_the_mean_of_the_others():
    others = torch.tensor([[1.0, 4 / 3, 4 / 3, 4 / 3], [NAN, (6.5 + 14.25) / 2, (4.5 + 14.25) / 2, 5.5]])
    advantages = rloo_advantages(REWARDS, 4, reward_weights=WEIGHTS)
    torch.testing.assert_close(advantages, expected(SUMS - others))
    values = (SUMS - others).flatten()
    present = values[~values.isnan()]
    normalised = rloo_advantages(REWARDS, 4, reward_weights=WEIGHTS, normalize_advantages=True)
    torch.testing.assert_close(normalised, expected((values - present.mean()) / (present.std() + 1e-4)))


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_equal_rewards_give_exactly_zero(scale):
    rewards = torch.tensor([0.1] * 3 + [0.7] * 3 + [0.2, NAN, NAN], dtype=torch.float64)
    assert group_advantages(rewards, 3, scale_rewards=scale).tolist() == [0] * 9
    assert rloo_advantages(rewards, 3).tolist() == [0] * 9
    gdpo = group_advantages(rewards, 3, multi_objective_aggregation="normalize_then_sum")
    assert gdpo.tolist() == [0] * 9


def test_arguments_that_cannot_be_meant_are_refused():
    with pytest.raises(InputError, match=r"^num_generations is 1; a group needs two completions to compare$"):
        group_advantages(REWARDS, 1)
    with pytest.raises(InputError, match=r"^rewards has 8 completions; it must have a multiple of num_generations, 3$"):
        rloo_advantages(REWARDS, 3)
    with pytest.raises(InputError, match=r"^reward_weights has 1 weights; it must have one for each of 2 functions$"):
        group_advantages(REWARDS, 4, reward_weights=[1.0])
    with pytest.raises(InputError, match=r'^scale_rewards is "std"; it must be group, batch or none$'):
        group_advantages(REWARDS, 4, scale_rewards="std")
    with pytest.raises(InputError, match=r'^scale_rewards is "batch", which has no effect with normalize_then_sum'):
        group_advantages(REWARDS, 4, scale_rewards="batch", multi_objective_aggregation="normalize_then_sum")
    with pytest.raises(
        InputError, match=r'^multi_objective_aggregation is "sum"; it must be sum_then_normalize or normalize_then_sum$'
    ):
        group_advantages(REWARDS, 4, multi_objective_aggregation="sum")
