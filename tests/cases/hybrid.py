"""Families with layers whose memory is a state beside attention. Heads of the delta rule differ in number and size."""

from tests.cases.base import FULL, TINY, YARN, Raw, family

LINEAR, CONV = "linear_attention", "conv"
MAMBA, ATTENTION = "mamba", "attention"
ROPE: Raw = {
    "rope_type": "default",
    "rope_theta": 500.0,
    "partial_rotary_factor": 0.25,
    "mrope_section": [1, 1, 0],
    "mrope_interleaved": True,
}
DELTA: Raw = {key: value for key, value in TINY.items() if key != "rope_theta"} | {
    "rms_norm_eps": 0.1,  # norms of outputs near zero would magnify rounding errors
    "head_dim": 16,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "full_attention_interval": 3,
}
EXPERTS: Raw = {
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
QWEN3_NEXT = (
    DELTA
    | EXPERTS
    | {
        "model_type": "qwen3_next",
        "architectures": ["Qwen3NextForCausalLM"],
        "rope_theta": 500.0,
        "partial_rotary_factor": 0.25,
    }
)
QWEN3_5_TEXT = DELTA | {
    "model_type": "qwen3_5_text",
    "architectures": ["Qwen3_5ForCausalLM"],
    "rope_parameters": ROPE,
}
MOE = {key: value for key, value in DELTA.items() if key != "intermediate_size"} | EXPERTS
QWEN3_5_MOE_TEXT = MOE | {
    "model_type": "qwen3_5_moe_text",
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "rope_parameters": ROPE,
}
VISION: Raw = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "num_position_embeddings": 16,
    "out_hidden_size": 48,
    "patch_size": 4,
    "deepstack_visual_indexes": [],
}


def wrapped(text: Raw, kind: str, name: str) -> Raw:
    """The config of a model with an image side."""
    return {
        "model_type": kind,
        "architectures": [name],
        "text_config": {key: value for key, value in text.items() if key != "architectures"},
        "vision_config": VISION | {"model_type": kind},
        "tie_word_embeddings": False,
        "image_token_id": 97,
        "video_token_id": 98,
    }


QWEN3_5 = wrapped(QWEN3_5_TEXT, "qwen3_5", "Qwen3_5ForConditionalGeneration")
QWEN3_5_MOE = wrapped(QWEN3_5_MOE_TEXT, "qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration")
LFM2 = {key: value for key, value in TINY.items() if key not in ("rms_norm_eps", "intermediate_size")} | {
    "model_type": "lfm2",
    "architectures": ["Lfm2ForCausalLM"],
    "norm_eps": 1e-2,
    "block_ff_dim": 80,
    "block_multiple_of": 12,
    "full_attn_idxs": [1],
    "pad_token_id": 4,
}
LFM2_MOE = {key: value for key, value in TINY.items() if key != "rms_norm_eps"} | {
    "model_type": "lfm2_moe",
    "architectures": ["Lfm2MoeForCausalLM"],
    "norm_eps": 1e-2,
    "layer_types": [CONV, FULL, CONV],
    "num_dense_layers": 1,
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "routed_scaling_factor": 1.7,
    "pad_token_id": 4,
}
GRANITE = TINY | {
    "model_type": "granitemoehybrid",
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "rms_norm_eps": 1e-2,
    "layer_types": [MAMBA, ATTENTION, MAMBA],
    "mamba_n_heads": 6,
    "mamba_d_state": 10,
    "mamba_chunk_size": 8,  # of the reference, which pads a sequence to a multiple of it
    "intermediate_size": 24,
    "shared_intermediate_size": 40,
    "num_local_experts": 7,
    "num_experts_per_tok": 3,
    "embedding_multiplier": 1.5,
    "attention_multiplier": 0.4,
    "residual_multiplier": 0.7,
    "logits_scaling": 1.3,
}
AUX_LOSS: Raw = {"output_router_logits": True, "router_aux_loss_coef": 1.5}
LAYER_TYPES: Raw = {"layer_types": [FULL, LINEAR, LINEAR]}

CASES = {
    **family(
        QWEN3_NEXT,
        {
            "layer-types": LAYER_TYPES,
            "equal-heads": {"linear_num_value_heads": 2},
            "norm-topk-off": {"norm_topk_prob": False},
            "every-expert": {"num_experts_per_tok": 7},
            "mlp-only-layers": {"mlp_only_layers": [0]},
            "sparse-step": {"decoder_sparse_step": 2},
            "attention-bias": {"attention_bias": True},
            "aux-loss": AUX_LOSS,
            "tied": {"tie_word_embeddings": True},
        },
    ),
    **family(
        QWEN3_5_TEXT,
        {
            "layer-types": LAYER_TYPES,
            "equal-heads": {"linear_num_value_heads": 2},
            "three-taps": {"linear_conv_kernel_dim": 3},
            "whole-rotary": {"rope_parameters": ROPE | {"partial_rotary_factor": 1.0, "mrope_section": [3, 3, 2]}},
            "attention-bias": {"attention_bias": True},
            "tied": {"tie_word_embeddings": True},
        },
    ),
    **family(QWEN3_5, {"tied": {"tie_word_embeddings": True}}),
    **family(QWEN3_5_MOE_TEXT, {"every-expert": {"num_experts_per_tok": 7}, "aux-loss": AUX_LOSS}),
    **family(QWEN3_5_MOE, {"tied": {"tie_word_embeddings": True}}),
    **family(
        LFM2,
        {
            "layer-types": {"layer_types": [CONV, CONV, FULL]},
            "unadjusted": {"block_auto_adjust_ff_dim": False},
            "multiplier": {"block_ffn_dim_multiplier": 1.3},
            "four-taps": {"conv_L_cache": 4},
            "conv-bias": {"conv_bias": True},
            "rope-yarn": {"rope_scaling": YARN},
            "tied": {"tie_embedding": True},
        },
    ),
    **family(
        LFM2_MOE,
        {
            "every-expert": {"num_experts_per_tok": 7},
            "norm-topk-off": {"norm_topk_prob": False},
            "no-expert-bias": {"use_expert_bias": False},
            "conv-bias": {"conv_bias": True},
            "tied": {"tie_word_embeddings": True},
        },
    ),
    **family(
        GRANITE,
        {
            "dense": {"num_local_experts": 0, "num_experts_per_tok": 0},
            "every-expert": {"num_experts_per_tok": 7},
            "layer-types": {"layer_types": [LINEAR, LINEAR, FULL]},
            "all-attention": {"layer_types": [ATTENTION] * 3},
            "rope": {"position_embedding_type": "rope", "attention_bias": True},
            "nope": {"position_embedding_type": "nope"},
            "groups": {"mamba_n_groups": 3},
            "three-taps": {"mamba_d_conv": 3, "mamba_conv_bias": False},
            "projection-bias": {"mamba_proj_bias": True},
            "time-step-limit": {"time_step_limit": [0.9, 1.6]},
            "expand": {"mamba_expand": 3, "mamba_d_head": 24},
            "aux-loss": AUX_LOSS,
            "tied": {"tie_word_embeddings": True},
        },
    ),
}
