"""A new tokenizer for models that are trained from scratch, and the end-of-text token of a model's own tokenizer.

The new tokenizer is a byte-level BPE trained on the data. Except for its vocabulary it equals Qwen 2's: the same word
boundaries, the same special tokens, the same chat format (ChatML). Libraries that build the tokenizer from the model
type instead of tokenizer.json, as transformers does for Qwen 2, therefore produce the same ids. A document becomes
<|endoftext|> text <|endoftext|>: this one token both begins and ends it, so that the first word of a document is a
target too, and generation starts as training did. This module knows nothing about rows or models.
"""

import json
from collections.abc import Iterable
from pathlib import Path

import tokenizers
from tokenizers import models, pre_tokenizers, processors, trainers

from ligermodels.errors import InputError
from ligermodels.tokenizer import Tokenizer
from ligermodels.tokenizer.built_in_templates import BUILT_IN_TEMPLATES
from ligermodels.tokenizer.chat_template import DEFAULT_TEMPLATE, ChatTemplate
from ligermodels.tokenizer.files import (
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    TokenizerFiles,
    has_tokenizer,
    split_as_qwen2,
)
from ligermodels.weights.config_file import (
    CONFIG_FILE,
    GENERATION_CONFIG_FILE,
    end_of_text_ids,
    read_config,
    read_generation_config,
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
    """Byte-level BPE of at most `vocab_size` entries, the first three of them special. Deterministic in `texts`."""
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


def read_tokenizer_and_end(folder: Path, adapter: Path | None = None) -> tuple[Tokenizer, int]:
    """The tokenizer of a model folder, and its end-of-text token: the first eos_token_id of config.json, otherwise of
    generation_config.json. An adapter's folder with a tokenizer comes first. Raises InputError if none gives one."""
    own = adapter if adapter is not None and has_tokenizer(adapter) else None
    configs = [read_config(folder), read_generation_config(folder)]
    if own is not None:
        configs.insert(0, read_generation_config(own))
    ends = [token for config in configs for token in end_of_text_ids(config, folder)]
    if not ends:
        raise InputError(f"{folder / CONFIG_FILE}: eos_token_id is missing; it must be the end-of-text token")
    return Tokenizer.from_folder(own or folder), ends[0]
