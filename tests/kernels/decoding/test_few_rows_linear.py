import pytest
import torch
import torch.nn.functional as F

from ligermodels.kernels.decoding import few_rows_linear as module
from ligermodels.kernels.decoding.few_rows_linear import few_rows_gated_linear, few_rows_linear, few_rows_norm_linear
from ligermodels.kernels.linear.linear import gated_linear_reference, norm_linear_reference
from tests.conftest import DEVICE
from tests.kernels.error_budget import DTYPES, check

pytestmark = pytest.mark.usefixtures("kernels", "poisoned")
SIZES = [(1, 600, 19), (2, 33, 5), (3, 1024, 8), (8, 64, 9)]  # rows, inputs, outputs


def draw(*shape, scale=1.0):
    return scale * torch.randn(shape, dtype=torch.float64, device=DEVICE)


def without_gradients(function):
    return torch.no_grad()(lambda *inputs: function(*inputs))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "inputs", "outputs"), SIZES)
def test_linear_is_within_the_error_budget(rows, inputs, outputs, dtype):
    tensors = [draw(rows, inputs), draw(outputs, inputs), draw(outputs)]
    check(without_gradients(few_rows_linear), without_gradients(F.linear), tensors, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "inputs", "outputs"), SIZES)
def test_norm_and_linear_are_within_the_error_budget(rows, inputs, outputs, dtype):
    stream, weights = [draw(rows, inputs), draw(rows, inputs)], [draw(inputs), draw(outputs, inputs), draw(outputs)]

    def call(function):
        return without_gradients(lambda *inputs: function(*inputs, eps=1e-3, offset=1.0))

    check(call(few_rows_norm_linear), call(norm_linear_reference), [*stream, *weights], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu"])
def test_activation_and_linear_are_within_the_error_budget(activation, dtype):
    def call(function):
        options = {"gate_multiplier": 0.75, "down_multiplier": -1.25}
        return without_gradients(lambda *inputs: function(*inputs, None, activation, **options))

    tensors = [draw(2, 2 * 600), draw(70, 600)]  # so many outputs that errors average out
    check(call(few_rows_gated_linear), call(gated_linear_reference), tensors, dtype)


def test_a_norm_without_weight_and_without_residual_returns_the_stream_itself():
    x, weight = draw(2, 1, 40).float(), draw(6, 40).float()
    y, hidden = few_rows_norm_linear(x, None, None, weight, eps=1e-5)
    assert hidden is x
    torch.testing.assert_close(y, F.linear(F.rms_norm(x, (40,), eps=1e-5), weight))


def test_a_large_stream_does_not_overflow_in_half_precision():
    """The products are taken before the norm's factor, which would make them small."""
    x, weight = torch.full((1, 512), 6e4, device=DEVICE).half(), torch.ones(3, 512, device=DEVICE).half()
    y, _ = few_rows_norm_linear(x, None, torch.ones(512, device=DEVICE).half(), weight)
    assert torch.equal(y, torch.full_like(y, 512))


def test_an_fp32_stream_stays_fp32_beside_weights_in_half_precision():
    x, residual, weight = draw(1, 32).half(), draw(1, 32).float(), draw(4, 32).half()
    y, hidden = few_rows_norm_linear(x, residual, None, weight)
    assert y.dtype == torch.float16 and torch.equal(hidden, x + residual)
    torch.testing.assert_close(y, F.linear(F.rms_norm(hidden, (32,), eps=1e-6).half(), weight), rtol=4e-3, atol=4e-3)


def test_narrow_weights_are_split_between_more_programs():
    device = torch.device("cpu")  # two multiprocessors: four programs are wanted
    assert module.columns_of_program(1, 4096, device) == 8
    assert module.columns_of_program(1, 17, device) == 4
    assert module.columns_of_program(1, 3, device) == 2
    assert module.columns_of_program(3, 4096, device) == 4


@pytest.mark.parametrize("on_kernels", [True, False])
def test_what_does_not_fit_raises(on_kernels, monkeypatch):
    monkeypatch.setattr("ligermodels.kernels.launch.interpreting", on_kernels)
    x, weight = draw(2, 8).float(), draw(3, 8).float()
    with pytest.raises(ValueError, match="few_rows_linear: 9 rows; at most 8 are supported"):
        few_rows_linear(draw(9, 8).float(), weight)
    with pytest.raises(ValueError, match=r"weight has shape \[3, 8\]; needed \[3, 4\]"):
        few_rows_gated_linear(x, weight)
    with pytest.raises(ValueError, match=r"bias has shape \[2\]; needed \[3\]"):
        few_rows_linear(x, weight, x[:, 0])
    with pytest.raises(ValueError, match=r"norm_weight has shape \[3\]; needed \[8\]"):
        few_rows_norm_linear(x, None, weight[:, 0], weight)
    with pytest.raises(RuntimeError, match=r"few_rows_norm_linear: has no backward; call it under torch.no_grad\(\)"):
        few_rows_norm_linear(x, None, None, weight.requires_grad_())
