import copy
import itertools

import pytest
import torch
from torch import nn

from ligermodels.training.optimizer import adamw, clipped_step, cosine, decay_groups, set_learning_rate


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


def gradients(model, scale):
    for parameter in model.parameters():
        parameter.grad = scale * torch.randn(
            parameter.shape, generator=torch.Generator().manual_seed(parameter.numel())
        )


@pytest.mark.parametrize("scale", [1e-3, 10.0])
def test_a_clipped_step_is_clipping_and_then_a_step(scale):
    """Gradients below the largest norm are left as they are, larger ones scaled down to it."""
    torch.manual_seed(0)
    ours = Small(tied=False)
    theirs = copy.deepcopy(ours)
    for model in (ours, theirs):
        optimizer = adamw(model, weight_decay=0.1)
        set_learning_rate(optimizer, 1e-2)
        for _ in range(3):
            gradients(model, scale)
            if model is theirs:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
            else:
                norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
                clipped_step(optimizer, torch.tensor(1.0), norm, 0.5)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("loss, norm", [(float("nan"), 1.0), (1.0, float("inf")), (1.0, float("nan"))])
def test_nothing_is_updated_from_a_loss_or_gradient_that_is_not_finite(loss, norm):
    model = Small(tied=False)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = adamw(model, weight_decay=0.1)
    set_learning_rate(optimizer, 1e-2)
    gradients(model, 1.0)
    clipped_step(optimizer, torch.tensor(loss), torch.tensor(norm), 1.0)
    for a, b in zip(model.parameters(), before, strict=True):
        assert torch.equal(a, b)
