import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ligermodels import losses
from ligermodels.kernels.losses import linear_logprobs_loss as module
from ligermodels.kernels.losses.linear_logprobs import EXTRAS, linear_logprobs, linear_logprobs_reference
from ligermodels.kernels.losses.linear_logprobs_loss import linear_logprobs_loss
from ligermodels.kernels.losses.logits_chunks import Ring
from tests.conftest import DEVICE
from tests.kernels.error_budget import DTYPES, check, relative_error
from tests.kernels.losses import test_linear_logprobs as op_tests
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


# 45 rows in pieces of 16; the ring holds two pieces. Units end between pieces or within one; one unit is empty, and one
# needs three pieces.
UNITS = (45, 40, 33)
BORDERS = [0, 11, 11, 20, 33, 45], [0, 16, 32, 45], [0, 5, 44, 45], [0, 45]


def of_units(borders, called=None):
    """A loss that reads the sums of whole units, and of their entropies."""

    def row_loss(logprobs, entropies, rows):
        inside = [x - rows.start for x in borders if rows.start <= x <= rows.stop]
        offsets = torch.tensor(inside, dtype=torch.int32, device=DEVICE)
        loss = torch.nn.functional.logsigmoid(0.1 * losses.segment_sums(logprobs, offsets)).sum().to(logprobs.dtype)
        if called is not None:
            called.append((rows.start, rows.stop))
        return loss if entropies is None else loss - 0.1 * losses.segment_means(entropies, offsets).sum()

    return row_loss


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("borders", BORDERS)
def test_a_loss_of_units_equals_that_of_linear_logprobs(borders, entropy, dtype):
    (hidden, weight, targets), called = leaves(*UNITS, dtype=dtype), []
    options = {"entropy": entropy, "extras": EXTRAS, **OPTIONS}
    got = linear_logprobs_loss(hidden, weight, targets, of_units(borders, called), borders=borders, **options)
    assert got.loss.grad_fn.name() == "_KnownCoefficientsBackward"
    assert [a for a, _ in called] + [45] == [0] + [b for _, b in called] and {b for _, b in called} <= {*borders}
    out = linear_logprobs(hidden, weight, targets, **options)
    assert all(map(torch.equal, got.logprobs, out)) and not any(x.requires_grad for x in got.logprobs)
    expected = of_units(borders)(out.logprobs, out.entropy, slice(0, 45))
    torch.testing.assert_close(got.loss.double(), expected.double(), rtol=1e-6, atol=1e-7)
    gradients = [torch.autograd.grad(3 * loss, (hidden, weight)) for loss in (got.loss, expected)]
    bound = 1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps
    assert all(relative_error(a, b.double()) <= bound for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_loss_of_units_is_within_the_error_budget(dtype):
    inputs, borders = op_tests.draw(*UNITS), BORDERS[0]

    def ours(hidden, weight, targets):
        return linear_logprobs_loss(hidden, weight, targets, of_units(borders), borders=borders, **OPTIONS).loss

    def reference(hidden, weight, targets):
        logprobs = linear_logprobs_reference(hidden, weight, targets, **OPTIONS).logprobs
        return of_units(borders)(logprobs, None, slice(0, 45))

    # Rounded each time that the ring is full, and once more with the upstream gradient.
    check(ours, reference, inputs, dtype, 1.5 * op_tests.FACTOR)


def test_the_first_step_of_dpo_in_one_pass_has_a_loss_of_exactly_log_2():
    hidden, weight, targets = leaves(40, 40, 33)
    offsets = torch.tensor([0, 11, 20, 33, 40], dtype=torch.int32, device=DEVICE)
    with torch.no_grad():
        reference = losses.pair_sums(linear_logprobs(hidden, weight, targets).logprobs, offsets)
    seen = []

    def pairs(logprobs, entropies, rows):
        part = slice(0, 3) if rows.start == 0 else slice(2, 5)
        seen.append(rows.stop)
        return losses.dpo(logprobs, offsets[part] - rows.start, reference[part][:2], beta=0.1).loss / 2

    loss = linear_logprobs_loss(hidden, weight, targets, pairs, borders=[0, 20, 40]).loss
    assert loss.item() == torch.tensor(math.log(2)).item() and seen == [20, 40]


def test_where_linear_logprobs_takes_as_few_products_or_less_memory_it_is_called():
    hidden, weight, targets = leaves(45, 24, 33)

    def in_one_pass(borders=(0, 32, 45), head=weight, **options):
        loss = linear_logprobs_loss(hidden, head, targets, of_units(borders), borders=borders, **options).loss
        return loss.grad_fn.name() == "_KnownCoefficientsBackward"

    frozen = weight.detach()
    assert [in_one_pass(), in_one_pass(low_memory=True), in_one_pass(head=frozen)] == [True, False, False]
    assert in_one_pass(head=frozen, entropy=True)  # whose gradient linear_logprobs computes from logits of its own
    # Of three pieces, 45 rows of 48 logits: more than 24 (45 + 33) sums. Those of 32 rows are not.
    assert not in_one_pass((0, 33, 45))


@pytest.mark.parametrize("borders", [[], [0, 44], [1, 45], [0, 30, 20, 45]])
def test_borders_that_are_not_those_of_the_rows_raise(borders):
    hidden, weight, targets = leaves(*RECOMPUTED)
    with pytest.raises(ValueError, match="linear_logprobs_loss: borders must rise from 0 to the 45 rows"):
        linear_logprobs_loss(hidden, weight, targets, of_units(borders), borders=borders)


def test_sums_in_half_precision_are_rounded_a_few_times_only():
    half, fp32 = torch.bfloat16, torch.float32
    ring = Ring(16, 32)
    assert [ring.sums_dtypes(n, half) for n in (16 * 32, 16 * 32 + 1)] == [(half, half), (half, fp32)]
    assert ring.sums_dtypes(1, torch.float16) == (fp32, fp32) and ring.sums_dtypes(999, fp32) == (fp32, fp32)
