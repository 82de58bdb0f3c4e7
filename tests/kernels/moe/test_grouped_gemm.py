import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import ligermodels.kernels.moe.grouped_gemm as module
from ligermodels.kernels.moe.grouped_gemm import (
    grouped_gemm,
    grouped_gemm_reference,
    grouped_input_gradient,
    grouped_weight_gradient,
)
from tests.conftest import DEVICE, TENS_OF_GIB
from tests.kernels.error_budget import DTYPES, check, relative_error

# Rows of each group, N, K: empty groups at both ends and inside, several tiles each way, more groups than rows.
CASES = {
    "empty groups": ([0, 5, 0, 0, 9, 1, 0], 33, 20),
    "several tiles": ([150, 3], 140, 70),
    "not a power of two": ([1, 0] * 30, 9, 24),
    "one group": ([37], 16, 16),
}
pytestmark = pytest.mark.usefixtures("kernels", "poisoned")


class GroupedGemm(torch.autograd.Function):
    """The three functions under test as one differentiable function."""

    @staticmethod
    def forward(ctx, x, weight, offsets):
        ctx.save_for_backward(x, weight, offsets)
        return grouped_gemm(x, weight, offsets)

    @staticmethod
    def backward(ctx, dy):
        x, weight, offsets = ctx.saved_tensors
        return grouped_input_gradient(dy, weight, offsets), grouped_weight_gradient(dy, x, offsets), None


def ends(counts):
    return torch.tensor(counts, device=DEVICE).cumsum(0).int()


def draw(counts, width, depth, dtype=torch.float64):
    """x, weight and offsets of groups with these row counts."""
    x, weight = (
        torch.randn(shape, dtype=dtype, device=DEVICE) for shape in [(sum(counts), depth), (len(counts), width, depth)]
    )
    return x, weight, ends(counts)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_grouped_gemm_and_its_gradients_are_within_the_error_budget(name, dtype):
    check(GroupedGemm.apply, grouped_gemm_reference, draw(*CASES[name]), dtype)


@pytest.mark.parametrize(("width", "depth"), [(24, 1030), (1030, 24)])
def test_long_sums_are_within_the_error_budget(width, depth):
    check(GroupedGemm.apply, grouped_gemm_reference, draw([7, 0, 9], width, depth), torch.float32)


def test_the_reference_gradients_are_gradients_of_the_reference_product(monkeypatch):
    monkeypatch.setattr(module, "runs_kernels", lambda x: False)
    check(GroupedGemm.apply, grouped_gemm_reference, draw(*CASES["empty groups"]), torch.float32)


def test_non_contiguous_operands():
    x, weight, offsets = draw([4, 0, 7], 24, 40)
    inputs = x.t().contiguous().t(), weight.mT.contiguous().mT, offsets
    check(GroupedGemm.apply, grouped_gemm_reference, inputs, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_group_without_rows_gets_a_zero_weight_gradient(dtype):
    x, _, offsets = draw([0, 8, 0], 16, 32, dtype)
    dweight = grouped_weight_gradient(torch.randn(8, 16, device=DEVICE).to(dtype), x, offsets)
    assert torch.equal(dweight[[0, 2]], torch.zeros_like(dweight[[0, 2]]))
    assert dweight[1].abs().min() > 0


def test_zero_rows():
    x, weight, offsets = draw([0, 0], 8, 24, torch.float32)
    y = grouped_gemm(x, weight, offsets)
    assert y.shape == (0, 8)
    assert grouped_input_gradient(y, weight, offsets).shape == (0, 24)
    assert torch.equal(grouped_weight_gradient(y, x, offsets), torch.zeros_like(weight))


def test_flops_are_counted():
    x, weight, offsets = draw([3, 4], 8, 16, torch.float32)
    with FlopCounterMode(display=False) as counter:
        dy = grouped_gemm(x, weight, offsets)
        grouped_input_gradient(dy, weight, offsets)
        grouped_weight_gradient(dy, x, offsets)
    assert counter.get_total_flops() == 3 * 2 * 7 * 8 * 16


@pytest.mark.gpu
@pytest.mark.parametrize("counts", [[300, 0, 17, 1, 0], [0, 4096, 0], [64] * 60])
def test_torch_and_triton_are_both_within_the_error_budget(counts, monkeypatch):
    inputs = draw(counts, 264, 136)
    for supported in (module.GROUPED_MM_CAPABILITIES, ()):
        monkeypatch.setattr(module, "GROUPED_MM_CAPABILITIES", supported)
        check(GroupedGemm.apply, grouped_gemm_reference, inputs, torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize(("width", "depth"), [(33, 64), (64, 33), (7, 5)])
def test_sizes_that_grouped_mm_does_not_support_run_in_bfloat16(width, depth):
    check(GroupedGemm.apply, grouped_gemm_reference, draw([5, 0, 40], width, depth), torch.bfloat16)


@pytest.mark.gpu
def test_misaligned_operands_run_in_bfloat16():
    """Contiguous, of sizes that grouped_mm supports, but two bytes off the alignment it needs."""

    def misaligned(x):
        return x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)

    x, weight, offsets = draw([5, 0, 40], 64, 32, torch.bfloat16)
    dy = torch.randn(45, 64, device=DEVICE, dtype=torch.bfloat16)
    for function, left, right in [
        (grouped_gemm, x, weight),
        (grouped_input_gradient, dy, weight),
        (grouped_weight_gradient, dy, x),
    ]:
        expected = function(left, right, offsets)
        for operands in [(misaligned(left), right), (left, misaligned(right))]:
            assert module.uses_grouped_mm(left, right, 64) and not module.uses_grouped_mm(*operands, 64)
            torch.testing.assert_close(function(*operands, offsets), expected)


@TENS_OF_GIB
@pytest.mark.gpu
def test_offsets_beyond_two_to_the_31():
    """Rows that the Triton kernels read and write; grouped_mm does not take fp16."""
    rows, depth = 2**17 + 100, 2**14
    x = torch.zeros(rows, depth, device=DEVICE, dtype=torch.float16)
    x[-1] = torch.randn(depth, device=DEVICE)
    weight, offsets = torch.randn(2, 16, depth, device=DEVICE, dtype=torch.float16), ends([rows - 70, 70])
    y = grouped_gemm(x, weight, offsets)
    assert relative_error(y[-1], x[-1].double() @ weight[1].double().t()) < 1e-3
    assert not y[:-1].any()
    dweight = grouped_weight_gradient(y, x, offsets)
    assert relative_error(dweight[1], torch.outer(y[-1], x[-1]).double()) < 1e-3
    assert not dweight[0].any()
    dx = grouped_input_gradient(y, weight, offsets)
    assert relative_error(dx[-1], y[-1].double() @ weight[1].double()) < 1e-3
    assert not dx[:-1].any()
