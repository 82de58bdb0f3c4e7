import pytest
import torch

from ligermodels.kernels.norms.partial_sums import sum_partials
from tests.conftest import DEVICE

pytestmark = pytest.mark.usefixtures("kernels", "poisoned")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("widths", [(70, 33), (1030, 7)])
@pytest.mark.parametrize("programs", [1, 64, 550])
def test_each_weight_gets_the_sum_of_its_columns_rounded_once(programs, widths, dtype):
    partials = torch.randn(programs, sum(widths), device=DEVICE)
    gradients = [torch.empty(width, dtype=dtype, device=DEVICE) for width in widths]
    sum_partials(partials, *gradients)
    exact, sizes = partials.double().sum(0).split(widths), partials.double().abs().sum(0).split(widths)
    for got, expected, size in zip(gradients, exact, sizes, strict=True):
        assert got.dtype == dtype
        assert ((got - expected).abs() <= torch.finfo(dtype).eps / 2 * expected.abs() + 2**-23 * size).all()


def test_a_single_weight_gets_all_columns():
    partials = torch.randn(3, 40, device=DEVICE)
    gradient = torch.empty(40, device=DEVICE)
    sum_partials(partials, gradient)
    torch.testing.assert_close(gradient, partials.sum(0))


def test_no_partials_sum_to_zero():
    gradient = torch.empty(40, device=DEVICE)
    sum_partials(torch.empty(0, 40, device=DEVICE), gradient)
    assert torch.equal(gradient, torch.zeros(40, device=DEVICE))
