"""Gemma 4: heads of two sizes, shared keys and values, per-layer embeddings, experts beside the MLP."""

from tests.cases.base import FULL, SLIDING, TINY, Raw, family

BASE = {key: value for key, value in TINY.items() if key not in ("hidden_act", "rope_theta")}
GEMMA4_TEXT = BASE | {
    "model_type": "gemma4_text",
    "architectures": ["Gemma4ForCausalLM"],
    "hidden_activation": "gelu_pytorch_tanh",
    "num_hidden_layers": 6,
    "head_dim": 6,
    "global_head_dim": 8,
    "layer_types": [SLIDING, FULL, SLIDING, SLIDING, SLIDING, FULL],
    "num_kv_shared_layers": 3,
    "sliding_window": 5,
    "final_logit_softcapping": 4.0,
    # With 8, a gate closes for whole tokens, and the norm behind it then divides rounding errors.
    "hidden_size_per_layer_input": 24,
    "vocab_size_per_layer_input": 1024,  # the vocabulary of some tests
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "rope_parameters": {
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 300.0},
        SLIDING: {"rope_type": "default", "rope_theta": 30.0},
    },
}
MOE: Raw = {
    "num_hidden_layers": 2,
    "layer_types": [SLIDING, FULL],
    "enable_moe_block": True,
    "num_experts": 5,
    "top_k_experts": 2,
    "moe_intermediate_size": 28,
    # The reference cannot run shared keys without per-layer inputs.
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
}
GEMMA4: Raw = {
    "model_type": "gemma4",
    "architectures": ["Gemma4ForConditionalGeneration"],
    "text_config": {key: value for key, value in GEMMA4_TEXT.items() if key != "architectures"},
    "vision_config": None,
    "audio_config": None,
    "tie_word_embeddings": True,
}

CASES = {
    **family(
        GEMMA4_TEXT,
        {
            "own-keys": {"num_kv_shared_layers": 0},
            "no-layer-inputs": {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
            "keys-are-values": {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
            "keys-are-values-same-heads": {"attention_k_eq_v": True, "num_global_key_value_heads": None},
            "wide-mlp": {"use_double_wide_mlp": True},
            "moe": MOE,
            "moe-layer-inputs": MOE
            | {
                "num_hidden_layers": 4,
                "layer_types": [SLIDING, FULL, SLIDING, FULL],
                "hidden_size_per_layer_input": 24,
                "num_kv_shared_layers": 2,
            },
            "every-expert": MOE | {"top_k_experts": 5},
            "attention-bias": {"attention_bias": True},
            "no-softcap": {"final_logit_softcapping": None},
            "default-layer-types": {"layer_types": None, "num_hidden_layers": 7, "num_kv_shared_layers": 0},
            "default-rope": {"rope_parameters": None},
            "last-layer-forced": {"layer_types": [SLIDING, FULL, SLIDING, SLIDING, SLIDING, SLIDING]},
            "untied": {"tie_word_embeddings": False},
            "norm-eps": {"rms_norm_eps": 0.1},  # beside it the scale of the layers' inputs shows
        },
    ),
    **family(GEMMA4, {}),
}
