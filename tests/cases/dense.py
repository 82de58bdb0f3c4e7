"""Dense families of 2025: dropout of branches, QK-norm without RoPE or after it, parallel branches on a LayerNorm."""

from tests.cases.base import FULL, SLIDING, TINY, YARN, Raw, family

SEED_OSS = TINY | {
    "model_type": "seed_oss",
    "architectures": ["SeedOssForCausalLM"],
    "head_dim": 10,
    "pad_token_id": 4,
    "attention_dropout": 0.0,
    "residual_dropout": 0.0,
}
EXAONE4 = TINY | {
    "model_type": "exaone4",
    "architectures": ["Exaone4ForCausalLM"],
    "num_hidden_layers": 4,
    "head_dim": 10,
    "sliding_window": 5,
    "sliding_window_pattern": 3,
}
HUNYUAN = TINY | {
    "model_type": "hunyuan_v1_dense",
    "architectures": ["HunYuanDenseV1ForCausalLM"],
    "head_dim": 10,
    "pad_token_id": 4,
}
COHERE2 = {key: value for key, value in TINY.items() if key not in ("rms_norm_eps", "tie_word_embeddings")} | {
    "model_type": "cohere2",
    "architectures": ["Cohere2ForCausalLM"],
    "num_hidden_layers": 4,
    "layer_norm_eps": 1e-3,
    "logit_scale": 0.7,
    "sliding_window": 5,
    "sliding_window_pattern": 3,
    "pad_token_id": 4,
}
NO_WINDOW: Raw = {"sliding_window": None, "layer_types": [FULL] * 4}

CASES = {
    **family(
        SEED_OSS,
        {
            "attention-bias-off": {"attention_bias": False},
            "output-bias": {"attention_out_bias": True},
            "mlp-bias": {"mlp_bias": True},
            "tied": {"tie_word_embeddings": True},
        },
    ),
    **family(
        EXAONE4,
        {
            "no-window": NO_WINDOW,
            "layer-types": {"layer_types": [FULL, SLIDING, SLIDING, FULL], "sliding_window_pattern": "LLLG"},
            "rope-yarn": {"rope_scaling": YARN},
            "tied": {"tie_word_embeddings": True},
        },
    ),
    **family(
        HUNYUAN,
        {
            "rope-alpha": {"rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}},
            "attention-bias": {"attention_bias": True},
            "tied": {"tie_word_embeddings": True},
        },
    ),
    **family(
        COHERE2,
        {
            "untied": {"tie_word_embeddings": False},
            "attention-bias": {"attention_bias": True},
            "layer-types": {"layer_types": [FULL, SLIDING, SLIDING, FULL]},
        },
    ),
}
