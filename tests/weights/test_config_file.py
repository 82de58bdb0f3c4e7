import copy
import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from ligermodels.errors import CheckpointError
from ligermodels.weights.config_file import both_spellings, read_config, with_dtype

CONFIGS = sorted((Path(__file__).parent.parent / "data" / "configs").iterdir())


def test_a_missing_config_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json: is missing"):
        read_config(tmp_path)


def test_a_config_of_transformers_4_stays_unchanged():
    raw = {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2.0}, "torch_dtype": "bfloat16"}
    assert both_spellings(raw) == raw


def test_a_config_of_transformers_5_gets_the_old_fields():
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


def test_default_rope_has_no_scaling_in_the_old_fields():
    both = both_spellings({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}})
    assert both["rope_scaling"] is None and both["rope_theta"] == 1e4


def test_with_rope_by_layer_type_the_old_fields_are_those_of_full_attention():
    full = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    raw = {
        "rope_parameters": {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    }
    assert both_spellings(raw) == raw | {
        "rope_theta": 1e6,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "rope_local_base_freq": 1e4,
    }


def test_longrope_has_exactly_the_three_keys_that_transformers_4_accepts():
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 4096}
    factors = {"short_factor": [1.0, 1.5], "long_factor": [2.0, 2.5]}
    for parameters in (rope | factors, rope | factors | {"type": "longrope"}):
        raw = {"original_max_position_embeddings": 4096, "rope_parameters": parameters}
        assert both_spellings(raw) == raw | {"rope_theta": 1e4, "rope_scaling": {"type": "longrope"} | factors}


def test_further_keys_of_longrope_are_in_the_old_and_the_new_fields():
    rope = {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0], "attention_factor": 1.2}
    rope["original_max_position_embeddings"] = 16
    assert both_spellings({"rope_parameters": rope})["rope_scaling"] == rope


def test_transformers_reads_the_same_longrope_for_any_family():
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 2, "long_factor": [2.0] * 2, "rope_theta": 1e4}
    rope |= {"original_max_position_embeddings": 16, "factor": 4.0}
    raw = {"model_type": "llama", "hidden_size": 16, "num_attention_heads": 4, "rope_parameters": rope}
    assert as_read(both_spellings(raw))["rope_parameters"] == as_read(raw)["rope_parameters"] | {"type": "longrope"}


def test_the_sub_configurations_of_a_multimodal_config_get_the_old_fields_too():
    text = {"dtype": "float16", "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    raw = {"text_config": text, "vision_config": {"dtype": "float16"}}
    assert both_spellings(raw) == {
        "text_config": text | {"torch_dtype": "float16", "rope_theta": 1e6, "rope_scaling": None},
        "vision_config": {"dtype": "float16", "torch_dtype": "float16"},
    }


def test_fields_that_the_family_lists_as_renamed_are_written_under_both_names():
    raw = {"num_local_experts": 8}
    assert both_spellings(raw) == raw
    assert both_spellings(raw, {"num_experts": "num_local_experts"}) == {"num_local_experts": 8, "num_experts": 8}
    old = {"num_experts": 8}
    assert both_spellings(old, {"num_experts": "num_local_experts"}) == old


def as_read(raw):
    """The fields as transformers reads them from a file, where it writes infinity as an object."""
    infinity = {"__float__": "Infinity"}
    fields = json.loads(json.dumps(raw), object_hook=lambda found: math.inf if found == infinity else found)
    return AutoConfig.for_model(**fields).to_dict()


def without(raw, *fields):
    return {key: without(x, *fields) if isinstance(x, dict) else x for key, x in raw.items() if key not in fields}


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_transformers_reads_the_same_values_from_new_both_and_old_fields(file):
    """transformers 5 reads the new fields alone, old and new fields together, and the old fields alone."""
    raw = without(json.loads(file.read_text()), "_name_or_path")  # transformers 5 drops this field
    renamed = {"num_experts": "num_local_experts"} if "num_experts" in raw else {}
    new = json.loads(AutoConfig.for_model(**copy.deepcopy(raw)).to_json_string())
    assert "rope_theta" not in new and "rope_parameters" in new.get("text_config", new)

    both = both_spellings(new, {old: name for old, name in renamed.items() if name in new})
    old = without(both, "rope_parameters", "dtype", *renamed.values())
    expected = as_read(raw).items()
    assert as_read(new).items() >= expected
    assert as_read(both).items() >= expected
    assert as_read(old).items() >= expected
    assert "num_experts" not in raw or both["num_experts"] == raw["num_experts"]


def test_sorted_fields_stay_sorted_and_others_stay_in_place():
    assert list(both_spellings({"a": 1, "dtype": "float32", "z": 2})) == ["a", "dtype", "torch_dtype", "z"]
    assert list(both_spellings({"z": 1, "dtype": "float32", "a": 2})) == ["z", "dtype", "a", "torch_dtype"]


def test_existing_old_fields_are_kept():
    raw = {"rope_parameters": {"rope_theta": 1e4}, "rope_theta": 5.0, "rope_scaling": None}
    assert both_spellings(raw) == raw


def test_old_fields_that_are_null_are_filled():
    """transformers 5 prefers rope_scaling, and uses its default theta if rope_theta is null beside it."""
    both = both_spellings(
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 9.0}, "rope_theta": None}
    )
    assert both["rope_theta"] == 9.0 and both["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}


def test_the_former_name_of_longrope_is_replaced_by_the_current_one():
    parameters = {"rope_type": "longrope", "type": "su", "short_factor": [1.0], "long_factor": [2.0], "rope_theta": 9.0}
    both = both_spellings({"rope_parameters": parameters})
    assert both["rope_scaling"] == {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}


def test_the_dtype_is_written_to_the_fields_that_exist():
    assert with_dtype({"dtype": "float16"}, torch.bfloat16) == {"dtype": "bfloat16"}
    both = {"dtype": "float16", "torch_dtype": "float16"}
    assert with_dtype(both, torch.float32) == {"dtype": "float32", "torch_dtype": "float32"}
    parts = {"text_config": {"dtype": "float16", "torch_dtype": "float16"}, "vision_config": {}, "dtype": "float16"}
    assert with_dtype(parts, torch.float32) == {
        "text_config": {"dtype": "float32", "torch_dtype": "float32"},
        "vision_config": {},
        "dtype": "float32",
    }
    assert with_dtype({}, torch.float32) == {"torch_dtype": "float32"}
    assert json.dumps(with_dtype({"torch_dtype": "float32"}, torch.float32)) == '{"torch_dtype": "float32"}'
