"""A byte-level BPE trained on the spot, and the end-of-text token of a model that came with its own tokenizer.

With the former every document becomes <|endoftext|> text <|endoftext|>: the one token both begins and ends it, so that
its first word, too, is predicted from something, and generation starts as training did. Must not know rows or models.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from ligermodels.errors import InputError
from ligermodels.tokenizer import Tokenizer as FolderTokenizer
from ligermodels.weights.config_file import CONFIG_FILE, read_config, read_generation_config

END_OF_TEXT, END_OF_TEXT_ID = "<|endoftext|>", 0


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE of at most `vocab_size` entries, <|endoftext|> being 0. The same texts give the same tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        f"{END_OF_TEXT} $A", special_tokens=[(END_OF_TEXT, END_OF_TEXT_ID)]
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and generation_config.json for a tokenizer of `train_tokenizer`."""
    describe = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT}
    generate = {"bos_token_id": END_OF_TEXT_ID, "eos_token_id": END_OF_TEXT_ID}
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(describe, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(generate, indent=2) + "\n")


def load_tokenizer(folder: Path) -> tuple[Tokenizer, int]:
    """The tokenizer of a model folder, and its end-of-text token: config.json's, the first where there are several."""
    end = (read_generation_config(folder) | read_config(folder)).get("eos_token_id")
    if isinstance(end, list) and end:
        end = end[0]
    if not isinstance(end, int):
        raise InputError(f"{folder / CONFIG_FILE}: eos_token_id is {end!r}; it must be the token that ends a document")
    return FolderTokenizer.from_folder(folder).tokenizer, end
