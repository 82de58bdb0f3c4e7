"""The parts of a model with images in a run: which of them are trained, and at which learning rates."""

import torch

from ligermodels.aliases import flag_of
from ligermodels.errors import InputError
from ligermodels.layers.decoder import CausalLM
from ligermodels.training.settings.config import RunConfig, TrainConfig
from ligermodels.vision.multimodal import ImageParts

# The setting of the learning rate of each part that may have its own.
PART_RATES = {"vision": "vision_learning_rate", "projector": "projector_learning_rate"}


def train_parts(model: CausalLM, config: TrainConfig, frozen_dtype: torch.dtype) -> None:
    """Freezes the parts that --train-parts does not name, and stores them in `frozen_dtype`.

    model: on the meta device. Raises InputError for settings of parts that the model does not have, or does not train.
    """
    settings = [name for name in ("train_parts", *PART_RATES.values()) if getattr(config, name) is not None]
    if not settings:
        return
    if not isinstance(model, ImageParts):
        raise InputError(f"{flag_of(settings[0])}: {config.model} is a model of text alone; leave it out")
    if config.train_parts is not None:
        model.train_parts(config.train_parts)
        fp32 = set(model.fp32_parameters())
        for parameter in model.parameters():
            if not parameter.requires_grad and parameter not in fp32:
                parameter.data = parameter.data.to(frozen_dtype)
    for part, setting in PART_RATES.items():
        if setting in settings and not any(parameter.requires_grad for parameter in model.parts()[part]):
            raise InputError(f"{flag_of(setting)}: the {part} is not trained; leave it out, or train that part")


def refuse_parts_without_images(model: CausalLM, config: RunConfig, image_tokens: int) -> None:
    """Raises InputError for rows without images where they alone would train what is trained, or has a rate of its own.

    image_tokens: those of all rows.
    """
    if image_tokens or not isinstance(model, ImageParts):
        return
    if model.trains_images_alone:
        raise InputError("--data: has no images, which alone reach what is trained; name data with images")
    for part, setting in PART_RATES.items():
        if getattr(config, setting) is not None:
            raise InputError(f"{flag_of(setting)}: the data have no images, which alone train the {part}; leave it out")


def part_scales(model: CausalLM, config: RunConfig) -> dict[str, float]:
    """Of each part with a learning rate of its own, that rate as a multiple of the run's."""
    rates = {part: getattr(config, setting) for part, setting in PART_RATES.items()}
    return {part: rate / config.learning_rate for part, rate in rates.items() if rate is not None}
