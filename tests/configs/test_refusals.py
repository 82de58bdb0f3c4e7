"""Unsupported configs are refused before weights are read, in one line that names field, value and remedy."""

import dataclasses
import json
import typing

import pytest

import ligermodels
from ligermodels.architectures import ARCHITECTURES
from ligermodels.configs.fields import MAXIMUM
from ligermodels.configs.rope import FULL_ATTENTION, SLIDING_ATTENTION
from ligermodels.errors import ConfigError, HubError
from tests.configs.small_configs import LINEAR, NESTED, SIZES, raw

LONGROPE = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
MOE = ("mixtral", "qwen2_moe", "qwen3_moe", "granitemoe", "granitemoehybrid", "qwen3_next", "qwen3_5_moe_text")
GEMMAS = ("gemma", "gemma2", "gemma3_text")
GEMMA4 = ("gemma4", "gemma4_text")
TWO_ROPES = ("gemma3", "gemma3_text", "olmo3", *GEMMA4)  # by layer type
DELTA = ("qwen3_next", "qwen3_5_text", "qwen3_5", "qwen3_5_moe_text", "qwen3_5_moe")
PARTIAL = ("glm", "glm4", "glm4_moe", "phi3", *DELTA)

SWITCHES = (  # model type, switch, a value that nobody publishes, that of published files
    *((name, "output_gate_type", "sigmoid", "swish") for name in DELTA),
    *((name, "moe_layer_freq", 2, 1) for name in ("deepseek_v3", "glm4_moe", "glm4_moe_lite")),
    *((name, "block_use_swiglu", False, True) for name in ("lfm2", "lfm2_moe")),
    *((name, "use_pos_enc", False, True) for name in ("lfm2", "lfm2_moe")),
    ("cohere2", "use_qk_norm", True, False),
    ("cohere2", "use_parallel_block", False, True),
    ("cohere2", "use_gated_activation", False, True),
    ("cohere2", "rotary_pct", 0.5, 1.0),
    ("cohere2", "position_embedding_type", "learned", "rope_gptj"),
    ("cohere2", "order_of_interleaved_layers", "global_attn_first", "local_attn_first"),
    ("hunyuan_v1_dense", "use_cla", True, False),
    ("hunyuan_v1_dense", "use_qk_norm", False, True),
    ("hunyuan_v1_dense", "use_rotary_pos_emb", False, True),
)


def refusals():
    """Model type, fields, and what the message must contain: the field, its value if it has one, the remedy."""
    for name in ARCHITECTURES:
        yield name, {"rope_scaling": {"type": "ntk"}}, ["rope_scaling", "'ntk'", "choose from", "linear"]
        yield name, {"rope_scaling": {"type": "linear"}}, ["rope_scaling", "'linear'", "lacks factor", "add"]
        yield name, {"rope_scaling": 5}, ["rope_scaling", "5", "must be an object"]
        yield name, {"quantization_config": {"bits": 4}}, ["quantization_config", "'fp8'", "load the original"]
        yield name, {"head_dim": 7}, ["head_dim", "7", "must be"]
        yield name, {"num_attention_heads": 3, "num_key_value_heads": 2}, ["num_key_value_heads", "2", "must divide"]
        yield name, {"num_hidden_layers": 0}, ["num_hidden_layers", "0", "must be positive"]
        yield name, {"rms_norm_eps": "tiny"}, ["rms_norm_eps", "'tiny'", "must be float"]
        for part in ("text_config", "vision_config", "audio_config", "rope_parameters"):
            yield name, {part: "x"}, [part, "'x'", "must be an object"]
        if name not in TWO_ROPES:
            yield name, {"rope_parameters": NESTED}, ["rope_parameters", "give one"]
        else:
            yield name, {"rope_parameters": LINEAR}, ["rope_parameters", "by layer type"]
            yield name, {"rope_parameters": {FULL_ATTENTION: 5}}, [FULL_ATTENTION, "5", "must be an object"]
        if name not in PARTIAL:
            rope = {"rope_type": "default", "partial_rotary_factor": 0.5}
            rope = {FULL_ATTENTION: rope, SLIDING_ATTENTION: rope} if name in TWO_ROPES else rope
            yield name, {"rope_parameters": rope}, ["partial_rotary_factor", "0.5", "must be 1"]
        activation = "hidden_activation" if name in ("gemma2", "gemma3", "gemma3_text", *GEMMA4) else "hidden_act"
        yield name, {activation: "relu"}, [activation, "'relu'", "'silu'"]
    yield "llama", {"rope_scaling": LINEAR | {"factor": 1e308}}, ["factor is 1e+308", "must be at most 65536"]
    yield "granitemoehybrid", {"time_step_limit": []}, ["time_step_limit []", "must be two numbers"]
    yield "mllama", {"tie_word_embeddings": True}, ["tie_word_embeddings", "must be false"]
    yield "mllama", {"cross_attention_layers": [1, 40]}, ["cross_attention_layers", "[1, 40]", "must be indices"]
    yield "llama", {"rope_scaling": {"type": "llama3", "factor": 8.0}}, ["original_max_position_embeddings", "add"]
    fp8 = {"quant_method": "fp8"}
    for field, value in (("fmt", "e5m2"), ("activation_scheme", "token"), ("weight_block_size", [128])):
        yield "llama", {"quantization_config": fp8 | {field: value}}, ["quantization_config", field, str(value)]
    yield "llama", {"hidden_size": 25, "head_dim": None}, ["num_attention_heads", "hidden_size", "must divide"]
    yield "phi3", {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, ["rope_scaling", "lacks long_factor"]
    yield "phi3", {"rope_scaling": LONGROPE | {"long_factor": [1.0] * 5}}, ["long_factor", "5", "must have", "4"]
    yield "phi3", {"rope_scaling": LONGROPE, "partial_rotary_factor": 0.75}, ["short_factor", "4", "must have", "3"]
    yield "phi3", {"embd_pdrop": 0.1}, ["embd_pdrop", "0.1", "remove it"]
    yield "phi3", {"resid_pdrop": 0.1}, ["resid_pdrop", "0.1", "remove it"]
    yield "mixtral", {"router_jitter_noise": 0.1}, ["router_jitter_noise", "0.1", "remove it"]
    yield "smollm3", {"no_rope_layers": [1, 0]}, ["no_rope_layers", "2", "must have", "8"]
    yield "gemma2", {"attention_dropout": 0.1}, ["attention_dropout", "0.1", "remove it"]
    yield "gemma3", {"final_logit_softcapping": 30.0}, ["final_logit_softcapping", "30.0", "remove it"]
    for name in (*GEMMAS, "gemma3"):
        yield name, {"use_bidirectional_attention": True}, ["use_bidirectional_attention", "True", "remove it"]
    for name in ("mistral", "qwen2", "qwen3_moe", "gemma2", "gemma3", "olmo3", "phi3", "smollm3"):
        yield name, {"layer_types": [FULL_ATTENTION] * 7}, ["layer_types", "7", "must have one per layer", "8"]
        yield (
            name,
            {"layer_types": [FULL_ATTENTION] * 7 + ["chunked"]},
            ["layer_types", "'chunked'", repr(SLIDING_ATTENTION)],
        )
    yield "olmoe", {"clip_qkv": 8.0}, ["clip_qkv", "8.0", "remove it"]
    for field, value in {"swiglu_limit": 6.0, "swiglu_alpha": 1.0, "hidden_act": "gelu"}.items():
        yield "gpt_oss", {field: value}, [field, repr(value), "must be one of"]
    yield "gpt_oss", {"attention_dropout": 0.1}, ["attention_dropout", "0.1", "remove it"]
    yield "glm4_moe", {"n_routed_experts": 6, "n_group": 4}, ["n_group", "4", "n_routed_experts", "6"]
    yield "glm4_moe", {"n_group": 64, "topk_group": 3}, ["topk_group", "3", "num_experts_per_tok", "8"]
    moe = {"enable_moe_block": True, "num_experts": 2, "top_k_experts": 3, "moe_intermediate_size": 8}
    sizes = {"3": {"head_dim": 16}, "7": {"head_dim": 32}}
    for name in GEMMA4:
        yield name, {"use_bidirectional_attention": "all"}, ["use_bidirectional_attention", "'all'", "remove it"]
        yield name, {"num_global_key_value_heads": 2}, ["num_global_key_value_heads", "2", "must divide", "3"]
        yield name, {"num_kv_shared_layers": 3}, ["num_kv_shared_layers", "3", "a layer of each type", "8 layers"]
        yield name, {"num_kv_shared_layers": 8}, ["num_kv_shared_layers", "8", "a layer of each type", "8 layers"]
        yield name, {"enable_moe_block": True}, ["enable_moe_block", "num_experts", "missing", "add it"]
        yield name, moe, ["top_k_experts", "3", "at most num_experts", "2"]
        yield name, {"per_layer_config": sizes}, ["per_layer_config", "equal in all its layers"]
        yield name, {"per_layer_config": {"7": {"sliding_window": 3}}}, ["per_layer_config", "head_dim"]
        yield name, {"vocab_size_per_layer_input": 31}, ["vocab_size_per_layer_input 31", "at least vocab_size, 32"]
        yield name, {"global_head_dim": 7}, ["head_dim 7", "must be even"]
    for name in ("deepseek_v3", "glm4_moe_lite"):
        yield name, {"num_key_value_heads": 1}, ["num_key_value_heads 1", "num_attention_heads, 3", "leave it out"]
        yield name, {"head_dim": 16}, ["head_dim 16", "must be qk_rope_head_dim, 8"]
        yield name, {"scoring_func": "softmax"}, ["scoring_func", "'softmax'", "'sigmoid'"]
        yield name, {"topk_method": "greedy"}, ["topk_method", "'greedy'", "'noaux_tc'"]
        yield name, {"attention_bias": True, "q_lora_rank": None}, ["attention_bias", "q_lora_rank", "set it false"]
        yield name, {"v_head_dim": 0}, ["v_head_dim", "0", "must be positive"]
    yield "glm4_moe_lite", {"first_k_dense_replace": 2}, ["first_k_dense_replace", "2", "must be one of 1"]
    yield "glm4_moe_lite", {"mlp_layer_types": ["dense"]}, ["mlp_layer_types", "1", "must have one per layer", "8"]
    yield "glm4_moe_lite", {"mlp_layer_types": ["moe"] * 8}, ["mlp_layer_types", "'moe'", "'sparse'"]
    for name in DELTA:
        yield name, {"layer_types": [FULL_ATTENTION] * 7}, ["layer_types", "7", "must have one per layer", "8"]
        yield (
            name,
            {"layer_types": [SLIDING_ATTENTION] * 8},
            ["layer_types", repr(SLIDING_ATTENTION), "linear_attention"],
        )
        yield name, {"hidden_act": "gelu"}, ["hidden_act", "'gelu'", "'silu'"]
        yield name, {"attn_output_gate": False}, ["attn_output_gate", "False", "must be one of True"]
        yield name, {"use_sliding_window": True}, ["use_sliding_window", "True", "remove it"]
        yield name, {"mtp_num_hidden_layers": -1}, ["mtp_num_hidden_layers", "-1", "must not be negative"]
        yield name, {"linear_conv_kernel_dim": 5}, ["linear_conv_kernel_dim", "5", "must be one of 2, 3, 4"]
        yield name, {"linear_key_head_dim": 512}, ["linear_key_head_dim", "512", "at most 256"]
        yield (
            name,
            {"linear_num_key_heads": 3, "linear_num_value_heads": 4},
            ["linear_num_key_heads", "3", "must divide"],
        )
    yield "qwen3_5", {"model_type": "qwen3_5_moe_text"}, ["text_config: model_type", "'qwen3_5_text'"]
    for name in ("lfm2", "lfm2_moe"):
        yield name, {"layer_types": [FULL_ATTENTION] * 7}, ["layer_types", "7", "must have one per layer", "8"]
        yield name, {"layer_types": [SLIDING_ATTENTION] * 8}, ["layer_types", repr(SLIDING_ATTENTION), "'conv'"]
        yield name, {"hidden_act": "gelu"}, ["hidden_act", "'gelu'", "'silu'"]
        yield name, {"conv_L_cache": 5}, ["conv_L_cache", "5", "must be one of 2, 3, 4"]
    yield "lfm2_moe", {"num_experts": 3}, ["num_experts_per_tok", "4", "must be one of 1, 2, 3"]
    for name, switch, value, published in SWITCHES:
        yield name, {switch: value}, [switch, repr(value), f"must be one of {published!r}"]
    yield from (("granitemoehybrid", *refusal) for refusal in granite_refusals())
    for name in MOE:
        experts = "num_experts" if name.startswith("qwen") else "num_local_experts"
        yield name, {experts: 4, "num_experts_per_tok": 5}, ["num_experts_per_tok", "5", experts, "4"]


def granite_refusals():
    """As refusals(), of Granite 4, whose hidden_size here is 24."""
    yield {"layer_types": ["mamba"] * 7}, ["layer_types", "7", "must have one per layer", "8"]
    yield {"layer_types": [SLIDING_ATTENTION] * 8}, ["layer_types", repr(SLIDING_ATTENTION), "'mamba', 'attention'"]
    yield {"position_embedding_type": "alibi"}, ["position_embedding_type", "'alibi'", "'rope', 'nope'"]
    yield {"hidden_act": "gelu"}, ["hidden_act", "'gelu'", "'silu'"]
    yield {"mamba_d_conv": 5}, ["mamba_d_conv", "5", "must be one of 2, 3, 4"]
    yield {"mamba_d_state": 512}, ["mamba_d_state", "512", "at most 256"]
    yield {"mamba_n_heads": 7}, ["mamba_n_heads 7", "must divide", "48"]
    yield {"mamba_n_groups": 5}, ["mamba_n_groups 5", "must divide mamba_n_heads, 6"]
    yield {"mamba_d_head": 4}, ["mamba_d_head", "4", "must be one of", "8"]
    yield {"num_experts_per_tok": 0}, ["num_experts_per_tok", "0", "must be positive"]
    for limit in ([0.1], [0.2, 0.1], [-1.0, 1.0]):
        yield {"time_step_limit": limit}, ["time_step_limit", str(limit), "must be two numbers"]


@pytest.mark.parametrize(("model_type", "fields", "named"), list(refusals()))
def test_an_unsupported_config_is_refused_in_one_line_before_weights_are_read(model_type, fields, named, tmp_path):
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
def test_an_unsupported_vision_config_is_refused(vision, named):
    with pytest.raises(ConfigError) as refused:
        ligermodels.create({"model_type": "gemma3", "text_config": SIZES, "vision_config": vision}, device="meta")
    assert all(part in str(refused.value) for part in ["config.json", *named])


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"vision_feature_layer": -26}, ["vision_feature_layer -26", "24 blocks"]),
        ({"vision_feature_layer": [-2, -26]}, ["vision_feature_layer (-2, -26)", "24 blocks"]),
        ({"vision_feature_layer": []}, ["vision_feature_layer is []", "at least one block"]),
        ({"vision_feature_layer": [-2, "3"]}, ["vision_feature_layer[1] is '3'; must be int"]),
        ({"vision_feature_select_strategy": "cls"}, ["vision_feature_select_strategy 'cls'", "'default', 'full'"]),
        ({"projector_hidden_act": "relu"}, ["projector_hidden_act 'relu'", "'gelu'"]),
        ({"text_config": SIZES | {"model_type": "mistral"}}, ["text_config: model_type 'mistral'", "'llama'"]),
        ({"vision_config": {"model_type": "siglip"}}, ["vision_config: model_type 'siglip'", "'clip_vision_model'"]),
    ],
)
def test_an_unsupported_llava_is_refused(fields, named):
    vision = {"num_hidden_layers": 24, "image_size": 32}
    raw = {"model_type": "llava", "text_config": SIZES, "vision_config": vision} | fields
    with pytest.raises(ConfigError) as refused:
        ligermodels.create(raw, device="meta")
    assert all(part in str(refused.value) for part in ["config.json", *named])


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"projection_dim": 16}, ["projection_dim 16 must be the hidden_size of the text model, 24"]),
        ({"projection_dim": "24"}, ["projection_dim", "must be int"]),
        ({"text_config": SIZES | {"model_type": "gemma3_text"}}, ["text_config: model_type 'gemma3_text'", "'gemma2'"]),
        ({"vision_config": {"image_size": 32}}, ["vision_use_head must be false"]),
        ({"vision_config": {"vision_use_head": False, "image_size": 8}}, ["image_size 8 must be at least patch_size"]),
        ({"vision_config": None}, ["vision_config is None; must be an object"]),
    ],
)
def test_an_unsupported_paligemma_is_refused(fields, named):
    vision = {"image_size": 32, "vision_use_head": False}
    raw = {"model_type": "paligemma", "projection_dim": 24, "text_config": SIZES, "vision_config": vision} | fields
    with pytest.raises(ConfigError) as refused:
        ligermodels.create(raw, device="meta")
    assert all(part in str(refused.value) for part in ["config.json", *named])


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"scale_factor": 3}, ["scale_factor 3 must divide the 4 patches"]),
        ({"scale_factor": 0}, ["scale_factor is 0; must be positive"]),
        ({"scale_factor": "2"}, ["scale_factor", "must be int"]),
        ({"text_config": SIZES | {"model_type": "mistral"}}, ["text_config: model_type 'mistral'", "'llama'"]),
        ({"vision_config": None}, ["vision_config is None; must be an object"]),
        ({"vision_config": {"image_size": 31}}, ["image_size 31 must be at least patch_size 32"]),
    ],
)
@pytest.mark.parametrize("model_type", ["idefics3", "smolvlm"])
def test_an_unsupported_idefics3_is_refused(model_type, fields, named):
    vision = {"image_size": 32, "patch_size": 8}
    raw = {"model_type": model_type, "text_config": SIZES, "vision_config": vision} | fields
    with pytest.raises(ConfigError) as refused:
        ligermodels.create(raw, device="meta")
    assert all(part in str(refused.value) for part in ["config.json", *named])


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"vision_feature_select_strategy": "default"}, ["vision_feature_select_strategy 'default'", "'full'"]),
        ({"text_config": SIZES | {"model_type": "llama"}}, ["text_config: model_type 'llama'", "'mistral'"]),
        ({"vision_feature_layer": -26}, ["vision_feature_layer -26", "24 blocks"]),
        ({"vision_config": {"model_type": "pixtral", "head_dim": 32}}, ["16 heads of size 32", "hidden_size 1024"]),
        (
            {"vision_config": {"model_type": "pixtral", "rope_parameters": {"rope_type": "yarn"}}},
            ["rope_type 'yarn'", "'axial'"],
        ),
    ],
)
def test_an_unsupported_pixtral_is_refused(fields, named):
    text = {"text_config": SIZES | {"model_type": "mistral"}, "vision_config": {"model_type": "pixtral"}}
    raw = {"model_type": "llava", "vision_feature_select_strategy": "full"} | text | fields
    with pytest.raises(ConfigError) as refused:
        ligermodels.create(raw, device="meta")
    assert all(part in str(refused.value) for part in ["config.json", *named])


def test_the_error_for_an_unknown_model_type_suggests_the_closest_one(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(raw("qwen3_mo")))
    with pytest.raises(
        HubError, match=r"config\.json: model_type 'qwen3_mo' is not supported; did you mean 'qwen3_moe'"
    ):
        ligermodels.load(tmp_path)


def test_several_feature_layers_of_mistral3_are_refused():
    raw = {"model_type": "mistral3", "text_config": SIZES, "vision_config": {}, "vision_feature_layer": [-1, -2]}
    with pytest.raises(ConfigError, match=r"vision_feature_layer is \[-1, -2\]; must be int"):
        ligermodels.create(raw, device="meta")


def test_another_text_model_of_mistral3_is_refused():
    raw = {"model_type": "mistral3", "text_config": SIZES | {"model_type": "mixtral"}}
    message = r"text_config: model_type 'mixtral' is not supported; must be one of 'ministral3', 'mistral'"
    with pytest.raises(ConfigError, match=message):
        ligermodels.create(raw, device="meta")


# Numbers that no memory and no loop depends on, or that are compared with another size.
NO_SIZES = {
    "decoder_sparse_step", "first_k_dense_replace", "full_attention_interval", "max_position_embeddings",
    "max_window_layers", "n_group", "no_rope_layer_interval", "num_dense_layers", "num_kv_shared_layers",
    "pad_token_id", "sliding_window", "sliding_window_pattern", "tokens_per_second", "topk_group",
    "vision_feature_layer",
    *("conv_L_cache", "linear_conv_kernel_dim", "mamba_d_conv", "mamba_d_head"),  # one of a few
}  # fmt: skip


def whole_numbers(config):
    hints = typing.get_type_hints(config)
    for field in dataclasses.fields(config):
        kinds = typing.get_args(hints[field.name]) or (hints[field.name],)
        if int in kinds and typing.get_origin(hints[field.name]) is not tuple:
            yield field.name


def test_every_size_has_a_maximum():
    configs = {part for a in ARCHITECTURES.values() for part in (a.Config, getattr(a.Config, "Vision", a.Config))}
    names = {name for config in configs for name in whole_numbers(config)}
    assert {"num_hidden_layers", "num_global_layers"} <= names
    assert names - NO_SIZES <= MAXIMUM.keys()


def test_many_layers_that_read_keys_of_others_are_counted_once():
    """Gemma 4's readers have the last layers of their types before them as sources, and only these are read."""
    config = ligermodels.create("gemma4_text", size="e2b", device="meta").config
    sources = [config.source(layer) for layer in range(config.num_hidden_layers)]
    assert sources[:15] == [None] * 15 and set(sources[15:]) == {13, 14}
    assert [layer for layer in range(config.num_hidden_layers) if config.is_read(layer)] == [13, 14]
