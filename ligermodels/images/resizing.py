"""Resizing and normalising pixels, and the sizes to which models resize: pure functions of (height, width).

Pixels are those of the image processors of transformers 5 with torchvision, bit for bit. Resizing is on the CPU only:
on a GPU a fifth of the values differ by one level.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.images.reading import pillow

Filter: TypeAlias = Literal["lanczos", "bilinear", "bicubic"]
FILTERS: dict[int, Filter] = {1: "lanczos", 2: "bilinear", 3: "bicubic"}  # by the numbers of PIL.Image.Resampling
MAX_RATIO = 200  # of the sides, in Qwen's models
MAX_RESIZED_PIXELS = 3 * 2**24  # of an image, three times those of Qwen3-VL's largest; a gigabyte, with its copies
# SmolVLM: no side is longer, whatever the file says.
MAX_TILED_SIDE = 4096
# Torch 2.11 has no such filter.
TORCH_HAS_LANCZOS = hasattr(torch.ops.aten, "_upsample_lanczos2d_aa")


class Size(NamedTuple):
    height: int
    width: int


class Box(NamedTuple):
    """A part of an image. It may reach over the edges, where there are no pixels."""

    top: int
    left: int
    height: int
    width: int


def resize(image: Tensor, size: tuple[int, int], how: Filter) -> Tensor:
    """An image [3, H, W] uint8 as [3, *size] uint8, antialiased."""
    if tuple(image.shape[1:]) == tuple(size):
        return image
    if how == "lanczos" and not TORCH_HAS_LANCZOS:
        return resize_by_pillow(image, size, how)
    # Only contiguous input takes the path of integers, whose roundings are those of torchvision.
    batch = image.contiguous()[None]
    return F.interpolate(batch, tuple(size), mode=how, align_corners=False, antialias=True)[0]


def resize_by_pillow(image: Tensor, size: tuple[int, int], how: Filter) -> Tensor:
    """Resizes as Pillow rounds, and so transformers without torchvision."""
    module, (height, width) = pillow(), size
    picture = module.fromarray(image.permute(1, 2, 0).contiguous().numpy())
    resized = picture.resize((width, height), module.Resampling[how.upper()])
    return torch.frombuffer(bytearray(resized.tobytes()), dtype=torch.uint8).view(height, width, 3).permute(2, 0, 1)


def normalize(pixels: Tensor, mean: Sequence[float], std: Sequence[float], rescale_factor: float) -> Tensor:
    """(pixels * rescale_factor - mean) / std in fp32, as one subtraction and one division. pixels: [..., 3, H, W]."""
    shift, scale = (torch.tensor(values)[:, None, None] * (1.0 / rescale_factor) for values in (mean, std))
    return pixels.to(torch.float32).sub_(shift).div_(scale)


def smart_size(height: int, width: int, factor: int, least: int, most: int) -> Size:
    """Qwen: multiples of `factor` that keep the ratio nearly, with at least `least` and at most `most` pixels."""
    if max(height, width) > MAX_RATIO * min(height, width):
        raise InputError(f"is {width} x {height} pixels; one side must not be over {MAX_RATIO} times the other")
    rows, columns = round(height / factor) * factor, round(width / factor) * factor
    if rows * columns > most:
        shrink = math.sqrt(height * width / most)
        return Size(*(max(factor, math.floor(side / shrink / factor) * factor) for side in (height, width)))
    if rows * columns < least:
        grow = math.sqrt(least / (height * width))
        return Size(*(math.ceil(side * grow / factor) * factor for side in (height, width)))
    return Size(rows, columns)


def within(height: int, width: int, most: Size, unit: int) -> Size:
    """Pixtral: at most `most`, with the same ratio, then both sides up to multiples of `unit`; never enlarged else."""
    ratio = max(height / most.height, width / most.width)
    if ratio > 1:
        height, width = math.floor(height / ratio), math.floor(width / ratio)
    if not height * width:
        raise InputError(f"is so narrow that nothing is left of it within {most.width} x {most.height} pixels")
    return Size(((height - 1) // unit + 1) * unit, ((width - 1) // unit + 1) * unit)


def shortest_side(height: int, width: int, side: int) -> Size:
    """CLIP: the shorter side becomes `side`, the other is rounded down."""
    longer = int(side * max(height, width) / min(height, width))
    return Size(side, longer) if height <= width else Size(longer, side)


def pan_and_scan(height: int, width: int, least: int, most: int, ratio: float) -> tuple[Box, ...]:
    """Gemma 3's crops along the longer side, none for an image that is nearly square.

    least: pixels of a crop's shorter side. most: crops. ratio: of the sides, from which on there are crops.
    """
    longer, shorter = max(height, width), min(height, width)
    if longer / shorter < ratio:
        return ()
    count = min(most, max(2, min(longer // least, math.floor(longer / shorter + 0.5))))
    step = math.ceil(longer / count)
    if min(step, shorter) < least:
        return ()
    if width >= height:
        return tuple(Box(0, number * step, height, step) for number in range(count))
    return tuple(Box(number * step, 0, step, width) for number in range(count))


def tile_grids(most: int) -> list[tuple[int, int]]:
    """Mllama: the grids (rows, columns) of at most `most` tiles. A grid's aspect_ratio_id is its index + 1."""
    return [(rows, columns) for rows in range(1, most + 1) for columns in range(1, most + 1) if rows * columns <= most]


def best_grid(height: int, width: int, tile: int, most: int) -> tuple[int, int]:
    """Mllama: the grid of tiles that enlarges the image least, or else shrinks it least; of equal ones the smallest."""
    grids = tile_grids(most)
    scales = [min(rows * tile / height, columns * tile / width) for rows, columns in grids]
    best = min((scale for scale in scales if scale >= 1), default=max(scales))
    return min((grid for grid, scale in zip(grids, scales, strict=True) if scale == best), key=math.prod)


def in_canvas(height: int, width: int, canvas: Size, tile: int) -> Size:
    """Mllama: the size of the image in its canvas of tiles: not enlarged beyond one tile."""
    widest, tallest = min(max(width, tile), canvas.width), min(max(height, tile), canvas.height)
    if widest / width < tallest / height:
        return Size(min(math.floor(height * (widest / width)) or 1, tallest), widest)
    return Size(tallest, min(math.floor(width * (tallest / height)) or 1, widest))


def longest_side(height: int, width: int, side: int) -> Size:
    """SmolVLM: the longer side becomes `side`, the other is made even; both are at most MAX_TILED_SIDE."""
    ratio = width / height
    if width >= height:
        width, height = side, int(side / ratio)
        height = max(height + height % 2, 1)
    else:
        height, width = side, int(side * ratio)
        width = max(width + width % 2, 1)
    return no_longer(height, width, MAX_TILED_SIDE)


def no_longer(height: int, width: int, most: int) -> Size:
    ratio = width / height
    if width >= height and width > most:
        return Size(max(int(most / ratio), 1), most)
    if height > most:
        return Size(most, max(int(most * ratio), 1))
    return Size(height, width)


def whole_tiles(height: int, width: int, tile: int) -> Size:
    """SmolVLM: the longer side up to a multiple of `tile`, the other in proportion and then up to a multiple too."""
    ratio = width / height
    if width >= height:
        width = math.ceil(width / tile) * tile
        return Size(math.ceil(int(width / ratio) / tile) * tile, width)
    height = math.ceil(height / tile) * tile
    return Size(height, math.ceil(int(height * ratio) / tile) * tile)
