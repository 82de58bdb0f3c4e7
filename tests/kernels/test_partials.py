import pytest
import torch

from ligermodels.kernels.partials import sum_partials
from tests.conftest import DEVICE

pytestmark = pytest.mark.usefixtures("kernels", "poisoned")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("programs", [1, 64, 150])
def test_each_weight_gets_the_sum_of_its_columns_rounded_once(programs, dtype):
    partials = torch.randn(programs, 103, device=DEVICE)
    weights = torch.empty(70, dtype=dtype, device=DEVICE), torch.empty(33, dtype=dtype, device=DEVICE)
    gradients = sum_partials(partials, *weights)
    for got, expected in zip(gradients, partials.double().sum(0).split((70, 33)), strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=torch.finfo(dtype).eps)


def test_one_weight_takes_all_columns():
    partials = torch.randn(3, 40, device=DEVICE)
    (gradient,) = sum_partials(partials, torch.empty(40, device=DEVICE))
    torch.testing.assert_close(gradient, partials.sum(0))


def test_no_partials_sum_to_zero():
    (gradient,) = sum_partials(torch.empty(0, 40, device=DEVICE), torch.empty(40, device=DEVICE))
    assert torch.equal(gradient, torch.zeros(40, device=DEVICE))
