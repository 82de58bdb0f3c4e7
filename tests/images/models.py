"""Small models that read images, in folders with a tokenizer of bytes, a chat template and an image processor."""

import torch

import ligermodels
from tests.cases import CASES
from tests.images.folders import QWEN_TEMPLATE, byte_tokenizer, write_folder

TURNS = (
    "{% for message in messages %}[{{ message.role }}]{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<pad>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)  # fmt: skip
# Of each family: the kind of its processor, the fields of its two files, the chat template, and the model's fields that
# name tokens. Pictures have as many patches as those of tests/cases.
FAMILIES = {
    "qwen2_vl": (
        "Qwen2VL", {"patch_size": 2, "min_pixels": 16, "max_pixels": 256}, {}, QWEN_TEMPLATE,
        {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"},
    ),
    "qwen2_5_vl": (
        "Qwen2VL", {"patch_size": 2, "min_pixels": 16, "max_pixels": 256}, {}, QWEN_TEMPLATE,
        {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"},
    ),
    "gemma3": (
        "Gemma3", {"size": {"height": 16, "width": 16}}, {"image_seq_length": 4},
        TURNS.replace("IMAGE", "<start_of_image>"), {"image_token_index": "<image_soft_token>"},
    ),
    "llava": (
        "Llava", {"size": {"shortest_edge": 6}, "crop_size": {"height": 6, "width": 6}}, {"patch_size": 2},
        TURNS.replace("IMAGE", "<image>"), {"image_token_index": "<image>"},
    ),
    "mllama": (
        "Mllama", {"size": {"height": 6, "width": 6}}, {}, TURNS.replace("IMAGE", "<|image|>"),
        {"image_token_index": "<|image|>"},
    ),
}  # fmt: skip
VOCABULARY = 280  # bytes and the tokens of any family


def save_image_model(folder, family, seed=0):
    """Writes random weights, a tokenizer and a processor; returns the folder."""
    kind, image, text, template, tokens = FAMILIES[family]
    tokenizer = byte_tokenizer(kind)
    raw, wide = CASES[family], {"vocab_size": VOCABULARY, "max_position_embeddings": 512}
    raw = raw | {name: tokenizer.token_to_id(token) for name, token in tokens.items()}
    if family == "gemma3":
        wide |= {"head_dim": 16}  # of FlexAttention, at least
    raw |= {"text_config": raw["text_config"] | wide} if "text_config" in raw else wide
    raw |= {"eos_token_id": tokenizer.token_to_id("<pad>")}
    model = ligermodels.create(raw, seed=seed)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.fill_(0.5) if key.endswith(("gate_attn", "gate_ffn")) else None  # closed in a new model
    ligermodels.export(model, folder)
    return write_folder(folder, kind, image, text, template)
