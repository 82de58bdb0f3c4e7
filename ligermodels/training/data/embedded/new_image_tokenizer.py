"""The tokenizer and the image processor of new models that read images: those of their family but for their sizes.

The tokens of images are the last of the vocabulary, or the first behind it, which have no row of the head. This module
knows nothing about rows or models.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ligermodels.errors import InputError
from ligermodels.images.settings import IMAGE_PROCESSOR_FILE, PROCESSOR_FILE
from ligermodels.tokenizer import Tokenizer
from ligermodels.tokenizer.chat_template import DEFAULT_TEMPLATE, ChatTemplate
from ligermodels.training.data.embedded.new_tokenizer import train_tokenizer


class ImageTokens(NamedTuple):
    """all: their ids follow those of text. feature: that of each feature. printed: what the template prints."""

    all: tuple[str, ...]
    feature: str
    printed: str


IDEFICS_TOKENS = ImageTokens(
    (
        "<fake_token_around_image>", "<global-img>",
        *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)), "<image>",
    ), "<image>", "<image>",
)  # fmt: skip
TOKENS_OF_PROCESSOR = {
    "Qwen2VLImageProcessor": ImageTokens(
        ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
        "<|image_pad|>",
        "<|vision_start|><|image_pad|><|vision_end|>",
    ),
    "Gemma3ImageProcessor": ImageTokens(
        ("<start_of_image>", "<end_of_image>", "<image_soft_token>"), "<image_soft_token>", "<start_of_image>"
    ),
    "MllamaImageProcessor": ImageTokens(("<|image|>",), "<|image|>", "<|image|>"),
    "PixtralImageProcessor": ImageTokens(("[IMG_BREAK]", "[IMG_END]", "[IMG]"), "[IMG]", "[IMG]"),
    "CLIPImageProcessor": ImageTokens(("<image>",), "<image>", "<image>"),
    "SiglipImageProcessor": ImageTokens(("<image>",), "<image>", "<image>"),
    "Idefics3ImageProcessor": IDEFICS_TOKENS,
    "SmolVLMImageProcessor": IDEFICS_TOKENS,
}
CONTENT = r"""
{%- macro content(message) %}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for part in message.content %}
            {{- 'PRINTED' if part.type == 'image' else part.text }}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}"""


@dataclass(frozen=True)
class NewImages:
    """What a new model fixes about images. token_id: of its image tokens. settings: of its image processor.
    text_settings: of what the text of an image depends on."""

    token_id: int
    settings: dict[str, Any]
    text_settings: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> ImageTokens:
        return TOKENS_OF_PROCESSOR[self.settings["image_processor_type"]]

    def write(self, folder: Path) -> None:
        files = {IMAGE_PROCESSOR_FILE: self.settings, PROCESSOR_FILE: self.text_settings}
        for name, settings in files.items():
            if settings:
                (folder / name).write_text(json.dumps(settings, indent=2) + "\n")


def train_image_tokenizer(texts: Iterable[str], vocab_size: int, images: NewImages) -> Tokenizer:
    """As `train_tokenizer`, with tokens for images. Raises InputError if the model has its image token elsewhere."""
    tokens = images.tokens
    within = 0 if images.token_id >= vocab_size else len(tokens.all)
    tokenizer = train_tokenizer(texts, vocab_size - within)
    tokenizer.tokenizer.add_special_tokens(list(tokens.all))
    found = tokenizer.tokenizer.token_to_id(tokens.feature)
    if found != images.token_id:
        raise InputError(
            f"config: image_token_id is {images.token_id}, but {tokens.feature} of the new tokenizer has the id "
            f"{found}; continue a model that has a tokenizer"
        )
    source = tokenizer.templates[DEFAULT_TEMPLATE].source.replace("message.content", "content(message)")
    content = CONTENT.replace("PRINTED", tokens.printed)
    tokenizer.templates = {DEFAULT_TEMPLATE: ChatTemplate(content + source, "the chat template of new models")}
    return tokenizer
