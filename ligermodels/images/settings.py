"""The settings of an image processor, from the files of a checkpoint folder.

    preprocessor_config.json    the image processor
    processor_config.json       what the text of an image depends on; in files of transformers 5 its field
                                image_processor has the image processor too, and counts

A field that is missing or null has the default of its processor in transformers 5.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ligermodels.errors import CheckpointError
from ligermodels.images.resizing import FILTERS, MAX_RESIZED_PIXELS, Size
from ligermodels.tokenizer.files import JsonFields

IMAGE_PROCESSOR_FILE, PROCESSOR_FILE = "preprocessor_config.json", "processor_config.json"
NESTED = "image_processor"
HOW_TO_WRITE = "AutoProcessor.from_pretrained(folder).save_pretrained(folder) of transformers writes it"
BACKEND_SUFFIXES = ("Fast", "Pil")  # at the end of a type's name: which library resizes
# Switches that no published checkpoint turns off.
ALWAYS_ON = ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb")
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
HALVES = (0.5, 0.5, 0.5)
# The least and the largest value of each number. The largest is several times that of any published processor, so that
# a damaged file cannot ask for an impossible size; the ranges of the last three keep pixels finite in fp32.
RANGES = {
    "min_pixels": (1, 2**24), "max_pixels": (1, 2**26), "size.height": (1, 2**12), "size.width": (1, 2**12),
    "size.shortest_edge": (1, 2**12), "size.longest_edge": (1, 2**13), "max_image_size.longest_edge": (1, 2**12),
    "crop_size.height": (1, 2**12), "crop_size.width": (1, 2**12), "patch_size": (1, 2**12), "merge_size": (1, 2**8),
    "spatial_merge_size": (1, 2**8), "temporal_patch_size": (1, 2**4), "max_image_tiles": (1, 2**4),
    "image_seq_length": (1, 2**14), "image_seq_len": (1, 2**14), "num_additional_image_tokens": (0, 2**8),
    "pan_and_scan_min_crop_size": (1, 2**12), "pan_and_scan_max_num_crops": (1, 2**4),
    "pan_and_scan_min_ratio_to_activate": (1, 1000), "rescale_factor": (0.0001, 1), "image_mean": (-255, 255),
    "image_std": (0.0001, 255),
}  # fmt: skip


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

    def check_switch(self, field: str, value: bool) -> None:
        """Raises CheckpointError for another value, but for none."""
        if self.image.get(field, bool, value) != value:
            raise self.image.error(field, not value, f"must be {str(value).lower()}")

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
        if isinstance(how, bool) or how not in FILTERS:
            raise self.image.error("resample", how, f"must be one of {', '.join(map(str, FILTERS))}")
        values = {"mean": self.channels("image_mean", mean), "std": self.channels("image_std", std)}
        return values | {"rescale_factor": read_number(self.image, "rescale_factor", 1 / 255), "how": FILTERS[how]}

    def channels(self, field: str, default: tuple[float, ...]) -> tuple[float, ...]:
        """One number for each of red, green and blue."""
        values = self.image.get(field, list, list(default))
        if len(values) != 3 or not all(in_range(field, value) for value in values):
            raise self.image.error(field, values, f"must be three numbers {range_of(field)}")
        return tuple(map(float, values))

    def sides(self, field: str, default: Mapping[str, int]) -> dict[str, int]:
        """A size: the fields of `default`."""
        sizes = self.image.get(field, dict, default)
        if not default.keys() <= sizes.keys():
            raise self.image.error(field, sizes, f"must have {' and '.join(default)}")
        return {name: checked_integer(self.image, f"{field}.{name}", sizes[name]) for name in default}

    def square(self, field: str, default: int) -> int:
        """The side of a square size."""
        sizes = self.sides(field, {"height": default, "width": default})
        if sizes["height"] != sizes["width"]:
            raise self.image.error(field, sizes, "must be a square")
        return sizes["height"]

    def pictures(self, field: str, default: int, size: Size) -> int:
        """Into how many pictures of this size an image is cut at most."""
        count = read_integer(self.image, field, default)
        if count * size.height * size.width > MAX_RESIZED_PIXELS:
            each = f"pictures of {size.width} x {size.height} pixels must have at most {MAX_RESIZED_PIXELS:,} in all"
            raise self.image.error(field, count, f"{each}; lower it or size")
        return count


def read_integer(file: JsonFields, field: str, default: int | None) -> int:
    return checked_integer(file, field, file.values.get(field, default))


def checked_integer(file: JsonFields, field: str, value: Any) -> int:
    if not isinstance(value, int) or not in_range(field, value):
        raise file.error(field, value, f"must be an integer {range_of(field)}")
    return value


def read_number(file: JsonFields, field: str, default: float) -> float:
    value = file.values.get(field, default)
    if not in_range(field, value):
        raise file.error(field, value, f"must be a number {range_of(field)}")
    return float(value)


def in_range(field: str, value: Any) -> bool:
    """Whether the value is a number in the range of the field."""
    least, most = RANGES[field]
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most


def range_of(field: str) -> str:
    least, most = RANGES[field]
    return f"from {least} to {most:,}"
