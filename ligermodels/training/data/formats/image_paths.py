"""The paths of images in records: relative to the file that the record is in, and within its folder.

This module knows nothing about images or tokens.
"""

from collections.abc import Sequence
from pathlib import Path

from ligermodels.errors import InputError, first_line
from ligermodels.images.reading import ImageSource
from ligermodels.training.data.formats.records import Completion, Conversation, GroupRecord, Record


def with_image_paths(record: Record, folder: Path | None) -> Record:
    """The record with the whole paths of its images. folder: of its file; None if it comes from no file.

    Raises InputError for a path that leaves the folder: a data set must not choose among all files of this machine.
    """
    if not isinstance(record, Conversation | Completion | GroupRecord) or not record.images:
        return record
    if isinstance(record, GroupRecord):
        return record._replace(images=tuple(whole_paths(images, folder, record.place) for images in record.images))
    return record._replace(images=whole_paths(record.images, folder, record.place))


def whole_paths(images: Sequence[ImageSource], folder: Path | None, place: str) -> list[ImageSource]:
    return [whole_path(image, folder, place) for image in images]


def whole_path(image: ImageSource, folder: Path | None, place: str) -> ImageSource:
    if not isinstance(image, str):
        return image
    if folder is None:
        raise InputError(f"{place}: the image {image} is a path; a data set of the Hub must contain its images")
    try:
        path = (folder / image).resolve()
    except (OSError, RuntimeError, ValueError) as error:  # links in a circle, a character that no path can have
        fault = first_line(error)
        raise InputError(f"{place}: the image {image!r} cannot be found: {fault}; correct its path") from None
    if not path.is_relative_to(folder.resolve()):
        raise InputError(f"{place}: the image {image} is outside the folder {folder}; put it beside the data")
    return str(path)
