"""The chat template of a run, the token that ends a turn in it, and the tokenizer files of the run's export.

`--chat-template` replaces the templates of the run's tokenizer. The token that ends a turn becomes a stop token of the
exported model, in generation_config.json, where transformers, vLLM and this library look for it.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ligermodels.errors import InputError, suggest_closest
from ligermodels.hub import load_tokenizer
from ligermodels.tokenizer import Tokenizer
from ligermodels.tokenizer.built_in_templates import BUILT_IN_TEMPLATES, fitting_templates, missing_tokens
from ligermodels.tokenizer.chat_template import (
    DEFAULT_TEMPLATE,
    MAX_TEMPLATE_BYTES,
    TEMPLATE_FILE,
    TEMPLATE_FOLDER,
    TEMPLATE_JSON_FILE,
    ChatTemplate,
)
from ligermodels.tokenizer.files import TOKENIZER_CONFIG_FILE, has_tokenizer
from ligermodels.training.data.embedded.new_tokenizer import SPECIAL_IDS, NewImages, save_tokenizer
from ligermodels.training.data.formats.streams import print_status
from ligermodels.weights.config_file import (
    CONFIG_FILE,
    GENERATION_CONFIG_FILE,
    end_of_text_ids,
    read_generation_config,
)
from ligermodels.weights.exporting import replace_tokenizer
from ligermodels.weights.reading import read_text
from ligermodels.weights.writing import write_json

QUESTION, ANSWER = "QUESTION5b1c", "ANSWER5b1c"  # texts that no template contains


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
