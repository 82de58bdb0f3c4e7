"""What is specific to a LayerNorm in the node of linear.py; test_norm_linear.py tests the node itself."""

from functools import partial

import pytest
import torch

from ligermodels.kernels.linear import linear as module
from ligermodels.kernels.linear.linear import LowRank, layer_norm_linear, layer_norm_linear_reference
from ligermodels.kernels.norms.norm_tiles import SMALL_M_ROWS
from tests.kernels.error_budget import DTYPES, check
from tests.kernels.linear.test_linear import COLUMNS, SCALE, draw_low_rank, gradients_alive, saved_bytes
from tests.kernels.linear.test_norm_linear import draw, loss

NAMES = ["x", "residual", "norm_weight", "norm_bias", "weight", "bias"]
pytestmark = pytest.mark.usefixtures("kernels", "poisoned")


def draw_inputs(residual=True, dtype=torch.float32):
    """x, residual, norm_weight, norm_bias, weight and bias of a layer that maps 48 columns to 20."""
    x, residual = draw(2, 3, 48, dtype=dtype), draw(2, 3, 48, dtype=dtype) if residual else None
    norm = [draw(48, dtype=dtype) for _ in range(2)]
    return [x, residual, *norm, draw(20, 48, dtype=dtype) / 7, draw(20, dtype=dtype)]


def with_low_rank(function):
    """`function` with the update's A and B as its last two arguments."""
    return lambda *inputs: function(*inputs[:-2], 1e-6, LowRank(*inputs[-2:], COLUMNS, SCALE))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "width"), [((33, 25), 7), ((2, 3, 96), 20), ((SMALL_M_ROWS + 2, 130), 5)])
def test_layer_norm_linear_is_within_the_error_budget(shape, width, dtype):
    norm, weight, bias = [draw(shape[-1]), draw(shape[-1])], draw(width, shape[-1]), draw(width)
    ours, reference = partial(layer_norm_linear, eps=1e-6), partial(layer_norm_linear_reference, eps=1e-6)
    check(ours, reference, [draw(*shape), draw(*shape), *norm, weight, bias], dtype)
    without_residual = [draw(*shape), *norm, weight, bias]
    check(lambda x, *a: ours(x, None, *a), lambda x, *a: reference(x, None, *a), without_residual, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_biases(dtype):
    x, residual, norm_weight, _, weight, _ = draw_inputs(dtype=torch.float64)

    def without_biases(function):
        return lambda x, residual, norm_weight, weight: function(x, residual, norm_weight, None, weight, None, 1e-5)

    functions = map(without_biases, (layer_norm_linear, layer_norm_linear_reference))
    check(*functions, [x, residual, norm_weight, weight], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_with_a_low_rank_update(dtype):
    inputs = [*draw_inputs(dtype=torch.float64), *draw_low_rank(48)]
    check(with_low_rank(layer_norm_linear), with_low_rank(layer_norm_linear_reference), inputs, dtype)


@pytest.mark.parametrize("rows", [6, SMALL_M_ROWS + 1])
@pytest.mark.parametrize(
    "trained", [("a", "b"), ("a",), ("x", "a", "b"), ("norm_bias", "b"), ("norm_weight", "weight"), ("weight",)]
)
@pytest.mark.parametrize("residual", [True, False])
def test_any_choice_of_inputs_is_trained(trained, residual, rows):
    names, stream = [*NAMES, "a", "b"], [draw(rows, 48, dtype=torch.float32) for _ in range(2)]
    inputs = [stream[0], stream[1] if residual else None, *draw_inputs()[2:], *draw_low_rank(48, dtype=torch.float32)]
    leaves = [x.requires_grad_() for name, x in zip(names, inputs, strict=True) if name in trained]
    functions = with_low_rank(layer_norm_linear_reference), with_low_rank(layer_norm_linear)
    expected, got = (torch.autograd.grad(loss(*f(*inputs)), leaves) for f in functions)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4 * rows)  # sums over rows of fp32 values near 1
    loss(*with_low_rank(layer_norm_linear)(*inputs)).backward()
    assert [x is not None and x.grad is not None for x in inputs] == [name in trained for name in names]


@pytest.mark.parametrize("residual", [True, False])
def test_only_hidden_mean_and_rstd_are_saved_for_backward(residual):
    inputs = [x if x is None else x.requires_grad_() for x in draw_inputs(residual)]
    hidden, statistics = 6 * 48 * 4, 2 * 6 * 4
    assert saved_bytes(lambda *a: layer_norm_linear(*a, 1e-6), *inputs) == hidden + statistics
    low_rank, low = draw_low_rank(48, dtype=torch.float32), 6 * 3 * 4 * 4
    inputs += [x.requires_grad_() for x in low_rank]
    assert saved_bytes(with_low_rank(layer_norm_linear), *inputs) == hidden + statistics + low


def test_the_gradient_of_the_normed_rows_is_freed_before_the_weight_gradient_is_computed(monkeypatch):
    alive = gradients_alive(monkeypatch, module, (2, 3, 48))
    loss(*layer_norm_linear(*(x.requires_grad_() for x in draw_inputs()), 1e-6)).backward()
    assert alive == [False]


def test_a_residual_of_another_shape_raises():
    x, residual, *weights = draw_inputs()
    with pytest.raises(ValueError, match=r"residual has shape \[3, 48\]; needed \[2, 3, 48\]"):
        layer_norm_linear(x, residual[0], *weights)
