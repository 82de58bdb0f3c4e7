import itertools

import pytest
import torch
from torch import nn

from ligermodels.training.optimizer import adamw, cosine, decay_groups


class Small(nn.Module):
    def __init__(self, tied):
        super().__init__()
        self.embed_tokens = nn.Embedding(6, 4)
        self.mlp = nn.Linear(4, 4)
        self.experts = nn.Parameter(torch.randn(2, 4, 4))
        self.experts_bias = nn.Parameter(torch.randn(2, 4))
        self.norm = nn.RMSNorm(4)
        self.lm_head = nn.Linear(4, 6, bias=False)
        if tied:
            self.lm_head.weight = self.embed_tokens.weight


@pytest.mark.parametrize("tied", [False, True])
def test_only_matrices_decay(tied):
    model = Small(tied)
    matrices, others = (set(map(id, group)) for group in decay_groups(model))
    decaying = {model.mlp.weight, model.experts} | ({model.lm_head.weight} if not tied else set())
    resting = {model.embed_tokens.weight, model.mlp.bias, model.experts_bias, model.norm.weight}
    assert matrices == set(map(id, decaying))
    assert others == set(map(id, resting))


def test_decay_is_the_only_change_under_a_zero_gradient():
    model = Small(tied=False)
    optimizer = adamw(model, weight_decay=0.1)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = 0.5
    optimizer.step()
    torch.testing.assert_close(model.mlp.weight, before["mlp.weight"] * (1 - 0.5 * 0.1))
    assert torch.equal(model.norm.weight, before["norm.weight"])
    assert torch.equal(model.embed_tokens.weight, before["embed_tokens.weight"])


def test_frozen_parameters_are_left_out():
    model = Small(tied=False)
    model.mlp.weight.requires_grad_(False)
    assert all(parameter is not model.mlp.weight for group in decay_groups(model) for parameter in group)


def test_the_schedule_rises_to_its_peak_and_falls_to_a_tenth():
    rates = [cosine(step, steps=111, warmup=10, peak=2.0) for step in range(111)]
    assert rates[0] == pytest.approx(0.2)
    assert rates[9] == rates[10] == 2.0
    assert rates[60] == pytest.approx(1.1)  # half way: between 2.0 and 0.2
    assert rates[-1] == pytest.approx(0.2)
    assert all(a >= b for a, b in itertools.pairwise(rates[9:]))


@pytest.mark.parametrize("steps, warmup", [(1, 0), (1, 30), (2, 1), (10, 30)])
def test_the_schedule_is_defined_for_runs_shorter_than_the_warmup(steps, warmup):
    assert all(0 < cosine(step, steps, warmup, 1.0) <= 1.0 for step in range(steps))
