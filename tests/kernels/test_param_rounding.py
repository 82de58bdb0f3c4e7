"""Stochastic and compensated rounding of bf16 parameters, in both optimizer kernels."""

import pytest
import torch

from ligermodels.kernels.adamw import adamw_, adamw_reference
from ligermodels.kernels.adamw8bit import adamw8bit_, adamw8bit_reference
from ligermodels.kernels.param_rounding import round_param_reference, words_reference
from tests.conftest import DEVICE

HYPERPARAMETERS = 1e-3, 0.9, 0.999, 1e-8, 0.1  # lr, beta1, beta2, eps, weight_decay
SEED = 2**40 + 7
pytestmark = pytest.mark.usefixtures("kernels", "poisoned")


def scalar(value):
    return torch.tensor(float(value), device=DEVICE)


def draw(eight_bits, shape=(9, 256)):
    """Parameter, gradient and initial states."""
    param, grad = (torch.randn(shape, device=DEVICE).bfloat16() for _ in range(2))
    if not eight_bits:
        return [param, grad, *(torch.zeros(shape, device=DEVICE) for _ in range(2))]
    states = torch.zeros(shape, dtype=torch.uint8, device=DEVICE), torch.zeros(shape[0], 1, device=DEVICE)
    return [param, grad, *states, *(x.clone() for x in states)]


OPS = {False: (adamw_, adamw_reference), True: (adamw8bit_, adamw8bit_reference)}
BOTH = pytest.mark.parametrize("eight_bits", OPS)


@BOTH
@pytest.mark.parametrize("first", [0, 256, 2**34])
def test_kernels_and_references_round_alike(eight_bits, first):
    """But for the few weights that fp32 rounding places on the other side of a random number."""
    op, reference = OPS[eight_bits]
    tensors, options = draw(eight_bits), {"seed": SEED, "stream": 5, "first": first}
    expected = reference(*tensors, *HYPERPARAMETERS, scalar(3), **options)[0]
    op(*tensors, *HYPERPARAMETERS, scalar(3), **options)
    assert (tensors[0] != expected).float().mean() < 2e-3
    other = reference(*draw(eight_bits), *HYPERPARAMETERS, scalar(4), **options)[0]
    assert (other != expected).float().mean() > 0.1


@BOTH
def test_kernels_and_references_compensate_alike(eight_bits):
    op, reference = OPS[eight_bits]
    tensors = draw(eight_bits)
    compensation = (tensors[0].float() * 2**-9 * torch.rand(tensors[0].shape, device=DEVICE)).bfloat16()
    exact, _, *_, expected = reference(*tensors, *HYPERPARAMETERS, scalar(3), None, None, compensation)
    whole = exact.double() + expected.double()
    op(*tensors, *HYPERPARAMETERS, scalar(3), None, None, compensation)
    torch.testing.assert_close(tensors[0].double() + compensation.double(), whole, rtol=2**-15, atol=1e-6)
    assert (tensors[0] != exact).float().mean() < 2e-3


@pytest.mark.parametrize("first", [1, 2, 3, 6, 257])
def test_a_shard_is_rounded_as_it_is_in_the_whole(first):
    whole = draw(False, (3000,))
    shard = [x[first:2500].clone() for x in whole]
    adamw_(*whole, *HYPERPARAMETERS, scalar(2), seed=SEED, stream=1)
    adamw_(*shard, *HYPERPARAMETERS, scalar(2), seed=SEED, stream=1, first=first)
    assert all(torch.equal(a[first:2500], b) for a, b in zip(whole, shard, strict=True))


def test_stochastic_rounding_goes_to_a_neighbour_and_has_the_exact_mean():
    value = torch.tensor([1.0 + 0.3 * 2**-7, -3.0 - 0.9 * 2**-6, 1e-30, 5.0], device=DEVICE)
    p = value.repeat(20000, 1)
    rounded, _ = round_param_reference(p, torch.bfloat16, scalar(1), None, SEED, 0, 0)
    mean, step = rounded.float().mean(0), value.abs() * 2**-7
    assert ((rounded.float() - p).abs() <= step).all() and (rounded[:, 3] == 5).all()
    assert ((mean - value).abs() <= 4 * step * 0.5 / 20000**0.5).all()


def test_every_random_word_is_used_once():
    words = words_reference(4096, scalar(1), SEED, 0, 0)
    assert torch.equal(words[10:], words_reference(4086, scalar(1), SEED, 0, 10))
    assert len(words.unique()) == 4096
    draws = [(1, 0, 0), (2, 0, 0), (1, 0, 1), (1, 1, 0)]  # step, seed, stream
    assert len({tuple(words_reference(64, scalar(step), *rest, 0).tolist()) for step, *rest in draws}) == 4


@BOTH
@pytest.mark.parametrize("rounding", ["kahan", "stochastic"])
def test_small_updates_are_not_lost(eight_bits, rounding):
    """25 updates of 8e-4 on weights whose unit in the last place is 10 times that: rounded to nearest, all would be
    lost. The compensation, in bf16 itself, gets them to 3 %."""
    op, _ = OPS[eight_bits]
    tensors = draw(eight_bits)
    tensors[0].fill_(1.5)
    tensors[1].fill_(1.0)
    compensation = torch.zeros_like(tensors[0])
    options = {"kahan": {"compensation": compensation}, "stochastic": {"seed": SEED}}[rounding]
    for step in range(1, 26):
        op(*tensors, 8e-4, 0.9, 0.999, 1e-8, 0.0, scalar(step), **options)
    moved = (1.5 - (tensors[0].double() + compensation.double())).mean().item()
    assert abs(moved - 0.02) < 1e-3


@BOTH
def test_a_skipped_update_leaves_the_compensation(eight_bits):
    op, _ = OPS[eight_bits]
    tensors = draw(eight_bits)
    compensation = torch.full_like(tensors[0], 1e-3)
    before = [x.clone() for x in (*tensors, compensation)]
    op(*tensors, *HYPERPARAMETERS, scalar(1), None, scalar(1), compensation)
    assert all(map(torch.equal, (*tensors, compensation), before))


@BOTH
def test_arguments_that_do_not_go_together_raise(eight_bits):
    op, _ = OPS[eight_bits]
    tensors = draw(eight_bits)
    with pytest.raises(ValueError, match="two ways to round"):
        op(*tensors, *HYPERPARAMETERS, scalar(1), compensation=torch.zeros_like(tensors[0]), seed=1)
    with pytest.raises(ValueError, match=r"param is torch.float32; .* are for torch.bfloat16"):
        op(tensors[0].float(), *tensors[1:], *HYPERPARAMETERS, scalar(1), seed=1)
