"""The text that stands for an image: a chat template prints one placeholder, which is replaced before tokenisation.

After tokenisation would be too late: line breaks beside a placeholder merge with their neighbours. Texts are those of
the processors of transformers 5. The end of the file has each image_processor_type of checkpoints with its text.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ligermodels.errors import InputError, suggest
from ligermodels.images.processors import (
    ClipImages,
    Gemma3Images,
    ImagePlan,
    ImageProcessor,
    MllamaImages,
    PixtralImages,
    QwenImages,
    SiglipImages,
    SmolVlmImages,
)
from ligermodels.images.settings import ImageSettings

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
