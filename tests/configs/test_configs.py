"""Reading config.json: what is refused, and that everything else is read as the reference implementation reads it."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

import ligermodels
from ligermodels.architectures import ARCHITECTURES
from ligermodels.configs.rope import FULL_ATTENTION, SLIDING_ATTENTION, Rope
from ligermodels.errors import ConfigError, HubError
from tests.cases import CASES

SAVED_BY_4 = Path(__file__).parent.parent / "data" / "saved_by_transformers_4"

SIZES = {
    "vocab_size": 32,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 8,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "pad_token_id": None,
}
VISION = {"vision_config": {"vision_use_head": False}}
LINEAR = {"rope_type": "linear", "factor": 4.0}
LONG = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
NESTED = {
    FULL_ATTENTION: {"rope_type": "default", "rope_theta": 9.0},
    SLIDING_ATTENTION: {"rope_type": "default", "rope_theta": 8.0},
}
MOE = ("mixtral", "qwen2_moe", "qwen3_moe", "granitemoe")
GEMMAS = ("gemma", "gemma2", "gemma3_text")
TWO_ROPES = ("gemma3", "gemma3_text", "olmo3")  # by layer type
PARTIAL = ("glm", "glm4", "phi3")


def raw(model_type, **fields):
    if model_type == "gemma3":
        return {"model_type": model_type, "text_config": SIZES | fields} | VISION
    return SIZES | {"model_type": model_type} | fields


def read(model_type, **fields):
    return ARCHITECTURES[model_type].Config.from_dict(raw(model_type, **fields))


def refusals():
    """Model type, fields, and what the refusal must name: the field, its value where it has one, the remedy."""
    for name in ARCHITECTURES:
        yield name, {"rope_scaling": {"type": "ntk"}}, ["rope_scaling", "'ntk'", "choose from", "linear"]
        yield name, {"rope_scaling": {"type": "linear"}}, ["rope_scaling", "'linear'", "lacks factor", "add"]
        yield name, {"rope_scaling": 5}, ["rope_scaling", "5", "must be an object"]
        yield name, {"quantization_config": {"bits": 4}}, ["quantization_config", "load the original"]
        yield name, {"head_dim": 7}, ["head_dim", "7", "must be"]
        yield name, {"num_attention_heads": 3, "num_key_value_heads": 2}, ["num_key_value_heads", "2", "must divide"]
        yield name, {"num_hidden_layers": 0}, ["num_hidden_layers", "0", "must be positive"]
        yield name, {"rms_norm_eps": "tiny"}, ["rms_norm_eps", "'tiny'", "must be float"]
        if name not in TWO_ROPES:
            yield name, {"rope_parameters": NESTED}, ["rope_parameters", "give one"]
        else:
            yield name, {"rope_parameters": LINEAR}, ["rope_parameters", "by layer type"]
            yield name, {"rope_parameters": {FULL_ATTENTION: 5}}, [FULL_ATTENTION, "5", "must be an object"]
        if name not in PARTIAL:
            rope = {"rope_type": "default", "partial_rotary_factor": 0.5}
            rope = {FULL_ATTENTION: rope, SLIDING_ATTENTION: rope} if name in TWO_ROPES else rope
            yield name, {"rope_parameters": rope}, ["partial_rotary_factor", "0.5", "must be 1"]
        activation = "hidden_activation" if name in ("gemma2", "gemma3", "gemma3_text") else "hidden_act"
        yield name, {activation: "relu"}, [activation, "'relu'", "'silu'"]
    yield "llama", {"rope_scaling": {"type": "llama3", "factor": 8.0}}, ["original_max_position_embeddings", "add"]
    yield "llama", {"hidden_size": 25, "head_dim": None}, ["num_attention_heads", "hidden_size", "must divide"]
    yield "phi3", {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, ["rope_scaling", "lacks long_factor"]
    yield "phi3", {"rope_scaling": LONG | {"long_factor": [1.0] * 5}}, ["long_factor", "5", "must be", "4"]
    yield "phi3", {"rope_scaling": LONG, "partial_rotary_factor": 0.75}, ["short_factor", "4", "must be", "3"]
    yield "phi3", {"embd_pdrop": 0.1}, ["embd_pdrop", "0.1", "remove it"]
    yield "phi3", {"resid_pdrop": 0.1}, ["resid_pdrop", "0.1", "remove it"]
    yield "mixtral", {"router_jitter_noise": 0.1}, ["router_jitter_noise", "0.1", "remove it"]
    yield "smollm3", {"no_rope_layers": [1, 0]}, ["no_rope_layers", "2", "must have", "8"]
    yield "gemma2", {"attention_dropout": 0.1}, ["attention_dropout", "0.1", "remove it"]
    yield "gemma3", {"final_logit_softcapping": 30.0}, ["final_logit_softcapping", "30.0", "remove it"]
    for name in (*GEMMAS, "gemma3"):
        yield name, {"use_bidirectional_attention": True}, ["use_bidirectional_attention", "True", "remove it"]
    for name in ("mistral", "qwen2", "qwen3_moe", "gemma2", "gemma3", "olmo3", "phi3", "smollm3"):
        yield name, {"layer_types": [FULL_ATTENTION] * 7}, ["layer_types", "7", "must have num_hidden_layers", "8"]
        yield (
            name,
            {"layer_types": [FULL_ATTENTION] * 7 + ["chunked"]},
            ["layer_types", "'chunked'", repr(SLIDING_ATTENTION)],
        )
    for name in MOE:
        experts = "num_experts" if name.startswith("qwen") else "num_local_experts"
        yield name, {experts: 4, "num_experts_per_tok": 5}, ["num_experts_per_tok", "5", experts, "4"]


@pytest.mark.parametrize(("model_type", "fields", "named"), list(refusals()))
def test_what_is_not_supported_is_refused_in_one_line_before_the_weights_are_opened(
    model_type, fields, named, tmp_path
):
    (tmp_path / "config.json").write_text(json.dumps(raw(model_type, **fields)))
    (tmp_path / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(ConfigError) as refused:
        ligermodels.load(tmp_path)
    message = str(refused.value)
    assert message.startswith("config.json: ") and "\n" not in message
    assert all(part in message for part in named), message


@pytest.mark.parametrize(
    ("vision", "named"),
    [
        (None, ["vision_config", "must be an object"]),
        ({}, ["vision_use_head", "must be false"]),
        ({"vision_use_head": True}, ["vision_use_head", "must be false"]),
        ({"vision_use_head": False, "patch_size": "14"}, ["patch_size", "'14'", "must be int"]),
    ],
)
def test_an_image_side_that_is_not_supported_is_refused(vision, named):
    with pytest.raises(ConfigError) as refused:
        ligermodels.create({"model_type": "gemma3", "text_config": SIZES, "vision_config": vision}, device="meta")
    assert all(part in str(refused.value) for part in ["config.json", *named])


def test_an_unknown_model_type_gets_the_nearest(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(raw("qwen3_mo")))
    with pytest.raises(
        HubError, match=r"config\.json: model_type 'qwen3_mo' is not supported; did you mean 'qwen3_moe'"
    ):
        ligermodels.load(tmp_path)


READ_OTHERWISE = {"raw", "model_type", "sliding_window_pattern"}
TESTED_APART = {"ropes", "head_dim", "hidden_act", "layer_types", "sliding_window", "no_rope_layers"}


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_what_a_file_leaves_out_is_as_in_the_reference(model_type):
    ours = ARCHITECTURES[model_type].Config.from_dict({"model_type": model_type} | VISION)
    reference = AutoConfig.for_model(model_type).get_text_config()
    for field in dataclasses.fields(ours):
        if field.name not in READ_OTHERWISE | TESTED_APART:
            expected = getattr(reference, field.name, field.default)  # some lack what they have no use for
            assert plain(getattr(ours, field.name)) == plain(expected), field.name
    if hasattr(reference, "hidden_act"):  # else it has hidden_activation
        assert ours.hidden_act == reference.hidden_act
    implied = reference.hidden_size // reference.num_attention_heads
    assert ours.head_dim == (getattr(reference, "head_dim", None) or implied)
    assert windows(ours) == reference_windows(reference)
    kinds = {kind: (r.rope_type, r.rope_theta, r.partial_rotary_factor) for kind, r in ours.ropes.items()}
    assert kinds == reference_ropes(reference)


def plain(value):
    """Lists as tuples, and what is absent, empty or off as None."""
    return (tuple(value) if isinstance(value, list) else value) or None


def windows(config):
    return [config.window(i) if hasattr(config, "window") else None for i in range(config.num_hidden_layers)]


def reference_windows(reference):
    """Families without layer_types give their window, if any, to all layers."""
    window = getattr(reference, "sliding_window", None) or None
    types = getattr(reference, "layer_types", None) or [SLIDING_ATTENTION] * reference.num_hidden_layers
    return [window if kind == SLIDING_ATTENTION else None for kind in types]


def reference_ropes(reference):
    parameters = reference.rope_parameters
    nested = parameters if FULL_ATTENTION in parameters else {FULL_ATTENTION: parameters}
    return {k: (r["rope_type"], r["rope_theta"], r.get("partial_rotary_factor", 1.0)) for k, r in nested.items()}


@pytest.mark.parametrize("model_type", sorted(set(ARCHITECTURES) - {"gemma3"}))
def test_no_rope_layers_and_sparse_layers_are_as_in_the_reference(model_type):
    config, reference = read(model_type), AutoConfig.for_model(model_type, **SIZES)
    if hasattr(reference, "no_rope_layers"):
        assert [int(config.has_rope(i)) for i in range(8)] == reference.no_rope_layers == [1, 1, 1, 0] * 2
    if hasattr(reference, "decoder_sparse_step"):
        assert [config.is_sparse(i) for i in range(8)] == [True] * 8


YES, NO = 5, None


@pytest.mark.parametrize(
    ("model_type", "fields", "expected"),
    [
        ("llama", {"sliding_window": 5}, None),
        ("mistral", {"sliding_window": 5}, [YES] * 8),
        ("mistral", {"sliding_window": None}, [NO] * 8),
        ("mistral", {}, [4096] * 8),
        ("mixtral", {"sliding_window": 5}, [YES] * 8),
        ("mixtral", {}, [NO] * 8),
        ("phi3", {"sliding_window": 5}, [YES] * 8),
        ("phi3", {}, [NO] * 8),
        ("qwen2", {"sliding_window": 5, "max_window_layers": 3}, [NO] * 8),
        ("qwen2", {"sliding_window": 5, "max_window_layers": 3, "use_sliding_window": True}, [NO] * 3 + [YES] * 5),
        ("qwen2", {"sliding_window": None, "max_window_layers": 0, "use_sliding_window": True}, [NO] * 8),
        ("qwen3", {"sliding_window": 5, "max_window_layers": 6, "use_sliding_window": True}, [NO] * 6 + [YES] * 2),
        ("qwen3", {"sliding_window": 5, "max_window_layers": 0}, [NO] * 8),
        (
            "qwen2_moe",
            {"sliding_window": 5, "max_window_layers": 5, "use_sliding_window": True},
            [YES, NO, YES, NO, YES, NO, NO, NO],
        ),
        ("qwen2_moe", {"sliding_window": 5, "max_window_layers": 5}, [NO] * 8),
        ("qwen3_moe", {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 5}, [YES] * 8),
        ("qwen3_moe", {"sliding_window": 5}, [NO] * 8),
        ("gemma", {"sliding_window": 5}, None),
        ("gemma2", {"sliding_window": 5}, [YES, NO] * 4),
        ("gemma3_text", {"sliding_window": 5}, [YES] * 5 + [NO, YES, YES]),
        ("gemma3_text", {"sliding_window": 5, "sliding_window_pattern": 3}, [YES, YES, NO] * 2 + [YES, YES]),
        ("gemma3", {"sliding_window": 5}, [YES] * 5 + [NO, YES, YES]),
        ("olmo2", {}, None),
        ("olmo3", {"sliding_window": 5}, [YES, YES, YES, NO] * 2),
        ("smollm3", {"sliding_window": 5, "use_sliding_window": True}, [NO, NO, NO, YES] * 2),
        ("smollm3", {"sliding_window": 5}, [NO] * 8),
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


def what_is_computed(config):
    """Its fields, but for what is said otherwise: the activation by several names, the windows by several fields."""
    apart = {"raw", "hidden_act", "hidden_activation", "layer_types", "sliding_window", "rope_local_base_freq"}
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.name not in apart}
    return fields | {"activation": config.activation, "windows": windows(config)}


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_what_transformers_4_saves_reads_as_what_5_saves(model_type, tmp_path):
    AutoConfig.for_model(**json.loads(json.dumps(CASES[model_type]))).save_pretrained(tmp_path)
    files = SAVED_BY_4 / f"{model_type}.json", tmp_path / "config.json"
    by_4, by_5 = (ARCHITECTURES[model_type].Config.from_dict(json.loads(file.read_text())) for file in files)
    assert what_is_computed(by_4) == what_is_computed(by_5)


@pytest.mark.parametrize("model_type", ["qwen2", "qwen2_moe", "qwen3", "gemma2", "gemma3_text", "gemma3", "olmo3"])
def test_layer_types_rule_where_the_file_has_them(model_type):
    types = [
        FULL_ATTENTION,
        FULL_ATTENTION,
        SLIDING_ATTENTION,
        FULL_ATTENTION,
        SLIDING_ATTENTION,
        SLIDING_ATTENTION,
        FULL_ATTENTION,
        FULL_ATTENTION,
    ]
    config = read(model_type, layer_types=types, sliding_window=5)
    assert windows(config) == [NO, NO, YES, NO, YES, YES, NO, NO]


YARN = {"rope_type": "yarn", "factor": 2.0}


@pytest.mark.parametrize(
    ("model_type", "fields", "full", "sliding"),
    [
        # 1. rope_scaling where it is not null, else rope_parameters
        ("llama", {"rope_scaling": LINEAR, "rope_parameters": YARN}, Rope(rope_theta=1e4, **LINEAR), None),
        ("llama", {"rope_scaling": None, "rope_parameters": YARN}, Rope(rope_theta=1e4, **YARN), None),
        ("llama", {"rope_scaling": None}, Rope(rope_theta=1e4), None),
        # 2. theta and the partial factor: that dict's, else the top level's, else the class's
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
        # 3. rope_type or type, by today's or a former name
        ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}, Rope(rope_theta=1e4, **LINEAR), None),
        # 4. Gemma 3 of version 4: the scaling is that of the full layers, the sliding ones have a theta of their own
        ("gemma3_text", {}, Rope(rope_theta=1e6), Rope(rope_theta=1e4)),
        (
            "gemma3",
            {"rope_scaling": LINEAR, "rope_theta": 5.0, "rope_local_base_freq": 3.0},
            Rope(rope_theta=5.0, **LINEAR),
            Rope(rope_theta=3.0),
        ),
        ("gemma3_text", {"rope_parameters": NESTED}, Rope(rope_theta=9.0), Rope(rope_theta=8.0)),
        # 5. OLMo 3 of version 4: scaling and theta are those of the full layers
        ("olmo3", {"rope_scaling": YARN}, Rope(rope_theta=5e5, **YARN), Rope(rope_theta=5e5)),
        ("olmo3", {"rope_theta": 5.0}, Rope(rope_theta=5.0), Rope(rope_theta=5e5)),
        ("olmo3", {"rope_parameters": NESTED}, Rope(rope_theta=9.0), Rope(rope_theta=8.0)),
        # 11. whole numbers are numbers
        ("llama", {"rope_theta": 500000}, Rope(rope_theta=5e5), None),
    ],
)
def test_ropes_are_read_from_both_spellings(model_type, fields, full, sliding):
    assert read(model_type, **fields).ropes == {FULL_ATTENTION: full} | (
        {SLIDING_ATTENTION: sliding} if sliding else {}
    )


@pytest.mark.parametrize("name", ["longrope", "su", "yarn"])
@pytest.mark.parametrize("inside", [{}, {"original_max_position_embeddings": 7}])
def test_longrope_of_phi3_by_any_name_switches_at_the_length_of_the_top_level(name, inside):
    config = read("phi3", rope_scaling=LONG | {"type": name} | inside, original_max_position_embeddings=6)
    factors = {"short_factor": (1.0,) * 4, "long_factor": (2.0,) * 4}
    expected = Rope(rope_theta=1e4, rope_type="longrope", original_max_position_embeddings=6, **factors)
    assert config.ropes == {FULL_ATTENTION: expected} and config.longrope_switch_length == 6


def test_the_new_spelling_of_the_dtype_wins(tmp_path):
    ligermodels.export(ligermodels.create(raw("llama")), tmp_path / "in")
    written = json.loads((tmp_path / "in" / "config.json").read_text())
    (tmp_path / "in" / "config.json").write_text(json.dumps(written | {"dtype": "bfloat16", "torch_dtype": "float16"}))
    assert ligermodels.load(tmp_path / "in").lm_head.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_heads_are_tied_where_the_file_does_not_say_only_as_in_the_reference(model_type):
    tied = AutoConfig.for_model(model_type).tie_word_embeddings
    assert read(model_type).tie_word_embeddings == tied
    assert read(model_type, tie_word_embeddings=not tied).tie_word_embeddings == (not tied)


@pytest.mark.parametrize(
    "fields",
    [
        {"pretraining_tp": 2, "auto_map": {"AutoModel": "x.Y"}, "_name_or_path": "z", "unsloth_fixed": True},
        {"cache_implementation": "hybrid", "transformers.js_config": {}, "use_cache": True, "rope_interleaved": False},
        {"is_llama_config": True, "dual_chunk_attention_config": {"chunk_size": 1}, "eos_token_id": [1, 2]},
    ],
)
@pytest.mark.parametrize("model_type", sorted(set(ARCHITECTURES) - {"gemma3"}))
def test_fields_that_change_nothing_are_kept(model_type, fields):
    config = read(model_type, **fields)
    assert config == read(model_type) and config.raw.items() >= fields.items()


@pytest.mark.parametrize(
    ("model_type", "fields", "activation"),
    [
        ("llama", {"hidden_act": "gelu"}, "gelu"),
        ("llama", {"hidden_act": "gelu_new"}, "gelu_tanh"),
        ("gemma", {"hidden_act": "gelu"}, "gelu_tanh"),
        ("gemma2", {"hidden_act": "silu"}, "gelu_tanh"),
        ("gemma3_text", {"hidden_activation": "silu", "hidden_act": "gelu"}, "silu"),
    ],
)
def test_the_activation_of_gemma(model_type, fields, activation):
    assert read(model_type, **fields).activation == activation


def test_no_experts_makes_every_layer_dense():
    config = read("qwen3_moe", num_experts=0)
    assert [config.is_sparse(i) for i in range(8)] == [False] * 8
