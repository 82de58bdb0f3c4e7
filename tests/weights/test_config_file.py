import json

import pytest
import torch

from ligermodels.errors import CheckpointError
from ligermodels.weights.config_file import both_spellings, read_config, with_dtype

NESTED = "[" * 200_000 + "]" * 200_000


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("{", "not JSON: Expecting property name enclosed in double quotes: line 1 column 2"),
        ("\ufeff{}", "BOM"),
        ("[1]", "list, not a JSON object"),
        ('{"rope_theta": NaN}', "field rope_theta"),
        ('{"rope_scaling": {"factor": -Infinity}}', "field rope_scaling.factor"),
        ('{"eos_token_id": [1, 1e999]}', "field eos_token_id[1]"),
        ('{"hidden_size": 9223372036854775808}', "field hidden_size"),
        ('{"hidden_size": -' + "9" * 5000 + "}", "field hidden_size"),
        ('{"a": {"b": "c"}, "rope_scaling": ' + NESTED + ', "d": 1}', 'field "rope_scaling" is nested too deeply'),
        ('{"rope_scaling": ' + '{"x": ' * 200_000 + "}", 'field "rope_scaling" is nested too deeply'),
    ],
)
def test_bad_config_is_refused_naming_file_and_field(tmp_path, text, names):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError) as caught:
        read_config(tmp_path)
    assert names in str(caught.value) and str(tmp_path / "config.json") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_config_that_is_not_utf8_names_the_position(tmp_path):
    (tmp_path / "config.json").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(CheckpointError, match=r"config\.json: not JSON: .*position 7"):
        read_config(tmp_path)


def test_missing_config(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json: is missing"):
        read_config(tmp_path)


def test_a_version_4_config_needs_nothing():
    raw = {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2.0}, "torch_dtype": "bfloat16"}
    assert both_spellings(raw) == raw


def test_a_version_5_config_gets_the_old_spelling():
    raw = {
        "dtype": "bfloat16",
        "rope_parameters": {"rope_type": "llama3", "factor": 8.0, "rope_theta": 5e5, "partial_rotary_factor": 0.5},
    }
    assert both_spellings(raw) == raw | {
        "torch_dtype": "bfloat16",
        "rope_theta": 5e5,
        "partial_rotary_factor": 0.5,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0},
    }


def test_default_rope_has_no_scaling_in_the_old_spelling():
    both = both_spellings({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}})
    assert both["rope_scaling"] is None and both["rope_theta"] == 1e4


def test_sorted_fields_stay_sorted_and_others_stay_in_place():
    assert list(both_spellings({"a": 1, "dtype": "float32", "z": 2})) == ["a", "dtype", "torch_dtype", "z"]
    assert list(both_spellings({"z": 1, "dtype": "float32", "a": 2})) == ["z", "dtype", "a", "torch_dtype"]


def test_old_fields_that_are_there_are_kept():
    raw = {"rope_parameters": {"rope_theta": 1e4}, "rope_theta": 5.0, "rope_scaling": None}
    assert both_spellings(raw) == raw


def test_old_fields_that_are_null_are_filled():
    """Version 5 prefers the scaling, and would take its default for a theta that it does not find beside it."""
    both = both_spellings(
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 9.0}, "rope_theta": None}
    )
    assert both["rope_theta"] == 9.0 and both["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}


def test_a_longrope_of_a_former_name_gets_the_name_of_today():
    parameters = {"rope_type": "longrope", "type": "su", "short_factor": [1.0], "long_factor": [2.0], "rope_theta": 9.0}
    both = both_spellings({"rope_parameters": parameters})
    assert both["rope_scaling"] == {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}


def test_dtype_is_written_in_the_spelling_in_use():
    assert with_dtype({"dtype": "float16"}, torch.bfloat16) == {"dtype": "bfloat16"}
    both = {"dtype": "float16", "torch_dtype": "float16"}
    assert with_dtype(both, torch.float32) == {"dtype": "float32", "torch_dtype": "float32"}
    assert with_dtype({}, torch.float32) == {"torch_dtype": "float32"}
    assert json.dumps(with_dtype({"torch_dtype": "float32"}, torch.float32)) == '{"torch_dtype": "float32"}'
