"""Which layers have a sliding window: as in the reference implementation."""

import json

import pytest
from transformers import AutoConfig

from ligermodels.configs.rope import FULL_ATTENTION, SLIDING_ATTENTION
from tests.configs.small_configs import raw, read, reference_windows, windows

WINDOW, FULL = 5, None  # of a layer


@pytest.mark.parametrize(
    ("model_type", "fields", "expected"),
    [
        ("llama", {"sliding_window": 5}, None),
        ("mistral", {"sliding_window": 5}, [WINDOW] * 8),
        ("mistral", {"sliding_window": None}, [FULL] * 8),
        ("mistral", {}, [4096] * 8),
        ("mixtral", {"sliding_window": 5}, [WINDOW] * 8),
        ("mixtral", {}, [FULL] * 8),
        ("phi3", {"sliding_window": 5}, [WINDOW] * 8),
        ("phi3", {}, [FULL] * 8),
        ("qwen2", {"sliding_window": 5, "max_window_layers": 3}, [FULL] * 8),
        ("qwen2", {"sliding_window": 5, "max_window_layers": 3, "use_sliding_window": True}, [FULL] * 3 + [WINDOW] * 5),
        ("qwen2", {"sliding_window": None, "max_window_layers": 0, "use_sliding_window": True}, [FULL] * 8),
        ("qwen3", {"sliding_window": 5, "max_window_layers": 6, "use_sliding_window": True}, [FULL] * 6 + [WINDOW] * 2),
        ("qwen3", {"sliding_window": 5, "max_window_layers": 0}, [FULL] * 8),
        (
            "qwen2_moe",
            {"sliding_window": 5, "max_window_layers": 5, "use_sliding_window": True},
            [WINDOW, FULL, WINDOW, FULL, WINDOW, FULL, FULL, FULL],
        ),
        ("qwen2_moe", {"sliding_window": 5, "max_window_layers": 5}, [FULL] * 8),
        ("qwen3_moe", {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 5}, [WINDOW] * 8),
        ("qwen3_moe", {"sliding_window": 5}, [FULL] * 8),
        ("gemma", {"sliding_window": 5}, None),
        ("gemma2", {"sliding_window": 5}, [WINDOW, FULL] * 4),
        ("gemma3_text", {"sliding_window": 5}, [WINDOW] * 5 + [FULL, WINDOW, WINDOW]),
        (
            "gemma3_text",
            {"sliding_window": 5, "sliding_window_pattern": 3},
            [WINDOW, WINDOW, FULL] * 2 + [WINDOW, WINDOW],
        ),
        ("gemma3", {"sliding_window": 5}, [WINDOW] * 5 + [FULL, WINDOW, WINDOW]),
        ("olmo2", {}, None),
        ("olmo3", {"sliding_window": 5}, [WINDOW, WINDOW, WINDOW, FULL] * 2),
        ("smollm3", {"sliding_window": 5, "use_sliding_window": True}, [FULL, FULL, FULL, WINDOW] * 2),
        ("smollm3", {"sliding_window": 5}, [FULL] * 8),
        ("granite", {}, None),
        ("granitemoe", {}, None),
        ("glm", {}, None),
        ("glm4", {}, None),
    ],
)
def test_which_layers_have_a_window(model_type, fields, expected):
    config = read(model_type, **fields)
    assert windows(config) == (expected or [None] * 8)
    in_file = raw(model_type, **fields)
    reference = AutoConfig.for_model(**json.loads(json.dumps(in_file))).get_text_config()
    if expected:
        assert reference_windows(reference) == expected


@pytest.mark.parametrize("model_type", ["qwen2", "qwen2_moe", "qwen3", "gemma2", "gemma3_text", "gemma3", "olmo3"])
def test_layer_types_take_precedence_over_all_other_fields(model_type):
    expected = [FULL, FULL, WINDOW, FULL, WINDOW, WINDOW, FULL, FULL]
    layer_types = [SLIDING_ATTENTION if window else FULL_ATTENTION for window in expected]
    assert windows(read(model_type, layer_types=layer_types, sliding_window=5)) == expected
