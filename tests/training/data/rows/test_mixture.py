import pytest

from ligermodels.errors import InputError
from ligermodels.training.data.rows import run_rows
from ligermodels.training.data.rows.run_rows import MIXTURE_BLOCK, Mixture


def test_each_epoch_has_every_row_once_and_is_shuffled_anew():
    rows = [row for _, row in Mixture([12], [1.0], seed=7).entries(0, 36)]
    epochs = [rows[:12], rows[12:24], rows[24:]]
    assert all(sorted(epoch) == list(range(12)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


@pytest.mark.parametrize("sizes, weights", [([12], [1.0]), ([40, 7, 300], [0.5, 0.2, 0.3])])
def test_any_part_of_the_sequence_is_computed_without_the_parts_before_it(sizes, weights, monkeypatch):
    monkeypatch.setattr(run_rows, "MIXTURE_BLOCK", 50)
    whole = Mixture(sizes, weights, seed=3).entries(0, 500)
    for start, count in [(0, 4), (7, 16), (493, 7), (45, 20), (98, 4)]:
        assert Mixture(sizes, weights, seed=3).entries(start, count) == whole[start : start + count]
    assert Mixture(sizes, weights, seed=4).entries(0, 500) != whole


def test_every_stretch_of_the_sequence_has_the_weights_to_within_three_rows():
    """One row at either end of a stretch, and one by rounding."""
    weights = [0.6, 0.25, 0.1, 0.05]
    sources = [
        source
        for source, _ in Mixture([9, 50, 1000, 3], [12 * w for w in weights], seed=1).entries(0, 2 * MIXTURE_BLOCK)
    ]
    for source, weight in enumerate(weights):
        assert sources[:MIXTURE_BLOCK].count(source) == weight * MIXTURE_BLOCK
        for start, stop in [(0, 10), (0, 100), (17, 1017), (5000, 15_000), (9_990, 10_190)]:
            assert abs(sources[start:stop].count(source) - weight * (stop - start)) <= 3


def test_a_source_of_any_weight_is_taken_in_whole_epochs(monkeypatch):
    monkeypatch.setattr(run_rows, "MIXTURE_BLOCK", 50)
    mixture_of_two = Mixture([10, 1000], [0.9, 0.1], seed=1)
    entries = mixture_of_two.entries(0, 2000)
    assert mixture_of_two.rows_per_epoch == [pytest.approx(10 / 0.9), 10_000]
    small = [row for source, row in entries if source == 0]
    assert all(sorted(small[i : i + 10]) == list(range(10)) for i in range(0, 1790, 10))
    large = [row for source, row in entries if source == 1]
    assert len(set(large)) == len(large)


def test_weights_are_rounded_to_the_nearest_share_and_too_small_ones_are_refused():
    assert run_rows.integer_shares([1, 1, 1]) == (3334, 3333, 3333)
    assert run_rows.integer_shares([2.0, 1.0]) == (6667, 3333)
    with pytest.raises(InputError, match="weight 1e-05 is less than one row in 10,000"):
        Mixture([5, 5], [1.0, 1e-5], seed=0)
