import pytest
import torch

from ligermodels.kernels.norms import layer_norm as module
from ligermodels.kernels.norms.layer_norm import layer_norm, layer_norm_reference
from ligermodels.kernels.norms.norm_tiles import SMALL_M_ROWS
from tests.conftest import DEVICE
from tests.kernels.error_budget import DTYPES, check, relative_error

SHAPES = [(7, 5), (2, 3, 1000), (3, 33, 96), (18, 4100), (300, 130), (197, 257)]  # the last two take several programs
pytestmark = pytest.mark.usefixtures("kernels", "poisoned")


def draw(*shape):
    return torch.randn(shape, dtype=torch.float64, device=DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_layer_norm_is_within_the_error_budget(shape, dtype):
    inputs = draw(*shape), draw(shape[-1]), draw(shape[-1])
    check(lambda *a: layer_norm(*a, 1e-6), lambda *a: layer_norm_reference(*a, 1e-6), inputs, dtype)


def test_wide_rows_on_the_persistent_path_are_within_the_error_budget(monkeypatch):
    monkeypatch.setattr(module, "SMALL_M_ROWS", 2)
    inputs = draw(7, 2050), draw(2050), draw(2050)
    check(lambda *a: layer_norm(*a, 1e-6), lambda *a: layer_norm_reference(*a, 1e-6), inputs, DTYPES[-1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_norm_without_bias_is_within_the_error_budget(dtype):
    inputs = draw(9, 96), draw(96)
    check(lambda *a: layer_norm(*a, None, 1e-6), lambda *a: layer_norm_reference(*a, None, 1e-6), inputs, dtype)


def test_the_reference_equals_pytorch():
    x, weight, bias = draw(5, 40), draw(40), draw(40)
    for b in (bias, None):
        expected = torch.nn.functional.layer_norm(x, (40,), weight, b, 1e-5)
        torch.testing.assert_close(layer_norm_reference(x, weight, b, 1e-5), expected)


def test_a_large_mean_does_not_cancel_the_variance():
    x = draw(4, 1000) + 300.0  # E[x²] - E[x]² would keep two digits of it in fp32
    weight, bias = draw(1000), draw(1000)
    exact = layer_norm_reference(x.float().double(), weight.float().double(), bias.float().double(), 1e-6)
    assert relative_error(layer_norm(x.float(), weight.float(), bias.float(), 1e-6), exact) < 2e-5


def test_non_contiguous_rows_are_within_the_error_budget():
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
def test_the_persistent_path_gives_the_gradients_of_what_is_trained(trained):
    rows = SMALL_M_ROWS + 1  # test_contracts.py checks the same on the small-M path
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


def test_backward_launches_a_second_kernel_only_on_the_persistent_path(monkeypatch):
    monkeypatch.setattr(module, "sum_partials", lambda partials, *gradients: launched.append(len(partials)))
    weight = torch.ones(32, device=DEVICE)
    for rows, kernels in [(SMALL_M_ROWS, 1), (SMALL_M_ROWS + 1, 2)]:
        launched, x = [], torch.randn(rows, 32, device=DEVICE)
        stats = torch.ones(2, rows, device=DEVICE)
        module.layer_norm_backward(x, None, x, stats, weight, None, True, True, True, False)
        assert 1 + len(launched) == kernels


def test_rows_longer_than_the_kernels_support_raise():
    with pytest.raises(ValueError, match="at most 65536"):
        layer_norm(torch.empty(1, 65537, device=DEVICE), torch.empty(65537, device=DEVICE), None, 1e-6)


def test_weights_of_another_length_than_a_row_raise():
    x, weight = torch.ones(3, 8, device=DEVICE), torch.ones(8, device=DEVICE)
    for weights in ((weight[:4], None), (weight, weight[:4])):
        with pytest.raises(ValueError, match=r"(weight|bias) has shape \[4\]; needed \[8\]"):
            layer_norm(x, *weights, 1e-6)
