import pytest
import torch

from ligermodels.kernels import layer_norm as module
from ligermodels.kernels.layer_norm import layer_norm, layer_norm_reference
from ligermodels.kernels.norm_tiles import FEW_ROWS
from tests.conftest import DEVICE
from tests.kernels.error_budget import DTYPES, check, relative_error

SHAPES = [(7, 5), (2, 3, 1000), (3, 33, 96), (18, 4100), (300, 130), (197, 257)]  # the last two by several programs
pytestmark = pytest.mark.usefixtures("kernels", "poisoned")


def draw(*shape):
    return torch.randn(shape, dtype=torch.float64, device=DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_is_within_the_error_budget(shape, dtype):
    inputs = draw(*shape), draw(shape[-1]), draw(shape[-1])
    check(lambda *a: layer_norm(*a, 1e-6), lambda *a: layer_norm_reference(*a, 1e-6), inputs, dtype)


def test_wide_rows_of_more_than_few(monkeypatch):
    monkeypatch.setattr(module, "FEW_ROWS", 2)
    inputs = draw(7, 2050), draw(2050), draw(2050)
    check(lambda *a: layer_norm(*a, 1e-6), lambda *a: layer_norm_reference(*a, 1e-6), inputs, DTYPES[-1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_bias(dtype):
    inputs = draw(9, 96), draw(96)
    check(lambda *a: layer_norm(*a, None, 1e-6), lambda *a: layer_norm_reference(*a, None, 1e-6), inputs, dtype)


def test_reference_is_pytorchs():
    x, weight, bias = draw(5, 40), draw(40), draw(40)
    for b in (bias, None):
        expected = torch.nn.functional.layer_norm(x, (40,), weight, b, 1e-5)
        torch.testing.assert_close(layer_norm_reference(x, weight, b, 1e-5), expected)


def test_a_large_mean_does_not_cancel_the_variance():
    x = draw(4, 1000) + 300.0  # E[x²] - E[x]² would keep two digits of it in fp32
    weight, bias = draw(1000), draw(1000)
    oracle = layer_norm_reference(x.float().double(), weight.float().double(), bias.float().double(), 1e-6)
    assert relative_error(layer_norm(x.float(), weight.float(), bias.float(), 1e-6), oracle) < 2e-5


def test_non_contiguous_rows():
    inputs = draw(6, 4, 64).transpose(0, 1)[..., ::2], draw(32), draw(32)
    check(lambda *a: layer_norm(*a, 1e-5), lambda *a: layer_norm_reference(*a, 1e-5), inputs, torch.float32)


def test_zero_rows_give_zero_weight_and_bias_gradients():
    x = torch.empty(0, 64, device=DEVICE, requires_grad=True)
    weight, bias = (torch.ones(64, device=DEVICE, requires_grad=True) for _ in range(2))
    y = layer_norm(x, weight, bias, 1e-6)
    y.sum().backward()
    assert y.shape == (0, 64)
    assert torch.equal(weight.grad, torch.zeros_like(weight))
    assert torch.equal(bias.grad, torch.zeros_like(bias))


@pytest.mark.parametrize("trained", [[0], [0, 1], [0, 2], [1], [2]])
def test_what_is_frozen_gets_no_gradient_and_the_rest_its_own(trained):
    rows = FEW_ROWS + 1  # of fewer the contracts ask the same
    inputs = [torch.randn(s, device=DEVICE) for s in [(rows, 32), (32,), (32,)]]
    for index in trained:
        inputs[index].requires_grad_()
    leaves = [inputs[index] for index in trained]
    upstream = torch.randn(rows, 32, device=DEVICE)
    expected, got = (
        torch.autograd.grad(f(*inputs, 1e-6), leaves, upstream) for f in (layer_norm_reference, layer_norm)
    )
    for a, b in zip(expected, got, strict=True):
        torch.testing.assert_close(b, a)


def test_weight_and_bias_gradients_are_bit_identical_from_run_to_run():
    x = torch.randn(600, 96, device=DEVICE)
    weight, bias = (torch.randn(96, device=DEVICE, requires_grad=True) for _ in range(2))
    upstream = torch.randn(600, 96, device=DEVICE)
    first, second = (torch.autograd.grad(layer_norm(x, weight, bias, 1e-6), (weight, bias), upstream) for _ in range(2))
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])


def test_only_of_more_than_few_rows_is_a_second_kernel_launched_in_backward(monkeypatch):
    monkeypatch.setattr(module, "sum_partials", lambda partials, *gradients: launched.append(len(partials)))
    weight = torch.ones(32, device=DEVICE)
    for rows, kernels in [(FEW_ROWS, 1), (FEW_ROWS + 1, 2)]:
        launched, x = [], torch.randn(rows, 32, device=DEVICE)
        module.layer_norm_backward(x, x, torch.ones(2, rows, device=DEVICE), weight, True, True, True)
        assert 1 + len(launched) == kernels


def test_rows_too_long_are_refused():
    with pytest.raises(ValueError, match="65536"):
        layer_norm(torch.empty(1, 65537, device=DEVICE), torch.empty(65537, device=DEVICE), None, 1e-6)


def test_weights_of_another_length_are_refused():
    x, weight = torch.ones(3, 8, device=DEVICE), torch.ones(8, device=DEVICE)
    for weights in ((weight[:4], None), (weight, weight[:4])):
        with pytest.raises(ValueError, match="of 4 elements for rows of 8"):
            layer_norm(x, *weights, 1e-6)
