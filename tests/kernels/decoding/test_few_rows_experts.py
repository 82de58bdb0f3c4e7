import pytest
import torch

from ligermodels.kernels.decoding.few_rows_experts import few_rows_experts
from ligermodels.kernels.moe.experts import experts_reference
from ligermodels.kernels.quant.fp8 import Float8
from ligermodels.kernels.quant.mxfp4 import Mxfp4Layout
from ligermodels.kernels.quant.nf4 import Nf4
from ligermodels.kernels.quant.quantised_weight import QuantisedWeight
from tests.conftest import DEVICE
from tests.kernels.error_budget import DTYPES, check

pytestmark = pytest.mark.usefixtures("kernels", "poisoned")


def draw(*shape, scale=1.0):
    return scale * torch.randn(shape, dtype=torch.float64, device=DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "hidden", "inner", "num_experts", "k"), [(1, 600, 11, 6, 3), (3, 21, 530, 4, 2), (2, 16, 8, 2, 1)]
)
def test_experts_of_few_tokens_are_within_the_error_budget(tokens, hidden, inner, num_experts, k, dtype):
    index = torch.rand(tokens, num_experts, device=DEVICE).topk(k).indices
    weight = torch.rand(tokens, k, device=DEVICE)

    def call(function):
        with_routing = lambda x, gate_up, down: function(x, index, weight, gate_up, down, "gelu_tanh")  # noqa: E731
        return torch.no_grad()(with_routing)

    gate_up, down = draw(num_experts, 2 * inner, hidden, scale=0.2), draw(num_experts, hidden, inner, scale=0.2)
    check(call(few_rows_experts), call(experts_reference), [draw(tokens, hidden), gate_up, down], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_biases_and_the_clamped_activation_are_within_the_error_budget(dtype):
    index, weight = torch.tensor([[2, 0], [1, 2]], device=DEVICE), torch.rand(2, 2, device=DEVICE)

    def call(function):
        def with_routing(x, gate_up, down, *biases):
            options = dict(zip(("gate_up_bias", "down_bias"), biases, strict=True))
            return function(x, index, weight, gate_up, down, "clamped_silu", **options)

        return torch.no_grad()(with_routing)

    inputs = [draw(2, 600), draw(3, 22, 600, scale=0.2), draw(3, 600, 11, scale=0.2), draw(3, 22), draw(3, 600)]
    check(call(few_rows_experts), call(experts_reference), inputs, dtype)


def test_gradients_and_shapes_that_do_not_fit_are_refused():
    x, index, weight = draw(2, 8).float(), torch.zeros(2, 1, dtype=torch.int64, device=DEVICE), draw(2, 1).float()
    gate_up, down = draw(3, 4, 8).float(), draw(3, 8, 2).float()
    with pytest.raises(ValueError, match="down has shape"):
        few_rows_experts(x, index, weight, gate_up, down.mT)
    with pytest.raises(RuntimeError, match=r"few_rows_experts: has no backward; call it under torch.no_grad\(\)"):
        few_rows_experts(x, index, weight, gate_up.requires_grad_(), down)


@pytest.mark.parametrize("scheme", ["nf4", "fp8", "mxfp4"])
def test_of_quantised_weights_the_chosen_experts_are_dequantised(scheme):
    """Of experts of several parts, whose scales have groups of their own; one is chosen twice."""
    experts, hidden, inner, x = 5, 64, 64, torch.randn(2, 64, device=DEVICE)
    weights, stacked = [], ((experts, 2 * inner, hidden), (experts, hidden, inner))
    for shape, parts in zip(stacked, ((inner,) * 10, (experts * hidden,)), strict=True):
        layout = {"nf4": Nf4, "fp8": Float8, "mxfp4": Mxfp4Layout}[scheme](shape, parts, torch.float32)
        if scheme == "mxfp4":
            data = torch.randint(256, (layout.nbytes,), dtype=torch.uint8, device=DEVICE)
            layout.view(data)[0].copy_(torch.randint(120, 124, layout.view(data)[0].shape))
        else:
            data = layout.quantize(torch.randn(shape, device=DEVICE) * torch.rand(experts, 1, 1, device=DEVICE))
        weights.append(QuantisedWeight(data, layout))
    index = torch.tensor([[4, 1], [1, 2]], device=DEVICE)
    weight = torch.rand(2, 2, device=DEVICE)
    options = {"gate_up_bias": torch.randn(experts, 2 * inner, device=DEVICE)}
    options["down_bias"] = torch.randn(experts, hidden, device=DEVICE)
    for quantised in weights:
        chosen = quantised.layout.dequantize_experts(quantised.data, index.flatten())
        assert torch.equal(chosen, quantised.dequantize()[index.flatten()])
    expected = few_rows_experts(x, index, weight, *(w.dequantize() for w in weights), **options)
    assert torch.equal(few_rows_experts(x, index, weight, *weights, **options), expected)
