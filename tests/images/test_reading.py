"""Images are read as Pillow and transformers read them; what cannot be used is refused in one line."""

import io
import re
import struct
import warnings
import zlib

import numpy as np
import pytest
from PIL import ExifTags, Image, ImageOps
from transformers.image_transforms import convert_to_rgb

from ligermodels.errors import InputError
from ligermodels.images import reading
from ligermodels.images.reading import image_size, read_image

MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "HSV")


def noise(height, width, channels=3, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)


def encoded(image, form, **options):
    stream = io.BytesIO()
    image.save(stream, form, **options)
    return stream.getvalue()


def pixels_of(image):
    return np.asarray(image.convert("RGB")).transpose(2, 0, 1)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_the_exif_orientation_is_applied_to_the_pixels_and_to_the_size(form, orientation, tmp_path):
    exif = Image.Exif()
    exif[reading.ORIENTATION] = orientation
    data = encoded(Image.fromarray(noise(20, 31)), form, exif=exif)
    file = tmp_path / "image"
    file.write_bytes(data)
    upright = pixels_of(ImageOps.exif_transpose(Image.open(io.BytesIO(data))))
    for source in (data, file, str(file)):
        assert np.array_equal(read_image(source), upright)
        assert image_size(source) == upright.shape[1:]


@pytest.mark.parametrize("orientation", [1, 3, 6, 7])
def test_an_image_is_converted_in_strips_which_bounds_the_memory(orientation, monkeypatch):
    exif = Image.Exif()
    exif[reading.ORIENTATION] = orientation
    image = Image.fromarray(noise(20, 31, 4))
    image.save(stream := io.BytesIO(), "PNG", exif=exif)
    whole, on_white, sizes = read_image(stream.getvalue()), reading.on_white, []
    monkeypatch.setattr(reading, "STRIP_PIXELS", 100)
    monkeypatch.setattr(reading, "on_white", lambda strip: sizes.append(strip.size) or on_white(strip))
    assert np.array_equal(read_image(stream.getvalue()), whole)
    assert sizes == [(31, 3)] * 6 + [(31, 2)]


def test_an_opened_image_is_taken_as_it_is():
    exif = Image.Exif()
    exif[reading.ORIENTATION] = 6
    image = Image.open(io.BytesIO(encoded(Image.fromarray(noise(20, 31)), "PNG", exif=exif)))
    assert image_size(image) == (20, 31) and np.array_equal(read_image(image), pixels_of(image))


@pytest.mark.parametrize("mode", MODES)
def test_modes_become_rgb_as_in_transformers(mode):
    image = Image.fromarray(noise(9, 12, 4), "RGBA").convert("RGB" if mode == "HSV" else "RGBA").convert(mode)
    assert np.array_equal(read_image(image), convert_to_rgb(image, return_numpy=True).transpose(2, 0, 1))


def test_what_is_transparent_is_white():
    image = Image.fromarray(noise(9, 12, 4), "RGBA")
    image.putpixel((3, 4), (10, 20, 30, 0))
    assert read_image(encoded(image, "PNG"))[:, 4, 3].tolist() == [255, 255, 255]
    palette = Image.new("P", (2, 1))
    palette.putpalette([0, 0, 0, 9, 8, 7])
    palette.putpixel((1, 0), 1)
    pixels = read_image(encoded(palette, "PNG", transparency=0))
    assert pixels[:, 0].T.tolist() == [[255, 255, 255], [9, 8, 7]]


def png_header(width, height, depth=8, colour=2):
    def chunk(name, content):
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
        + chunk(b"IDAT", b"")
    )


def test_the_size_needs_the_header_only():
    assert image_size(png_header(5000, 7000)) == (7000, 5000)
    data = encoded(Image.fromarray(noise(40, 30)), "JPEG")
    assert image_size(data[: data.index(b"\xff\xda") + 14]) == (40, 30)


def test_a_photo_with_previews_is_an_image():
    photo, preview = Image.fromarray(noise(40, 30)), Image.fromarray(noise(4, 3))
    data = encoded(photo, "MPO", save_all=True, append_images=[preview])
    assert np.array_equal(read_image(data), pixels_of(Image.open(io.BytesIO(data))))


def tiff16(mode):
    """A TIFF file of 16 bits a channel, as its header says."""
    data = encoded(Image.fromarray(noise(8, 9, 4), "RGBA").convert(mode), "TIFF")
    eight, sixteen = (struct.pack(f"<{len(mode)}H", *[bits] * len(mode)) for bits in (8, 16))
    assert data.count(eight) == 1
    return data.replace(eight, sixteen)


def webp(width, height):
    """A lossless WebP file whose header says this size, after the signature in 14 bits each."""
    data = encoded(Image.new("RGB", (1, 1)), "WEBP", lossless=True)
    size = data.index(b"\x2f") + 1
    return data[:size] + struct.pack("<I", (width - 1) | (height - 1) << 14) + data[size + 4 :]


def many_scans(scans):
    """A progressive JPEG file of 900 x 800 pixels, whose last scan is repeated."""
    *before, last = encoded(Image.new("L", (900, 800)), "JPEG", progressive=True).split(reading.START_OF_SCAN)
    end = b"\xff\xd9"
    return reading.START_OF_SCAN.join([*before, *[last.removesuffix(end)] * (scans - len(before) + 1)]) + end


FRAMES = [Image.fromarray(noise(8, 9, seed=seed)) for seed in range(3)]
REFUSED = {
    "a text": (b"no image at all", "is not an image in one of the formats PNG, JPEG"),
    "postscript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "is not an image in one of the formats"),
    "nothing": (b"", "is not an image"),
    "truncated": (encoded(FRAMES[0], "PNG")[:-60], "cannot be decoded: .*truncated"),
    "truncated JPEG": (encoded(Image.fromarray(noise(80, 90)), "JPEG")[:-200], "cannot be decoded: .*truncated"),
    "bomb": (png_header(60000, 60000), "exceeds limit of"),
    "large": (png_header(10000, 9000), "is 10000 x 9000 pixels, more than 89,478,485; make it smaller"),
    "wide": (png_header(2_000_000, 3), "is 2000000 x 3 pixels; a side must be at most 1,048,576; cut it into pieces"),
    "tall": (png_header(3, 2_000_000), "is 3 x 2000000 pixels; a side must be at most 1,048,576"),
    "many scans": (many_scans(3000), "has 3,000 scans of 900 x 800 pixels; save it as a baseline JPEG"),
    "large WebP": (webp(9000, 6000), "is 9000 x 6000 pixels, more than 50,000,000 of a WebP file; make it smaller"),
    "largest WebP": (webp(16384, 16384), "exceeds limit of"),
    "animated WebP": (encoded(FRAMES[0], "WEBP", save_all=True, append_images=FRAMES[1:]), "is animated"),
    "animated": (encoded(FRAMES[0], "GIF", save_all=True, append_images=FRAMES[1:]), "is animated or has several"),
    "pages": (encoded(FRAMES[0], "TIFF", save_all=True, append_images=FRAMES[1:]), "is animated or has several pages"),
    "16 bits": (encoded(Image.fromarray(noise(8, 9)[..., 0] * np.uint16(256)), "PNG"), "has the mode I;16, more"),
    "16 bits of RGB": (png_header(8, 9, 16, 2), "has 16 bits a channel, more than 8; convert it to 8 bits"),
    "16 bits of grey and alpha": (png_header(8, 9, 16, 4), "has 16 bits a channel"),
    "16 bits of RGBA": (png_header(8, 9, 16, 6), "has 16 bits a channel"),
    "an opened image of 16 bits": (Image.open(io.BytesIO(png_header(8, 9, 16, 6))), "has 16 bits a channel"),
    "TIFF, 16 bits of RGB": (tiff16("RGB"), "has 16 bits a channel"),
    "TIFF, 16 bits of RGBA": (tiff16("RGBA"), "has 16 bits a channel"),
    "floats": (Image.fromarray(np.ones((4, 5), np.float32)), "has the mode F, more than 8 bits a channel"),
    "an array": (noise(4, 5), "is ndarray; must be the bytes of a file, its path, or a PIL image"),
    "no file": ("missing.png", "missing.png: cannot be read"),
}  # fmt: skip


@pytest.mark.parametrize("scans", [6, 200])
def test_a_photo_may_have_many_scans_as_long_as_they_are_quick(scans):
    data = many_scans(scans)
    assert data.count(reading.START_OF_SCAN) == scans and image_size(data) == (800, 900)
    assert not read_image(data).any()


@pytest.mark.parametrize("fault", REFUSED)
def test_unusable_images_are_refused_by_name(fault, tmp_path, monkeypatch):
    source, message = REFUSED[fault]
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings(record=True) as warned, pytest.raises(InputError, match=message) as error:
        read_image(source, "data.jsonl:7")
    assert re.match("data.jsonl:7: ", str(error.value)) and "\n" not in str(error.value)
    assert not warned


def test_corrupt_exif_data_counts_as_far_as_it_can_be_read_and_without_a_warning():
    exif = Image.Exif()
    exif[reading.ORIENTATION], exif[ExifTags.Base.Software] = 6, "the name of a camera"
    data = encoded(Image.fromarray(noise(20, 31)), "JPEG", exif=exif.tobytes()[:-5])
    with warnings.catch_warnings(record=True) as warned:
        assert image_size(data) == (31, 20)
    assert not warned


def test_without_pillow_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "PIL.Image", None)
    with pytest.raises(InputError, match=r"images need Pillow, but cannot import it: .*; pip install pillow"):
        read_image(b"")
