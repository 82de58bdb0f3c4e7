"""Llama and similar families: pre-norm blocks, RoPE over whole heads, dense feed-forward layers."""

from tests.cases.base import FULL, SLIDING, TINY, YARN, Raw, family

LLAMA = TINY | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
MISTRAL = TINY | {
    "model_type": "mistral",
    "architectures": ["MistralForCausalLM"],
    "head_dim": 10,
    "sliding_window": 6,
}
QWEN2 = TINY | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "max_window_layers": 3}
QWEN3 = TINY | {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "head_dim": 10,
    "max_window_layers": 3,
}
SMOLLM3 = TINY | {
    "model_type": "smollm3",
    "architectures": ["SmolLM3ForCausalLM"],
    "num_hidden_layers": 4,
    "tie_word_embeddings": True,
    "pad_token_id": 4,
}
GRANITE = TINY | {
    "model_type": "granite",
    "architectures": ["GraniteForCausalLM"],
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.4,
    "logits_scaling": 5.0,
}
NO_MULTIPLIERS: Raw = {
    "embedding_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
}
ALTERNATING = [SLIDING, FULL, SLIDING]
LLAMA3: Raw = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

CASES = {
    **family(
        LLAMA,
        {
            "tied": {"tie_word_embeddings": True},
            "multi-head": {"num_key_value_heads": 6},
            "head-dim": {"head_dim": 10},
            "attention-bias": {"attention_bias": True},
            "mlp-bias": {"mlp_bias": True},
            "gelu": {"hidden_act": "gelu"},
            "gelu-tanh": {"hidden_act": "gelu_pytorch_tanh"},
            "padding": {"pad_token_id": 7, "tie_word_embeddings": True},
            "rope-linear": {"rope_scaling": {"type": "linear", "factor": 4.0}},
            "rope-dynamic": {"rope_scaling": {"type": "dynamic", "factor": 4.0}},
            "rope-yarn": {"rope_scaling": YARN},
            "rope-yarn-mscale": {
                "rope_scaling": YARN
                | {"mscale": 1.2, "mscale_all_dim": 0.7, "truncate": False, "original_max_position_embeddings": 64}
            },
            "rope-yarn-factor": {"rope_scaling": YARN | {"attention_factor": 1.3, "beta_fast": 8, "beta_slow": 2}},
            "rope-llama3": {"rope_scaling": LLAMA3},
        },
    ),
    **family(
        MISTRAL,
        {
            "no-window": {"sliding_window": None},
            "hidden-head-dim": {"head_dim": None},
        },
    ),
    **family(
        QWEN2,
        {
            "tied": {"tie_word_embeddings": True},
            "sliding": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
            "layer-types": {"use_sliding_window": True, "sliding_window": 4, "layer_types": ALTERNATING},
            "unused-window": {"use_sliding_window": False, "sliding_window": 4, "max_window_layers": 0},
            "rope-yarn": {"rope_scaling": YARN},
        },
    ),
    **family(
        QWEN3,
        {
            "tied": {"tie_word_embeddings": True},
            "attention-bias": {"attention_bias": True},
            "sliding": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
            "unused-window": {"use_sliding_window": False, "sliding_window": 4, "max_window_layers": 0},
            "rope-yarn": {"rope_scaling": YARN},
        },
    ),
    **family(
        SMOLLM3,
        {
            "untied": {"tie_word_embeddings": False},
            "interval": {"no_rope_layer_interval": 2},
            "no-rope-layers": {"no_rope_layers": [0, 1, 1, 0]},
            "sliding": {"use_sliding_window": True, "sliding_window": 5, "no_rope_layer_interval": 2},
            "unused-window": {"use_sliding_window": False, "sliding_window": 5},
            "attention-bias": {"attention_bias": True},
            "mlp-bias": {"mlp_bias": True},
            "rope-yarn": {"rope_scaling": YARN},
        },
    ),
    **family(
        GRANITE,
        {
            "embedding-multiplier": NO_MULTIPLIERS | {"embedding_multiplier": 3.0},
            "attention-multiplier": NO_MULTIPLIERS | {"attention_multiplier": 0.2},
            "residual-multiplier": NO_MULTIPLIERS | {"residual_multiplier": 0.4},
            "logits-scaling": NO_MULTIPLIERS | {"logits_scaling": 5.0},
            "attention-bias": {"attention_bias": True},
            "mlp-bias": {"mlp_bias": True},
            "tied": {"tie_word_embeddings": True},
        },
    ),
}
