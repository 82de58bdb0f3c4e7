"""PaliGemma: Gemma and Gemma 2 with pictures of 3 x 3 patches, and prompts that are seen as a whole."""

from tests.cases.base import Raw, family
from tests.cases.gemma import GEMMA, GEMMA2, VISION

PALIGEMMA: Raw = {
    "model_type": "paligemma",
    "architectures": ["PaliGemmaForConditionalGeneration"],
    "image_token_index": 97,
    "projection_dim": 48,
    "text_config": {key: value for key, value in GEMMA.items() if key != "architectures"},
    "vision_config": VISION | {"image_size": 12},
}
GEMMA2_TEXT: Raw = {key: value for key, value in GEMMA2.items() if key != "architectures"} | {"sliding_window": 27}

CASES = family(
    PALIGEMMA,
    {
        "gemma2": {"text_config": GEMMA2_TEXT},
        "untied": {"tie_word_embeddings": False},
        "image-token-without-embedding": {"text_config": PALIGEMMA["text_config"] | {"vocab_size": 97}},
    },
)
