import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ligermodels.kernels.losses import linear_logprobs_loss as module
from ligermodels.kernels.losses.linear_logprobs import linear_logprobs
from ligermodels.kernels.losses.linear_logprobs_loss import linear_logprobs_loss
from tests.conftest import DEVICE
from tests.kernels.error_budget import DTYPES, relative_error
from tests.kernels.losses.test_linear_logprobs import FEW_ROWS, OPTIONS, RECOMPUTED, leaves, small_chunks  # noqa: F401

pytestmark = [
    pytest.mark.usefixtures("kernels", "poisoned", "small_chunks"),
    # The interpreter computes masked lanes with NumPy, which warns about their values.
    pytest.mark.filterwarnings("ignore:invalid value encountered in multiply:RuntimeWarning"),
]


def clipped(old, advantages):
    """GRPO's loss of rows, less a share of their entropies."""

    def row_loss(logprobs, entropies, rows):
        ratio, advantage = (logprobs - old[rows]).exp(), advantages[rows]
        loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum() / len(old)
        return loss if entropies is None else loss - 0.1 * entropies.sum() / len(old)

    return row_loss


def draw(shape, dtype=torch.float32, frozen=False):
    hidden, weight, targets = leaves(*shape, dtype=dtype)
    with torch.no_grad():
        old = linear_logprobs(hidden, weight, targets, **OPTIONS).logprobs + 0.3 * torch.randn(len(targets)).to(DEVICE)
    return hidden, weight.requires_grad_(not frozen), targets, clipped(old, torch.randn(len(targets), device=DEVICE))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("shape", [RECOMPUTED, FEW_ROWS])
def test_loss_and_gradients_equal_those_of_linear_logprobs(shape, entropy, dtype):
    hidden, weight, targets, row_loss = draw(shape, dtype)
    got = linear_logprobs_loss(hidden, weight, targets, row_loss, entropy=entropy, **OPTIONS)
    out = linear_logprobs(hidden, weight, targets, entropy=entropy, **OPTIONS)
    expected = row_loss(out.logprobs, out.entropy, slice(None))
    torch.testing.assert_close(got.loss, expected, rtol=1e-6, atol=1e-7)
    assert all(a is b or torch.equal(a, b) for a, b in zip(got.logprobs, out, strict=True))
    gradients = [torch.autograd.grad(3 * loss, (hidden, weight)) for loss in (got.loss, expected)]
    bound = 1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps
    assert all(relative_error(a, b.double()) <= bound for a, b in zip(*gradients, strict=True))


def test_a_frozen_head_has_no_gradient_and_no_sums(monkeypatch):
    hidden, weight, targets, row_loss = draw(RECOMPUTED, frozen=True)
    sums, make = [], module.empty_gradients
    monkeypatch.setattr(module, "empty_gradients", lambda *a: sums.append(make(*a)) or sums[-1])
    loss = linear_logprobs_loss(hidden, weight, targets, row_loss, **OPTIONS).loss
    (gradient,) = torch.autograd.grad(loss, hidden)
    expected = row_loss(linear_logprobs(hidden, weight, targets, **OPTIONS).logprobs, None, slice(None))
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, hidden)[0], rtol=1e-5, atol=1e-7)
    assert [x.numel() for x in sums[0][:2]] == [45 * 17, 0]


def test_the_first_ratio_is_exactly_one():
    hidden, weight, targets, _ = draw(RECOMPUTED)
    with torch.no_grad():
        old = linear_logprobs(hidden, weight, targets).logprobs
    ratios = []

    def sum_of_ratios(logprobs, entropies, rows):
        ratios.append((logprobs - old[rows]).exp())
        return ratios[-1].sum()

    linear_logprobs_loss(hidden, weight, targets, sum_of_ratios)
    assert torch.equal(torch.cat(ratios), torch.ones(45, device=DEVICE)) and len(ratios) == 2


def test_while_tracing_the_loss_is_that_of_all_rows_at_once():
    hidden, weight, targets, row_loss = draw(RECOMPUTED)
    with FlopCounterMode(display=False) as counter:
        loss = linear_logprobs_loss(hidden, weight, targets, row_loss, **OPTIONS).loss
        loss.backward()
    assert counter.get_total_flops() == 4 * 2 * math.prod(RECOMPUTED)
    torch.testing.assert_close(loss, linear_logprobs_loss(hidden, weight, targets, row_loss, **OPTIONS).loss)


def test_without_gradients_and_without_rows():
    hidden, weight, targets, row_loss = draw(RECOMPUTED)
    expected = linear_logprobs_loss(hidden, weight, targets, row_loss, **OPTIONS).loss
    with torch.no_grad():
        got = linear_logprobs_loss(hidden, weight, targets, row_loss, **OPTIONS).loss
    assert torch.equal(got, expected.detach()) and not got.requires_grad
    loss = linear_logprobs_loss(hidden[:0], weight, targets[:0], row_loss).loss
    loss.backward()
    assert loss.item() == 0 and not weight.grad.any()


def test_double_backward_raises():
    hidden, weight, targets, row_loss = draw(RECOMPUTED)
    loss = linear_logprobs_loss(hidden, weight, targets, row_loss).loss
    with pytest.raises(RuntimeError, match="do not support double backward"):
        torch.autograd.grad(loss, weight, create_graph=True)
