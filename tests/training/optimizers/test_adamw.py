"""AdamW compared with torch's: equal updates, equal state, a separate state dtype, and sharded parameters."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ligermodels.errors import InputError
from ligermodels.kernels.optim.adamw import adamw_reference
from ligermodels.training.optimizers import clip_and_step
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


def train(optimizer, steps, dtypes_of=None):
    """dtypes_of: parameters whose dtypes gradients are rounded to; None for the optimizer's own parameters."""
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (step + 1)
        params = [p for group in optimizer.param_groups for p in group["params"]]
        for p, like, gradient in zip(params, dtypes_of or params, gradients_of_step(step), strict=True):
            p.grad = gradient.to(like.dtype).to(p.dtype)
        optimizer.step()


def everything(optimizer):
    """Returns parameters, first moments, second moments and step counts, each as one flat float64 tensor."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    states = [optimizer.state[p] for p in params]
    kinds = [params, *([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq", "step"))]
    return [torch.cat([x.detach().double().flatten() for x in kind]) for kind in kinds]


def ours(params, **options):
    return AdamW(params, lr=1e-2, betas=BETAS, weight_decay=0.1, **options)


def torchs(params):
    return torch.optim.AdamW(params, lr=1e-2, betas=BETAS, weight_decay=0.1, fused=True)


def assert_within_budget(got, plain, exact, dtype):
    """After several steps, the error against float64 may not exceed that of torch's AdamW in the same dtype."""
    for result, baseline, expected in zip(everything(got), everything(plain), everything(exact), strict=True):
        allowed = max(FACTOR * relative_error(baseline, expected), torch.finfo(dtype).eps / 4)
        assert relative_error(result, expected) <= allowed


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_kernel_matches_torchs_adamw(kernels, dtype):
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
def test_on_a_cpu_the_update_is_bit_identical_to_torchs():
    params = draw(torch.bfloat16)
    first, second = ours(params, param_rounding="nearest"), torchs(copy.deepcopy(params))
    for optimizer in (first, second):
        train(optimizer, range(3))
    assert all(map(torch.equal, everything(first), everything(second)))


def test_the_state_has_torchs_names_shapes_and_dtypes(kernels):
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
def test_each_implementation_loads_the_others_state_dict(kernels, before, after):
    """A new optimizer that loads the state continues like the old one; bit-exactly if both are of one kind."""
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


def test_exact_parameters_continue_from_a_state_without_low_bits():
    params = draw(torch.bfloat16)
    optimizer, resumed = torchs(params), ours(copy.deepcopy(params))
    train(optimizer, range(3))
    train(resumed, range(5))  # other weights and low bits, which are replaced
    saved = copy.deepcopy(optimizer.state_dict())
    fresh = ours(copy.deepcopy(params))
    fresh.load_state_dict(saved)
    with torch.no_grad():
        torch._foreach_copy_(resumed.param_groups[0]["params"], params)
    resumed.load_state_dict(saved)
    for each in (fresh, resumed):
        train(each, range(3, 5))
    assert all(map(torch.equal, everything(fresh), everything(resumed)))
    assert all(state["low_bits"].any() for state in fresh.state.values())


def test_clipping_in_the_kernel_matches_torchs(kernels):
    params = draw(torch.float32)
    in_float64 = [nn.Parameter(p.detach().double()) for p in params]
    optimizers = ours(params), torchs(copy.deepcopy(params)), torchs(in_float64)
    for optimizer in optimizers:
        train(optimizer, range(1))
        clip_and_step(optimizer, torch.tensor(1.0, device=DEVICE), torch.tensor(5.0, device=DEVICE), 0.7)
    for got, plain, exact in zip(*map(everything, optimizers), strict=True):
        # Our kernel has one rounding more than torch's on a GPU, which computes in float64.
        assert relative_error(got, exact) <= FACTOR * relative_error(plain, exact) + torch.finfo(torch.float32).eps


def test_parameters_without_a_gradient_are_skipped(kernels):
    params = draw(torch.float32)
    optimizer = ours(params)
    optimizer.step()
    assert not optimizer.state
    params[0].grad = torch.ones_like(params[0])
    assert optimizer.step(lambda: 7) == 7
    assert set(optimizer.state) == {params[0]}


MIXED = [(torch.float32, torch.float16), (torch.float16, torch.float32)]  # param_dtype, state_dtype


@pytest.mark.parametrize("param_dtype, state_dtype", MIXED)
@pytest.mark.parametrize("native", [False, True])
def test_with_another_state_dtype_the_error_is_that_of_the_reference(param_dtype, state_dtype, native, request):
    """native: the kernel runs; otherwise the reference implementation, which runs on a CPU."""
    if native:
        request.getfixturevalue("kernels")
    params = draw(param_dtype)
    optimizer = AdamW(params, lr=1e-2, betas=BETAS, weight_decay=0.1, state_dtype=state_dtype)
    plain = [[p.detach().clone(), *(torch.zeros_like(p, dtype=state_dtype) for _ in range(2))] for p in params]
    exact = torchs([nn.Parameter(p.detach().double()) for p in params])
    for step in range(6):
        train(optimizer, [step])
        train(exact, [step], params)
        for tensors, p in zip(plain, params, strict=True):
            count = torch.tensor(step + 1.0, device=DEVICE)
            arguments = 1e-2 / (step + 1), *BETAS, 1e-8, 0.1, count
            tensors[:] = adamw_reference(tensors[0], p.grad, *tensors[1:], *arguments)
    assert {x.dtype for p in params for x in list(optimizer.state[p].values())[1:]} == {state_dtype}
    flat = [torch.cat([x.double().flatten() for x in column]) for column in zip(*plain, strict=True)]
    for got, baseline, expected in zip(everything(optimizer), flat, everything(exact), strict=False):
        assert relative_error(got, expected) <= FACTOR * relative_error(baseline, expected) + 1e-7


@pytest.mark.parametrize("param_dtype, state_dtype", MIXED)
def test_the_state_is_saved_and_loaded_in_its_own_dtype(param_dtype, state_dtype):
    def fresh(params):
        return AdamW(params, lr=1e-2, betas=BETAS, weight_decay=0.1, state_dtype=state_dtype)

    params = draw(param_dtype)
    optimizer = fresh(params)
    train(optimizer, range(3))
    resumed = fresh(copy.deepcopy(params))
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for trained in (optimizer, resumed):
        train(trained, range(3, 5))
    assert all(map(torch.equal, everything(resumed), everything(optimizer)))
    assert resumed.state[resumed.param_groups[0]["params"][0]]["exp_avg"].dtype == state_dtype


def test_the_state_of_another_optimizer_is_rejected():
    params = [nn.Parameter(torch.ones(2, 2))]
    other = torch.optim.Muon(params)
    params[0].grad = torch.ones(2, 2)
    other.step()
    optimizer = ours(params)
    with pytest.raises(InputError, match=r"momentum_buffer.*AdamW has step, exp_avg, exp_avg_sq"):
        optimizer.load_state_dict(optimizer.state_dict() | {"state": other.state_dict()["state"]})


def test_the_state_can_be_created_before_the_first_step():
    params = draw(torch.float32)
    before, at_once = ours(params), ours(copy.deepcopy(params))
    before.create_states()
    assert set(before.state) == set(params)
    for optimizer in (before, at_once):
        train(optimizer, range(2))
    assert all(map(torch.equal, everything(before), everything(at_once)))


def test_each_rank_updates_its_shard(kernels, rank_of_four):
    """Five rows on four ranks: two, two, one and none."""
    weight, *steps = (torch.randn(5, 16, device=DEVICE) for _ in range(4))
    whole = nn.Parameter(weight.clone())
    sharded = []
    for rank in range(4):
        mesh = rank_of_four(rank)

        def to_shards(x, mesh=mesh):
            return distribute_tensor(x.clone(), mesh, [Shard(0)], src_data_rank=None)

        p = nn.Parameter(to_shards(weight))
        optimizer = ours([p])
        for gradient in steps:
            p.grad = to_shards(gradient)
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
