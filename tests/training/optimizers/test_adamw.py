"""AdamW beside torch's: the same training, the same state, with states of another dtype, on shards."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ligermodels.errors import InputError
from ligermodels.kernels.adamw import adamw_reference
from ligermodels.training.optimizers import clipped_step
from ligermodels.training.optimizers.adamw import AdamW
from tests.conftest import DEVICE
from tests.kernels.error_budget import FACTOR, relative_error

BETAS = 0.9, 0.95
SHAPES = [(33, 16), (7,), (2, 3, 5), ()]


def draw(dtype):
    return [nn.Parameter(torch.randn(shape, device=DEVICE).to(dtype)) for shape in SHAPES]


def gradients_of_step(step):
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=generator).to(DEVICE) for shape in SHAPES]


def train(optimizer, steps, alike=None):
    """alike: parameters to whose dtype gradients are rounded, where not to the optimizer's own."""
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (step + 1)
        params = [p for group in optimizer.param_groups for p in group["params"]]
        for p, like, gradient in zip(params, alike or params, gradients_of_step(step), strict=True):
            p.grad = gradient.to(like.dtype).to(p.dtype)
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


MIXED = [(torch.float32, torch.float16), (torch.float16, torch.float32)]  # weights, states


@pytest.mark.parametrize("weights, states", MIXED)
@pytest.mark.parametrize("native", [False, True])
def test_states_of_another_dtype_err_as_the_reference_does(weights, states, native, request):
    """native: by the kernel; otherwise by the reference, which a CPU takes."""
    if native:
        request.getfixturevalue("kernels")
    params = draw(weights)
    optimizer = AdamW(params, lr=1e-2, betas=BETAS, weight_decay=0.1, states=states)
    plain = [[p.detach().clone(), *(torch.zeros_like(p, dtype=states) for _ in range(2))] for p in params]
    exact = torchs([nn.Parameter(p.detach().double()) for p in params])
    for step in range(6):
        train(optimizer, [step])
        train(exact, [step], params)
        for tensors, p in zip(plain, params, strict=True):
            count = torch.tensor(step + 1.0, device=DEVICE)
            arguments = 1e-2 / (step + 1), *BETAS, 1e-8, 0.1, count
            tensors[:] = adamw_reference(tensors[0], p.grad, *tensors[1:], *arguments)
    assert {x.dtype for p in params for x in list(optimizer.state[p].values())[1:]} == {states}
    flat = [torch.cat([x.double().flatten() for x in column]) for column in zip(*plain, strict=True)]
    for got, baseline, expected in zip(everything(optimizer), flat, everything(exact), strict=False):
        assert relative_error(got, expected) <= FACTOR * relative_error(baseline, expected) + 1e-7


@pytest.mark.parametrize("weights, states", MIXED)
def test_states_survive_saving_in_their_own_dtype(weights, states):
    def fresh(params):
        return AdamW(params, lr=1e-2, betas=BETAS, weight_decay=0.1, states=states)

    params = draw(weights)
    optimizer = fresh(params)
    train(optimizer, range(3))
    resumed = fresh(copy.deepcopy(params))
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for trained in (optimizer, resumed):
        train(trained, range(3, 5))
    assert all(map(torch.equal, everything(resumed), everything(optimizer)))
    assert resumed.state[resumed.param_groups[0]["params"][0]]["exp_avg"].dtype == states


def test_states_of_another_optimizer_are_refused():
    params = [nn.Parameter(torch.ones(2, 2))]
    other = torch.optim.Muon(params)
    params[0].grad = torch.ones(2, 2)
    other.step()
    optimizer = ours(params)
    with pytest.raises(InputError, match=r"momentum_buffer.*AdamW has step, exp_avg, exp_avg_sq"):
        optimizer.load_state_dict(optimizer.state_dict() | {"state": other.state_dict()["state"]})


def test_states_may_be_created_before_the_first_step():
    params = draw(torch.float32)
    before, at_once = ours(params), ours(copy.deepcopy(params))
    before.create_states()
    assert set(before.state) == set(params)
    for optimizer in (before, at_once):
        train(optimizer, range(2))
    assert all(map(torch.equal, everything(before), everything(at_once)))


def test_each_rank_updates_its_shard(kernels, rank_of_four):
    """Five rows over four ranks: two, two, one and none."""
    weight, *steps = (torch.randn(5, 16, device=DEVICE) for _ in range(4))
    whole = nn.Parameter(weight.clone())
    sharded = []
    for rank in range(4):
        mesh = rank_of_four(rank)

        def mine(x, mesh=mesh):
            return distribute_tensor(x.clone(), mesh, [Shard(0)], src_data_rank=None)

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
