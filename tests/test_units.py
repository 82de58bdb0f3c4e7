"""How numbers are printed."""

import pytest

from ligermodels.units import counted


@pytest.mark.parametrize("count, text", [(0, "0 rows"), (1, "1 row"), (2, "2 rows"), (1536, "1,536 rows")])
def test_only_a_count_of_one_takes_the_singular(count, text):
    assert counted(count, "row") == text
