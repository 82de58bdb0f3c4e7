"""The image processors by the image_processor_type of checkpoints, each with the text that stands for its images."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from ligermodels.errors import suggest
from ligermodels.images import placeholders
from ligermodels.images.placeholders import Placeholder
from ligermodels.images.processors import (
    ClipImages,
    Gemma3Images,
    ImageProcessor,
    PixtralImages,
    QwenImages,
    SiglipImages,
)
from ligermodels.images.settings import ImageSettings
from ligermodels.images.tiled import MllamaImages, SmolVlmImages


class ImageFamily(NamedTuple):
    """processor: its class. placeholder: of a processor of that class."""

    processor: type[ImageProcessor]
    placeholder: Callable[[Any], Placeholder]


LLAVA = ImageFamily(ClipImages, lambda _: placeholders.llava())
SMOLVLM = ImageFamily(SmolVlmImages, lambda images: placeholders.smolvlm(images.features))
IMAGE_FAMILIES = {
    "Qwen2VLImageProcessor": ImageFamily(QwenImages, lambda _: placeholders.qwen()),
    "Gemma3ImageProcessor": ImageFamily(Gemma3Images, lambda images: placeholders.gemma3(images.features)),
    "MllamaImageProcessor": ImageFamily(MllamaImages, lambda _: placeholders.mllama()),
    "PixtralImageProcessor": ImageFamily(PixtralImages, lambda _: placeholders.pixtral()),
    "CLIPImageProcessor": LLAVA,
    "LlavaImageProcessor": LLAVA,
    "SiglipImageProcessor": ImageFamily(SiglipImages, lambda _: placeholders.paligemma()),
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
