"""LLaVA: Llama with pictures of 3 x 3 patches, which CLIP encodes with a class token before them."""

from tests.cases.base import TINY, Raw, family

TEXT: Raw = TINY | {"model_type": "llama"}
VISION: Raw = {
    "model_type": "clip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 6,
    "patch_size": 2,
    "projection_dim": 16,
}
LLAVA: Raw = {
    "model_type": "llava",
    "architectures": ["LlavaForConditionalGeneration"],
    "image_token_index": 98,
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
    "text_config": TEXT,
    "vision_config": VISION,
}

CASES = family(
    LLAVA,
    {
        "last-block": {"vision_feature_layer": -1},
        "first-block": {"vision_feature_layer": 1},
        "three-blocks": {"vision_feature_layer": [2, -3, -2]},
        "class-token": {"vision_feature_select_strategy": "full"},
        "no-projector-bias": {"multimodal_projector_bias": False},
        "tower": {"vision_config": VISION | {"hidden_act": "gelu", "layer_norm_eps": 1e-3}},
        "tied": {"text_config": TEXT | {"tie_word_embeddings": True}},
    },
)
