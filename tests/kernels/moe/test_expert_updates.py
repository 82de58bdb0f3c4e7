"""Low-rank updates of routed experts: of either projection, and of both."""

import pytest
import torch

from ligermodels.kernels.dispatch import widen
from ligermodels.kernels.moe.experts import experts, experts_reference
from ligermodels.kernels.moe.grouped_gemm import GroupedLowRank
from tests.conftest import DEVICE
from tests.kernels.error_budget import DTYPES, FACTOR, check
from tests.kernels.linear.test_linear import saved_bytes
from tests.kernels.moe.test_experts import draw

TOKENS, HIDDEN, INNER, EXPERTS, K, RANK = 96, 20, 11, 5, 2, 3
pytestmark = pytest.mark.usefixtures("kernels", "poisoned")


def draw_factors(dtype=torch.float64):
    """A and B of gate_up, then of down."""
    shapes = [(RANK, HIDDEN), (2 * INNER, RANK), (RANK, INNER), (HIDDEN, RANK)]
    return [torch.randn(EXPERTS, *shape, dtype=dtype, device=DEVICE) for shape in shapes]


def with_updates(function, gate_up_updated=True, down_updated=True):
    def call(x, index, weight, gate_up, down, *factors):
        gate_up_update = GroupedLowRank(*factors[:2], 0.5) if gate_up_updated else None
        down_update = GroupedLowRank(*factors[-2:], 2.0) if down_updated else None
        return function(x, index, widen(weight), gate_up, down, "silu", gate_up_update, down_update)

    return call


@pytest.mark.parametrize("dtype", DTYPES)
def test_updates_and_all_gradients_are_within_the_error_budget(dtype):
    """Twice the factor in fp32, for the reason given in test_experts.py."""
    factor = 2 * FACTOR if dtype == torch.float32 else FACTOR
    inputs = *draw(TOKENS, HIDDEN, INNER, EXPERTS, K), *draw_factors()
    check(with_updates(experts), with_updates(experts_reference), inputs, dtype, factor)


@pytest.mark.parametrize("updated", [(True, False), (False, True)], ids=["gate_up", "down"])
def test_an_update_of_one_projection_is_within_the_error_budget(updated):
    factors = draw_factors()[:2] if updated[0] else draw_factors()[2:]
    inputs = *draw(TOKENS, HIDDEN, INNER, EXPERTS, K), *factors
    check(with_updates(experts, *updated), with_updates(experts_reference, *updated), inputs, torch.float32, 2 * FACTOR)


def test_frozen_experts_get_no_gradient_and_an_update_saves_only_rank_columns():
    x, index, weight, gate_up, down = draw(TOKENS, HIDDEN, INNER, EXPERTS, K, torch.float32)
    factors = [factor.requires_grad_() for factor in draw_factors(torch.float32)]
    updates = GroupedLowRank(*factors[:2], 0.5), GroupedLowRank(*factors[2:], 2.0)
    x.requires_grad_()

    def saved(*updates):
        return saved_bytes(lambda x, w: experts(x, index, w, gate_up, down, "silu", *updates), x, weight)

    assert saved(*updates) - saved() == 4 * (2 * TOKENS * K * RANK + sum(factor.numel() for factor in factors))
    experts(x, index, weight, gate_up, down, "silu", *updates).sum().backward()
    assert gate_up.grad is None and down.grad is None
    assert all(factor.grad.abs().max() > 0 for factor in factors)
