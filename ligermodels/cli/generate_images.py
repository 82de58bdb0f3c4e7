"""Images in `ligermodels generate`: those of --image, and those that lines of a conversation name."""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ligermodels.errors import InputError
from ligermodels.hub.models import read_preset_or_config, select_architecture
from ligermodels.images.inputs import Processor, image_tokens, refuse_image_tokens
from ligermodels.images.parts import PREFIX_END
from ligermodels.tokenizer import Tokenizer


class PromptInputs(NamedTuple):
    """images: the pixel inputs, under the names of a model's arguments; None for none. end: text that was put behind
    the prompt's."""

    ids: list[int]
    images: dict[str, Any] | None = None
    end: str = ""


class PromptReader:
    """Prompts and messages with images -> inputs of the model of a folder, whose processor is read when needed."""

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        self.folder, self.tokenizer = folder, tokenizer

    @functools.cached_property
    def processor(self) -> Processor:
        """Raises InputError for a model that reads no images."""
        raw, origin = read_preset_or_config(self.folder, None)
        architecture, config = select_architecture(raw, origin)
        if not architecture.takes_images:
            raise InputError(
                f"generate: {self.folder} is a {config.model_type} model, which reads no images; give none"
            )
        return Processor.from_folder(self.folder, self.tokenizer)

    def check(self, images: Sequence[str]) -> None:
        """Decodes images, so that a bad one is known before weights are loaded. Raises InputError, which names it."""
        for image in images:
            self.processor.prepare(image, image)

    def of_text(self, text: str, images: Sequence[Any]) -> PromptInputs:
        """A text to continue; images that it has no placeholders for come before it.

        images: as in `images/parts.py`.
        """
        if not images:
            return self.without_images(self.tokenizer.encode_prompt(text))
        placeholder = self.processor.placeholder
        if placeholder.printed not in text:
            text = placeholder.in_plain_text * len(images) + text
        return as_prompt(self.processor(text, images))._replace(end=PREFIX_END if placeholder.prefix else "")

    def of_messages(self, messages: list[dict[str, Any]], images: Sequence[Any] = ()) -> PromptInputs:
        """A conversation up to an answer. Messages with images have lists of parts; images: of parts without one."""
        if all(isinstance(message["content"], str) for message in messages):
            return self.without_images(self.tokenizer.apply_chat_template(messages, add_generation_prompt=True))
        return as_prompt(self.processor.apply_chat_template(messages, images, add_generation_prompt=True))

    def without_images(self, ids: list[int]) -> PromptInputs:
        """Raises InputError for a token of images."""
        refuse_image_tokens(ids, self.image_tokens, "generate: the prompt")
        return PromptInputs(ids)

    @functools.cached_property
    def image_tokens(self) -> Mapping[int, str]:
        return image_tokens(lambda: self.processor)


def as_prompt(inputs: dict[str, Any]) -> PromptInputs:
    pixels = {name: value for name, value in inputs.items() if name not in ("input_ids", "attention_mask")}
    return PromptInputs(inputs["input_ids"][0].tolist(), pixels)


def message_content(text: str, images: Sequence[str]) -> str | list[dict[str, str]]:
    """The content of a user's message: the text, or its images, then the text."""
    if not images:
        return text
    return [*({"type": "image", "path": image} for image in images), {"type": "text", "text": text}]
