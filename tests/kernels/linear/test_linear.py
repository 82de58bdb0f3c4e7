import weakref

import pytest
import torch

from ligermodels.kernels.linear.linear import (
    LowRank,
    bias_gradient,
    input_gradient,
    low_rank_linear,
    low_rank_linear_reference,
    weight_gradient,
)
from tests.conftest import DEVICE
from tests.kernels.error_budget import DTYPES, check

COLUMNS, SCALE = ((0, 9), (9, 11), (14, 20)), 0.3  # of 20 columns: three projections and a gap before the last
NAMES = ["x", "weight", "bias", "a", "b"]


def saved_bytes(function, *inputs) -> int:
    """Bytes that `function` saves for backward, counting each storage once, without parameters (inputs of at most 2
    dimensions)."""
    parameters = {x.untyped_storage().data_ptr() for x in inputs if x is not None and x.ndim <= 2}
    saved = {}

    def pack(x):
        storage = x.untyped_storage()
        saved[storage.data_ptr()] = (storage.nbytes(), x)  # keeps x alive, so that no address is reused
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        function(*inputs)
    return sum(size for address, (size, _) in saved.items() if address not in parameters)


def alive_at(monkeypatch, module, name, references):
    """A list. Every call of `module.name` appends, for each weak reference, whether its tensor is still alive."""
    alive, function = [], getattr(module, name)

    def call(*args):
        alive.extend(reference() is not None for reference in references)
        return function(*args)

    monkeypatch.setattr(module, name, call)
    return alive


def gradients_alive(monkeypatch, module, shape):
    """A list. Every call of `module.weight_gradient` appends, for each input gradient computed before, whether it is
    still alive. shape: expected of these input gradients."""
    references, input_gradient = [], module.input_gradient

    def record(*args):
        gradient = input_gradient(*args)
        assert gradient.shape == shape
        references.append(weakref.ref(gradient))
        return gradient

    monkeypatch.setattr(module, "input_gradient", record)
    return alive_at(monkeypatch, module, "weight_gradient", references)


def draw_low_rank(width, rank=4, dtype=torch.float64):
    """A and B of an update of COLUMNS."""
    a = torch.randn(len(COLUMNS) * rank, width, dtype=dtype, device=DEVICE) / width**0.5
    return a, torch.randn(17, rank, dtype=dtype, device=DEVICE)


def draw_inputs(dtype=torch.float64):
    x, weight, bias = (torch.randn(s, dtype=dtype, device=DEVICE) for s in [(2, 3, 48), (20, 48), (20,)])
    return [x, weight / 7, bias, *draw_low_rank(48, dtype=dtype)]


def ours(x, weight, bias, a, b):
    return low_rank_linear(x, weight, bias, LowRank(a, b, COLUMNS, SCALE))


def reference(x, weight, bias, a, b):
    return low_rank_linear_reference(x, weight, bias, LowRank(a, b, COLUMNS, SCALE))


def test_gradients_agree_with_torch_linear():
    x, weight, bias = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in [(2, 3, 5), (4, 5), (4,)])
    dy = torch.randn(3, 2, 4, dtype=torch.float64).transpose(0, 1)
    expected = torch.autograd.grad(torch.nn.functional.linear(x, weight, bias), (x, weight, bias), dy)
    got = input_gradient(dy, weight, None, None, None), weight_gradient(dy, x), bias_gradient(dy)
    torch.testing.assert_close(got, expected)


def test_the_reference_adds_to_each_projection_its_own_update():
    x, weight, bias, a, b = draw_inputs()
    expected = x @ weight.T + bias
    for index, (start, stop, rows) in enumerate([(0, 9, b[:9]), (9, 11, b[9:11]), (14, 20, b[11:])]):
        expected[..., start:stop] += SCALE * (x @ a[4 * index : 4 * index + 4].T) @ rows.T
    torch.testing.assert_close(reference(x, weight, bias, a, b), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("kernels", "poisoned")
def test_low_rank_linear_is_within_the_error_budget(dtype):
    check(ours, reference, draw_inputs(), dtype)
    x, weight, _, a, b = draw_inputs()
    without_bias = [x.transpose(0, 1), weight, a, b]
    check(lambda x, w, *ab: ours(x, w, None, *ab), lambda x, w, *ab: reference(x, w, None, *ab), without_bias, dtype)


@pytest.mark.parametrize("trained", [("a", "b"), ("a",), ("b",), ("x",), ("weight", "a"), ("x", "bias", "b")])
@pytest.mark.usefixtures("kernels", "poisoned")
def test_frozen_inputs_get_no_gradient_and_change_no_other_gradient(trained):
    inputs = draw_inputs()
    leaves = [x.requires_grad_() for name, x in zip(NAMES, inputs, strict=True) if name in trained]
    expected, got = (torch.autograd.grad(f(*inputs).sin().sum(), leaves) for f in (reference, ours))
    torch.testing.assert_close(got, expected)
    ours(*inputs).sum().backward()
    assert [x.grad is not None for x in inputs] == [name in trained for name in NAMES]


@pytest.mark.usefixtures("kernels")
def test_only_the_input_and_its_product_with_a_are_saved_for_backward():
    inputs = [x.float().requires_grad_() for x in draw_inputs()]
    assert saved_bytes(ours, *inputs) == 6 * (48 + 3 * 4) * 4
