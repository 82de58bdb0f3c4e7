"""The settings of an image processor, from the files of a checkpoint folder.

    preprocessor_config.json    the image processor
    processor_config.json       what the text of an image depends on; in files of transformers 5 its field
                                image_processor has the image processor too, and counts

A field that is missing or null has the default of its processor in transformers 5. Must not know processors.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ligermodels.errors import CheckpointError
from ligermodels.images.resizing import FILTERS
from ligermodels.tokenizer.files import JsonFields

IMAGE_PROCESSOR_FILE, PROCESSOR_FILE = "preprocessor_config.json", "processor_config.json"
NESTED = "image_processor"
HOW_TO_WRITE = "AutoProcessor.from_pretrained(folder).save_pretrained(folder) of transformers writes it"
BACKEND_SUFFIXES = ("Fast", "Pil")  # at the end of a type's name: which library resizes
# Switches that no published checkpoint turns off.
ALWAYS_ON = ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb")
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
HALVES = (0.5, 0.5, 0.5)


@dataclass(frozen=True)
class ImageSettings:
    """image: the fields of the image processor. text: those of processor_config.json."""

    image: JsonFields
    text: JsonFields

    @classmethod
    def read(cls, folder: Path) -> "ImageSettings":
        """Raises CheckpointError, which names the file and the field."""
        text, image = JsonFields.read(folder, PROCESSOR_FILE), JsonFields.read(folder, IMAGE_PROCESSOR_FILE)
        nested = text.get(NESTED, dict, None)
        if nested is not None:
            image = JsonFields(text.file, {name: value for name, value in nested.items() if value is not None})
        if not image.values:
            raise CheckpointError(f"{image.file}: is missing; a model that reads images has this file")
        for switch in ALWAYS_ON:
            if not image.get(switch, bool, True):
                raise image.error(switch, False, "must be true: other processing is not supported")
        return cls(image, text)

    @property
    def kind(self) -> str:
        """image_processor_type, without the name of a library."""
        kind = self.image.get("image_processor_type", str, None)
        if kind is None:
            raise CheckpointError(f"{self.image.file}: field image_processor_type is missing; {HOW_TO_WRITE}")
        for ending in BACKEND_SUFFIXES:
            kind = kind.removesuffix(ending)
        return kind

    def pixels(self, mean: tuple[float, ...], std: tuple[float, ...], resample: int) -> dict[str, Any]:
        """The fields that all image processors have, as arguments. mean, std, resample: the defaults."""
        how = self.image.get("resample", int, resample)
        if how not in FILTERS:
            raise self.image.error("resample", how, f"must be one of {', '.join(map(str, FILTERS))}")
        factor = self.image.get("rescale_factor", float, 1 / 255)
        if not factor > 0:
            raise self.image.error("rescale_factor", factor, "must be above 0")
        values = {"mean": self.channels("image_mean", mean), "std": self.channels("image_std", std)}
        return values | {"rescale_factor": factor, "how": FILTERS[how]}

    def channels(self, field: str, default: tuple[float, ...]) -> tuple[float, ...]:
        """One number for each of red, green and blue. A standard deviation is above 0."""
        values = self.image.get(field, list, list(default))
        numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
        if len(numbers) != len(values) or len(values) != 3 or (field == "image_std" and min(numbers) <= 0):
            raise self.image.error(field, values, "must be three numbers; a standard deviation is above 0")
        return tuple(map(float, values))

    def positive(self, field: str, default: int) -> int:
        return positive_field(self.image, field, self.image.get(field, int, default))

    def sides(self, field: str, default: Mapping[str, int]) -> dict[str, int]:
        """A size: the fields of `default`, all positive."""
        sizes = self.image.get(field, dict, default)
        if not default.keys() <= sizes.keys():
            raise self.image.error(field, sizes, f"must have {' and '.join(default)}")
        return {name: positive_field(self.image, f"{field}.{name}", sizes[name]) for name in default}

    def square(self, field: str, default: int) -> int:
        """The side of a square size."""
        sizes = self.sides(field, {"height": default, "width": default})
        if sizes["height"] != sizes["width"]:
            raise self.image.error(field, sizes, "must be a square")
        return sizes["height"]


def positive_field(file: JsonFields, field: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise file.error(field, value, "must be an integer of at least 1")
    return value
