"""Warmup, decay and final value of each schedule."""

import itertools

import pytest

from ligermodels.training.optimizers.schedules import SCHEDULES, default_learning_rate, learning_rate


def rates(schedule, steps=110, warmup=10, peak=2.0):
    return [learning_rate(schedule, step, steps, warmup, peak) for step in range(steps)]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_warmup_rises_to_the_peak_and_the_rate_never_rises_again(schedule):
    values = rates(schedule)
    assert values[:10] == pytest.approx([0.2 * n for n in range(1, 11)])
    assert values[10] == 2.0
    assert all(a >= b > 0 for a, b in itertools.pairwise(values[9:]))


def test_cosine_decays_to_a_tenth_at_the_last_step():
    values = rates("cosine", steps=111)
    assert values[60] == pytest.approx(1.1)  # half way: between 2.0 and 0.2
    assert values[35] == pytest.approx(0.2 + 1.8 * (1 + 0.5**0.5) / 2)
    assert values[-1] == pytest.approx(0.2)


def test_linear_decays_to_zero_one_step_after_the_last():
    values = rates("linear")
    assert values[60] == pytest.approx(1.0)
    assert values[-1] == pytest.approx(0.02)


def test_wsd_is_constant_and_decays_by_the_square_root_over_the_last_fifth():
    values = rates("wsd")
    assert set(values[9:89]) == {2.0}  # 110 steps, of which 22 decay from step 88 on
    assert values[88 + 11] == pytest.approx(2 * (1 - 0.5**0.5))
    assert values[-1] == pytest.approx(2 * (1 - (21 / 22) ** 0.5))


def test_wsd_decays_only_after_a_long_warmup():
    assert rates("wsd", steps=10, warmup=9) == pytest.approx([2 * n / 9 for n in range(1, 10)] + [2.0])


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("steps, warmup", [(1, 0), (1, 30), (2, 1), (10, 30)])
def test_a_run_can_be_shorter_than_its_warmup(schedule, steps, warmup):
    assert all(0 < rate <= 1.0 for rate in rates(schedule, steps, warmup, 1.0))


def test_the_default_learning_rate_falls_with_the_hidden_size_and_is_higher_for_lora():
    assert default_learning_rate(128, pretrained=False, lora=False) == 4.5e-3
    assert default_learning_rate(4096, pretrained=False, lora=True) == pytest.approx(4.5e-3 / 32)
    with_lora = default_learning_rate(4096, pretrained=True, lora=True)
    assert with_lora == 10 * default_learning_rate(4096, pretrained=True, lora=False) == 2e-4
