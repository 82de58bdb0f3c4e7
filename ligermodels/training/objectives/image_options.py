"""What data of a run must know of a model that reads images. Must not know data or losses."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

from ligermodels.layers.decoder import CausalLM
from ligermodels.training.data.embedded.new_tokenizer import NewImages
from ligermodels.vision.multimodal import ImageParts


class ImageOptions(NamedTuple):
    """images, prepare_inputs: as for `open_data`."""

    images: NewImages | None = None
    prepare_inputs: Callable[..., Any] | None = None


def image_options(model: CausalLM, folder: Path | None) -> ImageOptions:
    """folder: the model's, with its image processor; None for a new model."""
    if not model.takes_images:
        return ImageOptions()
    images = None
    if folder is None and isinstance(model, ImageParts):
        images = NewImages(model.config.image_token_id, *model.processor_settings)
    return ImageOptions(images, cast(Any, model).prepare_training_images)
