"""Mixtures of experts. The load-balancing loss has about the weight of the cross-entropy, so that neither hides errors
in the other.
"""

from tests.cases.base import FULL, SLIDING, TINY, YARN, Raw, family

MIXTRAL = TINY | {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "head_dim": 10,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}
QWEN2_MOE = TINY | {
    "model_type": "qwen2_moe",
    "architectures": ["Qwen2MoeForCausalLM"],
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "norm_topk_prob": False,
}
QWEN3_MOE = TINY | {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "head_dim": 10,
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
GRANITEMOE = TINY | {
    "model_type": "granitemoe",
    "architectures": ["GraniteMoeForCausalLM"],
    "intermediate_size": 24,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.4,
    "logits_scaling": 5.0,
}
OLMOE = TINY | {
    "model_type": "olmoe",
    "architectures": ["OlmoeForCausalLM"],
    "intermediate_size": 24,
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "norm_topk_prob": False,
    "pad_token_id": 4,
}
GLM4_MOE = TINY | {
    "model_type": "glm4_moe",
    "architectures": ["Glm4MoeForCausalLM"],
    "head_dim": 12,
    "attention_bias": True,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
    "num_nextn_predict_layers": 1,
}
DEEPSEEK_V3 = TINY | {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "rms_norm_eps": 1e-2,  # the norms of the latents have another one
    "num_key_value_heads": 6,
    "q_lora_rank": 20,
    "kv_lora_rank": 14,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
}
GLM4_MOE_LITE = DEEPSEEK_V3 | {
    "model_type": "glm4_moe_lite",
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "v_head_dim": 22,
    "n_group": 1,
    "topk_group": 1,
}
YARN_32 = YARN | {"original_max_position_embeddings": 32}  # truncation changes its frequencies
GPT_OSS = TINY | {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "head_dim": 12,
    "hidden_size": 96,
    "intermediate_size": 32,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "sliding_window": 6,
    "rope_scaling": YARN_32 | {"truncate": False},
}
AUX_LOSS: Raw = {"output_router_logits": True, "router_aux_loss_coef": 1.5}
ALTERNATING = [SLIDING, FULL, SLIDING]

CASES = {
    **family(
        MIXTRAL,
        {
            "aux-loss": AUX_LOSS,
            "window": {"sliding_window": 6},
            "one-expert": {"num_experts_per_tok": 1},
            "every-expert": {"num_experts_per_tok": 5},
            "tied": {"tie_word_embeddings": True},
        },
    ),
    **family(
        QWEN2_MOE,
        {
            "norm-topk": {"norm_topk_prob": True},
            "every-expert": {"num_experts_per_tok": 7},
            "qkv-bias-off": {"qkv_bias": False},
            "mlp-only-layers": {"mlp_only_layers": [0, 2]},
            "sparse-step": {"decoder_sparse_step": 2},
            "aux-loss": AUX_LOSS,
            "sliding": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
            "unused-window": {"use_sliding_window": False, "sliding_window": 5},
            "layer-types": {"use_sliding_window": True, "sliding_window": 4, "layer_types": ALTERNATING},
            "tied": {"tie_word_embeddings": True},
        },
    ),
    **family(
        QWEN3_MOE,
        {
            "norm-topk-off": {"norm_topk_prob": False},
            "every-expert": {"num_experts_per_tok": 7},
            "attention-bias": {"attention_bias": True},
            "mlp-only-layers": {"mlp_only_layers": [0, 2]},
            "sparse-step": {"decoder_sparse_step": 2},
            "aux-loss": AUX_LOSS | {"mlp_only_layers": [1]},
            "sliding": {"use_sliding_window": True, "sliding_window": 5},
            "unused-window": {"use_sliding_window": False, "sliding_window": 5},
            "tied": {"tie_word_embeddings": True},
        },
    ),
    **family(
        GRANITEMOE,
        {
            "every-expert": {"num_experts_per_tok": 5},
            "aux-loss": AUX_LOSS,
            "attention-bias": {"attention_bias": True},
            "tied": {"tie_word_embeddings": True},
        },
    ),
    **family(
        OLMOE,
        {
            "norm-topk": {"norm_topk_prob": True},
            "every-expert": {"num_experts_per_tok": 7},
            "attention-bias": {"attention_bias": True},
            "aux-loss": AUX_LOSS,
            "tied": {"tie_word_embeddings": True},
        },
    ),
    **family(
        DEEPSEEK_V3,
        {
            "no-query-latent": {"q_lora_rank": None},
            "rope-half-split": {"rope_interleave": False},
            "rope-yarn": {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
            "rope-yarn-mscale": {"rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}},
            "rope-yarn-no-mscale": {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 0.0}},
            "attention-bias": {"attention_bias": True},
            "values-wider-than-keys": {"v_head_dim": 26},
            "dense-layers": {"first_k_dense_replace": 2},
            "norm-topk-off": {"norm_topk_prob": False},
            "every-expert": {"num_experts_per_tok": 12, "topk_group": 4},
            "tied": {"tie_word_embeddings": True},
        },
    ),
    **family(
        GLM4_MOE_LITE,
        {
            "layer-types": {"mlp_layer_types": ["sparse", "dense", "sparse"]},
            "every-expert": {"num_experts_per_tok": 12},
        },
    ),
    **family(
        GPT_OSS,
        {
            "every-expert": {"num_experts_per_tok": 5},
            "aux-loss": AUX_LOSS,
            "attention-bias-off": {"attention_bias": False},
            "truncate": {"rope_scaling": YARN_32},
            "rope-default": {"rope_scaling": None},
            "layer-types": {"layer_types": [*ALTERNATING[1:], FULL]},
            "tied": {"tie_word_embeddings": True},
        },
    ),
    **family(
        GLM4_MOE,
        {
            "one-group": {"n_group": 1, "topk_group": 1},
            "every-expert": {"num_experts_per_tok": 12, "topk_group": 4},
            "norm-topk-off": {"norm_topk_prob": False},
            "qk-norm": {"use_qk_norm": True},
            "attention-bias-off": {"attention_bias": False},
            "sparse": {"first_k_dense_replace": 0, "n_shared_experts": 2},
            "partial-rotary": {"partial_rotary_factor": 0.67},
            "tied": {"tie_word_embeddings": True},
        },
    ),
}
CASES["qwen3_moe-num-local-experts"] = {
    "num_local_experts" if key == "num_experts" else key: value for key, value in QWEN3_MOE.items()
}
