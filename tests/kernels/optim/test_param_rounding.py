"""Exact and stochastically rounded bf16 parameters, in both optimizer kernels."""

from functools import partial

import pytest
import torch

from ligermodels.kernels.optim.adamw import adamw_, adamw_reference
from ligermodels.kernels.optim.adamw8bit import adamw8bit_, adamw8bit_reference
from ligermodels.kernels.optim.param_rounding import (
    master_reference,
    round_param_reference,
    split_reference,
    words_reference,
)
from tests.conftest import DEVICE
from tests.kernels.error_budget import CONTRACTION, relative_distance

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
def test_stochastic_rounding_does_not_lose_small_updates(eight_bits):
    """25 updates of 8e-4 on weights whose unit in the last place is 10 times that."""
    op, _ = OPS[eight_bits]
    tensors = draw(eight_bits)
    tensors[0].fill_(1.5)
    tensors[1].fill_(1.0)
    for step in range(1, 26):
        op(*tensors, 8e-4, 0.9, 0.999, 1e-8, 0.0, scalar(step), seed=SEED)
    assert abs((1.5 - tensors[0].double()).mean().item() - 0.02) < 1e-3


def as_float(bits):
    return torch.tensor(bits, dtype=torch.int64, device=DEVICE).to(torch.int32).view(torch.float32)


# Ties of either parity, the largest number that is rounded down, its neighbours, numbers that are rounded to infinity,
# denormal numbers, zeros and infinity; all with both signs.
EDGES = as_float(
    [
        sign | bits
        for sign in (0, 1 << 31)
        for bits in (
            *(0x3F800000, 0x3F807FFF, 0x3F808000, 0x3F808001, 0x3F818000, 0x3F81FFFF, 0x00000000, 0x00000001),
            *(0x00007FFF, 0x00008000, 0x007FFFFF, 0x00800000, 0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0x7F800000),
        )
    ]
)


def bits_of(x):
    return x.view(torch.int16 if x.dtype == torch.bfloat16 else torch.int32)


def test_a_master_is_its_parts_to_the_bit():
    masters = torch.cat([EDGES, torch.randn(4096, device=DEVICE), torch.randn(4096, device=DEVICE) * 1e-38])
    weights, low = split_reference(masters)
    assert torch.equal(bits_of(master_reference(weights, low)), bits_of(masters))
    finite = masters.abs() <= torch.finfo(torch.bfloat16).max
    nearest = masters[finite].bfloat16()
    ties = (bits_of(masters[finite]) & 0xFFFF) == 0x8000
    assert ties.sum() == 6 and torch.equal(bits_of(weights[finite])[~ties], bits_of(nearest)[~ties])
    assert (weights[finite][ties].float().abs() > masters[finite][ties].abs()).all()  # away from zero


def test_a_weight_is_nan_where_its_master_is():
    nans = as_float([0x7FFFFFFF, 0x7FC00000, 0xFFFFFFFF, 0xFFC00000])  # 0x7FFFFFFF is that of NVIDIA's GPUs
    weights, low = split_reference(nans)
    assert weights.isnan().all() and master_reference(weights, low).isnan().all()


def test_a_weight_that_is_set_to_zero_is_a_number():
    assert (master_reference(torch.zeros(2).bfloat16(), torch.tensor([-5, 5], dtype=torch.int16)) <= 1e-40).all()


@BOTH
def test_the_kernels_split_and_join_the_edges_as_the_references_do(eight_bits):
    """Without a learning rate an update leaves the master as it is."""
    op, _ = OPS[eight_bits]
    tensors = draw(eight_bits)
    normal = EDGES[EDGES.isfinite() & (EDGES.abs() >= torch.finfo(torch.float32).tiny)]
    masters = normal.repeat(200)[: tensors[0].numel()].view(tensors[0].shape)
    tensors[0], low = split_reference(masters)
    before = tensors[0].clone(), low.clone()
    op(*tensors, 0.0, *HYPERPARAMETERS[1:], scalar(1), low_bits=low)
    assert torch.equal(bits_of(tensors[0]), bits_of(before[0])) and torch.equal(low, before[1])
    low.fill_(-7)
    tensors[0].zero_()
    op(*tensors, 0.0, *HYPERPARAMETERS[1:], scalar(1), low_bits=low)
    assert not tensors[0].any() and not low.any()


def steps_of(op, tensors, gradients, **options):
    """Steps in place, with the learning rates and the scaled gradients of a run. Every fourth step is skipped."""
    for number, gradient in enumerate(gradients, 1):
        tensors[1] = gradient
        scales = scalar(1 + number % 3), scalar(number % 4 == 0)
        op(*tensors, 1e-3 / number, *HYPERPARAMETERS[1:], scalar(number), *scales, **options)


def reference_steps(reference):
    """A reference as an operation in place."""

    def op(*tensors_and_scalars, low_bits=None, count=None):
        results = reference(*tensors_and_scalars, low_bits=low_bits)
        written = [x for i, x in enumerate(tensors_and_scalars[:count]) if i != 1]
        for old, new in zip([*written, *([] if low_bits is None else [low_bits])], results, strict=True):
            old.copy_(new)

    return op


@BOTH
@pytest.mark.parametrize("runs", ["kernel", "reference"])
def test_exact_parameters_are_fp32_parameters_to_the_bit(eight_bits, runs):
    """50 steps: masters and moments are those of fp32 parameters, and no weight is far from its master.

    On a GPU, compiled with other contractions to fused multiply-adds, 8-bit codes may round to the next one.
    """
    op, reference = OPS[eight_bits]
    exact = draw(eight_bits, (7, 256))
    start = exact[0].float()
    plain = [exact[0].float(), *(x.clone() for x in exact[1:])]
    low = torch.zeros(exact[0].shape, dtype=torch.int16, device=DEVICE)
    gradients = [torch.randn(exact[0].shape, device=DEVICE).bfloat16() for _ in range(50)]
    if runs == "reference":
        op = partial(reference_steps(reference), count=len(exact))
    steps_of(op, exact, gradients, low_bits=low)
    steps_of(op, plain, gradients)
    if eight_bits and DEVICE != "cpu" and runs == "kernel":
        assert relative_distance(master_reference(exact[0], low), plain[0], start) < CONTRACTION
        return
    assert torch.equal(bits_of(master_reference(exact[0], low)), bits_of(plain[0]))
    assert all(map(torch.equal, exact[2:], plain[2:]))
    assert torch.equal(exact[0], split_reference(plain[0])[0])


@BOTH
def test_a_skipped_update_leaves_the_low_bits(eight_bits):
    op, _ = OPS[eight_bits]
    tensors = draw(eight_bits)
    low = torch.full_like(tensors[0], 77, dtype=torch.int16)
    before = [x.clone() for x in (*tensors, low)]
    op(*tensors, *HYPERPARAMETERS, scalar(1), None, scalar(1), low)
    assert all(map(torch.equal, (*tensors, low), before))


@BOTH
def test_arguments_that_do_not_go_together_raise(eight_bits):
    op, _ = OPS[eight_bits]
    tensors = draw(eight_bits)
    low = torch.zeros_like(tensors[0], dtype=torch.int16)
    with pytest.raises(ValueError, match="two ways to round"):
        op(*tensors, *HYPERPARAMETERS, scalar(1), low_bits=low, seed=1)
    with pytest.raises(ValueError, match=r"param is torch.float32; .* are for torch.bfloat16"):
        op(tensors[0].float(), *tensors[1:], *HYPERPARAMETERS, scalar(1), seed=1)
    with pytest.raises(ValueError, match=r"low_bits is torch.int32 \[9, 256\]; it must be int16"):
        op(*tensors, *HYPERPARAMETERS, scalar(1), low_bits=low.int())
