"""Reading images: the bytes of a file, its path or a PIL image -> RGB pixels; and the size without decoding.

As in transformers, the EXIF orientation of files is applied, that of PIL images is not; what is transparent is put on
white. Refused are files that are truncated or no image, more pixels than MAX_PIXELS, of a WebP file MAX_WEBP_PIXELS,
sides of more than MAX_SIDE, more frames than one, and more than 8 bits a channel. Every error names the image's place.
"""

import importlib
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ligermodels.errors import InputError, first_line
from ligermodels.weights.reading import open_for_reading

if TYPE_CHECKING:
    from PIL.Image import Image

# Pillow warns of images that are refused here, in one line, and of EXIF data that is read as far as it can be.
PILLOW = r"PIL\."
PILLOW_IS_QUIET = ("ignore", None, Warning, re.compile(PILLOW), 0)  # an entry of warnings.filters
MAX_PIXELS = 89_478_485  # Pillow's MAX_IMAGE_PIXELS: a quarter of a GiB of RGB
MAX_WEBP_PIXELS = 50_000_000  # of which Pillow takes sixteen bytes each, whatever the file's size
MAX_SIDE = 2**20  # Pillow keeps a pointer for each row, and parts of an image are converted in whole rows
MAX_SCANNED_PIXELS = 20 * MAX_PIXELS  # each scan of a JPEG file takes the time of all pixels; encoders write up to 20
# Pillow reads more formats, some by running other programs.
IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")
PHOTO_AND_PREVIEWS = "MPO"  # a JPEG file of a camera, followed by smaller copies
START_OF_SCAN = b"\xff\xda"
ORIENTATION = 0x0112  # EXIF's tag
BITS_PER_SAMPLE = 0x0102  # TIFF's tag
# EXIF orientations. A quarter-turned image is stored by columns; then rows, or what of each row is first, may be last.
QUARTER_TURNED, LAST_ROW_FIRST, LAST_COLUMN_FIRST = (5, 6, 7, 8), (3, 4, 6, 7), (2, 3, 7, 8)
STRIP_PIXELS = 2**22  # that are converted at a time: Pillow needs twenty bytes for each

ImageSource: TypeAlias = "bytes | str | Path | Image"


def pillow() -> Any:
    """The module PIL.Image. Raises InputError if Pillow is not installed."""
    try:
        module = importlib.import_module("PIL.Image")
    except ImportError as error:
        raise InputError(f"images need Pillow, but cannot import it: {first_line(error)}; pip install pillow") from None
    # For good: images are decoded in threads, and filters belong to the process. Added again where they were restored.
    if PILLOW_IS_QUIET not in warnings.filters:
        warnings.filterwarnings("ignore", module=PILLOW)
    return module


def image_size(source: ImageSource, place: str = "image") -> tuple[int, int]:
    """(height, width) of the upright image, from the file's header. Raises InputError as `read_image` does."""
    with opened(source, place) as image:
        return upright_size(image, orientation(image, source))


def read_image(source: ImageSource, place: str = "image") -> Tensor:
    """The upright image: uint8 [3, height, width].

    source: the bytes of a file, its path, or a PIL image. place: names the image in errors.
    Raises InputError for what the module's description refuses.
    """
    with opened(source, place) as image:
        refuse_many_scans(image)
        turn = orientation(image, source)
        upright = np.empty((3, *upright_size(image, turn)), np.uint8)
        stored = upright.swapaxes(1, 2) if turn in QUARTER_TURNED else upright
        stored = stored[:, :: -1 if turn in LAST_ROW_FIRST else 1, :: -1 if turn in LAST_COLUMN_FIRST else 1]
        rows = max(1, STRIP_PIXELS // image.width)
        for top in range(0, image.height, rows):
            strip = image.crop((0, top, image.width, min(top + rows, image.height)))
            stored[:, top : top + rows] = np.asarray(on_white(strip)).transpose(2, 0, 1)
        return torch.from_numpy(upright)


def upright_size(image: "Image", turn: int) -> tuple[int, int]:
    """(height, width) of an image with this EXIF orientation."""
    width, height = image.size
    return (width, height) if turn in QUARTER_TURNED else (height, width)


@contextmanager
def opened(source: ImageSource, place: str) -> Iterator["Image"]:
    """The image with its header read and checked. Whatever Pillow raises within the context becomes an InputError."""
    module = pillow()
    try:
        if isinstance(source, module.Image):
            with decoding():
                yield checked(source)
        elif isinstance(source, bytes):
            with decoding():
                yield checked(module.open(BytesIO(source), formats=IMAGE_FORMATS))
        elif isinstance(source, str | Path):
            with open_for_reading(Path(source)) as stream, decoding():
                yield checked(module.open(stream, formats=IMAGE_FORMATS))
        else:
            raise InputError(f"is {type(source).__name__}; must be the bytes of a file, its path, or a PIL image")
    except InputError as error:
        reason = str(error).removeprefix(f"{place}: ")  # of a file, begins with its path, which may be the place
        raise InputError(f"{place}: {reason}") from None


@contextmanager
def decoding() -> Iterator[None]:
    """Makes an InputError of whatever Pillow raises: its decoders raise errors of any kind."""
    module = pillow()
    try:
        yield
    except InputError:
        raise
    except module.UnidentifiedImageError:
        raise InputError(f"is not an image in one of the formats {', '.join(IMAGE_FORMATS)}") from None
    except module.DecompressionBombError as error:
        raise InputError(first_line(error)) from None
    except Exception as error:
        raise InputError(f"cannot be decoded: {first_line(error)}; restore the image") from error


def checked(image: "Image") -> "Image":
    width, height = image.size
    if not width or not height:
        raise InputError(f"is {width} x {height} pixels; both sides must be at least 1")
    if max(width, height) > MAX_SIDE:
        raise InputError(f"is {width} x {height} pixels; a side must be at most {MAX_SIDE:,}; cut it into pieces")
    most, form = (MAX_WEBP_PIXELS, " of a WebP file") if image.format == "WEBP" else (MAX_PIXELS, "")
    if width * height > most:
        raise InputError(f"is {width} x {height} pixels, more than {most:,}{form}; make it smaller")
    if getattr(image, "is_animated", False) and image.format != PHOTO_AND_PREVIEWS:
        raise InputError("is animated or has several pages; give one of them as a still image")
    if image.mode[0] in "IF":
        raise InputError(f"has the mode {image.mode}, more than 8 bits a channel; convert it to 8 bits")
    if bits_of_channel(image) > 8:
        raise InputError(f"has {bits_of_channel(image)} bits a channel, more than 8; convert it to 8 bits")
    return image


def refuse_many_scans(image: "Image") -> None:
    """Raises InputError for a JPEG file of so many scans that it takes minutes, whatever its size. Previews count."""
    stream = getattr(image, "fp", None)
    if stream is None or image.format not in ("JPEG", PHOTO_AND_PREVIEWS):
        return
    place = stream.tell()
    stream.seek(0)
    scans = sum(piece.count(START_OF_SCAN) for piece in iter(partial(stream.read, 2**20), b""))
    stream.seek(place)
    if scans * image.width * image.height > MAX_SCANNED_PIXELS:
        raise InputError(f"has {scans:,} scans of {image.width} x {image.height} pixels; save it as a baseline JPEG")


def bits_of_channel(image: "Image") -> int:
    """The most bits a channel of a PNG file that is not decoded yet, or of a TIFF file; 8 for any other image. The mode
    does not say them: Pillow decodes 16 bits of RGB, and of grey with transparency, to 8."""
    if image.format == "TIFF":
        return max(image.tag_v2.get(BITS_PER_SAMPLE, (1,)))  # type: ignore[attr-defined]
    deep = image.format == "PNG" and any(str(tile[3]).endswith(";16B") for tile in image.tile)  # type: ignore[attr-defined]
    return 16 if deep else 8


def orientation(image: "Image", source: ImageSource) -> int:
    """The EXIF orientation of an image, 1 if it is upright, has none, or did not come from a file. Pillow itself turns
    TIFF files. In a PNG file only what comes before the pixels counts: Pillow would decode them to look for more."""
    if (
        image is source
        or image.format == "TIFF"
        or (image.format == "PNG" and not {"exif", "Raw profile type exif"} & image.info.keys())
    ):
        return 1
    return image.getexif().get(ORIENTATION, 1)


def on_white(image: "Image") -> "Image":
    """The image in RGB, its transparent parts on white."""
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    white = pillow().new("RGBA", image.size, (255, 255, 255, 255))
    return pillow().alpha_composite(white, image.convert("RGBA")).convert("RGB")
