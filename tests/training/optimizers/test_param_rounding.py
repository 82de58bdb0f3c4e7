"""bf16 parameters with stochastic rounding or a compensation, compared with fp32 on a training curve; sharded."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from ligermodels.training.optimizers.adamw import AdamW
from ligermodels.training.optimizers.adamw8bit import AdamW8bit
from tests.conftest import DEVICE

OPTIONS = {"betas": (0.9, 0.95), "weight_decay": 0.0}
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


@pytest.mark.parametrize("optimizer", [AdamW, AdamW8bit])
def test_the_curve_follows_that_of_fp32(optimizer):
    exact = curve(optimizer, torch.float32)
    distance = {
        name: ((curve(optimizer, torch.bfloat16, param_rounding=name) - exact).abs().mean() / exact.mean()).item()
        for name in ("nearest", "stochastic", "kahan")
    }
    assert distance["kahan"] < 0.03 and distance["stochastic"] < 0.1 and distance["nearest"] > 0.3, distance


@pytest.mark.parametrize("optimizer", [AdamW, AdamW8bit])
@pytest.mark.parametrize("rounding", ["stochastic", "kahan"])
def test_updates_of_shards_are_bit_identical_to_those_of_the_whole(optimizer, rounding, rank_of_four):
    """Nine rows on four ranks, of a parameter behind another one."""
    values = [torch.randn(9, 512, generator=torch.Generator().manual_seed(i)).to(DEVICE).bfloat16() for i in range(3)]

    def trained(to_shards):
        p = nn.Parameter(to_shards(values[0]))
        made = optimizer([nn.Parameter(values[0][0]), p], lr=1e-3, **OPTIONS, param_rounding=rounding, seed=3)
        for gradient in values[1:]:
            p.grad = to_shards(gradient)
            made.step()
        return p.detach()

    whole, parts = trained(torch.clone), []
    for rank in range(4):
        mesh = rank_of_four(rank)
        parts.append(trained(lambda x, mesh=mesh: distribute_tensor(x.clone(), mesh, [Shard(0)], src_data_rank=None)))
    assert torch.equal(torch.cat([x.to_local() for x in parts]), whole)
