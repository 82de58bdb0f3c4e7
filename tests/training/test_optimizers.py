import copy
import itertools

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from ligermodels.training.optimizer import AdamW, adamw, clipped_step, cosine, decay_groups, set_learning_rate
from tests.conftest import DEVICE
from tests.kernels.error_budget import FACTOR, relative_error


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


BETAS = 0.9, 0.95
SHAPES = [(33, 16), (7,), (2, 3, 5), ()]


def draw(dtype):
    return [nn.Parameter(torch.randn(shape, device=DEVICE).to(dtype)) for shape in SHAPES]


def gradients_of_step(step):
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=generator).to(DEVICE) for shape in SHAPES]


def train(optimizer, steps):
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (step + 1)
        params = [p for group in optimizer.param_groups for p in group["params"]]
        for p, gradient in zip(params, gradients_of_step(step), strict=True):
            p.grad = gradient.to(p.dtype)
        optimizer.step()


def everything(optimizer):
    """Parameters, first moments, second moments, step counts, each kind as one flat tensor in float64."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    states = [optimizer.state[p] for p in params]
    kinds = [params, *([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq", "step"))]
    return [torch.cat([x.detach().double().flatten() for x in kind]) for kind in kinds]


def ours(params):
    return AdamW(params, lr=1e-2, betas=BETAS, weight_decay=0.1)


def torchs(params):
    return torch.optim.AdamW(params, lr=1e-2, betas=BETAS, weight_decay=0.1, fused=True)


def assert_within_budget(got, plain, oracle, dtype):
    """The error against float64 of a whole training may not exceed torch's in the same dtype."""
    for result, baseline, expected in zip(everything(got), everything(plain), everything(oracle), strict=True):
        allowed = max(FACTOR * relative_error(baseline, expected), torch.finfo(dtype).eps / 4)
        assert relative_error(result, expected) <= allowed


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_kernel_trains_as_torch_does(kernels, dtype):
    params = draw(dtype)
    optimizers = (
        ours(params),
        torchs(copy.deepcopy(params)),
        torchs([nn.Parameter(p.detach().double()) for p in params]),
    )
    for optimizer in optimizers:
        train(optimizer, range(6))
    assert_within_budget(*optimizers, dtype)


@pytest.mark.skipif(DEVICE != "cpu", reason="on a GPU the kernel runs")
def test_on_the_cpu_torchs_own_kernel_runs():
    params = draw(torch.bfloat16)
    first, second = ours(params), torchs(copy.deepcopy(params))
    for optimizer in (first, second):
        train(optimizer, range(3))
    assert all(map(torch.equal, everything(first), everything(second)))


def test_the_state_is_torchs_in_names_shapes_and_dtypes(kernels):
    params = draw(torch.float16)
    first, second = ours(params), torchs(copy.deepcopy(params))
    for optimizer in (first, second):
        train(optimizer, range(1))
    first, second = first.state_dict(), second.state_dict()
    assert first["param_groups"] == second["param_groups"]
    for a, b in zip(first["state"].values(), second["state"].values(), strict=True):
        assert {name: (x.shape, x.dtype, x.device) for name, x in a.items()} == {
            name: (x.shape, x.dtype, x.device) for name, x in b.items()
        }


@pytest.mark.parametrize("before, after", [(ours, torchs), (torchs, ours), (ours, ours)])
def test_either_continues_the_others_state_dict(kernels, before, after):
    """Continuing in a new optimizer is bit for bit continuing in the old one, had it been of the other kind."""
    params = draw(torch.float32)
    optimizer = before(params)
    train(optimizer, range(3))
    copied = copy.deepcopy(params)
    resumed = after(copied)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert all(map(torch.equal, everything(resumed), everything(optimizer)))
    train(resumed, range(3, 6))
    train(optimizer, range(3, 6))
    for got, expected in zip(everything(resumed), everything(optimizer), strict=True):
        if before is after:
            assert torch.equal(got, expected)
        assert relative_error(got, expected) < 3e-7


@pytest.mark.parametrize("loss", [1.0, float("nan")])
def test_a_refused_step_counts_and_moves_nothing(kernels, loss):
    optimizer = ours(draw(torch.float32))
    train(optimizer, range(2))
    before = everything(optimizer)
    clipped_step(optimizer, torch.tensor(loss, device=DEVICE), torch.tensor(5.0, device=DEVICE), 1.0)
    equal = [torch.equal(a, b) for a, b in zip(everything(optimizer), before, strict=True)]
    assert equal == [loss != loss] * 4
    assert everything(optimizer)[3].tolist() == [2.0 if loss != loss else 3.0] * len(SHAPES)


def test_a_clipped_step_of_the_kernel_is_torchs(kernels):
    params = draw(torch.float32)
    exact = [nn.Parameter(p.detach().double()) for p in params]
    optimizers = ours(params), torchs(copy.deepcopy(params)), torchs(exact)
    for optimizer in optimizers:
        train(optimizer, range(1))
        clipped_step(optimizer, torch.tensor(1.0, device=DEVICE), torch.tensor(5.0, device=DEVICE), 0.7)
    for got, plain, truth in zip(*map(everything, optimizers), strict=True):
        # One rounding more than torch's kernel on a GPU, which computes in float64.
        assert relative_error(got, truth) <= FACTOR * relative_error(plain, truth) + torch.finfo(torch.float32).eps


def test_parameters_without_a_gradient_are_left_out(kernels):
    params = draw(torch.float32)
    optimizer = ours(params)
    optimizer.step()
    assert not optimizer.state
    params[0].grad = torch.ones_like(params[0])
    assert optimizer.step(lambda: 7) == 7
    assert set(optimizer.state) == {params[0]}


@pytest.fixture
def rank_of_four():
    """Makes this process believe it is one rank of four; nothing is communicated."""

    def pretend(rank):
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
        # Meshes compare equal whatever the rank, unless their names differ, and DTensor caches by mesh.
        return init_device_mesh(DEVICE, (4,), mesh_dim_names=(f"rank {rank}",))

    yield pretend
    torch.distributed.destroy_process_group()


def test_each_rank_updates_its_shard(kernels, rank_of_four):
    """Five rows over four ranks: two, two, one and none."""
    weight, *steps = (torch.randn(5, 16, device=DEVICE) for _ in range(4))
    whole = nn.Parameter(weight.clone())
    sharded = []
    for rank in range(4):
        mesh = rank_of_four(rank)

        def mine(x, rank=rank, mesh=mesh):
            rows = x[2 * rank : 2 * rank + 2].clone()
            return DTensor.from_local(rows, mesh, [Shard(0)], run_check=False, shape=x.shape, stride=x.stride())

        p = nn.Parameter(mine(weight))
        optimizer = ours([p])
        for gradient in steps:
            p.grad = mine(gradient)
            optimizer.step()
        state = optimizer.state[p]
        assert isinstance(state["exp_avg"], DTensor) and state["step"] == 3
        sharded.append([x.detach().to_local() for x in (p, state["exp_avg"], state["exp_avg_sq"])])
    optimizer = ours([whole])
    for gradient in steps:
        whole.grad = gradient
        optimizer.step()
    state = optimizer.state[whole]
    for parts, expected in zip(zip(*sharded, strict=True), (whole, state["exp_avg"], state["exp_avg_sq"]), strict=True):
        assert torch.equal(torch.cat(parts), expected)


@pytest.mark.gpu
def test_no_synchronisation(kernels):
    optimizer = ours(draw(torch.bfloat16))
    train(optimizer, range(1))  # compiles the kernel
    loss, norm = torch.tensor([1.0, 5.0], device=DEVICE)
    torch.cuda.set_sync_debug_mode("error")
    try:
        set_learning_rate(optimizer, 1e-3)
        clipped_step(optimizer, loss, norm, 1.0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
