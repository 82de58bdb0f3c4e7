import pytest
import torch

from ligermodels.kernels.attention.sigmoid_gate import sigmoid_gate, sigmoid_gate_reference
from tests.conftest import DEVICE
from tests.kernels.error_budget import DTYPES, check

pytestmark = pytest.mark.usefixtures("kernels", "poisoned")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 40, 3, 12), (1, 7, 5, 256), (3, 1, 1, 2050)])
def test_within_the_error_budget(shape, dtype):
    x, z = (torch.randn(shape, device=DEVICE, dtype=torch.float64) for _ in range(2))
    check(sigmoid_gate, sigmoid_gate_reference, [x, 8 * z], dtype)


def test_any_layout_of_heads_gives_equal_bits():
    x = torch.randn(2, 3, 5, 8, device=DEVICE).transpose(1, 2)  # as attention returns it
    z = torch.randn(2, 5, 3, 16, device=DEVICE)[..., 8:]
    leaves = [a.detach().requires_grad_() for a in (x, z, x.contiguous(), z.contiguous())]
    dy = torch.randn(5, 2, 3, 8, device=DEVICE).transpose(0, 1)
    y, expected = sigmoid_gate(*leaves[:2]), sigmoid_gate(*leaves[2:])
    assert y.is_contiguous() and torch.equal(y, expected)
    for a, b in zip(torch.autograd.grad(y, leaves[:2], dy), torch.autograd.grad(expected, leaves[2:], dy), strict=True):
        assert torch.equal(a, b)


def test_gates_that_are_nearly_open_or_shut_keep_their_gradients():
    """The exponential of z is as exact as z: |z| times the error of one rounding."""
    rtol = 80 * torch.finfo(torch.float32).eps
    z = torch.tensor([60.0, 30.0, -30.0, -60.0, -80.0], device=DEVICE).view(1, 1, 1, -1).requires_grad_()
    y = sigmoid_gate(torch.ones_like(z), z)
    (dz,) = torch.autograd.grad(y.sum(), z)
    s = z.detach().double().sigmoid()
    torch.testing.assert_close(y.double(), s, rtol=rtol, atol=0)
    torch.testing.assert_close(dz.double(), (-z.detach().double()).sigmoid() * s, rtol=rtol, atol=0)


def test_other_shapes_are_refused():
    x = torch.zeros(1, 2, 3, 8, device=DEVICE)
    with pytest.raises(ValueError, match=r"z has shape \[1, 2, 3, 1\]; needed \[1, 2, 3, 8\]"):
        sigmoid_gate(x, x[..., :1])
    with pytest.raises(ValueError, match=r"x has shape \[2, 3, 8\]; needed \[B, T, H, D\]"):
        sigmoid_gate(x[0], x[0])
