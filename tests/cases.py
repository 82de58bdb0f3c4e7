"""The parity cases: for every switch of every family, the content of a config.json of a tiny model.

Sizes are chosen to catch confusions: fewer key-value heads than heads, head_dim other than hidden / heads, sequences
longer than windows and than the trained length, an odd vocabulary.
"""

from typing import Any

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 99,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QWEN2 = LLAMA | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "max_window_layers": 3}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}

CASES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama-tied": LLAMA | {"tie_word_embeddings": True},
    "llama-multi-head": LLAMA | {"num_key_value_heads": 6},
    "llama-head-dim": LLAMA | {"head_dim": 10},
    "llama-attention-bias": LLAMA | {"attention_bias": True},
    "llama-mlp-bias": LLAMA | {"mlp_bias": True},
    "llama-gelu": LLAMA | {"hidden_act": "gelu"},
    "llama-gelu-tanh": LLAMA | {"hidden_act": "gelu_pytorch_tanh"},
    "llama-padding": LLAMA | {"pad_token_id": 7, "tie_word_embeddings": True},
    "llama-rope-linear": LLAMA | {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama-rope-dynamic": LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 4.0}},
    "llama-rope-yarn": LLAMA | {"rope_scaling": YARN},
    "llama-rope-yarn-mscale": LLAMA
    | {
        "rope_scaling": YARN
        | {"mscale": 1.2, "mscale_all_dim": 0.7, "truncate": False, "original_max_position_embeddings": 64}
    },
    "llama-rope-yarn-factor": LLAMA
    | {"rope_scaling": YARN | {"attention_factor": 1.3, "beta_fast": 8, "beta_slow": 2}},
    "llama-rope-llama3": LLAMA
    | {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
    "qwen2": QWEN2,
    "qwen2-tied": QWEN2 | {"tie_word_embeddings": True},
    "qwen2-sliding": QWEN2 | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "qwen2-layer-types": QWEN2
    | {
        "use_sliding_window": True,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "qwen2-unused-window": QWEN2 | {"use_sliding_window": False, "sliding_window": 4, "max_window_layers": 0},
    "qwen2-rope-yarn": QWEN2 | {"rope_scaling": YARN},
}
