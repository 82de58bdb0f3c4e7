"""Images of documents: the text and the tokens that stand for them, and the pixels that a batch gets.

When a document is tokenised, the text of an image replaces each placeholder. Its tokens are known from the image's
size, which is read from the file's header. An image is decoded when a batch needs it, in threads: Pillow and torch
leave Python free to go on.
"""

import bisect
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor
from torch.utils._pytree import tree_map_only

from ligermodels.errors import InputError, at_place
from ligermodels.images.inputs import Processor
from ligermodels.images.processors import ImagePlan, Prepared
from ligermodels.images.reading import ImageSource, image_size
from ligermodels.tokenizer import Tokenizer
from ligermodels.tokenizer.chat_template import Rendered
from ligermodels.training.data.formats.records import IMAGES_BESIDE_TEXT, Completion, Conversation
from ligermodels.training.data.rows.packing import Segment
from ligermodels.training.data.rows.store import Document, DocumentImage, TokenStore, cache_folder

MAX_THREADS = 16  # of a rank; hosts with many GPUs share their cores among as many ranks
StoredImage: TypeAlias = tuple[TokenStore, int]  # an image by its number in a store


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
        """Renders the first messages of the conversation, or all. Raises InputError as `Tokenizer.render` does."""
        rendered = super().render(self.processor.contents(messages), **options)
        return expanded(rendered, self.processor.placeholder.printed, self.texts)

    def expand(self, text: str) -> str:
        """Returns a text without a chat, with its placeholders replaced.

        Raises InputError unless it has one for each image.
        """
        return self.processor.placeholder.expand(text, [image.plan for image in self.images])

    def unsupervised(self, ids: Sequence[int], supervised: Sequence[bool]) -> list[bool]:
        """Returns the mask without the tokens of images, which a model never writes."""
        never = self.processor.image_tokens
        return [kept and token not in never for kept, token in zip(supervised, ids, strict=True)]

    def locate(self, ids: Sequence[int]) -> list[DocumentImage]:
        return locate_images(ids, self.images, self.processor.feature_id)


def prefix_document(record: Completion, end: int, processor: Processor) -> Document:
    """Returns the document of a prompt with images and its completion, which is supervised.

    end: the end-of-text token. Raises InputError, which names the place, for a model whose prompts are no prefixes, and
    as `ImageChats` does.
    """
    with at_place(f"{record.place}:"):
        if not processor.placeholder.prefix:
            raise InputError(IMAGES_BESIDE_TEXT)
        images = plan_images(record.images, processor)
        completion = [*processor.encode_completion(record.completion), end]
    prompt = processor.encode(record.prompt, [image.plan for image in images], record.place)
    supervised = [False] * len(prompt) + [True] * len(completion)
    return Document(
        [*prompt, *completion], supervised, record.place, locate_images(prompt, images, processor.feature_id)
    )


def as_prefix(record: Conversation, processor: Processor) -> Completion | None:
    """Returns the prompt and the completion of a conversation with images.

    Returns None for a model whose prompts are no prefixes. Raises InputError, which names the place, for a
    conversation of another form.
    """
    if not processor.placeholder.prefix:
        return None
    options = {"tools": record.tools, **(record.template_kwargs or {})}
    given = {name: value for name, value in options.items() if value is not None}
    with at_place(f"{record.place}:"):
        if record.messages[-1]["role"] != "assistant" or not record.messages[-1].get("weight", 1):
            raise InputError("field messages: no assistant message with a weight other than 0: nothing is supervised")
        prompt, completion = processor.prefix(record.messages, **given)
    return Completion(prompt, completion or "", record.place, record.images)


def expanded(rendered: Rendered, placeholder: str, texts: Sequence[str]) -> Rendered:
    """Returns the rendered text with its placeholders replaced by the first of `texts`, and its spans moved."""
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
    """Returns the images of a document, which are the first of these.

    Raises InputError if tokens do not fit the images.
    """
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


class ImageDecoder:
    """Decodes the images of batches in threads, with the processor of the model.

    prepare_inputs: makes of ids, labels, cu_seqlens and pixel inputs, by their names, what `forward` takes as `images`,
    so that it need not ask the device for ids; None where `forward` takes pixel inputs alone.
    """

    def __init__(self, processor: Processor, prepare_inputs: Callable[..., Any] | None = None) -> None:
        self.processor, self.prepare_inputs = processor, prepare_inputs
        self.threads = ThreadPoolExecutor(min(MAX_THREADS, len(os.sched_getaffinity(0))), "images")

    def arguments(
        self, rows: Sequence[Sequence[StoredImage]], input_ids: Tensor, labels: Tensor | None,
        cu_seqlens: Tensor | None, pinned: bool,
    ) -> dict[str, Any]:  # fmt: skip
        """Returns the arguments of `forward` for the images of rows; empty if there are none."""
        inputs: dict[str, Any] = self.pixel_inputs(rows, input_ids)
        if inputs and self.prepare_inputs is not None:
            inputs = {"images": self.prepare_inputs(input_ids, labels, cu_seqlens=cu_seqlens, **inputs)}
        return tree_map_only(Tensor, Tensor.pin_memory, inputs) if pinned else inputs

    def pixel_inputs(self, rows: Sequence[Sequence[StoredImage]], input_ids: Tensor) -> dict[str, Tensor]:
        """Returns the images of rows, under the Hub's names of a model's arguments; empty if there are none.

        rows: the images of each row, in the order of their tokens; one that is there twice is decoded once.
        input_ids: [B, T], the tokens of the B rows. Raises InputError as `prepare` does.
        """
        if not any(rows):
            return {}
        different = {(id(store), number): (store, number) for row in rows for store, number in row}
        futures = {key: self.threads.submit(self.prepare, *image) for key, image in different.items()}
        prepared = [[futures[id(store), number].result() for store, number in row] for row in rows]
        return self.processor.images.collate(prepared, input_ids == self.processor.feature_id)

    def prepare(self, store: TokenStore, number: int) -> Prepared:
        """Raises InputError, which names the document, if the image cannot be read, or is another than was planned."""
        images = store.images
        assert images is not None
        first = int(images.starts[number])
        place = f"{store.place(first)}: image"
        plan, pixels = self.processor.prepare(images.source(number), place)
        expected = self.processor.plan_size(int(images.heights[number]), int(images.widths[number]), place)
        if plan != expected:
            raise InputError(
                f"{place}: has another size than when the data were tokenised; restore it, or delete the cache of "
                f"data, {cache_folder()}, and start another run"
            )
        return plan, pixels


def images_of(row: Iterable[Segment]) -> list[StoredImage]:
    return [
        (store, number)
        for store, start, size in row
        if store.images is not None
        for number in store.images.between(start, start + size)
    ]
