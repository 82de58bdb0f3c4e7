"""Dense families that differ more from Llama: packed projections, partial RoPE, LongRoPE, post-norm blocks."""

from tests.cases.base import FULL, SLIDING, TINY, YARN, Raw, family

PHI3 = TINY | {"model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "pad_token_id": 4}
GLM = TINY | {
    "model_type": "glm",
    "architectures": ["GlmForCausalLM"],
    "head_dim": 12,
    "attention_bias": True,
    "pad_token_id": 4,
}
ERNIE4_5 = TINY | {
    "model_type": "ernie4_5",
    "architectures": ["Ernie4_5ForCausalLM"],
    "head_dim": 12,
    "pad_token_id": 4,
}
GLM4 = GLM | {"model_type": "glm4", "architectures": ["Glm4ForCausalLM"]}
OLMO2 = TINY | {"model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"], "pad_token_id": 4}
OLMO3 = OLMO2 | {
    "model_type": "olmo3",
    "architectures": ["Olmo3ForCausalLM"],
    "num_hidden_layers": 4,
    "sliding_window": 5,
}
LONG_FACTORS: Raw = {"short_factor": [1.0, 1.1, 1.3, 1.7], "long_factor": [1.2, 2.0, 4.0, 7.0]}


def longrope(trained: int, name: str = "longrope", longest: int = 64, **further) -> Raw:
    """Config fields of LongRoPE that uses its long factors beyond `trained` tokens."""
    return {
        "rope_scaling": {"type": name} | LONG_FACTORS | further,
        "original_max_position_embeddings": trained,
        "max_position_embeddings": longest,
    }


CASES = {
    **family(
        PHI3,
        {
            "window": {"sliding_window": 6},
            "partial-rotary": {"partial_rotary_factor": 0.75},
            "tied": {"tie_word_embeddings": True},
            "longrope-just-short": longrope(23),
            "longrope-just-long": longrope(22),
            "longrope-long": longrope(20),
            "longrope-su": longrope(20, "su", original_max_position_embeddings=20),
            "longrope-yarn": longrope(20, "yarn"),
            "longrope-factor": longrope(20, factor=8.0),
            "longrope-attention-factor": longrope(20, attention_factor=1.4),
            "longrope-partial": longrope(20, short_factor=[1.0, 1.1, 1.3], long_factor=[1.2, 2.0, 4.0])
            | {"partial_rotary_factor": 0.75, "tie_word_embeddings": True, "sliding_window": 6},
        },
    ),
    **family(ERNIE4_5, {"bias": {"use_bias": True}, "tied": {"tie_word_embeddings": True}}),
    **family(
        GLM,
        {
            "attention-bias-off": {"attention_bias": False},
            "partial-rotary": {"partial_rotary_factor": 0.67},
            "whole-rotary": {"partial_rotary_factor": 1.0},
            "tied": {"tie_word_embeddings": True},
        },
    ),
    **family(
        GLM4,
        {
            "attention-bias-off": {"attention_bias": False},
            "partial-rotary": {"partial_rotary_factor": 0.67},
            "tied": {"tie_word_embeddings": True},
        },
    ),
    **family(
        OLMO2,
        {
            "tied": {"tie_word_embeddings": True},
            "attention-bias": {"attention_bias": True},
            "rope-yarn": {"rope_scaling": YARN},
        },
    ),
    **family(
        OLMO3,
        {
            "tied": {"tie_word_embeddings": True},
            "attention-bias": {"attention_bias": True},
            "rope-yarn": {"rope_theta": 500000.0, "rope_scaling": YARN | {"attention_factor": 1.3}},
            "layer-types": {"layer_types": [FULL, SLIDING, SLIDING, FULL]},
        },
    ),
}
