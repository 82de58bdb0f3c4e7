"""Experts on ranks are those of one rank: here on one rank, with the kernels; on several in tests/training/scaling."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

from ligermodels.kernels.collectives import all_to_all, mean_over_ranks, sum_gradient
from ligermodels.kernels.moe.experts import experts
from ligermodels.kernels.moe.permute import experts_on_ranks
from tests.conftest import DEVICE
from tests.kernels.moe.test_experts import draw


@pytest.fixture(scope="module")
def group():
    backend = "nccl" if DEVICE == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def on_ranks(x, index, weight, gate_up, down, group):
    def compute(x, index, weight):
        return experts(x, index, weight, gate_up, down)

    return experts_on_ranks(compute, x, index, weight, gate_up.shape[0], group)


@pytest.mark.parametrize("tokens", [43, 0])
@pytest.mark.usefixtures("kernels", "poisoned")
def test_experts_on_ranks_and_their_gradients_are_those_of_one_node(tokens, group):
    inputs = [x.float() if x.is_floating_point() else x for x in draw(tokens, 20, 11, 6, 3)]
    results = []
    for function in (experts, partial(on_ranks, group=group)):
        own = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
        y = function(*own)
        y.backward(torch.linspace(-1, 1, y.numel(), device=DEVICE).view_as(y))
        results.append([y.detach(), *(x.grad for x in own if x.is_floating_point())])
    for got, expected in zip(*reversed(results), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_collectives_on_one_rank_change_neither_values_nor_gradients(group):
    for function in (all_to_all, mean_over_ranks, sum_gradient):
        x = torch.randn(4, 3, device=DEVICE, requires_grad=True)
        y = function(x, group)
        (gradient,) = torch.autograd.grad(y, x, 2 * torch.ones_like(y))
        assert torch.equal(y, x) and (gradient == 2).all()
