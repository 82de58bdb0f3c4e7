"""Everything else in config.json is read as the reference implementation reads it."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

import ligermodels
from ligermodels.architectures import ARCHITECTURES
from ligermodels.configs.rope import FULL_ATTENTION
from ligermodels.configs.vision import ClipConfig, PixtralVisionConfig
from tests.cases import CASES
from tests.configs.small_configs import SIZES, SIZES_OF, VISION, raw, read, reference_windows, windows

SAVED_BY_4 = Path(__file__).parent.parent / "data" / "saved_by_transformers_4"
# Fields that the reference names or stores in another way, and fields with tests of their own.
READ_OTHERWISE = {"raw", "model_type", "sliding_window_pattern", "full_attn_idxs"}
TESTED_ELSEWHERE = {"ropes", "head_dim", "hidden_act", "layer_types", "sliding_window", "no_rope_layers"} | {
    "mlp_layer_types",
    "global_head_dim",
    "mamba_d_head",
}


# Families whose text model has a configuration of its own inside that of the file.
NESTED = {"gemma3", "gemma4", "idefics3", "llava", "mistral3", "mllama", "paligemma", "smolvlm"} | {
    *("qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe"),
}
# What has no default in every file: a head_dim that hidden_size does not give, and the text model of Mistral 3.
GIVEN = {"glm4_moe": {"head_dim": 128}, "mistral3": {"text_config": {"model_type": "ministral3"}}}


# What has no effect. That the text model of Qwen3-VL-MoE is tied: the field outside of it decides. That attention of
# PaliGemma's is in both directions: token types say where.
IGNORED = {"qwen3_vl_moe": {"tie_word_embeddings"}, "paligemma": {"use_bidirectional_attention"}}


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_defaults_are_those_of_the_reference(model_type):
    given = GIVEN.get(model_type, {})
    ours = ARCHITECTURES[model_type].Config.from_dict({"model_type": model_type} | VISION | given)
    reference = AutoConfig.for_model(model_type, **given).get_text_config()
    reference.allow_global_per_layer_attribute_access = True  # of Gemma 4: those of its sliding layers
    for field in dataclasses.fields(ours):
        ignored = IGNORED.get(model_type, set())
        if field.name not in READ_OTHERWISE | TESTED_ELSEWHERE | ignored:
            expected = getattr(reference, field.name, field.default)  # some families do not use the field
            assert normalized(getattr(ours, field.name)) == normalized(expected), field.name
    if hasattr(reference, "hidden_act"):  # else it has hidden_activation
        assert ours.hidden_act == reference.hidden_act
    default_head_dim = reference.hidden_size // reference.num_attention_heads
    assert ours.head_dim == (getattr(reference, "head_dim", None) or default_head_dim)
    assert windows(ours) == reference_windows(reference)
    kinds = {kind: (r.rope_type, r.rope_theta, r.partial_rotary_factor) for kind, r in ours.ropes.items()}
    assert kinds == reference_ropes(reference)


TOWER_FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "image_size",
    "patch_size",
)


@pytest.mark.parametrize(
    ("ours", "reference"),
    [(ClipConfig, "clip_vision_model"), (PixtralVisionConfig, "pixtral")],
    ids=["clip", "pixtral"],
)
def test_defaults_of_a_tower_are_those_of_the_reference(ours, reference):
    ours, reference = ours.from_dict({"model_type": reference}), AutoConfig.for_model(reference)
    for field in (*TOWER_FIELDS, "hidden_act"):
        assert getattr(ours, field) == getattr(reference, field), field
    assert ours.in_channels == reference.num_channels


def test_defaults_of_the_text_model_of_pixtral_are_those_of_mistral():
    raw = {"model_type": "llava", "text_config": {"model_type": "mistral"}, "vision_config": {"model_type": "pixtral"}}
    ours = ARCHITECTURES["llava"].of_config(raw).Config.from_dict(raw | {"vision_feature_select_strategy": "full"})
    mistral = ARCHITECTURES["mistral"].Config.from_dict({"model_type": "mistral"})
    assert {field.name: getattr(ours, field.name) for field in dataclasses.fields(mistral)} == vars(mistral) | {
        "raw": ours.raw
    }


def normalized(value):
    """Lists as tuples; absent, empty and false values as None."""
    return (tuple(value) if isinstance(value, list) else value) or None


def reference_ropes(reference):
    parameters = reference.rope_parameters
    nested = parameters if FULL_ATTENTION in parameters else {FULL_ATTENTION: parameters}
    return {k: (r["rope_type"], r["rope_theta"], r.get("partial_rotary_factor", 1.0)) for k, r in nested.items()}


@pytest.mark.parametrize("model_type", sorted(set(ARCHITECTURES) - NESTED))
def test_no_rope_layers_and_sparse_layers_are_as_in_the_reference(model_type):
    config, reference = read(model_type), AutoConfig.for_model(model_type, **SIZES | SIZES_OF.get(model_type, {}))
    if hasattr(reference, "no_rope_layers"):
        assert [int(config.has_rope(i)) for i in range(8)] == reference.no_rope_layers == [1, 1, 1, 0] * 2
    if hasattr(reference, "decoder_sparse_step"):
        assert [config.is_sparse(i) for i in range(8)] == [True] * 8
    if hasattr(reference, "mlp_layer_types"):
        sparse = [kind == "sparse" for kind in reference.mlp_layer_types]
        assert [config.is_sparse(i) for i in range(8)] == sparse == [False] + [True] * 7


def what_affects_the_maths(config):
    """Its fields, with activation and windows in one form: files write them under several names and fields."""
    apart = {"raw", "hidden_act", "hidden_activation", "layer_types", "sliding_window", "rope_local_base_freq"}
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.name not in apart}
    return fields | {"activation": config.activation, "windows": windows(config)}


@pytest.mark.parametrize("model_type", sorted(file.stem for file in SAVED_BY_4.iterdir()))
def test_files_of_transformers_4_and_5_read_the_same(model_type, tmp_path):
    AutoConfig.for_model(**json.loads(json.dumps(CASES[model_type]))).save_pretrained(tmp_path)
    files = SAVED_BY_4 / f"{model_type}.json", tmp_path / "config.json"
    by_4, by_5 = (ARCHITECTURES[model_type].Config.from_dict(json.loads(file.read_text())) for file in files)
    assert what_affects_the_maths(by_4) == what_affects_the_maths(by_5)


def test_dtype_takes_precedence_over_torch_dtype(tmp_path):
    ligermodels.export(ligermodels.create(raw("llama")), tmp_path / "in")
    written = json.loads((tmp_path / "in" / "config.json").read_text())
    (tmp_path / "in" / "config.json").write_text(json.dumps(written | {"dtype": "bfloat16", "torch_dtype": "float16"}))
    assert ligermodels.load(tmp_path / "in").lm_head.weight.dtype == torch.bfloat16


# Files of Mistral 3 that do not name the field store a head of their own, whatever the reference's default. Those of
# Llama 3.2 Vision cannot be tied: see test_refusals.py.
@pytest.mark.parametrize("model_type", sorted(set(ARCHITECTURES) - {"mistral3", "mllama"}))
def test_the_default_of_tied_embeddings_is_that_of_the_reference(model_type):
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
@pytest.mark.parametrize("model_type", sorted(set(ARCHITECTURES) - NESTED))
def test_fields_without_effect_are_kept_in_raw(model_type, fields):
    config = read(model_type, **fields)
    assert config == read(model_type) and config.raw.items() >= fields.items()


@pytest.mark.parametrize(
    ("model_type", "fields", "activation"),
    [
        ("llama", {"hidden_act": "gelu"}, "gelu"),
        ("llama", {"hidden_act": "gelu_new"}, "gelu_tanh"),
        ("llama", {"hidden_act": "swish"}, "silu"),
        ("qwen3_next", {"hidden_act": "swish"}, "silu"),
        ("gemma", {"hidden_act": "gelu"}, "gelu_tanh"),
        ("gemma2", {"hidden_act": "silu"}, "gelu_tanh"),
        ("gemma3_text", {"hidden_activation": "silu", "hidden_act": "gelu"}, "silu"),
    ],
)
def test_gemma_reads_gelu_as_its_tanh_approximation(model_type, fields, activation):
    assert read(model_type, **fields).activation == activation


@pytest.mark.parametrize("model_type", ["llama", "seed_oss", "qwen3_moe", "gpt_oss"])
def test_a_null_dropout_of_attention_is_none(model_type):
    assert read(model_type, attention_dropout=None).attention_dropout == 0.0


def test_without_experts_every_layer_is_dense():
    config = read("qwen3_moe", num_experts=0)
    assert [config.is_sparse(i) for i in range(8)] == [False] * 8
