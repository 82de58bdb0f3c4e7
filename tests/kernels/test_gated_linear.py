from functools import partial

import pytest
import torch

from ligermodels.kernels.gated_linear import gated_linear, gated_linear_reference
from tests.conftest import DEVICE
from tests.kernels.error_budget import DTYPES, check
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


def test_only_gate_up_is_kept_for_backward():
    gate_up, weight, bias = (x.requires_grad_() for x in draw_inputs())
    assert saved_bytes(partial(gated_linear, activation="silu"), gate_up, weight, bias) == 6 * 96 * 4
