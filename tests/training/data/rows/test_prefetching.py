"""What comes next is made in a thread, once; an error in the thread is raised where its result is taken."""

import threading

import pytest

from ligermodels.errors import InputError
from ligermodels.training.data.rows import run_rows
from ligermodels.training.data.rows.run_rows import DataError, Prefetcher
from tests.training.data.documents import CPU, distinct, validation


def recorder(record, function):
    """The function, which also records the name of its thread."""

    def recorded(*arguments):
        record.append(threading.current_thread().name)
        return function(*arguments)

    return recorded


def half(number):
    if number % 2:
        raise InputError(f"{number} is odd")
    return number // 2


def test_a_request_is_made_in_the_thread_if_it_was_named_and_at_once_if_not():
    threads = []
    prefetcher = Prefetcher(recorder(threads, half), "ahead")
    assert [prefetcher.take(2, 4), prefetcher.take(4, 6)] == [1, 2]
    assert prefetcher.prefetched[1].result() == 3  # without being taken
    assert prefetcher.take(8, None) == 4 and prefetcher.prefetched is None
    assert threads == ["MainThread", "ahead_0", "ahead_0", "MainThread"]


def test_the_error_of_a_thread_is_raised_with_its_own_request():
    results = Prefetcher(half, "ahead").take_all([2, 3])
    assert next(results) == 1
    with pytest.raises(InputError, match="3 is odd"):
        next(results)


def test_files_that_cannot_be_read_at_their_turn_are_an_error_of_data():
    prefetcher = Prefetcher(half, "ahead", reads_files=True)
    assert prefetcher.take(2, 3) == 1
    with pytest.raises(DataError, match="3 is odd"):
        prefetcher.take(3, 4)
    assert prefetcher.take(4, None) == 2


def test_validation_collates_each_batch_once_and_all_but_the_first_ahead(monkeypatch):
    threads, data = [], validation(distinct(*[6] * 7), 6)
    expected = [data.collate(range(start, start + 3), 3, CPU).input_ids.tolist() for start in (0, 3, 6)]
    monkeypatch.setattr(run_rows, "collate", recorder(threads, run_rows.collate))
    for _ in range(2):
        assert [batch.input_ids.tolist() for batch in data.batches(3, CPU)] == expected
    assert threads == ["MainThread", "validation_0", "validation_0"] * 2
