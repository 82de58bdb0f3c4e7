"""Weights in NF4 with parts that are not quantised: each part as if it were alone."""

import pytest
import torch

from ligermodels.kernels.quant.nf4 import DensePart, Nf4, PartlyNf4, nf4_weight
from ligermodels.kernels.quant.quantised_weight import QuantisedWeight, frozen_linear
from tests.conftest import DEVICE

COLUMNS = 128
HALF = torch.float16
LAYOUT = PartlyNf4(
    (Nf4((3, COLUMNS), (3,), HALF), DensePart((5, COLUMNS), (5,), HALF, torch.float32), Nf4((4, COLUMNS), (4,), HALF))
)


def weight_and_value():
    """Its bytes, and the three parts as they should be."""
    first, second, third = torch.randn(12, COLUMNS, device=DEVICE).split(LAYOUT.parts)
    data = LAYOUT.quantize(torch.cat([first, second, third]))
    return QuantisedWeight(data, LAYOUT), (nf4_weight(first), second, nf4_weight(third))


@pytest.mark.usefixtures("kernels", "poisoned")
def test_a_part_has_the_values_that_it_has_alone():
    quantised, (first, second, third) = weight_and_value()
    dense = torch.cat([first.dequantize(), second, third.dequantize()]).half()
    assert quantised.dtype == HALF and torch.equal(quantised.dequantize(), dense)
    x = torch.randn(2, COLUMNS, device=DEVICE, dtype=HALF, requires_grad=True)
    y = frozen_linear(x, quantised)
    y.sum().backward()
    torch.testing.assert_close(y, x @ dense.T, rtol=2**-10, atol=1e-2)
    torch.testing.assert_close(x.grad[0], dense.float().sum(0).half(), rtol=2**-9, atol=1e-2)


def test_bytes_are_those_of_the_parts_and_keep_the_stored_dtype():
    quantised, (_, second, third) = weight_and_value()
    unpacked = quantised.unpack()
    assert torch.equal(unpacked[1]["values"], second) and unpacked[1].keys() == {"values"}
    assert torch.equal(unpacked[2]["codes"], third.unpack()[0]["codes"])
    assert torch.equal(quantised.pack(unpacked), quantised.data)
    assert quantised.nbytes == len(quantised.data) == sum(layout.nbytes for layout in LAYOUT.layouts)
    assert LAYOUT.with_dtype(torch.bfloat16).dequantize(quantised.data).dtype == torch.bfloat16
    assert torch.equal(LAYOUT.with_dtype(torch.float32).dequantize(quantised.data)[3:8], second)
