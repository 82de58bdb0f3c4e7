import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ligermodels
from ligermodels.layers.fused import linear
from ligermodels.layers.lora import LoRALinear
from tests.cases import LLAMA
from tests.conftest import DEVICE
from tests.layers.adapters import ALPHA, RANK, adapt, lora


def base(bias=True, dtype=torch.float64):
    return nn.Linear(12, 20, bias, device=DEVICE, dtype=dtype).requires_grad_(False)


def test_the_output_is_that_of_the_merged_weight():
    layer = lora(base(), columns=((0, 8), (14, 20)))
    delta = torch.zeros(20, 12, dtype=torch.float64, device=DEVICE)
    delta[:8] = layer.lora_B[:8] @ layer.lora_A[:4]
    delta[14:] = layer.lora_B[8:] @ layer.lora_A[4:]
    x = torch.randn(2, 3, 12, dtype=torch.float64, device=DEVICE)
    merged = F.linear(x, layer.base_layer.weight + ALPHA / RANK * delta, layer.base_layer.bias)
    torch.testing.assert_close(layer(x), merged)


def test_a_new_adapter_changes_nothing_and_learns():
    layer = LoRALinear(base(), RANK, ALPHA)
    x = torch.randn(5, 12, dtype=torch.float64, device=DEVICE)
    y = layer(x)
    assert torch.equal(y, layer.base_layer(x))
    y.sin().sum().backward()
    assert layer.lora_B.grad.abs().min() > 0 and layer.base_layer.weight.grad is None
    bound = 1 / math.sqrt(12)  # of a Linear's own weight
    assert 0.8 * bound < layer.lora_A.abs().max() <= bound


def test_dropout_falls_on_the_input_of_the_update_alone():
    layer = lora(base(), dropout=0.5)
    x = torch.randn(5, 12, dtype=torch.float64, device=DEVICE)
    torch.manual_seed(1)
    dropped = F.dropout(x, 0.5)
    torch.manual_seed(1)
    expected = layer.base_layer(x) + ALPHA / RANK * (dropped @ layer.lora_A.T) @ layer.lora_B.T
    torch.testing.assert_close(linear(layer, x), expected)
    layer.eval()
    merged = layer.base_layer(x) + ALPHA / RANK * (x @ layer.lora_A.T) @ layer.lora_B.T
    torch.testing.assert_close(linear(layer, x), merged)


@pytest.mark.usefixtures("kernels")
def test_adapters_may_be_wider_than_the_base():
    model = adapt(ligermodels.create(LLAMA, dtype=torch.float16, device=DEVICE), dtype=torch.float32)
    ids = torch.randint(3, 99, (2, 16), device=DEVICE)
    model(ids, ids).loss.backward()
    trained = {name: p for name, p in model.named_parameters() if p.grad is not None}
    assert len(trained) == 3 * 4 * 2
    assert all("lora_" in name and p.grad.dtype == torch.float32 and p.grad.any() for name, p in trained.items())
