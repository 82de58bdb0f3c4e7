"""Exact bf16 parameters are fp32 parameters; other ways to round, compared with them on a training curve; sharded."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from ligermodels.kernels.optim.param_rounding import master_reference
from ligermodels.training.optimizers import adamw
from ligermodels.training.optimizers.adamw import AdamW, AdamW8bit
from ligermodels.training.optimizers.muon import Muon, split_by_rows
from tests.conftest import DEVICE
from tests.kernels.error_budget import CONTRACTION, relative_distance
from tests.suites import quick

OPTIONS = {"betas": (0.9, 0.95), "weight_decay": 0.0}
DECAY = {"weight_decay": 0.1}
STEPS, RATE = 400, 2e-4


def curve(optimizer_class, dtype, **rounding):
    """The losses of a regression whose updates are mostly below half a unit in the last place of the bf16 weights."""
    generator = torch.Generator().manual_seed(0)
    start, x = (torch.randn(shape, generator=generator).to(DEVICE) for shape in ((64, 128), (128, 512)))
    target = (start + 0.05 * torch.randn(start.shape, generator=generator).to(DEVICE)) @ x
    p = nn.Parameter(start.to(dtype))
    optimizer = optimizer_class([p], lr=RATE, **OPTIONS, **rounding)
    losses = []
    for _ in range(STEPS):
        loss = (p.float() @ x - target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


@pytest.mark.parametrize("optimizer", quick([AdamW, AdamW8bit], [AdamW]))
def test_other_roundings_leave_the_curve_of_fp32(optimizer):
    exact = curve(optimizer, torch.float32)
    distance = {
        name: ((curve(optimizer, torch.bfloat16, param_rounding=name) - exact).abs().mean() / exact.mean()).item()
        for name in ("nearest", "stochastic")
    }
    assert distance["stochastic"] < 0.1 and distance["nearest"] > 0.3, distance


def muon(params, **options):
    return Muon(params, {params[0]: split_by_rows([8, 4])}, **options)


@pytest.mark.parametrize("runs", ["reference", "kernels"])
@pytest.mark.parametrize("optimizer", [AdamW, AdamW8bit, muon])
def test_exact_parameters_are_fp32_parameters_to_the_bit(optimizer, runs, request, monkeypatch):
    """50 steps with the same gradients, of which every fifth is skipped; a matrix, and a vector as norms have.

    On a GPU that is so of AdamW; the others are compiled with other contractions to fused multiply-adds.
    """
    if runs == "kernels":
        request.getfixturevalue("kernels")
    monkeypatch.setattr(adamw, "runs_kernels", lambda _: True)  # else fp32 parameters take torch's own kernel
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(shape, generator=generator).to(DEVICE).bfloat16() for shape in ((12, 512), (33,))]
    pairs = [(nn.Parameter(x), nn.Parameter(x.float())) for x in drawn]
    made, plain = (
        optimizer(list(p), lr=1e-4, state_dtype=torch.float32, **OPTIONS | DECAY) for p in zip(*pairs, strict=True)
    )
    for step in range(50):
        for p, q in pairs:
            p.grad = torch.randn(p.shape, generator=generator).to(DEVICE).bfloat16()
            q.grad = p.grad.float()
        for each in (made, plain):
            each.grad_scale, each.found_inf = torch.tensor([1.0 + step % 2, step % 5 == 4], device=DEVICE).unbind()
            each.step()
    for (p, q), start in zip(pairs, drawn, strict=True):
        master = master_reference(p.detach(), made.state[p]["low_bits"])
        if DEVICE != "cpu" and optimizer is not AdamW:
            assert relative_distance(master, q.detach(), start.float()) < CONTRACTION
            continue
        assert torch.equal(master.view(torch.int32), q.detach().view(torch.int32)) and p.dtype == torch.bfloat16
        moments = plain.state[q]
        assert all(torch.equal(made.state[p][name], value) for name, value in moments.items()) and moments
        assert (q != start.float()).float().mean() > 0.999


@pytest.mark.parametrize("optimizer", [AdamW, AdamW8bit])
@pytest.mark.parametrize("rounding", ["stochastic", "exact"])
def test_updates_of_shards_are_bit_identical_to_those_of_the_whole(optimizer, rounding, rank_of_four):
    """Nine rows on four ranks, of a parameter behind another one."""
    values = [torch.randn(9, 512, generator=torch.Generator().manual_seed(i)).to(DEVICE).bfloat16() for i in range(3)]

    def trained(to_shards):
        p = nn.Parameter(to_shards(values[0]))
        made = optimizer([nn.Parameter(values[0][0]), p], lr=1e-3, **OPTIONS, param_rounding=rounding, seed=3)
        for gradient in values[1:]:
            p.grad = to_shards(gradient)
            made.step()
        return [x.detach() for x in (p, *list(made.state[p].values())[1:])]

    whole, parts = trained(torch.clone), []
    for rank in range(4):
        mesh = rank_of_four(rank)
        parts.append(trained(lambda x, mesh=mesh: distribute_tensor(x.clone(), mesh, [Shard(0)], src_data_rank=None)))
    for shards, expected in zip(zip(*parts, strict=True), whole, strict=True):
        assert torch.equal(torch.cat([x.to_local() for x in shards]), expected)
