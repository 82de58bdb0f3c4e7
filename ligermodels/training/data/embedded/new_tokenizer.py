"""A new tokenizer for models that are trained from scratch.

The new tokenizer is a byte-level BPE trained on the data. Except for its vocabulary it equals Qwen 2's: the same word
boundaries, the same special tokens, the same chat format (ChatML). Libraries that build the tokenizer from the model
type instead of tokenizer.json, as transformers does for Qwen 2, therefore produce the same ids. A document becomes
<|endoftext|> text <|endoftext|>: this one token both begins and ends it, so that the first word of a document is a
target too, and generation starts as training did.

A new model that reads images also gets the image processor of its family, but for its sizes. The tokens of images are
the last of the vocabulary, or the first behind it, which have no row of the head.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import models, pre_tokenizers, processors, trainers

from ligermodels.errors import InputError
from ligermodels.images.settings import IMAGE_PROCESSOR_FILE, PROCESSOR_FILE
from ligermodels.tokenizer import Tokenizer
from ligermodels.tokenizer.built_in_templates import BUILT_IN_TEMPLATES
from ligermodels.tokenizer.chat_template import DEFAULT_TEMPLATE, ChatTemplate
from ligermodels.tokenizer.files import (
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    TokenizerFiles,
    split_as_qwen2,
)
from ligermodels.weights.config_file import (
    GENERATION_CONFIG_FILE,
)

END_OF_TEXT, END_OF_TEXT_ID = "<|endoftext|>", 0
START_OF_TURN = "<|im_start|>"
END_OF_TURN, END_OF_TURN_ID = "<|im_end|>", 2
SPECIAL_TOKENS = (END_OF_TEXT, START_OF_TURN, END_OF_TURN)  # their ids are 0, 1, 2
NAMED_TOKENS = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT, "pad_token": END_OF_TEXT}
# The fields of config.json. No pad_token_id: the row of the embedding that it names is never trained, and padding is
# the token that begins a text. To generate, padding needs an id.
SPECIAL_IDS = {"bos_token_id": END_OF_TEXT_ID, "eos_token_id": [END_OF_TEXT_ID, END_OF_TURN_ID], "pad_token_id": None}
GENERATION_CONFIG = SPECIAL_IDS | {"pad_token_id": END_OF_TEXT_ID}


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Trains a byte-level BPE of at most `vocab_size` entries, the first three of them special.

    Deterministic in `texts`.
    """
    tokenizer = tokenizers.Tokenizer(models.BPE())
    split_as_qwen2(tokenizer)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        f"{END_OF_TEXT} $A", special_tokens=[(END_OF_TEXT, END_OF_TEXT_ID)]
    )
    template = ChatTemplate(BUILT_IN_TEMPLATES["chatml"], "the chat template chatml")
    return Tokenizer(
        TokenizerFiles(Path(TOKENIZER_FILE), tokenizer, NAMED_TOKENS, "right", None, {DEFAULT_TEMPLATE: template})
    )


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and generation_config.json for a tokenizer of `train_tokenizer`.

    By that generation_config.json, generation stops at the end of a text and at the end of an assistant's turn.
    """
    added = sorted(tokenizer.tokenizer.get_added_tokens_decoder().items())
    special = [token.content for _, token in added if token.content != END_OF_TEXT]
    others = {"additional_special_tokens": special, "chat_template": tokenizer.chat_template}
    describe = {"tokenizer_class": "PreTrainedTokenizerFast", **NAMED_TOKENS, **others}
    (folder / TOKENIZER_FILE).write_text(tokenizer.tokenizer.to_str(pretty=True), encoding="utf-8")
    (folder / TOKENIZER_CONFIG_FILE).write_text(json.dumps(describe, indent=2) + "\n")
    (folder / GENERATION_CONFIG_FILE).write_text(json.dumps(GENERATION_CONFIG, indent=2) + "\n")


class ImageTokens(NamedTuple):
    """The tokens that stand for images.

    all: have the ids behind those of text. feature: stands for one feature. printed: what the template prints.
    """

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
    """What a new model fixes about images.

    token_id: the id of its image tokens. settings: those of its image processor. text_settings: those that the text of
    an image depends on.
    """

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
    """Trains a tokenizer with tokens for images. Raises InputError if the model has its image token elsewhere."""
    tokens = images.tokens
    within = 0 if images.token_id >= vocab_size else len(tokens.all)
    tokenizer = train_tokenizer(texts, vocab_size - within)
    missing = vocab_size - within - tokenizer.tokenizer.get_vocab_size()  # little text makes few entries
    tokenizer.tokenizer.add_special_tokens([f"<|unused_{number}|>" for number in range(missing)])
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
