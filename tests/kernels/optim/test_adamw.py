import itertools

import pytest
import torch

from ligermodels.kernels.optim.adamw import adamw_, adamw_reference
from tests.conftest import DEVICE
from tests.kernels.error_budget import DTYPES, FACTOR, relative_error

HYPERPARAMETERS = 1e-2, 0.9, 0.999, 1e-8, 0.1  # lr, beta1, beta2, eps, weight_decay
NAMES = "param", "exp_avg", "exp_avg_sq"
pytestmark = pytest.mark.usefixtures("kernels", "poisoned")


def scalar(value):
    return torch.tensor(float(value), device=DEVICE)


def draw(shape, dtypes):
    """param, grad, exp_avg, exp_avg_sq as they are in the middle of a run."""
    tensors = [torch.randn(shape, device=DEVICE) for _ in range(4)]
    tensors[3] = tensors[3].square() + 0.1
    return [x.to(dtype) for x, dtype in zip(tensors, dtypes, strict=True)]


def updated(tensors, *arguments):
    """`adamw_` on copies, returning the updated tensors as the reference does."""
    param, grad, exp_avg, exp_avg_sq = (x.clone() for x in tensors)
    adamw_(param, grad, exp_avg, exp_avg_sq, *arguments)
    assert torch.equal(grad, tensors[1])
    return param, exp_avg, exp_avg_sq


def check(tensors, *arguments):
    """The error against float64 must not exceed that of plain PyTorch in the same dtypes, or one rounding."""
    exact = adamw_reference(*(x.double() for x in tensors), *arguments)
    plain = adamw_reference(*tensors, *arguments)
    for name, got, baseline, expected in zip(NAMES, updated(tensors, *arguments), plain, exact, strict=True):
        error = relative_error(got, expected)
        allowed = max(FACTOR * relative_error(baseline, expected), torch.finfo(got.dtype).eps / 4)
        assert got.dtype == baseline.dtype
        assert error <= allowed, f"{name}: error {error:.3e}, allowed {allowed:.3e}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(7, 5), (3, 341), (64, 32), (2049,)])
def test_the_update_is_within_the_error_budget(shape, dtype):
    check(draw(shape, [dtype] * 4), *HYPERPARAMETERS, scalar(3))


@pytest.mark.parametrize("dtypes", [p for p in itertools.product(DTYPES, repeat=4) if len(set(p)) > 1][::5])
def test_each_tensor_may_have_its_own_dtype(dtypes):
    check(draw((33, 40), dtypes), *HYPERPARAMETERS, scalar(3), scalar(2.5))


@pytest.mark.parametrize("beta1, beta2", [(0.9, 0.999), (0.9, 0.95), (0.0, 0.99)])
@pytest.mark.parametrize("step", [1, 2, 4, 5, 499, 501, 10**4, 10**7])
def test_the_bias_corrections_are_exact_to_fp32(step, beta1, beta2):
    """The parameter is zero, so only the update is compared: 1 - 0.999 computed in fp32 would be off by 6e-5."""
    tensors = draw((100,), [torch.float32] * 4)
    tensors[0].zero_()
    arguments = 1e-3, beta1, beta2, 1e-2, 0.1, scalar(step)
    exact = adamw_reference(*(x.double() for x in tensors), *arguments)
    for name, got, expected in zip(NAMES, updated(tensors, *arguments), exact, strict=True):
        assert relative_error(got, expected) < 1e-6, name


def test_several_steps_equal_those_of_torch():
    """Against torch.optim.AdamW in float64, from the first step on, with scaled gradients."""
    param = torch.randn(40, 30, device=DEVICE)
    exp_avg, exp_avg_sq = torch.zeros_like(param), torch.zeros_like(param)
    theirs = torch.nn.Parameter(param.double())
    lr, *betas, eps, weight_decay = HYPERPARAMETERS
    optimizer = torch.optim.AdamW([theirs], lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
    for step in range(1, 6):
        grad = torch.randn_like(param)
        adamw_(param, grad, exp_avg, exp_avg_sq, *HYPERPARAMETERS, scalar(step), scalar(4))
        theirs.grad = grad.double() / 4
        optimizer.step()
    state = optimizer.state[theirs]
    for got, expected in [(param, theirs), (exp_avg, state["exp_avg"]), (exp_avg_sq, state["exp_avg_sq"])]:
        assert relative_error(got, expected.detach()) < 2e-7


@pytest.mark.parametrize("scale", [None, scalar(3)])
def test_nothing_is_written_if_found_inf_is_one(scale):
    tensors = draw((70, 31), [torch.float32] * 4)
    tensors[1][0] = float("inf")
    for step in (0, 5):
        results = updated(tensors, *HYPERPARAMETERS, scalar(step), scale, scalar(1))
        assert all(torch.equal(got, tensors[i]) for got, i in zip(results, (0, 2, 3), strict=True))


def test_a_found_inf_of_zero_changes_nothing():
    tensors = draw((70, 31), [torch.float32] * 4)
    flagged = updated(tensors, *HYPERPARAMETERS, scalar(5), None, scalar(0))
    for got, expected in zip(flagged, updated(tensors, *HYPERPARAMETERS, scalar(5)), strict=True):
        assert torch.equal(got, expected)


def fail_if_the_kernel_runs(monkeypatch):
    def fail(*_):
        raise AssertionError("the kernel ran")

    monkeypatch.setattr("ligermodels.kernels.optim.adamw.adamw_update_", fail)


def test_tensors_that_are_not_contiguous_or_wider_than_fp32_take_the_reference(monkeypatch):
    tensors = draw((30, 40), [torch.float32] * 4)
    expected = updated(tensors, *HYPERPARAMETERS, scalar(3))
    fail_if_the_kernel_runs(monkeypatch)
    param, grad, exp_avg, exp_avg_sq = (x.clone() for x in tensors)
    param, grad = param.t().contiguous().t(), torch.stack((grad, grad), -1)[..., 0]
    adamw_(param, grad, exp_avg, exp_avg_sq, *HYPERPARAMETERS, scalar(3))
    wide = updated([x.double() for x in tensors], *HYPERPARAMETERS, scalar(3))
    for got, double, result in zip((param, exp_avg, exp_avg_sq), wide, expected, strict=True):
        torch.testing.assert_close(got, result, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(double.float(), result, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_tensors_of_one_element_are_updated(shape):
    tensors = draw(shape, [torch.float32] * 4)
    expected = adamw_reference(*tensors, *HYPERPARAMETERS, scalar(3))
    torch.testing.assert_close(updated(tensors, *HYPERPARAMETERS, scalar(3)), expected, rtol=1e-6, atol=0)


def test_shapes_that_differ_raise():
    tensors = draw((4, 6), [torch.float32] * 4)
    with pytest.raises(ValueError, match=r"adamw_.*\[24\]"):
        adamw_(*tensors[:2], tensors[2].flatten(), tensors[3], *HYPERPARAMETERS, scalar(1))


def test_autograd_raises_if_the_parameter_was_saved_for_backward():
    weight = torch.randn(5, device=DEVICE, requires_grad=True)
    loss = weight.square().sum()
    with torch.no_grad():
        adamw_(weight, *draw((5,), [torch.float32] * 4)[1:], *HYPERPARAMETERS, scalar(1))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.gpu
def test_nothing_synchronizes_and_all_learning_rates_share_one_compiled_kernel():
    from ligermodels.kernels.optim.adamw import _update_kernel

    tensors = draw((64, 64), [torch.bfloat16] * 4)
    step, scale, flag = scalar(1), scalar(2), scalar(0)
    adamw_(*tensors, *HYPERPARAMETERS, step, scale, flag)  # compiles the kernel
    compiled = len(_update_kernel.jit.device_caches[torch.cuda.current_device()][0])
    torch.cuda.set_sync_debug_mode("error")
    try:
        for lr in (0.0, 1.0, 1, 3e-4):
            adamw_(*tensors, lr, *HYPERPARAMETERS[1:], step, scale, flag)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(_update_kernel.jit.device_caches[torch.cuda.current_device()][0]) == compiled
