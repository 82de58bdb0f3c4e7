"""The tokenizer of a run: a new one, the chat template, the token that ends a turn in it, and the files of an export.

A new tokenizer is a byte-level BPE trained on the data. Except for its vocabulary it equals Qwen 2's: the same word
boundaries, the same special tokens, the same chat format (ChatML). Libraries that build the tokenizer from the model
type instead of tokenizer.json, as transformers does for Qwen 2, therefore produce the same ids. A document becomes
<|endoftext|> text <|endoftext|>: this one token both begins and ends it, so that the first word of a document is a
target too, and generation starts as training did. A new model that reads images also gets the image processor of its
family, but for its sizes. The tokens of images are the last of the vocabulary, or the first behind it, which have no
row of the head.

`--chat-template` replaces the templates of the run's tokenizer. The token that ends a turn becomes a stop token of the
exported model, in generation_config.json, where transformers, vLLM and this library look for it.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import models, pre_tokenizers, processors, trainers

from ligermodels.errors import InputError, suggest_closest
from ligermodels.hub import load_tokenizer
from ligermodels.images.settings import IMAGE_PROCESSOR_FILE, PROCESSOR_FILE
from ligermodels.tokenizer import Tokenizer
from ligermodels.tokenizer.chat_template import (
    BUILT_IN_TEMPLATES,
    DEFAULT_TEMPLATE,
    MAX_TEMPLATE_BYTES,
    TEMPLATE_FILE,
    TEMPLATE_FOLDER,
    TEMPLATE_JSON_FILE,
    ChatTemplate,
)
from ligermodels.tokenizer.files import (
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    TokenizerFiles,
    has_tokenizer,
    split_as_qwen2,
)
from ligermodels.training.data.formats.streams import print_status
from ligermodels.weights.config_file import CONFIG_FILE, GENERATION_CONFIG_FILE, end_of_text_ids, read_generation_config
from ligermodels.weights.exporting import replace_tokenizer
from ligermodels.weights.reading import read_text
from ligermodels.weights.writing import write_json

QUESTION, ANSWER = "QUESTION5b1c", "ANSWER5b1c"  # texts that no template contains
END_OF_TEXT, END_OF_TEXT_ID = "<|endoftext|>", 0
START_OF_TURN = "<|im_start|>"
END_OF_TURN, END_OF_TURN_ID = "<|im_end|>", 2
SPECIAL_TOKENS = (END_OF_TEXT, START_OF_TURN, END_OF_TURN)  # their ids are 0, 1, 2
NAMED_TOKENS = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT, "pad_token": END_OF_TEXT}
# The fields of config.json. No pad_token_id: the row of the embedding that it names is never trained, and padding is
# the token that begins a text. To generate, padding needs an id.
SPECIAL_IDS = {"bos_token_id": END_OF_TEXT_ID, "eos_token_id": [END_OF_TEXT_ID, END_OF_TURN_ID], "pad_token_id": None}
GENERATION_CONFIG = SPECIAL_IDS | {"pad_token_id": END_OF_TEXT_ID}

# The tokens of the built-in templates. Formats without tokens of their own end a turn by eos_token.
OWN_TOKENS = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "gemma": ("<start_of_turn>", "<end_of_turn>"),
    "granite": ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"),
    "phi3": ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
}


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Trains a byte-level BPE of at most `vocab_size` entries, the first three of them special.

    Deterministic in `texts`.
    """
    tokenizer = tokenizers.Tokenizer(models.BPE())
    split_as_qwen2(tokenizer)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(SPECIAL_TOKENS), show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )  # fmt: skip
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


def use_template(tokenizer: Tokenizer, name_or_file: str, title: str | None = None) -> None:
    """Makes a built-in template, or that of a Jinja file, the only one of `tokenizer`.

    title: names the tokenizer in errors; by default its folder does. Raises InputError for a template that does not
    exist, does not fit the tokenizer, or does not render a message.
    """
    if name_or_file in BUILT_IN_TEMPLATES:
        refuse_missing_tokens(name_or_file, tokenizer, title or str(tokenizer.file.parent))
        template = ChatTemplate(BUILT_IN_TEMPLATES[name_or_file], f"the chat template {name_or_file}")
    else:
        template = template_of_file(name_or_file)
    tokenizer.templates = {DEFAULT_TEMPLATE: template}
    if QUESTION not in tokenizer.render_chat_template([{"role": "user", "content": QUESTION}]):
        raise InputError(f"{template.origin}: does not write the user's message; it is not a chat template")
    if end_of_turn(tokenizer) is None:
        print_status(
            f"warning: {template.origin}: no special token ends an answer, so generation may run to its limit of tokens"
        )


def refuse_missing_tokens(name: str, tokenizer: Tokenizer, title: str) -> None:
    missing = missing_tokens(name, tokenizer)
    if missing:
        raise InputError(
            f"--chat-template {name}: {title} has no token {', '.join(missing)}; {template_advice(tokenizer)}"
        )


def missing_tokens(name: str, tokenizer: Tokenizer) -> list[str]:
    """The tokens of a built-in template that the tokenizer would not read as one token; "eos_token" if it has none."""
    texts = OWN_TOKENS.get(name, ())
    ids = {text: tokenizer.encode(text, add_special_tokens=False) for text in texts}
    missing = [text for text in texts if ids[text] != [tokenizer.tokenizer.token_to_id(text)]]
    needs_eos = "eos_token" in BUILT_IN_TEMPLATES[name] and tokenizer.eos_token is None
    return [*missing, "eos_token"] if needs_eos else missing


def fitting_templates(tokenizer: Tokenizer) -> list[str]:
    """The names of the built-in templates that the tokenizer has all tokens for, the best first."""
    return [name for name in BUILT_IN_TEMPLATES if not missing_tokens(name, tokenizer)]


def template_advice(tokenizer: Tokenizer) -> str:
    """Returns what to do for a tokenizer without a fitting chat template."""
    best, *others = fitting_templates(tokenizer) or ["FILE"]
    return f"use --chat-template {best}" + (f", or {', '.join(others)} or a Jinja file" if others else "")


def template_of_file(name: str) -> ChatTemplate:
    file = Path(name).expanduser()
    if not file.is_file():
        names = ", ".join(BUILT_IN_TEMPLATES)
        raise InputError(
            f"--chat-template {name}: is neither a file nor one of {names}{suggest_closest(name, BUILT_IN_TEMPLATES)}"
        )
    if file.suffix == ".json":
        raise InputError(f"--chat-template {name}: must be a Jinja file; save the field chat_template of it as one")
    return ChatTemplate(read_text(file, MAX_TEMPLATE_BYTES), str(file))


def end_of_turn(tokenizer: Tokenizer) -> int | None:
    """Returns the added token that the chat template writes after the assistant's text, or else before the next turn.

    None if there is none, or if the template does not render a user's message, an answer and a message.
    """
    messages = [
        {"role": role, "content": text} for role, text in (("user", QUESTION), ("assistant", ANSWER), ("user", "more"))
    ]
    try:
        text = tokenizer.render_chat_template(messages)
    except InputError:
        return None
    before, _, after = text.partition(ANSWER)
    [encoding] = tokenizer.encode_with_offsets([text], add_special_tokens=False)
    begin = len(before) + len(ANSWER) + len(after) - len(after.lstrip())
    first = next((token for token, (_, stop) in zip(encoding.ids, encoding.offsets, strict=True) if stop > begin), None)
    return first if first in tokenizer.tokenizer.get_added_tokens_decoder() else None


def generation_config(
    tokenizer: Tokenizer | None, given: dict[str, Any], config: Mapping[str, Any], *, chats: bool
) -> dict[str, Any]:
    """Returns the content of generation_config.json for the model of a run.

    given, config: the model's generation_config.json and config.json. chats: whether the model learns chats; the end of
    a turn is then one of its eos_token_id.
    """
    end = end_of_turn(tokenizer) if chats and tokenizer else None
    if end is None:
        return given
    complete = {field: config[field] for field in SPECIAL_IDS if config.get(field) is not None} | given
    ids = end_of_text_ids(complete, CONFIG_FILE)
    return given if end in ids else complete | {"eos_token_id": [*ids, end]}


def write_tokenizer(
    folder: Path, source: Path | None, new: Tokenizer | None, template: str | None, generation_config: dict[str, Any],
    images: NewImages | None = None,
) -> None:  # fmt: skip
    """Writes the tokenizer of a run, and generation_config.json, to the folder of an exported model or adapter.

    source: a folder whose tokenizer files replace those there, or None. new: the tokenizer if it is a new one.
    images: the image processor beside a new tokenizer.
    template: the source of the chat template, if it replaces those of the files.
    """
    if new is not None:
        save_tokenizer(new, folder)
        if images is not None:
            images.write(folder)
    elif source is not None:
        replace_tokenizer(source, folder)
    if template is not None:
        replace_templates(folder, template)
    if generation_config != read_generation_config(folder):
        write_json(folder / GENERATION_CONFIG_FILE, generation_config)


def replace_templates(folder: Path, template: str) -> None:
    """Makes `template` the only chat template of the folder, in tokenizer_config.json, which every library reads."""
    for pattern in (TEMPLATE_FILE, TEMPLATE_JSON_FILE, f"{TEMPLATE_FOLDER}/*.jinja"):
        for file in folder.glob(pattern):
            file.unlink()
    file = folder / TOKENIZER_CONFIG_FILE
    config = json.loads(file.read_text("utf-8")) if file.exists() else {}  # valid: the tokenizer was read from it
    write_json(file, config | {"chat_template": template})


def tokenizer_of(folder: Path) -> Tokenizer | None:
    return load_tokenizer(folder) if has_tokenizer(folder) else None


def refuse_other_tokens(own: Tokenizer, other: Tokenizer, title: str, flag: str) -> None:
    """Raises InputError where a number belongs to different tokens. title: of the trained model. flag: names the other
    one, as `--teacher FOLDER`."""
    mine, theirs = (tokenizer.tokenizer.get_vocab(with_added_tokens=True) for tokenizer in (own, other))
    if mine == theirs:
        return
    token = min(number for _, number in mine.items() ^ theirs.items())
    here, there = (next((text for text, number in v.items() if number == token), None) for v in (mine, theirs))
    raise InputError(
        f"{flag}: token {token} is {here!r} in the tokenizer of {title}, {there!r} in its own; take a model with the "
        "same vocabulary"
    )
