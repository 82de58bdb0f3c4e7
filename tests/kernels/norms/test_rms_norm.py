from itertools import cycle

import pytest
import torch

from ligermodels.kernels.norms import rms_norm as module
from ligermodels.kernels.norms.norm_tiles import SMALL_M_ROWS
from ligermodels.kernels.norms.rms_norm import (
    CHUNKED_WIDTHS,
    add_rms_norm,
    add_rms_norm_reference,
    rms_norm,
    rms_norm_reference,
)
from tests.conftest import DEVICE
from tests.kernels.error_budget import DTYPES, check

SHAPES = [(7, 5), (2, 3, 1000), (3, 33, 96), (18, 4100), (300, 130), (197, 257)]  # the last two take several programs
pytestmark = pytest.mark.usefixtures("kernels", "poisoned")


def draw(*shape):
    return torch.randn(shape, dtype=torch.float64, device=DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "offset"), list(zip(SHAPES, cycle([0.0, 1.0]), strict=False)))
def test_rms_norm_is_within_the_error_budget(shape, offset, dtype):
    inputs = draw(*shape), draw(shape[-1])
    check(lambda *a: rms_norm(*a, 1e-6, offset), lambda *a: rms_norm_reference(*a, 1e-6, offset), inputs, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "offset"), list(zip(SHAPES, cycle([0.0, 1.0]), strict=False)))
def test_add_rms_norm_is_within_the_error_budget(shape, offset, dtype):
    inputs = draw(*shape), draw(*shape), draw(shape[-1])
    check(lambda *a: add_rms_norm(*a, 1e-6, offset), lambda *a: add_rms_norm_reference(*a, 1e-6, offset), inputs, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(7, 5), (2, 3, 1000), (300, 130)])  # the last takes several programs
def test_norms_without_a_weight_are_within_the_error_budget(shape, dtype):
    check(rms_norm, rms_norm_reference, [draw(*shape)], dtype)
    check(add_rms_norm, add_rms_norm_reference, [draw(*shape), draw(*shape)], dtype)


def test_without_a_weight_nothing_scales_and_an_offset_is_refused():
    x = torch.randn(3, 40, device=DEVICE)
    for function in (rms_norm, rms_norm_reference):
        torch.testing.assert_close(function(x), torch.nn.functional.rms_norm(x, (40,), eps=1e-6))
    with pytest.raises(ValueError, match="rms_norm: offset is 1, but there is no weight"):
        rms_norm(x, offset=1.0)
    with pytest.raises(ValueError, match="add_rms_norm: offset is 1, but there is no weight"):
        add_rms_norm(x, x, offset=1.0)


def test_a_sum_whose_norm_is_not_used_passes_its_gradient_on():
    x, residual, weight = (torch.randn(s, device=DEVICE, requires_grad=True) for s in [(5, 32), (5, 32), (32,)])
    upstream = torch.randn(5, 32, device=DEVICE)
    dx, dresidual, dweight = torch.autograd.grad(add_rms_norm(x, residual, weight)[1], (x, residual, weight), upstream)
    assert torch.equal(dx, upstream) and torch.equal(dresidual, upstream) and not dweight.any()


def test_wide_rows_on_the_persistent_path_are_within_the_error_budget(monkeypatch):
    monkeypatch.setattr(module, "SMALL_M_ROWS", 2)
    inputs = draw(7, 2050), draw(7, 2050), draw(2050)
    check(lambda *a: add_rms_norm(*a, 1e-6), lambda *a: add_rms_norm_reference(*a, 1e-6), inputs, DTYPES[-1])


@pytest.mark.parametrize("trained", range(3))
def test_the_persistent_path_gives_the_gradient_of_one_trained_input(trained):
    inputs = [torch.randn(s, device=DEVICE) for s in [(SMALL_M_ROWS + 1, 32), (SMALL_M_ROWS + 1, 32), (32,)]]
    upstream = torch.randn(2, SMALL_M_ROWS + 1, 32, device=DEVICE)
    leaf = inputs[trained].requires_grad_()
    expected, got = (
        torch.autograd.grad((torch.stack(f(*inputs, 1e-6)) * upstream).sum(), leaf)
        for f in (add_rms_norm_reference, add_rms_norm)
    )
    torch.testing.assert_close(got, expected)


def test_one_tensor_as_upstream_gradient_of_both_outputs_counts_twice():
    x, residual, weight = (torch.randn(s, device=DEVICE, requires_grad=True) for s in [(5, 32), (5, 32), (32,)])
    upstream = torch.randn(5, 32, device=DEVICE)
    expected, got = (
        torch.autograd.grad(f(x, residual, weight, 1e-6), (x, residual, weight), (upstream, upstream))
        for f in (add_rms_norm_reference, add_rms_norm)
    )
    for a, b in zip(expected, got, strict=True):
        torch.testing.assert_close(b, a)


def test_rows_longer_than_the_kernels_support_raise():
    with pytest.raises(ValueError, match="at most 65536"):
        rms_norm(torch.empty(1, 65537, device=DEVICE), torch.empty(65537, device=DEVICE), 1e-6)


def test_shapes_that_disagree_raise():
    x, weight = torch.ones(3, 8, device=DEVICE), torch.ones(8, device=DEVICE)
    with pytest.raises(ValueError, match=r"weight has shape \[4\]; needed \[8\]"):
        rms_norm(x, weight[:4], 1e-6)
    with pytest.raises(ValueError, match=r"residual has shape \[1, 8\]; needed \[3, 8\]"):
        add_rms_norm(x, x[:1], weight, 1e-6)


@torch.no_grad()
def test_rows_read_in_chunks_equal_the_reference():
    for columns in CHUNKED_WIDTHS:
        x, weight = torch.randn(3, columns, device=DEVICE), torch.randn(columns, device=DEVICE)
        torch.testing.assert_close(rms_norm(x, weight, 1e-6, 1.0), rms_norm_reference(x, weight, 1e-6, 1.0))
        torch.testing.assert_close(rms_norm(x), rms_norm_reference(x))


@pytest.mark.gpu
def test_a_kernel_launched_by_pdl_waits_for_the_kernels_ahead_of_it():
    """Each norm reads the output of the norm before it, and all are launched before any input has been written."""
    x, weight, upstream = (torch.randn(s, device=DEVICE) for s in [(4096, 2048), (2048,), (4096, 2048)])

    def chain(norm, x):
        hidden = x
        for _ in range(4):
            hidden = norm(hidden, weight, 1e-6) + hidden
        return norm(norm(hidden, weight, 1e-6), weight, 1e-6)

    late = torch.zeros_like(x).requires_grad_()
    torch.cuda._sleep(50_000_000)
    late.data.copy_(x)
    got = chain(rms_norm, late)
    (gradient,) = torch.autograd.grad(got, late, upstream)
    x.requires_grad_()
    expected = chain(rms_norm_reference, x)
    for a, b in [(got, expected), (gradient, torch.autograd.grad(expected, x, upstream)[0])]:
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
