"""Idefics 3 and SmolVLM: Llama with tiles of 6 x 6 patches, and a pixel behind them, that SigLIP encodes."""

from tests.cases.base import TINY, Raw, family

TEXT: Raw = TINY | {"model_type": "llama"}
VISION: Raw = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 13,
    "patch_size": 2,
}


def case(model_type: str, hub_class: str) -> Raw:
    return {
        "model_type": model_type,
        "architectures": [hub_class],
        "image_token_id": 98,
        "scale_factor": 2,
        "text_config": TEXT,
        "vision_config": VISION | {"model_type": f"{model_type}_vision"},
    }


CASES = family(case("idefics3", "Idefics3ForConditionalGeneration"), {}) | family(
    case("smolvlm", "SmolVLMForConditionalGeneration"),
    {
        "wide-squares": {"scale_factor": 3},
        "tower": {"vision_config": VISION | {"hidden_act": "gelu", "layer_norm_eps": 1e-3}},
        "tied": {"tie_word_embeddings": True},
        "tied-in-text": {"text_config": TEXT | {"tie_word_embeddings": True}},
    },
)
