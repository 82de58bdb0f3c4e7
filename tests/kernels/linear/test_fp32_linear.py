import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ligermodels.kernels.linear.fp32_linear import fp32_linear, fp32_linear_reference
from tests.conftest import DEVICE
from tests.kernels.error_budget import DTYPES, FACTOR, check

CUT_OFF = 5.0  # times the error of plain PyTorch: tensor cores cut the sums' last bits off, where fp32 rounds

pytestmark = pytest.mark.usefixtures("kernels", "poisoned")


def draw(rows, inputs, width, dtype=torch.float64):
    return [
        torch.randn(shape, device=DEVICE, dtype=torch.float64).to(dtype) for shape in ((rows, inputs), (width, inputs))
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(40, 33, 6), (70, 256, 128), (1, 64, 1)])
def test_within_the_error_budget(shape, dtype):
    factor = CUT_OFF if DEVICE == "cuda" and dtype != torch.float32 else FACTOR
    check(fp32_linear, fp32_linear_reference, draw(*shape), dtype, factor)


def test_outputs_have_the_precision_of_fp32():
    x, weight = draw(50, 300, 7, torch.bfloat16)
    exact = x.double() @ weight.double().t()
    assert fp32_linear(x, weight).dtype == torch.float32
    torch.testing.assert_close(fp32_linear(x, weight).double(), exact, rtol=1e-5, atol=1e-4)


def test_gradients_do_not_round_that_of_the_outputs():
    """dy is 1 + 2^-12 or -1: rounded to bf16, its sums would be zero."""
    x, weight = (
        torch.ones(shape, device=DEVICE, dtype=torch.bfloat16).requires_grad_() for shape in ((64, 8), (32, 8))
    )
    dy = torch.full((64, 32), 1 + 2.0**-12, device=DEVICE)
    dy[:, 16:] = -1.0
    dx, _ = torch.autograd.grad(fp32_linear(x, weight), (x, weight), dy)
    assert torch.equal(dx, torch.full_like(dx, 16 * 2.0**-12))
    dy = torch.full((64, 32), 1 + 2.0**-12, device=DEVICE)
    dy[32:] = -1.0
    _, dweight = torch.autograd.grad(fp32_linear(x, weight), (x, weight), dy)
    assert torch.equal(dweight, torch.full_like(dweight, 32 * 2.0**-12))


def test_inputs_are_saved_as_they_are():
    x, weight = (a.requires_grad_() for a in draw(10, 16, 4, torch.bfloat16))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda a: saved.append(a.data_ptr()) or a, lambda a: a):
        fp32_linear(x, weight)
    assert saved == [x.data_ptr(), weight.data_ptr()]


def test_flops_are_counted():
    x, weight = (a.requires_grad_() for a in draw(10, 16, 4, torch.bfloat16))
    with FlopCounterMode(display=False) as counter:
        fp32_linear(x, weight).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 10 * 16 * 4
