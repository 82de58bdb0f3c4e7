"""The tokenizer of models that begin here, and the end-of-text token of a model that came with its own.

The former is a byte-level BPE trained on the spot, in everything but its vocabulary that of Qwen 2: its words, its
special tokens, its way to write a chat (ChatML). Libraries that build a tokenizer by the model's type rather than from
tokenizer.json, as transformers does for Qwen 2, so come to the same ids. A document becomes <|endoftext|> text
<|endoftext|>: the one token both begins and ends it, so that its first word, too, is predicted from something, and
generation starts as training did. Must not know rows or models.
"""

import json
from collections.abc import Iterable
from pathlib import Path

import tokenizers
from tokenizers import models, pre_tokenizers, processors, trainers

from ligermodels.errors import InputError
from ligermodels.tokenizer import Tokenizer
from ligermodels.tokenizer.chat_template import DEFAULT_TEMPLATE, ChatTemplate
from ligermodels.tokenizer.files import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE, TokenizerFiles, split_as_qwen2
from ligermodels.weights.config_file import CONFIG_FILE, read_config, read_generation_config

END_OF_TEXT, END_OF_TEXT_ID = "<|endoftext|>", 0
START_OF_TURN = "<|im_start|>"
END_OF_TURN, END_OF_TURN_ID = "<|im_end|>", 2
SPECIAL = (END_OF_TEXT, START_OF_TURN, END_OF_TURN)  # their ids are their places
NAMED = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT, "pad_token": END_OF_TEXT}
GENERATION_CONFIG = {"bos_token_id": END_OF_TEXT_ID, "eos_token_id": [END_OF_TEXT_ID, END_OF_TURN_ID]}
CHATML = """\
{%- if tools %}
    {{- raise_exception('tools are not for this template; take a model whose chat template writes them') }}
{%- endif %}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {{- raise_exception('tool calls are not for this template; take a model whose chat template writes them') }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}
            {{- message.content + '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\\n' }}
    {%- else %}
        {{- message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE of at most `vocab_size` entries, the first three special. The same texts give the same one."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    split_as_qwen2(tokenizer)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        f"{END_OF_TEXT} $A", special_tokens=[(END_OF_TEXT, END_OF_TEXT_ID)]
    )
    template = ChatTemplate(CHATML, "the embedded chat template")
    return Tokenizer(
        TokenizerFiles(Path(TOKENIZER_FILE), tokenizer, NAMED, "right", None, {DEFAULT_TEMPLATE: template})
    )


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and generation_config.json for a tokenizer of `train_tokenizer`.

    Generation ends with a text as with an assistant's turn.
    """
    others = {"additional_special_tokens": [START_OF_TURN, END_OF_TURN], "chat_template": CHATML}
    describe = {"tokenizer_class": "PreTrainedTokenizerFast", **NAMED, **others}
    (folder / TOKENIZER_FILE).write_text(tokenizer.tokenizer.to_str(pretty=True), encoding="utf-8")
    (folder / TOKENIZER_CONFIG_FILE).write_text(json.dumps(describe, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(GENERATION_CONFIG, indent=2) + "\n")


def tokenizer_and_end(folder: Path) -> tuple[Tokenizer, int]:
    """The tokenizer of a model folder, and its end-of-text token: config.json's, the first where there are several."""
    end = (read_generation_config(folder) | read_config(folder)).get("eos_token_id")
    if isinstance(end, list) and end:
        end = end[0]
    if not isinstance(end, int):
        raise InputError(f"{folder / CONFIG_FILE}: eos_token_id is {end!r}; it must be the token that ends a document")
    return Tokenizer.from_folder(folder), end
