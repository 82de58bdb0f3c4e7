"""Conversations with images: their text, in which each placeholder is replaced, and their image tokens.

The tokens of an image are known from its size, which is read from the file's header; nothing is decoded here. This
module knows nothing about rows.
"""

import bisect
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from ligermodels.errors import InputError
from ligermodels.images.inputs import Processor
from ligermodels.images.processors import ImagePlan
from ligermodels.images.reading import ImageSource, image_size
from ligermodels.tokenizer import Tokenizer
from ligermodels.tokenizer.chat_template import Rendered
from ligermodels.training.data.formats.records import IMAGES_BESIDE_TEXT, Completion, Conversation
from ligermodels.training.data.rows.image_store import DocumentImage
from ligermodels.training.data.rows.store import Document


class PlannedImage(NamedTuple):
    """An image, the size of which it was planned, and what becomes of it."""

    source: ImageSource
    height: int
    width: int
    plan: ImagePlan


def plan_images(sources: Sequence[ImageSource], processor: Processor) -> list[PlannedImage]:
    """Raises InputError, which names the image, if a header cannot be read or a size does not fit the model."""
    planned = []
    for number, source in enumerate(sources):
        place = f"image {number + 1}"
        height, width = image_size(source, place)
        planned.append(PlannedImage(source, height, width, processor.plan_size(height, width, place)))
    return planned


class ImageChats(Tokenizer):
    """A processor's tokenizer for one conversation: what it renders has the texts of these images.

    Raises InputError if they take too many tokens.
    """

    def __init__(self, processor: Processor, images: Sequence[PlannedImage]) -> None:
        self.__dict__.update(processor.tokenizer.__dict__)
        self.processor, self.images = processor, images
        self.texts = processor.placeholder.texts([image.plan for image in images])

    def render(self, messages: Sequence[Any], **options: Any) -> Rendered:
        """The first messages of the conversation, or all. Raises InputError as `Tokenizer.render` does."""
        rendered = super().render(self.processor.contents(messages), **options)
        return expanded(rendered, self.processor.placeholder.printed, self.texts)

    def expand(self, text: str) -> str:
        """A text without a chat, with its placeholders replaced. Raises InputError unless it has one for each image."""
        return self.processor.placeholder.expand(text, [image.plan for image in self.images])

    def unsupervised(self, ids: Sequence[int], supervised: Sequence[bool]) -> list[bool]:
        """The mask without the tokens of images, which a model never writes."""
        never = self.processor.image_tokens
        return [kept and token not in never for kept, token in zip(supervised, ids, strict=True)]

    def locate(self, ids: Sequence[int]) -> list[DocumentImage]:
        return locate_images(ids, self.images, self.processor.feature_id)


def prefix_document(record: Completion, end: int, processor: Processor) -> Document:
    """The document of a prompt with images and its completion, which is supervised, and end, the end-of-text token.

    Raises InputError, which names the place, for a model whose prompts are no prefixes, and as `ImageChats` does.
    """
    try:
        if not processor.placeholder.prefix:
            raise InputError(IMAGES_BESIDE_TEXT)
        images = plan_images(record.images, processor)
        completion = [*processor.encode_completion(record.completion), end]
    except InputError as error:
        raise InputError(f"{record.place}: {error}") from None
    prompt = processor.encode(record.prompt, [image.plan for image in images], record.place)
    supervised = [False] * len(prompt) + [True] * len(completion)
    return Document(
        [*prompt, *completion], supervised, record.place, locate_images(prompt, images, processor.feature_id)
    )


def as_prefix(record: Conversation, processor: Processor) -> Completion | None:
    """The prompt and the completion of a conversation with images; None for a model whose prompts are no prefixes.

    Raises InputError, which names the place, for a conversation of another form.
    """
    if not processor.placeholder.prefix:
        return None
    options = {"tools": record.tools, **(record.template_kwargs or {})}
    given = {name: value for name, value in options.items() if value is not None}
    try:
        if record.messages[-1]["role"] != "assistant" or not record.messages[-1].get("weight", 1):
            raise InputError("field messages: no assistant message with a weight other than 0: nothing is supervised")
        prompt, completion = processor.prefix(record.messages, **given)
    except InputError as error:
        raise InputError(f"{record.place}: {error}") from None
    return Completion(prompt, completion or "", record.place, record.images)


def expanded(rendered: Rendered, placeholder: str, texts: Sequence[str]) -> Rendered:
    """The rendered text with its placeholders replaced by the first of `texts`, and its spans moved."""
    pieces = rendered.text.split(placeholder)
    count = len(pieces) - 1
    if count > len(texts):
        raise InputError(f"the chat template writes {placeholder} {count} times for {len(texts)} images")
    text = "".join(piece + image for piece, image in zip(pieces, [*texts[:count], ""], strict=True))
    marks = [end + number * len(placeholder) for number, end in enumerate(accumulate(map(len, pieces[:-1])))]
    growth = [0, *accumulate(len(image) - len(placeholder) for image in texts[:count])]
    moved = tuple(
        (start + growth[bisect.bisect_left(marks, start)], end + growth[bisect.bisect_left(marks, end)])
        for start, end in rendered.spans
    )
    return replace(rendered, text=text, spans=moved)


def locate_images(ids: Sequence[int], images: Sequence[PlannedImage], feature_id: int) -> list[DocumentImage]:
    """The images of a document, which are the first of these. Raises InputError if tokens do not fit the images."""
    places = [place for place, token in enumerate(ids) if token == feature_id]
    located, taken = [], 0
    for source, height, width, plan in images:
        if taken == len(places):
            break
        mine = places[taken : taken + plan.features]
        taken += plan.features
        assert isinstance(source, bytes | str | Path)
        reference = str(source) if isinstance(source, Path) else source
        located.append(DocumentImage(mine[0], mine[-1] + 1, reference, height, width, plan.features))
    if taken != len(places):
        raise InputError(f"has {len(places)} image tokens for images of {taken} features")
    return located
