from functools import partial

import pytest
import torch

from ligermodels.kernels.linear import linear as module
from ligermodels.kernels.linear.linear import LowRank, gated_linear, gated_linear_reference
from tests.conftest import DEVICE
from tests.kernels.error_budget import DTYPES, FACTOR, check, relative_error
from tests.kernels.linear.test_linear import COLUMNS, SCALE, draw_low_rank, gradients_alive, saved_bytes

ACTIVATIONS = ["silu", "gelu_tanh", "gelu"]
pytestmark = pytest.mark.usefixtures("kernels", "poisoned")


def draw(*shape, dtype=torch.float64):
    return torch.randn(shape, dtype=dtype, device=DEVICE)


def draw_inputs():
    """gate_up, weight and bias of a layer that maps 48 columns to 20."""
    return [draw(*shape, dtype=torch.float32) for shape in [(2, 3, 96), (20, 48), (20,)]]


def with_low_rank(function, activation="silu"):
    """`function` with the update's A and B as its last two arguments."""
    return lambda *inputs: function(*inputs[:-2], activation, LowRank(*inputs[-2:], COLUMNS, SCALE))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("shape", "width"), [((33, 50), 7), ((2, 3, 96), 20)])
def test_gated_linear_is_within_the_error_budget(shape, width, activation, dtype):
    inputs = draw(*shape), draw(width, shape[-1] // 2), draw(width)
    check(lambda *a: gated_linear(*a, activation), lambda *a: gated_linear_reference(*a, activation), inputs, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_bias(dtype):
    inputs = draw(5, 64), draw(16, 32)
    check(lambda *a: gated_linear(*a, None, "silu"), lambda *a: gated_linear_reference(*a, None, "silu"), inputs, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_with_a_low_rank_update(activation, dtype):
    inputs = [*(x.double() for x in draw_inputs()), *draw_low_rank(48)]
    check(with_low_rank(gated_linear, activation), with_low_rank(gated_linear_reference, activation), inputs, dtype)


@pytest.mark.parametrize("trained", [(3, 4), (3,), (4,), (0, 3, 4), (1, 4), (2, 3)])
def test_a_low_rank_update_is_trained_for_any_choice_of_frozen_inputs(trained):
    functions = map(with_low_rank, (gated_linear, gated_linear_reference))
    check_frozen(*functions, [*draw_inputs(), *draw_low_rank(48, dtype=torch.float32)], trained)


def check_frozen(ours, reference, inputs, trained):
    """Only the inputs at these indices get gradients, and these are within the error budget."""
    for index in trained:
        inputs[index].requires_grad_()

    def gradients(function, dtype):
        leaves = [x.detach().to(dtype).requires_grad_(x.requires_grad) for x in inputs]
        loss = function(*leaves).square().sum()
        return torch.autograd.grad(loss, [leaves[index] for index in trained])

    exact, plain = (gradients(reference, dtype) for dtype in (torch.float64, torch.float32))
    for got, baseline, truth in zip(gradients(ours, torch.float32), plain, exact, strict=True):
        allowed = FACTOR * max(relative_error(baseline, truth), torch.finfo(torch.float32).eps)
        assert relative_error(got, truth) <= allowed
    ours(*inputs).sum().backward()
    assert [x.grad is not None for x in inputs] == [index in trained for index in range(len(inputs))]


def test_only_gate_up_is_saved_for_backward():
    gate_up, weight, bias = (x.requires_grad_() for x in draw_inputs())
    assert saved_bytes(partial(gated_linear, activation="silu"), gate_up, weight, bias) == 6 * 96 * 4
    low_rank = (x.requires_grad_() for x in draw_low_rank(48, dtype=torch.float32))
    assert saved_bytes(with_low_rank(gated_linear), gate_up, weight, bias, *low_rank) == 6 * (96 + 3 * 4) * 4


@pytest.mark.parametrize("inplace", [False, True])
def test_the_gradient_of_the_product_is_freed_before_the_weight_gradient_is_computed(inplace, monkeypatch):
    """In place, the product takes its memory, and the weight gradient is computed from the product."""
    gate_up, weight, bias = draw_inputs()
    alive = gradients_alive(monkeypatch, module, (2, 3, 48))
    y = gated_linear(gate_up.requires_grad_() * 1, weight.requires_grad_(), bias, "silu", inplace=inplace)
    y.sum().backward()
    assert alive == [inplace]
