"""Rotary embeddings are read from both spellings, of transformers 4 and 5."""

import pytest

from ligermodels.configs.rope import FULL_ATTENTION, SLIDING_ATTENTION, Rope
from tests.configs.small_configs import LINEAR, NESTED, read

LONGROPE = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
YARN = {"rope_type": "yarn", "factor": 2.0}


@pytest.mark.parametrize(
    ("model_type", "fields", "full", "sliding"),
    [
        # 1. rope_scaling takes precedence over rope_parameters, unless it is null
        ("llama", {"rope_scaling": LINEAR, "rope_parameters": YARN}, Rope(rope_theta=1e4, **LINEAR), None),
        ("llama", {"rope_scaling": None, "rope_parameters": YARN}, Rope(rope_theta=1e4, **YARN), None),
        ("llama", {"rope_scaling": None}, Rope(rope_theta=1e4), None),
        # 2. theta and partial_rotary_factor: from that object, else from the top level, else the family's default
        ("llama", {"rope_theta": 5.0, "rope_parameters": {"rope_theta": 7.0}}, Rope(rope_theta=7.0), None),
        ("llama", {"rope_theta": 5.0, "rope_scaling": LINEAR}, Rope(rope_theta=5.0, **LINEAR), None),
        ("mixtral", {}, Rope(rope_theta=1e6), None),
        ("smollm3", {}, Rope(rope_theta=2e6), None),
        ("glm", {}, Rope(rope_theta=1e4, partial_rotary_factor=0.5), None),
        ("glm4", {"partial_rotary_factor": 0.25}, Rope(rope_theta=1e4, partial_rotary_factor=0.25), None),
        (
            "glm",
            {"partial_rotary_factor": 0.25, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.75}},
            Rope(rope_theta=1e4, partial_rotary_factor=0.75),
            None,
        ),
        # 3. rope_type, or its former name type
        ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}, Rope(rope_theta=1e4, **LINEAR), None),
        # 4. Gemma 3, version 4: the scaling is for full-attention layers; sliding-window layers have their own theta
        ("gemma3_text", {}, Rope(rope_theta=1e6), Rope(rope_theta=1e4)),
        (
            "gemma3",
            {"rope_scaling": LINEAR, "rope_theta": 5.0, "rope_local_base_freq": 3.0},
            Rope(rope_theta=5.0, **LINEAR),
            Rope(rope_theta=3.0),
        ),
        ("gemma3_text", {"rope_parameters": NESTED}, Rope(rope_theta=9.0), Rope(rope_theta=8.0)),
        # 5. OLMo 3, version 4: scaling and theta are for full-attention layers
        ("olmo3", {"rope_scaling": YARN}, Rope(rope_theta=5e5, **YARN), Rope(rope_theta=5e5)),
        ("olmo3", {"rope_theta": 5.0}, Rope(rope_theta=5.0), Rope(rope_theta=5e5)),
        ("olmo3", {"rope_parameters": NESTED}, Rope(rope_theta=9.0), Rope(rope_theta=8.0)),
        # 6. a null factor of YaRN is the ratio of the lengths
        (
            "llama",
            {
                "max_position_embeddings": 96,
                "rope_scaling": YARN | {"factor": None, "original_max_position_embeddings": 32},
            },
            Rope(rope_theta=1e4, rope_type="yarn", factor=3.0, original_max_position_embeddings=32),
            None,
        ),
        # 7. an integer is accepted for a float
        ("llama", {"rope_theta": 500000}, Rope(rope_theta=5e5), None),
    ],
)
def test_ropes_are_read_from_both_spellings(model_type, fields, full, sliding):
    assert read(model_type, **fields).ropes == {FULL_ATTENTION: full} | (
        {SLIDING_ATTENTION: sliding} if sliding else {}
    )


@pytest.mark.parametrize("name", ["longrope", "su", "yarn"])
@pytest.mark.parametrize("inside", [{}, {"original_max_position_embeddings": 7}])
def test_longrope_of_phi3_under_any_name_switches_at_the_top_level_length(name, inside):
    config = read("phi3", rope_scaling=LONGROPE | {"type": name} | inside, original_max_position_embeddings=6)
    factors = {"short_factor": (1.0,) * 4, "long_factor": (2.0,) * 4}
    expected = Rope(rope_theta=1e4, rope_type="longrope", original_max_position_embeddings=6, **factors)
    assert config.ropes == {FULL_ATTENTION: expected} and config.longrope_switch_length == 6
