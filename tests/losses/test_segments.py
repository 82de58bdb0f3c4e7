"""Sums and means over sequences: values, gradients, empty sequences, padding, precision."""

import pytest
import torch

from ligermodels.losses import segment_means, segment_sums


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_sums_and_means_of_sequences(dtype):
    values = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, float("nan")])
    offsets = torch.tensor([0, 3, 3, 5], dtype=dtype)
    assert segment_sums(values, offsets).tolist() == [6, 0, 9]
    assert segment_means(values, offsets).tolist() == [2, 0, 4.5]


def test_gradients_reach_the_values_of_sequences_alone():
    values = torch.randn(6, dtype=torch.float64, requires_grad=True)
    offsets = torch.tensor([0, 3, 3, 5], dtype=torch.int32)
    assert torch.autograd.gradcheck(lambda v: segment_sums(v, offsets).square(), values)
    assert torch.autograd.gradcheck(lambda v: segment_means(v, offsets).square(), values)
    segment_means(values, offsets).sum().backward()
    assert values.grad.tolist() == pytest.approx([1 / 3] * 3 + [0.5] * 2 + [0])


def test_no_sequences():
    values, offsets = torch.zeros(0, requires_grad=True), torch.zeros(1, dtype=torch.int32)
    segment_sums(values, offsets).sum().backward()
    assert segment_means(values, offsets).shape == values.grad.shape == (0,)


def test_a_small_difference_of_large_sums_is_exact():
    values = torch.full((8192,), -1.1)
    changed = values.clone()
    changed[77] += 2**-20
    difference = segment_sums(changed, torch.tensor([0, 8192])) - segment_sums(values, torch.tensor([0, 8192]))
    assert difference.item() == pytest.approx((changed[77].double() - values[77].double()).item(), rel=1e-3)
