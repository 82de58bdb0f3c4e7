import pytest

from ligermodels.units import counted


@pytest.mark.parametrize("count, text", [(0, "0 rows"), (1, "1 row"), (2, "2 rows"), (1536, "1,536 rows")])
def test_one_of_anything_is_no_plural(count, text):
    assert counted(count, "row") == text
