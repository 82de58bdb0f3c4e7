"""Processor: texts or messages with images -> a model's inputs, under the Hub's names.

A chat template prints one placeholder for an image, which is replaced before tokenisation. Afterwards would be too
late: line breaks beside a placeholder merge with their neighbours. The texts of images are those of the processors of
transformers 5; IMAGE_FAMILIES has each image_processor_type of checkpoints with its text.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ligermodels.errors import CheckpointError, InputError, at_place, suggest
from ligermodels.images.parts import (
    IMAGE_PART,
    Prefix,
    images_by_text,
    is_image_part,
    is_list,
    parse_source,
    prefix_of_messages,
    prefix_text,
    take_images,
)
from ligermodels.images.processors import (
    ClipImages,
    Gemma3Images,
    ImagePlan,
    ImageProcessor,
    MllamaImages,
    PixtralImages,
    Prepared,
    QwenImages,
    SiglipImages,
    SmolVlmImages,
)
from ligermodels.images.reading import ImageSource, image_size, read_image
from ligermodels.images.settings import ImageSettings
from ligermodels.tokenizer import Tokenizer

NOT_SUPERVISED = -100
PROBE = "probe5b1c0e9d"  # a message that tells whether a template writes contents that are strings
MAX_FEATURES_OF_TEXT = 2**20


@dataclass(frozen=True)
class Placeholder:
    """printed: what a chat template prints for an image. feature: the token for each of the image's features.

    text: the text of an image with this plan. others: tokens of that text beside `feature`, none of which a model
    writes; their embeddings are their own. around: what chat templates print before and after `printed`.
    prefix: a text with images is a prompt of its own form, which no chat template writes; see `parts.py`.
    """

    printed: str
    feature: str
    text: Callable[[ImagePlan], str]
    others: tuple[str, ...] = ()
    around: tuple[str, str] = ("", "")
    prefix: bool = False

    @property
    def in_plain_text(self) -> str:
        """What stands for an image in a text without a chat template."""
        before, after = self.around
        return before + self.printed + after

    def expand(self, text: str, plans: Sequence[ImagePlan]) -> str:
        """The text with each placeholder replaced, in the order of the plans. Raises InputError for another number."""
        pieces = text.split(self.printed)
        if len(pieces) - 1 != len(plans):
            raise InputError(
                f"the text has the image placeholder {self.printed} {len(pieces) - 1} times, but there are "
                f"{len(plans)} images; give one image for each"
            )
        return "".join(piece + image for piece, image in zip(pieces, [*self.texts(plans), ""], strict=True))

    def texts(self, plans: Sequence[ImagePlan]) -> list[str]:
        """The texts of the images of one text. Raises InputError for more features than MAX_FEATURES_OF_TEXT."""
        features = sum(plan.features for plan in plans)
        if features > MAX_FEATURES_OF_TEXT:
            raise InputError(
                f"{len(plans)} images take {features:,} image tokens, more than {MAX_FEATURES_OF_TEXT:,}; use fewer or "
                "smaller images"
            )
        return [self.text(plan) for plan in plans]

    def refuse(self, text: str) -> None:
        """Raises InputError for a text of a message that has a token of images: it would be taken for an image."""
        found = next((token for token in (self.printed, self.feature, *self.others) if token in text), None)
        if found:
            raise InputError(f"has {found} in its text, which stands for an image; remove it, and give images as parts")


def repeated(token: str, **options: Any) -> Placeholder:
    """An image is a token for each of its features. options: fields of `Placeholder`."""
    return Placeholder(token, token, lambda plan: token * plan.features, **options)


def gemma3(features: int) -> Placeholder:
    """features: of a picture: the whole image or a crop."""
    start, token, end = "<start_of_image>", "<image_soft_token>", "<end_of_image>"
    picture = f"\n\n{start}{token * features}{end}\n\n"

    def text(plan: ImagePlan) -> str:
        if not plan.crops:
            return picture
        crops = " ".join([picture] * len(plan.crops))
        return f"Here is the original image {picture} and here are some crops to help you see better {crops}"

    return Placeholder(start, token, text, (end,))


def pixtral() -> Placeholder:
    token, row_end, image_end = "[IMG]", "[IMG_BREAK]", "[IMG_END]"

    def text(plan: ImagePlan) -> str:
        rows, columns = plan.grid
        return row_end.join([token * columns] * rows) + image_end

    return Placeholder(token, token, text, (row_end, image_end))


def smolvlm(features: int) -> Placeholder:
    """features: of a tile."""
    fake, token, whole = "<fake_token_around_image>", "<image>", "<global-img>"
    tile = token * features

    def text(plan: ImagePlan) -> str:
        rows, columns = plan.grid
        split = "".join(
            "".join(f"{fake}<row_{row + 1}_col_{column + 1}>{tile}" for column in range(columns)) + "\n"
            for row in range(rows)
        )
        return split + ("\n" if split else "") + f"{fake}{whole}{tile}{fake}"

    return Placeholder(token, token, text, (fake, whole))


class ImageFamily(NamedTuple):
    """processor: its class. placeholder: of a processor of that class."""

    processor: type[ImageProcessor]
    placeholder: Callable[[Any], Placeholder]


AROUND_QWEN = "<|vision_start|>", "<|vision_end|>"
LLAVA = ImageFamily(ClipImages, lambda _: repeated("<image>"))
SMOLVLM = ImageFamily(SmolVlmImages, lambda images: smolvlm(images.features))
IMAGE_FAMILIES = {
    "Qwen2VLImageProcessor": ImageFamily(QwenImages, lambda _: repeated("<|image_pad|>", around=AROUND_QWEN)),
    "Gemma3ImageProcessor": ImageFamily(Gemma3Images, lambda images: gemma3(images.features)),
    "MllamaImageProcessor": ImageFamily(MllamaImages, lambda _: repeated("<|image|>")),
    "PixtralImageProcessor": ImageFamily(PixtralImages, lambda _: pixtral()),
    "CLIPImageProcessor": LLAVA,
    "LlavaImageProcessor": LLAVA,
    "SiglipImageProcessor": ImageFamily(SiglipImages, lambda _: repeated("<image>", prefix=True)),
    "SmolVLMImageProcessor": SMOLVLM,
    "Idefics3ImageProcessor": SMOLVLM,
}


def read_image_family(folder: Path) -> tuple[ImageProcessor, Placeholder]:
    """The image processor of a checkpoint folder, and its placeholder. Raises CheckpointError naming file and field."""
    settings = ImageSettings.read(folder)
    if settings.kind not in IMAGE_FAMILIES:
        rule = f"is not supported{suggest(settings.kind, IMAGE_FAMILIES)}"
        raise settings.image.error("image_processor_type", settings.kind, rule)
    processor, placeholder = IMAGE_FAMILIES[settings.kind]
    images = processor.from_settings(settings)
    return images, placeholder(images)


class Processor:
    """The tokenizer and the image processor of a checkpoint folder.

    placeholder: the text that stands for an image. feature_id: the token for each of an image's features.
    image_tokens: all tokens that only stand for images, by id; a model reads them and never writes them.
    """

    def __init__(self, tokenizer: Tokenizer, images: ImageProcessor, placeholder: Placeholder) -> None:
        self.tokenizer, self.images, self.placeholder = tokenizer, images, placeholder
        tokens = (placeholder.feature, placeholder.printed, *placeholder.others)
        ids = [token_id(tokenizer, token) for token in tokens]
        self.feature_id, self.image_tokens = ids[0], dict(zip(ids, tokens, strict=True))

    @classmethod
    def from_folder(cls, folder: str | Path, tokenizer: Tokenizer | None = None) -> "Processor":
        """tokenizer: in place of the folder's. Raises CheckpointError, with file and field, for bad files."""
        return cls(tokenizer or Tokenizer.from_folder(folder), *read_image_family(Path(folder)))

    def plan(self, image: ImageSource, place: str = "image") -> ImagePlan:
        """What becomes of an image: its size, and how many tokens it takes. Only the header of a file is read."""
        return self.plan_size(*image_size(image, place), place)

    def plan_size(self, height: int, width: int, place: str = "image") -> ImagePlan:
        with at_place(f"{place}:"):
            return self.images.plan(height, width)

    def prepare(self, image: ImageSource, place: str = "image") -> Prepared:
        """Decodes an image: its plan and a model's pixels of it."""
        pixels = read_image(image, place)
        plan = self.plan_size(pixels.shape[1], pixels.shape[2], place)
        return plan, self.images.pixels(pixels, plan)

    @functools.cached_property
    def takes_strings(self) -> bool:
        """Whether the chat template writes a content that is a string; some write only lists of parts."""
        try:
            return PROBE in self.tokenizer.render_chat_template([{"role": "user", "content": PROBE}])
        except InputError:
            return False

    def contents(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Messages with contents as the chat template takes them. Raises InputError for text with an image token."""
        return [self.content(dict(message), f"messages[{index}]") for index, message in enumerate(messages)]

    def content(self, message: dict[str, Any], place: str) -> dict[str, Any]:
        content = message.get("content")
        if content is not None and not isinstance(content, str) and not is_list(content):
            raise InputError(f"field {place}.content is {type(content).__name__}; must be a string or a list of parts")
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
        texts = [part["text"] for part in parts if not is_image_part(part)]
        with at_place(f"field {place}.content"):
            for text in texts:
                self.placeholder.refuse(text)
        if content is None:
            return message
        if len(texts) == len(parts) and self.takes_strings:
            return message | {"content": "".join(texts)}
        return message | {"content": [dict(IMAGE_PART) if is_image_part(part) else dict(part) for part in parts]}

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], images: Any = None, **options: Any
    ) -> dict[str, Tensor]:
        """The inputs of a conversation, as `__call__` returns them, of one row.

        messages: their content is a string, or a list of parts as in `parts.py`. images: one or a list, for the parts
        without one.
        options: those of `Tokenizer.apply_chat_template`, such as add_generation_prompt. Raises InputError.
        """
        [beside] = images_by_text(images, 1)
        taken, sources = take_images(messages, beside)
        if sources and self.placeholder.prefix:
            prefix = self.prefix(taken, **options)
            completion = None if prefix.completion is None else [prefix.completion]
            return self.inputs([prefix.prompt], [sources], add_special_tokens=False, suffixes=completion)
        text = self.tokenizer.render_chat_template(self.contents(taken), **options)
        return self.inputs([text], [sources], add_special_tokens=False)

    def prefix(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = False, **options: Any
    ) -> Prefix:
        """The prompt of a conversation with images, of a model that has prefixes. Raises InputError."""
        if options:
            raise InputError(f"{', '.join(options)}: belong to a chat template, and prompts with images have none")
        made = prefix_of_messages(self.contents(messages), self.placeholder.printed)
        if made.completion is not None and add_generation_prompt:
            raise InputError("messages: end with an answer, so that there is none to generate; leave it out")
        return made

    def __call__(
        self, text: str | Sequence[str], images: Any = None, *, suffix: str | Sequence[str] | None = None,
        add_special_tokens: bool = True, padding_side: str | None = None,
    ) -> dict[str, Tensor]:  # fmt: skip
        """A model's inputs: input_ids and attention_mask int64 [B, T], and those of the images, such as pixel_values.

        text: with one placeholder for each image. images: of one text, one or a list; of several, a list for each.
        suffix: the completion of each text, of models whose prompts with images are prefixes; their inputs have
        token_type_ids too, 1 behind prompts with images, and labels if there is a suffix, -100 but at its tokens.
        add_special_tokens: put the tokenizer's tokens, such as bos, around a text that has no bos.
        Raises InputError, naming the row, if the numbers of placeholders and images differ.
        """
        texts = [text] if isinstance(text, str) else list(text)
        sources = [
            [parse_source(image, f"images[{row}][{number}]") for number, image in enumerate(of_row)]
            for row, of_row in enumerate(images_by_text(images, len(texts)))
        ]
        options: dict[str, Any] = {"add_special_tokens": add_special_tokens, "padding_side": padding_side}
        if suffix is None:
            return self.inputs(texts, sources, **options)
        if not self.placeholder.prefix:
            raise InputError("suffix: the prompts of this model are no prefixes; put the answer into the text")
        suffixes = [suffix] if isinstance(suffix, str) else list(suffix)
        if len(suffixes) != len(texts):
            raise InputError(f"suffix: has {len(suffixes)} completions for {len(texts)} texts; give one for each")
        return self.inputs(texts, sources, suffixes=suffixes, **options)

    def inputs(
        self, texts: Sequence[str], sources: Sequence[Sequence[ImageSource]], *, add_special_tokens: bool,
        padding_side: str | None = None, suffixes: Sequence[str] | None = None,
    ) -> dict[str, Tensor]:  # fmt: skip
        rows = [
            [self.prepare(image, f"images[{row}][{number}]") for number, image in enumerate(images)]
            for row, images in enumerate(sources)
        ]
        ids = [
            self.encode(text, [plan for plan, _ in prepared], f"texts[{row}]", add_special_tokens=add_special_tokens)
            for row, (text, prepared) in enumerate(zip(texts, rows, strict=True))
        ]
        prompts = [len(row) for row in ids]
        if suffixes is not None:
            end = [] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]
            ids = [row + self.encode_completion(text) + end for row, text in zip(ids, suffixes, strict=True)]
        if len(ids) == 1:
            input_ids = torch.tensor(ids)
            attention_mask = torch.ones_like(input_ids)
        else:
            input_ids, attention_mask = self.tokenizer.pad(ids, side=padding_side)
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        behind = (attention_mask.cumsum(1) > torch.tensor(prompts)[:, None]) & (attention_mask == 1)
        if suffixes is not None:
            inputs["labels"] = input_ids.masked_fill(~behind, NOT_SUPERVISED)
        if not any(rows):
            return inputs
        if self.placeholder.prefix:  # a text without images is no prefix
            alone = torch.tensor([not prepared for prepared in rows])[:, None] & (attention_mask == 1)
            inputs["token_type_ids"] = (behind | alone).long()
        return inputs | self.images.collate(rows, input_ids == self.feature_id)

    def encode_completion(self, text: str) -> list[int]:
        """The tokens of the completion of a prefix, without that of the end. Raises InputError for an image token."""
        with at_place("completion:"):
            self.placeholder.refuse(text)
        return self.tokenizer.encode(text, add_special_tokens=False)

    def encode(
        self, text: str, plans: Sequence[ImagePlan], place: str, *, add_special_tokens: bool = False
    ) -> list[int]:
        """The tokens of a text whose placeholders stand for images with these plans; of a prefix all but its end."""
        bos = self.tokenizer.bos_token
        if plans and self.placeholder.prefix:
            text, add_special_tokens = prefix_text(text, len(plans), self.placeholder.printed, bos or ""), False
        add = add_special_tokens and not (bos and bos in text)
        with at_place(f"{place}:"):
            ids = self.tokenizer.encode(self.placeholder.expand(text, plans), add_special_tokens=add)
        tokens, features = ids.count(self.feature_id), sum(plan.features for plan in plans)
        if tokens != features:
            raise InputError(f"{place}: has {tokens} image tokens for images of {features} features")
        return ids


def image_tokens(read_processor: Callable[[], Processor]) -> Mapping[int, str]:
    """The tokens that stand for images, by id; none of a model for which `read_processor` raises InputError."""
    try:
        return read_processor().image_tokens
    except InputError:
        return {}


def refuse_image_tokens(ids: Sequence[int], tokens: Mapping[int, str], place: str) -> None:
    """Raises InputError for a text without images that has one of the tokens of `image_tokens`."""
    if not tokens.keys().isdisjoint(ids):
        found = next(tokens[token] for token in ids if token in tokens)
        raise InputError(f"{place} has {found} in its text, which stands for an image; remove it, or give its image")


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """Raises CheckpointError if the tokenizer lacks the token."""
    index = tokenizer.tokenizer.token_to_id(token)
    if index is None:
        fault = f"lacks the token {token}, which stands for images; use the files of one model"
        raise CheckpointError(f"{tokenizer.file}: {fault}")
    return index
