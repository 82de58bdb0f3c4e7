import pytest
import torch

from ligermodels.kernels.rms_norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference
from tests.conftest import DEVICE
from tests.kernels.error_budget import DTYPES, check

SHAPES = [(7, 5), (3, 5, 96), (2, 3, 1000), (33, 257), (5, 9000)]
pytestmark = pytest.mark.usefixtures("kernels", "poisoned")


def draw(*shape):
    return torch.randn(shape, dtype=torch.float64, device=DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm_is_within_the_error_budget(shape, offset, dtype):
    inputs = draw(*shape), draw(shape[-1])
    check(lambda *a: rms_norm(*a, 1e-6, offset), lambda *a: rms_norm_reference(*a, 1e-6, offset), inputs, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_add_rms_norm_is_within_the_error_budget(shape, offset, dtype):
    inputs = draw(*shape), draw(*shape), draw(shape[-1])
    check(lambda *a: add_rms_norm(*a, 1e-6, offset), lambda *a: add_rms_norm_reference(*a, 1e-6, offset), inputs, dtype)


def test_non_contiguous_rows():
    x, residual = draw(6, 4, 64).transpose(0, 1)[..., ::2], draw(1, 1, 32).expand(4, 6, 32)
    inputs = x, residual, draw(64)[::2].contiguous()
    check(lambda *a: add_rms_norm(*a, 1e-5), lambda *a: add_rms_norm_reference(*a, 1e-5), inputs, torch.float32)


def test_one_gradient_for_both_outputs_counts_twice():
    x, residual, weight = (torch.randn(s, device=DEVICE, requires_grad=True) for s in [(5, 32), (5, 32), (32,)])
    upstream = torch.randn(5, 32, device=DEVICE)
    expected, got = (
        torch.autograd.grad(f(x, residual, weight, 1e-6), (x, residual, weight), (upstream, upstream))
        for f in (add_rms_norm_reference, add_rms_norm)
    )
    for a, b in zip(expected, got, strict=True):
        torch.testing.assert_close(b, a)


def test_zero_rows_give_zero_weight_gradient():
    x = torch.empty(0, 64, device=DEVICE, requires_grad=True)
    weight = torch.ones(64, device=DEVICE, requires_grad=True)
    y = rms_norm(x, weight, 1e-6)
    y.sum().backward()
    assert y.shape == (0, 64)
    assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_frozen_weight_gets_no_gradient():
    x, weight = torch.randn(4, 32, device=DEVICE, requires_grad=True), torch.ones(32, device=DEVICE)
    (dx,) = torch.autograd.grad(rms_norm(x, weight, 1e-6).sum(), x)
    expected = torch.autograd.grad(rms_norm_reference(x, weight, 1e-6).sum(), x)[0]
    torch.testing.assert_close(dx, expected)


def test_weight_gradient_is_bit_identical_from_run_to_run():
    x = torch.randn(500, 96, device=DEVICE)
    weight = torch.randn(96, device=DEVICE, requires_grad=True)
    first, second = (torch.autograd.grad(rms_norm(x, weight, 1e-6).sum(), weight)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_rows_too_long_are_refused():
    with pytest.raises(ValueError, match="65536"):
        rms_norm(torch.empty(1, 65537, device=DEVICE), torch.empty(65537, device=DEVICE), 1e-6)


def test_opcheck():
    x, residual, weight = (torch.randn(s, device=DEVICE) for s in [(3, 40), (3, 40), (40,)])
    ops, rstd = torch.ops.ligermodels, torch.rand(3, device=DEVICE)
    torch.library.opcheck(ops.rms_norm.default, (x, weight, 1e-6, 1.0))
    torch.library.opcheck(ops.add_rms_norm.default, (x, residual, weight, 1e-6, 0.0))
    for weight_grad, emit in [(True, False), (False, True)]:
        torch.library.opcheck(ops.rms_norm_backward.default, (x, residual, x, rstd, weight, 0.0, weight_grad, emit))


def test_fullgraph_compile_gives_equal_gradients():
    inputs = [torch.randn(s, device=DEVICE, requires_grad=True) for s in [(4, 6, 48), (4, 6, 48), (48,)]]

    def loss(*inputs):
        y, hidden = add_rms_norm(*inputs, 1e-6, 1.0)
        return (rms_norm(y, inputs[2], 1e-6) * hidden).sum()

    backend = "inductor" if DEVICE == "cuda" else "aot_eager"
    compiled = torch.compile(loss, fullgraph=True, backend=backend)
    expected, got = (torch.autograd.grad(f(*inputs), inputs) for f in (loss, compiled))
    for a, b in zip(expected, got, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.gpu
def test_offsets_beyond_two_to_the_31():
    rows, columns = 2**18 + 1, 2**13
    x = torch.zeros(rows, columns, device=DEVICE, dtype=torch.bfloat16)
    x[-1] = torch.randn(columns, device=DEVICE)
    weight = torch.ones(columns, device=DEVICE, dtype=torch.bfloat16)
    y = rms_norm(x, weight, 1e-6)
    assert torch.equal(y[-1], rms_norm(x[-1:].clone(), weight, 1e-6)[0])
