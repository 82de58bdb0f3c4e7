"""Qwen3-VL and its mixture of experts: interleaved axes of positions, a learned table of positions, DeepStack."""

from tests.cases.base import TINY, Raw, family

TEXT: Raw = {key: value for key, value in TINY.items() if key != "tie_word_embeddings"} | {
    "max_position_embeddings": 64,
    "head_dim": 12,
    "rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [2, 2, 2]},
}
VISION: Raw = {
    "depth": 3,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_heads": 2,
    "out_hidden_size": 48,
    "patch_size": 2,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 25,
    "deepstack_visual_indexes": [0, 2],
}
QWEN3_VL: Raw = {
    "model_type": "qwen3_vl",
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "text_config": TEXT | {"model_type": "qwen3_vl_text"},
    "vision_config": VISION | {"model_type": "qwen3_vl"},
    "tie_word_embeddings": False,
    "image_token_id": 90,
    "video_token_id": 91,
    "vision_start_token_id": 92,
    "vision_end_token_id": 93,
}
EXPERTS: Raw = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "decoder_sparse_step": 1}
QWEN3_VL_MOE: Raw = QWEN3_VL | {
    "model_type": "qwen3_vl_moe",
    "architectures": ["Qwen3VLMoeForConditionalGeneration"],
    "text_config": TEXT | EXPERTS | {"model_type": "qwen3_vl_moe_text"},
    "vision_config": VISION | {"model_type": "qwen3_vl_moe"},
}

CASES = {
    **family(
        QWEN3_VL,
        {
            "tied": {"tie_word_embeddings": True},
            "attention-bias": {"text_config": QWEN3_VL["text_config"] | {"attention_bias": True}},
            "sections": {
                "text_config": QWEN3_VL["text_config"]
                | {"rope_scaling": {"rope_type": "default", "mrope_section": [4, 1, 1]}}
            },
        },
    ),
    **family(QWEN3_VL_MOE, {"mlp-only": {"text_config": QWEN3_VL_MOE["text_config"] | {"mlp_only_layers": [1]}}}),
}
