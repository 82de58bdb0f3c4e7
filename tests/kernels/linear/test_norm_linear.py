from functools import partial

import pytest
import torch

from ligermodels.kernels.linear import linear as module
from ligermodels.kernels.linear.linear import LowRank, norm_linear, norm_linear_reference
from tests.conftest import DEVICE
from tests.kernels.error_budget import DTYPES, check
from tests.kernels.linear.test_linear import COLUMNS, SCALE, draw_low_rank, gradients_alive, saved_bytes

NAMES = ["x", "residual", "norm_weight", "weight", "bias"]
pytestmark = pytest.mark.usefixtures("kernels", "poisoned")


def draw(*shape, dtype=torch.float64):
    return torch.randn(shape, dtype=dtype, device=DEVICE)


def draw_inputs(residual=True, dtype=torch.float32):
    """x, residual, norm_weight, weight and bias of a layer that maps 48 columns to 20."""
    x, residual = draw(2, 3, 48, dtype=dtype), draw(2, 3, 48, dtype=dtype) if residual else None
    return [x, residual, draw(48, dtype=dtype), draw(20, 48, dtype=dtype) / 7, draw(20, dtype=dtype)]


def with_low_rank(function):
    """`function` with the update's A and B as its last two arguments."""
    return lambda *inputs: function(*inputs[:-2], 1e-6, 1.0, LowRank(*inputs[-2:], COLUMNS, SCALE))


def loss(y, hidden):
    """Uses both outputs, so that hidden also gets an upstream gradient."""
    return y.sin().sum() + (hidden * hidden.cos()).sum()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize(("shape", "width"), [((33, 25), 7), ((2, 3, 96), 20)])
def test_norm_linear_is_within_the_error_budget(shape, width, offset, dtype):
    norm_weight, weight, bias = draw(shape[-1]), draw(width, shape[-1]), draw(width)
    settings = {"eps": 1e-6, "offset": offset}
    ours, reference = partial(norm_linear, **settings), partial(norm_linear_reference, **settings)
    check(ours, reference, [draw(*shape), draw(*shape), norm_weight, weight, bias], dtype)
    without_residual = [draw(*shape), norm_weight, weight, bias]
    check(lambda x, *a: ours(x, None, *a), lambda x, *a: reference(x, None, *a), without_residual, dtype)


def test_without_bias():
    inputs = draw_inputs(dtype=torch.float64)[:4]
    check(
        lambda *a: norm_linear(*a, None, 1e-5), lambda *a: norm_linear_reference(*a, None, 1e-5), inputs, torch.float32
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_with_a_low_rank_update(dtype):
    inputs = [*draw_inputs(dtype=torch.float64), *draw_low_rank(48)]
    check(with_low_rank(norm_linear), with_low_rank(norm_linear_reference), inputs, dtype)


@pytest.mark.parametrize(
    "trained", [("a", "b"), ("a",), ("b",), ("x", "a", "b"), ("norm_weight", "b"), ("weight", "b")]
)
@pytest.mark.parametrize("residual", [True, False])
def test_a_low_rank_update_is_trained_for_any_choice_of_frozen_inputs(trained, residual):
    names = [*NAMES, "a", "b"]
    inputs = [*draw_inputs(residual), *draw_low_rank(48, dtype=torch.float32)]
    leaves = [x.requires_grad_() for name, x in zip(names, inputs, strict=True) if name in trained]
    functions = with_low_rank(norm_linear_reference), with_low_rank(norm_linear)
    expected, got = (torch.autograd.grad(loss(*f(*inputs)), leaves) for f in functions)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)  # fp32 values of magnitude 1
    loss(*with_low_rank(norm_linear)(*inputs)).backward()
    assert [x is not None and x.grad is not None for x in inputs] == [name in trained for name in names]


@pytest.mark.parametrize("residual", [True, False])
def test_only_hidden_and_rstd_are_saved_for_backward(residual):
    inputs = [x if x is None else x.requires_grad_() for x in draw_inputs(residual)]
    hidden, rstd = 6 * 48 * 4, 6 * 4
    assert saved_bytes(lambda *a: norm_linear(*a, 1e-6), *inputs) == hidden + rstd
    low_rank, low = draw_low_rank(48, dtype=torch.float32), 6 * 3 * 4 * 4
    inputs += [x.requires_grad_() for x in low_rank]
    assert saved_bytes(with_low_rank(norm_linear), *inputs) == hidden + rstd + low


def test_the_gradient_of_the_normed_rows_is_freed_before_the_weight_gradient_is_computed(monkeypatch):
    alive = gradients_alive(monkeypatch, module, (2, 3, 48))
    loss(*norm_linear(*(x.requires_grad_() for x in draw_inputs()), 1e-6)).backward()
    assert alive == [False]


def test_without_residual_hidden_shares_the_memory_of_x():
    inputs = draw_inputs(residual=False)
    x = inputs[0].requires_grad_()
    _, hidden = norm_linear(*inputs, 1e-6)
    assert hidden.data_ptr() == x.data_ptr()


def test_an_unused_output_has_zero_upstream_gradient():
    inputs = [x.requires_grad_() for x in draw_inputs()]
    for index in (0, 1):
        expected, got = (
            torch.autograd.grad(f(*inputs, 1e-6)[index].sin().sum(), inputs[:2])
            for f in (norm_linear_reference, norm_linear)
        )
        torch.testing.assert_close(got, expected)
