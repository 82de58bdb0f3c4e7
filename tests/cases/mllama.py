"""Llama 3.2 Vision: blocks of cross-attention in the text model, a tower over tiles with gated positions.

Tiles have 3 x 3 patches of 2 x 2 pixels; with the class token they are padded from 10 rows to 16.
"""

from tests.cases.base import TINY, Raw, family

LLAMA3: Raw = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}  # fmt: skip
TEXT: Raw = TINY | {
    "model_type": "mllama_text_model",
    "num_hidden_layers": 4,
    "max_position_embeddings": 64,
    "cross_attention_layers": [1, 3],
    "pad_token_id": 0,
}
MLLAMA: Raw = {
    "model_type": "mllama",
    "architectures": ["MllamaForConditionalGeneration"],
    "image_token_index": 99,
    "text_config": TEXT,
    "vision_config": {
        "model_type": "mllama_vision_model",
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_global_layers": 2,
        "attention_heads": 2,
        "image_size": 6,
        "patch_size": 2,
        "norm_eps": 1e-4,
        "vision_output_dim": 72,
        "intermediate_layers_indices": [0, 2],
    },
}

CASES = family(
    MLLAMA,
    {
        "first-layer": {"text_config": TEXT | {"cross_attention_layers": [0, 1]}},
        "rope-llama3": {"text_config": TEXT | {"rope_scaling": LLAMA3}},
        "tanh-gelu": {"vision_config": MLLAMA["vision_config"] | {"hidden_act": "gelu_pytorch_tanh"}},
    },
)
