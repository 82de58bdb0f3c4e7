"""8-bit AdamW compared with torchao's, sharded compared with unsharded, and the size of its state."""

import pytest
import torch
import torchao.optim
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
from torchao.optim.quant_utils import create_dynamic_map

from ligermodels.kernels.optim.adamw8bit import dynamic_map
from ligermodels.training.optimizers.adamw import AdamW, AdamW8bit
from tests.conftest import DEVICE

OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}


def draw(shape, seed, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.mark.parametrize("signed", [True, False])
def test_the_map_is_torchaos(signed):
    assert dynamic_map(signed) == create_dynamic_map(signed)


@pytest.mark.skipif(DEVICE != "cpu", reason="on a GPU torchao's is compiled, which takes a minute")
@pytest.mark.parametrize("runs", ["reference", "kernels"])
@pytest.mark.parametrize("shape, block", [((16, 256), 256), ((3, 8, 512), 256), ((40, 896), 128), ((9, 576), 64)])
def test_updates_equal_torchaos_to_rounding(shape, block, runs, request):
    """But for a thousandth: a moment at a threshold may get the neighbouring code. Our kernel computes the place of a
    code in fp32, and torchao its bias corrections."""
    if runs == "kernels":
        request.getfixturevalue("kernels")
    p, q = (nn.Parameter(draw(shape, 0)) for _ in range(2))
    ours, theirs = AdamW8bit([p], **OPTIONS), torchao.optim.AdamW8bit([q], **OPTIONS, block_size=block)
    for seed in range(1, 4):
        p.grad, q.grad = draw(shape, seed), draw(shape, seed)
        ours.step()
        with torch.compiler.set_stance("force_eager"):
            theirs.step()
    far = (p - q).abs() > 1e-4 * (q - draw(shape, 0)).abs().mean()
    assert far.float().mean() < 1e-3
    for name in ("exp_avg", "exp_avg_sq"):
        distance = (ours.state[p][name].int() - theirs.state[q][name].codes.int()).abs()
        assert distance.max() <= 1 and distance.float().mean() < 1e-3
        scale = theirs.state[q][name].scale
        torch.testing.assert_close(ours.state[p][f"{name}_scale"].flatten(), scale, rtol=1e-6, atol=0)


@pytest.mark.parametrize("shape", [(4096,), (15, 256), (64, 96)])
def test_small_parameters_and_rows_without_whole_blocks_use_adamw(shape):
    p, q = (nn.Parameter(draw(shape, 0)) for _ in range(2))
    ours, theirs = AdamW8bit([p], **OPTIONS), AdamW([q], **OPTIONS)
    for seed in range(1, 3):
        p.grad, q.grad = draw(shape, seed), draw(shape, seed)
        ours.step()
        theirs.step()
    assert torch.equal(p, q) and ours.state[p].keys() == theirs.state[q].keys()


def test_the_state_has_two_bytes_per_weight_and_the_scales():
    p = nn.Parameter(draw((64, 512), 0))
    optimizer = AdamW8bit([p], **OPTIONS)
    optimizer.create_states()
    size = sum(x.numel() * x.itemsize for x in optimizer.state[p].values())
    assert size == 2 * p.numel() + 2 * 4 * p.numel() // 256 + 4


def test_updates_of_shards_are_bit_identical_to_those_of_the_whole(rank_of_four):
    """Nine rows on four ranks: three, three, three and none."""
    values = [draw((9, 512), seed) for seed in range(3)]
    sharded = []
    for rank in range(4):
        mesh = rank_of_four(rank)

        def to_shards(x, mesh=mesh):
            return distribute_tensor(x.clone(), mesh, [Shard(0)], src_data_rank=None)

        sharded.append([x.to_local() for x in trained(to_shards(values[0]), map(to_shards, values[1:]))])
    for parts, expected in zip(zip(*sharded, strict=True), trained(values[0], values[1:]), strict=True):
        assert torch.equal(torch.cat(parts), expected)


def trained(weight, gradients):
    """Returns weight, codes and scales after one step with each gradient."""
    p = nn.Parameter(weight.clone())
    optimizer = AdamW8bit([p], **OPTIONS)
    for p.grad in gradients:
        optimizer.step()
    assert optimizer.state[p].pop("step") == 2
    return [x.detach() for x in (p, *optimizer.state[p].values())]
