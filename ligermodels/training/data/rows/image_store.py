"""The images of a token store: where their tokens are, their sizes, and where each image comes from.

A reference takes some 40 bytes beside its path. An image that was given as bytes is stored as it was encoded; a file
stays where it is. Nothing is decoded here.
"""

import hashlib
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

IMAGE_SOURCES = "image_sources"
IMAGE_ARRAYS = {
    "starts": np.int64, "stops": np.int64, "heights": np.int32, "widths": np.int32, "features": np.int32,
    "source_ends": np.int64, "is_path": np.bool_,
}  # fmt: skip


class DocumentImage(NamedTuple):
    """An image of a document, whose tokens are ids[start:stop], between them those of text about its parts.

    source: the bytes of a file, or its path. height, width: of the upright image, from which its tokens were planned.
    features: how many of the tokens stand for the image.
    """

    start: int
    stop: int
    source: bytes | str
    height: int
    width: int
    features: int


@dataclass(frozen=True)
class StoredImages:
    """The I images of a store, in the order of their tokens, tokens[starts:stops]. starts, stops: [I] int64.

    heights, widths, features: [I] int32. sources: the bytes of all images or paths; number i ends at source_ends[i].
    is_path: [I] bool, whether a source is the path of a file.
    """

    starts: np.ndarray
    stops: np.ndarray
    heights: np.ndarray
    widths: np.ndarray
    features: np.ndarray
    source_ends: np.ndarray
    is_path: np.ndarray
    sources: np.ndarray

    def between(self, start: int, stop: int) -> range:
        """Returns the numbers of the images whose tokens are within tokens[start:stop]."""
        return range(*np.searchsorted(self.starts, [start, stop]).tolist())

    def source(self, number: int) -> bytes | str:
        begin = 0 if number == 0 else int(self.source_ends[number - 1])
        content = self.sources[begin : int(self.source_ends[number])].tobytes()
        return content.decode("utf-8", "surrogateescape") if self.is_path[number] else content

    @property
    def file_versions(self) -> str:
        """A hash of the files' sizes and times of change: another one where an image may be another."""
        digest = hashlib.sha256()
        for number in np.flatnonzero(self.is_path).tolist():
            try:
                status = os.stat(self.source(number))
                digest.update(f"{status.st_size} {status.st_mtime_ns},".encode())
            except OSError:  # reading the image will say what is wrong
                digest.update(b"missing,")
        return digest.hexdigest()


def source_bytes(source: bytes | str) -> bytes:
    return source if isinstance(source, bytes) else source.encode("utf-8", "surrogateescape")


class ImageWriter:
    """Appends the images of documents to files in a folder, which `stack` closes."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        names = (*(f"image_{name}" for name in IMAGE_ARRAYS), IMAGE_SOURCES)
        self.files: dict[str, BinaryIO] = {name: stack.enter_context((folder / name).open("wb")) for name in names}
        self.end = 0

    def write(self, images: Sequence[DocumentImage], first: int) -> None:
        """Appends the images of a document. first: the number of the document's first token in the store."""
        contents = [source_bytes(image.source) for image in images]
        self.files[IMAGE_SOURCES].write(b"".join(contents))
        ends = self.end + np.cumsum([len(content) for content in contents])
        self.end = int(ends[-1])
        columns = {
            "starts": [first + image.start for image in images], "stops": [first + image.stop for image in images],
            "heights": [image.height for image in images], "widths": [image.width for image in images],
            "features": [image.features for image in images], "source_ends": ends,
            "is_path": [isinstance(image.source, str) for image in images],
        }  # fmt: skip
        for name, column in columns.items():
            self.files[f"image_{name}"].write(np.array(column, IMAGE_ARRAYS[name]).data)


def open_images(folder: Path) -> StoredImages:
    """Returns the images of the store in a folder, memory-mapped."""
    dtypes = IMAGE_ARRAYS | {"sources": np.uint8}
    names = [field.name for field in fields(StoredImages)]
    return StoredImages(*(np.memmap(folder / f"image_{name}", dtypes[name], mode="r") for name in names))
