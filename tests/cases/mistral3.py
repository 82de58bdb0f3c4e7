"""Ministral 3, whose queries grow with their position, alone and with the images of Mistral 3; Pixtral."""

from tests.cases.base import TINY, Raw, family

YARN: Raw = {
    "type": "yarn",
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 8,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "mscale": 1.2,
    "mscale_all_dim": 0.7,
    "llama_4_scaling_beta": 0.4,
}
MINISTRAL3: Raw = {key: value for key, value in TINY.items() if key != "rope_theta"} | {
    "model_type": "ministral3",
    "architectures": ["Ministral3ForCausalLM"],
    "head_dim": 10,
    "rope_parameters": YARN,
}
VISION: Raw = {
    "model_type": "pixtral",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": 8,
    "image_size": 16,
    "patch_size": 4,
    "hidden_act": "silu",
    "rope_theta": 20.0,
}
MISTRAL3: Raw = {
    "model_type": "mistral3",
    "architectures": ["Mistral3ForConditionalGeneration"],
    "text_config": {key: value for key, value in MINISTRAL3.items() if key != "architectures"},
    "vision_config": VISION,
    "tie_word_embeddings": False,
    "image_token_index": 98,
    "spatial_merge_size": 2,
}
MISTRAL: Raw = TINY | {"model_type": "mistral", "head_dim": 10, "sliding_window": 6}
ONE_MORE: Raw = VISION | {"num_hidden_layers": 3}
PIXTRAL: Raw = {
    "model_type": "llava",
    "architectures": ["LlavaForConditionalGeneration"],
    "image_token_index": 98,
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "full",
    "text_config": MISTRAL,
    "vision_config": VISION,
}

CASES = {
    **family(
        MINISTRAL3,
        {
            "no-mscale": {"rope_parameters": YARN | {"mscale_all_dim": 0.0, "llama_4_scaling_beta": 0.0}},
            "window": {"sliding_window": 6},
            "tied": {"tie_word_embeddings": True},
        },
    ),
    **family(
        MISTRAL3,
        {
            "text-mistral": {"text_config": MISTRAL},
            "tied": {"tie_word_embeddings": True},
            "merged-by-1": {"spatial_merge_size": 1, "vision_feature_layer": 2, "vision_config": ONE_MORE},
            "projector-bias": {"multimodal_projector_bias": True},
        },
    ),
    "pixtral": PIXTRAL,
    "pixtral-first-block": {**PIXTRAL, "vision_feature_layer": 1, "multimodal_projector_bias": False},
    "pixtral-two-blocks": PIXTRAL | {"vision_feature_layer": [-1, 1]},
    "pixtral-gelu": PIXTRAL | {"vision_config": VISION | {"hidden_act": "gelu"}},
}
