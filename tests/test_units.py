"""How numbers are printed and recognised."""

import pytest

from ligermodels.units import counted, is_whole_number


@pytest.mark.parametrize("count, text", [(0, "0 rows"), (1, "1 row"), (2, "2 rows"), (1536, "1,536 rows")])
def test_only_a_count_of_one_takes_the_singular(count, text):
    assert counted(count, "row") == text


@pytest.mark.parametrize("text", ["0", "7", "9" * 18])
def test_a_whole_number_can_be_parsed(text):
    assert is_whole_number(text) and int(text) < 2**63


@pytest.mark.parametrize("text", ["", "-1", "+1", "1.0", " 1", "1_0", "\u0663", "\u00b2", "9" * 19, "9" * 5000])
def test_other_texts_are_no_whole_numbers(text):
    assert not is_whole_number(text)
