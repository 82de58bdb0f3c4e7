from functools import partial

import pytest
import torch

from ligermodels.kernels.gated_linear import gated_linear, gated_linear_reference
from tests.conftest import DEVICE
from tests.kernels.error_budget import DTYPES, FACTOR, check, relative_error
from tests.kernels.test_linear import saved_bytes

ACTIVATIONS = ["silu", "gelu_tanh", "gelu"]
pytestmark = pytest.mark.usefixtures("kernels", "poisoned")


def draw(*shape, dtype=torch.float64):
    return torch.randn(shape, dtype=dtype, device=DEVICE)


def draw_inputs():
    """gate_up, weight and bias of a layer that takes 48 columns to 20."""
    return [draw(*shape, dtype=torch.float32) for shape in [(2, 3, 96), (20, 48), (20,)]]


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


@pytest.mark.parametrize("trained", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 2)])
def test_frozen_inputs_get_no_gradient_and_change_no_other(trained):
    inputs = draw_inputs()
    for index in trained:
        inputs[index].requires_grad_()

    def gradients(function, dtype):
        leaves = [x.detach().to(dtype).requires_grad_(x.requires_grad) for x in inputs]
        loss = function(*leaves, "silu").square().sum()
        return torch.autograd.grad(loss, [leaves[index] for index in trained])

    exact, plain = (gradients(gated_linear_reference, dtype) for dtype in (torch.float64, torch.float32))
    for got, baseline, truth in zip(gradients(gated_linear, torch.float32), plain, exact, strict=True):
        allowed = FACTOR * max(relative_error(baseline, truth), torch.finfo(torch.float32).eps)
        assert relative_error(got, truth) <= allowed
    gated_linear(*inputs, "silu").sum().backward()
    assert [x.grad is not None for x in inputs] == [index in trained for index in range(3)]


def test_only_gate_up_is_kept_for_backward():
    gate_up, weight, bias = (x.requires_grad_() for x in draw_inputs())
    assert saved_bytes(partial(gated_linear, activation="silu"), gate_up, weight, bias) == 6 * 96 * 4


def test_zero_rows():
    gate_up, weight, bias = draw_inputs()
    gate_up, weight = gate_up[:0].requires_grad_(), weight.requires_grad_()
    y = gated_linear(gate_up, weight, bias, "silu")
    y.sum().backward()
    assert y.shape == (0, 3, 20)
    assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_weight_gradient_is_bit_identical_from_run_to_run():
    inputs = [x.requires_grad_() for x in draw_inputs()]
    first, second = (torch.autograd.grad(gated_linear(*inputs, "gelu").sin().sum(), inputs) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_fullgraph_compile_gives_equal_gradients():
    inputs = [x.requires_grad_() for x in draw_inputs()]

    def loss(*inputs):
        return gated_linear(*inputs, "silu").sin().sum()

    backend = "inductor" if DEVICE == "cuda" else "aot_eager"
    compiled = torch.compile(loss, fullgraph=True, backend=backend)
    expected, got = (torch.autograd.grad(f(*inputs), inputs) for f in (loss, compiled))
    for a, b in zip(expected, got, strict=True):
        torch.testing.assert_close(a, b)
