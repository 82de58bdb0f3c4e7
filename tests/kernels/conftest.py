"""Which cases of a test over all dtypes run."""

import operator
from pathlib import Path

import pytest

from tests.conftest import DEVICE
from tests.kernels.error_budget import DTYPES

HERE = Path(__file__).parent
WITH_MARKS = type(pytest.param())


def pytest_collection_modifyitems(config, items):
    """Of a test over cases and dtypes a CPU runs each case in one dtype, and the next in another.

    On a GPU, which compiles each dtype, the others are slow tests.
    """
    others = {item for item in items if item.path.is_relative_to(HERE) and not has_its_dtype(item)}
    if DEVICE == "cpu":
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]
    for item in others:
        item.add_marker(pytest.mark.slow)


def has_its_dtype(item) -> bool:
    """Whether the places of its parameters in their lists add up to a multiple of the number of dtypes."""
    lists = [mark.args for mark in item.iter_markers("parametrize")]
    if len(lists) == 1 or not any(names == "dtype" and values is DTYPES for names, values in lists):
        return True
    return sum(place(item.callspec.params, *each) for each in lists) % len(DTYPES) == 0


def place(params, names, rows) -> int:
    """The place among the rows of a `parametrize` of the one that a test has."""
    if isinstance(names, str):
        names = names.split(", ")
    own = [params[name] for name in names]
    rows = [row.values if isinstance(row, WITH_MARKS) else row if len(names) > 1 else [row] for row in rows]
    return next(number for number, row in enumerate(rows) if all(map(operator.is_, row, own)))
