"""The tokenizer and the image processor of new models that read images: those of Qwen2-VL but for their sizes.

The tokens of images are the last of the vocabulary. This module knows nothing about rows or models.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ligermodels.errors import InputError
from ligermodels.images.settings import IMAGE_PROCESSOR_FILE
from ligermodels.tokenizer import Tokenizer
from ligermodels.tokenizer.chat_template import DEFAULT_TEMPLATE, ChatTemplate
from ligermodels.training.data.new_tokenizer import train_tokenizer

# Their ids end the vocabulary.
IMAGE_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
IMAGE_TOKEN = "<|image_pad|>"
CONTENT = r"""
{%- macro content(message) %}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for part in message.content %}
            {{- '<|vision_start|><|image_pad|><|vision_end|>' if part.type == 'image' else part.text }}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}"""


@dataclass(frozen=True)
class NewImages:
    """What a new model fixes about images. token_id: of its image tokens. settings: of its image processor."""

    token_id: int
    settings: dict[str, Any]

    def write(self, folder: Path) -> None:
        (folder / IMAGE_PROCESSOR_FILE).write_text(json.dumps(self.settings, indent=2) + "\n")


def train_image_tokenizer(texts: Iterable[str], vocab_size: int, images: NewImages) -> Tokenizer:
    """As `train_tokenizer`, with tokens for images. Raises InputError if the model has its image token elsewhere."""
    tokenizer = train_tokenizer(texts, vocab_size - len(IMAGE_TOKENS))
    tokenizer.tokenizer.add_special_tokens(list(IMAGE_TOKENS))
    found = tokenizer.tokenizer.token_to_id(IMAGE_TOKEN)
    if found != images.token_id:
        raise InputError(
            f"config: image_token_id is {images.token_id}, but {IMAGE_TOKEN} of the new tokenizer has the id {found}; "
            "continue a model that has a tokenizer"
        )
    source = tokenizer.templates[DEFAULT_TEMPLATE].source.replace("message.content", "content(message)")
    tokenizer.templates = {DEFAULT_TEMPLATE: ChatTemplate(CONTENT + source, "the chat template of new models")}
    return tokenizer
