"""The Gemma families: RMSNorm with weight + 1, scaled embeddings, softcaps, two kinds of RoPE."""

from tests.cases.base import FULL, SLIDING, TINY, Raw, family

UNIT_OFFSET = TINY | {"head_dim": 10, "tie_word_embeddings": True, "pad_token_id": 0}
WINDOWED = {key: value for key, value in UNIT_OFFSET.items() if key != "hidden_act"} | {
    "hidden_activation": "gelu_pytorch_tanh",
    "num_hidden_layers": 4,
    "query_pre_attn_scalar": 7,
    "sliding_window": 5,
}
GEMMA = UNIT_OFFSET | {"model_type": "gemma", "architectures": ["GemmaForCausalLM"], "hidden_act": "gelu"}
GEMMA2 = WINDOWED | {
    "model_type": "gemma2",
    "architectures": ["Gemma2ForCausalLM"],
    "attn_logit_softcapping": 6.0,
    "final_logit_softcapping": 4.0,
}
GEMMA3_TEXT = WINDOWED | {
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "rope_local_base_freq": 30.0,
    "sliding_window_pattern": 3,
}
VISION: Raw = {
    "model_type": "siglip_vision_model",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
    "vision_use_head": False,
}
GEMMA3: Raw = {
    "model_type": "gemma3",
    "architectures": ["Gemma3ForConditionalGeneration"],
    "text_config": {key: value for key, value in GEMMA3_TEXT.items() if key != "architectures"},
    "vision_config": VISION,
    "mm_tokens_per_image": 4,
    "boi_token_index": 95,
    "eoi_token_index": 96,
    "image_token_index": 97,
}
UNTIED: Raw = {"tie_word_embeddings": False}
NESTED_ROPE: Raw = {
    "rope_theta": None,
    "rope_local_base_freq": None,
    "rope_parameters": {
        FULL: {"rope_type": "linear", "factor": 2.0, "rope_theta": 900.0},
        SLIDING: {"rope_type": "default", "rope_theta": 40.0},
    },
}


def without_nulls(raw: Raw) -> Raw:
    return {key: value for key, value in raw.items() if value is not None or key.endswith("softcapping")}


CASES = {
    **family(
        GEMMA,
        {
            "untied": {"tie_word_embeddings": False},
            "attention-bias": {"attention_bias": True},
            "gelu-tanh": {"hidden_act": "gelu_pytorch_tanh"},
            "silu": {"hidden_act": "silu"},
        },
    ),
    **family(
        GEMMA2,
        {
            "untied": {"tie_word_embeddings": False},
            "attention-bias": {"attention_bias": True},
            "attention-softcap": {"final_logit_softcapping": None},
            "final-softcap": {"attn_logit_softcapping": None},
            "no-softcap": {"attn_logit_softcapping": None, "final_logit_softcapping": None},
            "layer-types": {"layer_types": [FULL, SLIDING, SLIDING, FULL]},
            "query-scalar": {"query_pre_attn_scalar": 40},
        },
    ),
    **family(
        GEMMA3_TEXT,
        {
            "untied": {"tie_word_embeddings": False},
            "attention-bias": {"attention_bias": True},
            "default-local-theta": {"rope_local_base_freq": None},
            "rope-linear": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
            "nested-rope": NESTED_ROPE,
            "layer-types": {"layer_types": [FULL, SLIDING, SLIDING, FULL]},
            "final-softcap": {"final_logit_softcapping": 4.0},
            "attention-softcap": {"attn_logit_softcapping": 6.0},
        },
    ),
    **family(
        GEMMA3,
        {
            "rope-linear": {"text_config": GEMMA3["text_config"] | NESTED_ROPE},
            "untied": UNTIED | {"text_config": GEMMA3["text_config"] | UNTIED},
            "beyond-the-window": {"mm_tokens_per_image": 16},
            "image-token-without-embedding": {"text_config": GEMMA3["text_config"] | {"vocab_size": 97}},
            "vision-eps": {"vision_config": VISION | {"layer_norm_eps": 0.1}},
            "vision-gelu": {"vision_config": VISION | {"hidden_act": "gelu"}},
        },
    ),
}
CASES = {name: without_nulls(raw) for name, raw in CASES.items()}
