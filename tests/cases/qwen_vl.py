"""Qwen2-VL and Qwen2.5-VL: three-axis positions in the text model, 2-D RoPE and windows in the vision tower.

Configurations are flat, as on the Hub. Images of these towers have patches of 2 x 2 pixels over 2 frames, and squares
of 2 x 2 patches.
"""

from tests.cases.base import TINY, Raw, family

MROPE: Raw = {"type": "mrope", "mrope_section": [1, 2, 1]}
TEXT: Raw = {key: value for key, value in TINY.items() if key != "max_position_embeddings"} | {
    "max_position_embeddings": 64,
    "rope_scaling": MROPE,
    "image_token_id": 90,
    "video_token_id": 91,
    "vision_start_token_id": 92,
    "vision_end_token_id": 93,
}
QWEN2_VL: Raw = TEXT | {
    "model_type": "qwen2_vl",
    "architectures": ["Qwen2VLForConditionalGeneration"],
    "vision_config": {
        "depth": 3,
        "embed_dim": 24,
        "mlp_ratio": 2,
        "num_heads": 2,
        "hidden_size": 48,
        "patch_size": 2,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
}
QWEN2_5_VL: Raw = TEXT | {
    "model_type": "qwen2_5_vl",
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "vision_config": {
        "depth": 3,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_heads": 2,
        "out_hidden_size": 48,
        "patch_size": 2,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 8,
        "fullatt_block_indexes": [1],
        "tokens_per_second": 2,
    },
}


def with_vision(raw: Raw, **changes) -> Raw:
    return {"vision_config": raw["vision_config"] | changes}


CASES = {
    **family(
        QWEN2_VL,
        {
            "tied": {"tie_word_embeddings": True},
            "gelu": with_vision(QWEN2_VL, hidden_act="gelu"),
            "yarn": {"rope_scaling": MROPE | {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}},
        },
    ),
    **family(
        QWEN2_5_VL,
        {
            "tied": {"tie_word_embeddings": True},
            "no-windows": with_vision(QWEN2_5_VL, fullatt_block_indexes=[0, 1, 2]),
            "sliding": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
        },
    ),
}
