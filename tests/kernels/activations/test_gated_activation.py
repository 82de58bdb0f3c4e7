import math
from functools import partial

import pytest
import torch

from ligermodels.kernels.activations.gated_activation import (
    _launch_backward,
    gated_activation,
    gated_activation_reference,
    geglu,
    swiglu,
)
from ligermodels.kernels.linear.linear import gated_linear
from tests.conftest import DEVICE
from tests.kernels.error_budget import DTYPES, check

ACTIVATIONS = ["silu", "gelu_tanh", "gelu"]
SHAPES = [(7, 10), (2, 3, 96), (5, 2600)]
pytestmark = pytest.mark.usefixtures("kernels", "poisoned")


def draw(*shape, dtype=torch.float64):
    return torch.randn(shape, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_gated_activation_is_within_the_error_budget(shape, activation, dtype):
    check(
        lambda x: gated_activation(x, activation),
        lambda x: gated_activation_reference(x, activation),
        [3 * draw(*shape)],
        dtype,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_separate_gate_and_up_with_multipliers_are_within_the_error_budget(activation, dtype):
    options = {"gate_multiplier": 0.375, "down_multiplier": -1.25}
    check(
        lambda gate, up: gated_activation(gate, activation, up, **options),
        lambda gate, up: gated_activation_reference(gate, activation, up, **options),
        [3 * draw(2, 3, 1100), draw(2, 3, 1100)],
        dtype,
    )


@pytest.mark.parametrize("on_kernels", [True, False])
def test_multipliers_scale_the_gate_before_the_activation_and_the_product_after_it(on_kernels, monkeypatch):
    monkeypatch.setattr("ligermodels.kernels.launch.interpreting", on_kernels)
    gate, up = draw(3, 20, dtype=torch.float32), draw(3, 20, dtype=torch.float32)
    expected = torch.nn.functional.silu(0.5 * gate) * up * 3
    for inputs in ((torch.cat((gate, up), -1), "silu"), (gate, "silu", up)):
        torch.testing.assert_close(gated_activation(*inputs, gate_multiplier=0.5, down_multiplier=3.0), expected)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_separate_gate_and_up_of_any_strides_equal_packed_ones_bit_for_bit(activation):
    gate_up, dy = draw(3, 4, 2200, dtype=torch.float32).requires_grad_(), draw(3, 4, 1100, dtype=torch.float32)
    (expected,) = torch.autograd.grad(packed := gated_activation(gate_up, activation), gate_up, dy)
    gate, up = gate_up.detach().chunk(2, -1)
    gate, up = gate.requires_grad_(), up.mT.contiguous().mT.requires_grad_()
    got = torch.autograd.grad(y := gated_activation(gate, activation, up), (gate, up), dy)
    assert torch.equal(y, packed)
    assert torch.equal(torch.cat(got, -1), expected)


def test_in_place_gradients_overwrite_gate_and_up_where_they_share_no_memory():
    leaves = [draw(3, 50, dtype=torch.float32).requires_grad_() for _ in range(2)]
    expected = torch.autograd.grad(swiglu(*leaves).sum(), leaves)
    gate, up = (leaf * 1 for leaf in leaves)
    got = torch.autograd.grad(gated_activation(gate, "silu", up, inplace=True).sum(), leaves)
    assert torch.equal(gate, expected[0]) and torch.equal(up, expected[1])
    assert all(map(torch.equal, got, expected))
    (expected,) = torch.autograd.grad(swiglu(leaves[0], leaves[0]).sum(), leaves[0])
    shared = leaves[0] * 1
    (got,) = torch.autograd.grad(gated_activation(shared, "silu", shared, inplace=True).sum(), leaves[0])
    assert torch.equal(got, expected) and torch.equal(shared, leaves[0])


def test_a_gate_and_up_of_different_shapes_raise():
    with pytest.raises(ValueError, match=r"gate_up, the gate, is \[2, 4\], up \[2, 5\]"):
        swiglu(torch.zeros(2, 4, device=DEVICE), torch.zeros(2, 5, device=DEVICE))


def test_gate_is_the_first_half_of_gate_up():
    gate, up = [-30.0, -2.0, 0.0, 0.5, 30.0], [3.0, -1.0, 5.0, 2.0, 0.25]
    gate_up = torch.tensor(gate + up, device=DEVICE)
    cubic = [math.sqrt(2 / math.pi) * (g + 0.044715 * g**3) for g in gate]
    for result, activated in [
        (swiglu(gate_up), [g / (1 + math.exp(-g)) for g in gate]),
        (geglu(gate_up), [g * (1 + math.erf(g / math.sqrt(2))) / 2 for g in gate]),
        (geglu(gate_up, approximate="tanh"), [g * (1 + math.tanh(u)) / 2 for g, u in zip(gate, cubic, strict=True)]),
    ]:
        expected = torch.tensor([a * u for a, u in zip(activated, up, strict=True)], device=DEVICE)
        torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_large_gates_saturate_without_nan(activation):
    gate = torch.tensor([-6e4, -200.0, 200.0, 6e4], device=DEVICE, requires_grad=True)
    y = gated_activation(torch.cat((gate, torch.ones_like(gate))), activation)
    (slope,) = torch.autograd.grad(y.sum(), gate)
    assert y.tolist() == [0, 0, 200, 60000]
    assert slope.tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_backward_recomputes_a_product_bit_identical_to_forward(activation):
    gate_up, dy = draw(3, 2200, dtype=torch.float32).half(), draw(3, 1100, dtype=torch.float32).half()
    dgate_up, y, no_dup = torch.ops.ligermodels.gated_activation_backward(dy, gate_up, activation, True)
    plain, no_y, _ = torch.ops.ligermodels.gated_activation_backward(dy, gate_up, activation, False)
    assert torch.equal(y, gated_activation(gate_up, activation))
    assert torch.equal(dgate_up, plain)
    assert no_dup.numel() == no_y.numel() == 0


@pytest.mark.parametrize("width", [9, 24, 1100, 4096])  # one vector per thread, and one element per thread
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_in_place_gradient_and_product_overwrite_gate_up_and_the_upstream_gradient(width, dtype):
    gate_up, dy = (draw(37, columns, dtype=torch.float32).to(dtype) for columns in (2 * width, width))
    *expected, _ = _launch_backward(dy, gate_up, "silu", True)
    *got, _ = _launch_backward(dy, gate_up, "silu", True, inplace=True)
    assert [x.data_ptr() for x in got] == [gate_up.data_ptr(), dy.data_ptr()]
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


def gated_then_linear(gate_up, inplace):
    return gated_linear(gate_up, torch.eye(gate_up.shape[-1] // 2, device=DEVICE), None, "silu", inplace=inplace)


@pytest.mark.parametrize("function", [partial(gated_activation, activation="silu"), gated_then_linear])
def test_in_place_gradient_overwrites_gate_up_unless_the_graph_is_retained(function):
    leaf = draw(3, 2200, dtype=torch.float32).requires_grad_()
    (expected,) = torch.autograd.grad(function(leaf * 1, inplace=False).sum(), leaf)
    gate_up, addresses = leaf * 1, []
    gate_up.register_hook(lambda gradient: addresses.append(gradient.data_ptr()))
    loss = function(gate_up, inplace=True).sum()
    for retained in (True, True, False):
        (gradient,) = torch.autograd.grad(loss, leaf, retain_graph=retained)
        assert torch.equal(gradient, expected)
        assert torch.equal(gate_up, leaf) == retained
    assert [address == gate_up.data_ptr() for address in addresses] == [False, False, True]


def test_autograd_raises_if_another_node_saved_the_overwritten_gate_up():
    leaf = draw(2, 8, dtype=torch.float32).requires_grad_()
    gate_up = torch.exp(leaf)  # saves its output for backward
    loss = gated_activation(gate_up, "silu", inplace=True).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_unknown_activations_and_odd_widths_raise():
    with pytest.raises(ValueError, match="'relu'; supported: silu, gelu_tanh, gelu"):
        gated_activation(torch.zeros(1, 4, device=DEVICE), "relu")
    with pytest.raises(ValueError, match="even width"):
        swiglu(torch.zeros(1, 5, device=DEVICE))
