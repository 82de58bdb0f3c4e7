"""Options of sampling. Drawn tokens are tested in kernels/decoding/test_sample.py."""

import math

import pytest
import torch

from ligermodels.errors import InputError
from ligermodels.generation.sampling import SamplingOptions

WRONG = [
    ("temperature", -0.1, "0 for greedy decoding, or a number from 1e-5 to 1e5"),
    ("temperature", 1e-6, "0 for greedy decoding, or a number from 1e-5 to 1e5"),
    ("temperature", math.nan, "0 for greedy decoding, or a number from 1e-5 to 1e5"),
    ("temperature", "1", "0 for greedy decoding, or a number from 1e-5 to 1e5"),
    ("temperature", None, "0 for greedy decoding, or a number from 1e-5 to 1e5"),
    ("temperature", True, "0 for greedy decoding, or a number from 1e-5 to 1e5"),
    ("top_k", -1, "a positive whole number, or 0 or None for all tokens"),
    ("top_k", 2.0, "a positive whole number, or 0 or None for all tokens"),
    ("top_p", 0, "a number above 0 and at most 1"),
    ("top_p", 1.01, "a number above 0 and at most 1"),
    ("min_p", -0.5, "a number from 0 to 1"),
    ("repetition_penalty", 0.0, "a number from 0.01 to 100; 1 for no penalty"),
    ("presence_penalty", 2.5, "a number from -2 to 2; 0 for no penalty"),
    ("frequency_penalty", math.inf, "a number from -2 to 2; 0 for no penalty"),
    ("n", 0, "a whole number of at least 1"),
    ("seed", 2**63, "a whole number of 64 bits, or None"),
    ("stop", "", "a text or a list of texts, none of them empty"),
    ("stop", ["a", 3], "a text or a list of texts, none of them empty"),
    ("stop", 3, "a text or a list of texts, none of them empty"),
]


@pytest.mark.parametrize(("name", "value", "words"), WRONG)
def test_a_value_out_of_range_is_refused_by_name(name, value, words):
    with pytest.raises(InputError) as error:
        SamplingOptions(**{name: value})
    assert str(error.value) == f"{name} is {value!r}; must be {words}"


def test_several_greedy_completions_are_refused():
    with pytest.raises(InputError, match="n is 2 at temperature 0, where all completions are equal; set temperature"):
        SamplingOptions(n=2)
    assert SamplingOptions(n=2, temperature=0.5).n == 2


@pytest.mark.parametrize("name", ["top_k", "top_p", "min_p"])
def test_a_filter_of_greedy_decoding_is_refused(name):
    neutral, filtering = {"top_k": (0, 5), "top_p": (1, 0.5), "min_p": (0, 0.5)}[name]
    with pytest.raises(InputError) as error:
        SamplingOptions(**{name: filtering})
    reason = f"{name} is {filtering} at temperature 0, where no token is drawn"
    assert str(error.value) == f"{reason}; set temperature, or leave out {name}"
    assert getattr(SamplingOptions(temperature=0, **{name: neutral}), name) == neutral


def test_a_row_has_the_numbers_of_its_options_and_neutral_ones_without():
    options = SamplingOptions(
        temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, repetition_penalty=1.2, presence_penalty=1, frequency_penalty=-1
    )
    assert options.row == (0.5, 3, 0.9, 0.1, 1.2, 1.0, -1.0)
    assert SamplingOptions().row == (0.0, 0, 1.0, 0.0, 1.0, 0.0, 0.0)


def test_what_a_row_needs_is_known_from_its_options():
    def needs(**options):
        sampling = SamplingOptions(**options)
        return sampling.has_filters, sampling.has_penalties

    assert needs() == needs(temperature=0.7) == needs(temperature=1, top_k=0, top_p=1, min_p=0) == (False, False)
    for filtered in ({"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.5}):
        assert needs(temperature=1, **filtered) == (True, False)
    for penalized in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        assert needs(**{penalized: 0.5}) == (False, True)


def test_stop_strings_become_a_tuple():
    assert [SamplingOptions(stop=stop).stop for stop in (None, "a", ["a", "b"])] == [(), ("a",), ("a", "b")]


def test_without_a_seed_torchs_generator_gives_one():
    assert SamplingOptions(seed=-3).resolved_seed() == -3
    torch.manual_seed(1)
    drawn = [SamplingOptions().resolved_seed() for _ in range(2)]
    torch.manual_seed(1)
    assert SamplingOptions().resolved_seed() == drawn[0] != drawn[1]
