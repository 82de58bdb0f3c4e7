"""Image processors, one a family: from an image's size to a plan of what becomes of it, and from pixels to a model's.

A plan needs no pixels, so that the tokens of a whole data set are known before an image is decoded. Arguments and
defaults are those of the processor of the same name in transformers 5.

B rows of text with at most I images each; p patch size, m merge size, s pixels of a tile's side.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.images.resizing import (
    MAX_RESIZED_PIXELS,
    Box,
    Filter,
    Size,
    best_grid,
    in_canvas,
    longest_side,
    normalize,
    pan_and_scan,
    resize,
    shortest_side,
    smart_size,
    tile_grids,
    whole_tiles,
    within,
)
from ligermodels.images.settings import CLIP_MEAN, CLIP_STD, HALVES, ImageSettings, read_integer, read_number

MAX_FEATURES = 2**16  # of an image, four times those of Qwen3-VL's largest


@dataclass(frozen=True)
class ImagePlan:
    """What becomes of an image.

    resized: the size to which the image is resized. grid: rows and columns of what its text is made of: patches, or
    tiles; (0, 0) for one that is not split. crops: further pictures of the image, as boxes of the original.
    features: how many vectors the model makes of it, which is the number of image tokens in the text. read: how many
    pixels the model reads, where that is more than `resized` has.
    Raises InputError for more pixels than MAX_RESIZED_PIXELS, for more features than MAX_FEATURES, and for none.
    """

    resized: Size
    grid: tuple[int, int]
    features: int
    crops: tuple[Box, ...] = ()
    read: int = 0

    def __post_init__(self) -> None:
        height, width = self.resized
        if height * width > MAX_RESIZED_PIXELS:
            raise InputError(
                f"would be resized to {width} x {height} pixels, more than {MAX_RESIZED_PIXELS:,}; crop the image, or "
                "correct preprocessor_config.json"
            )
        if self.read > MAX_RESIZED_PIXELS:
            raise InputError(
                f"would be read as {self.read:,} pixels, more than {MAX_RESIZED_PIXELS:,}; make the image smaller, or "
                "correct preprocessor_config.json"
            )
        if not 1 <= self.features <= MAX_FEATURES:
            raise InputError(
                f"takes {self.features:,} image tokens, must take from 1 to {MAX_FEATURES:,}; make the image smaller, "
                "or correct preprocessor_config.json and processor_config.json"
            )


Prepared: TypeAlias = tuple[ImagePlan, Tensor]  # an image's plan and its pixels


@dataclass(frozen=True, kw_only=True)
class ImageProcessor:
    """mean, std [3], rescale_factor: of the normalisation. how: the filter of resizing."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    rescale_factor: float
    how: Filter

    @classmethod
    def from_settings(cls, settings: ImageSettings) -> "ImageProcessor":
        raise NotImplementedError

    def plan(self, height: int, width: int) -> ImagePlan:
        """Raises InputError for a size that the model cannot take."""
        raise NotImplementedError

    def picture_size(self, plan: ImagePlan) -> Size:
        """The size of an image, and of each of its crops, as the model reads it."""
        return plan.resized

    def pixels(self, image: Tensor, plan: ImagePlan) -> Tensor:
        """A model's pixels, fp32, of an image uint8 [3, height, width] and the plan for that size."""
        raise NotImplementedError

    @property
    def token_range(self) -> tuple[int, int] | None:
        """The fewest and the most tokens of an image; None for a processor whose images have no free size."""
        return None

    def with_token_range(self, fewest: int, most: int) -> "ImageProcessor":
        """Returns a processor for images of so many tokens. Raises InputError where images have no free size."""
        raise InputError("the images of this model have no free size, and so a fixed number of tokens; leave it out")

    def collate(self, rows: Sequence[Sequence[Prepared]], tokens: Tensor) -> dict[str, Tensor]:
        """The images of B rows, at least one in all, under the Hub's names of a model's arguments.

        tokens: bool [B, T], which tokens of the rows are image tokens.
        """
        raise NotImplementedError

    def resized(self, image: Tensor, size: Size) -> Tensor:
        return self.normalized(resize(image, size, self.how))

    def normalized(self, pixels: Tensor) -> Tensor:
        return normalize(pixels, self.mean, self.std, self.rescale_factor)


def flat(rows: Sequence[Sequence[Prepared]]) -> Iterator[Prepared]:
    return (image for row in rows for image in row)


@dataclass(frozen=True, kw_only=True)
class QwenImages(ImageProcessor):
    """Qwen2-VL, 2.5 and 3: any size in multiples of p m, as patches. least, most: pixels. frames: of a patch."""

    patch_size: int
    merge_size: int
    frames: int
    least: int
    most: int

    @classmethod
    def from_settings(cls, settings: ImageSettings) -> "QwenImages":
        size = settings.image.get("size", dict, {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280})
        least = read_integer(settings.image, "min_pixels", size.get("shortest_edge"))
        most = read_integer(settings.image, "max_pixels", size.get("longest_edge"))
        if least > most:
            raise settings.image.error("min_pixels", least, f"must be at most max_pixels, {most}")
        return cls(
            **settings.pixels(CLIP_MEAN, CLIP_STD, resample=3), least=least, most=most,
            patch_size=read_integer(settings.image, "patch_size", 14),
            merge_size=read_integer(settings.image, "merge_size", 2),
            frames=read_integer(settings.image, "temporal_patch_size", 2),
        )  # fmt: skip

    def plan(self, height: int, width: int) -> ImagePlan:
        size = smart_size(height, width, self.patch_size * self.merge_size, self.least, self.most)
        rows, columns = (side // self.patch_size for side in size)
        features = rows * columns // self.merge_size**2
        return ImagePlan(size, (rows, columns), features, read=math.prod(size) * self.frames)

    @property
    def pixels_per_token(self) -> int:
        return (self.patch_size * self.merge_size) ** 2

    @property
    def token_range(self) -> tuple[int, int]:
        return max(1, self.least // self.pixels_per_token), max(1, self.most // self.pixels_per_token)

    def with_token_range(self, fewest: int, most: int) -> "QwenImages":
        return replace(self, least=fewest * self.pixels_per_token, most=most * self.pixels_per_token)

    def pixels(self, image: Tensor, plan: ImagePlan) -> Tensor:
        """[patches, 3 * frames * p * p]: the m x m patches that are merged follow one another."""
        p, m, (rows, columns) = self.patch_size, self.merge_size, plan.grid
        x = self.resized(image, plan.resized).view(3, rows // m, m, p, columns // m, m, p)
        x = x.permute(1, 4, 2, 5, 0, 3, 6).unsqueeze(5)  # [rows/m, columns/m, m, m, 3, 1, p, p]
        return x.expand(-1, -1, -1, -1, -1, self.frames, -1, -1).reshape(rows * columns, -1)

    def collate(self, rows: Sequence[Sequence[Prepared]], tokens: Tensor) -> dict[str, Tensor]:
        plans, pixels = zip(*flat(rows), strict=True)
        return {"pixel_values": torch.cat(pixels), "image_grid_thw": torch.tensor([(1, *plan.grid) for plan in plans])}


@dataclass(frozen=True, kw_only=True)
class Gemma3Images(ImageProcessor):
    """Gemma 3: stretched to one size, and each crop too. features: of a picture. crops: least pixels of a side, most
    crops, the ratio of the sides from which on there are some; None for no crops."""

    size: Size
    features: int
    crops: tuple[int, int, float] | None

    @classmethod
    def from_settings(cls, settings: ImageSettings) -> "Gemma3Images":
        size = Size(**settings.sides("size", {"height": 224, "width": 224}))
        features = read_integer(settings.text, "image_seq_length", 256)
        crops = None
        if settings.image.get("do_pan_and_scan", bool, False):
            least = read_integer(settings.image, "pan_and_scan_min_crop_size", 256)
            most = settings.pictures("pan_and_scan_max_num_crops", 4, size)
            crops = least, most, read_number(settings.image, "pan_and_scan_min_ratio_to_activate", 1.2)
        return cls(**settings.pixels(HALVES, HALVES, resample=2), size=size, features=features, crops=crops)

    def plan(self, height: int, width: int) -> ImagePlan:
        crops = pan_and_scan(height, width, *self.crops) if self.crops else ()
        return ImagePlan(self.size, (0, 0), self.features * (1 + len(crops)), crops)

    def pixels(self, image: Tensor, plan: ImagePlan) -> Tensor:
        """[pictures, 3, H, W]: the whole image, then its crops."""
        crops = (image[:, box.top : box.top + box.height, box.left : box.left + box.width] for box in plan.crops)
        return torch.stack([self.resized(picture, plan.resized) for picture in (image, *crops)])

    def collate(self, rows: Sequence[Sequence[Prepared]], tokens: Tensor) -> dict[str, Tensor]:
        return {"pixel_values": torch.cat([pixels for _, pixels in flat(rows)])}


@dataclass(frozen=True, kw_only=True)
class SiglipImages(Gemma3Images):
    """SigLIP, PaliGemma: stretched to one size."""

    @classmethod
    def from_settings(cls, settings: ImageSettings) -> "SiglipImages":
        size = settings.sides("size", {"height": 224, "width": 224})
        features = read_integer(settings.image, "image_seq_length", None)
        return cls(**settings.pixels(HALVES, HALVES, resample=3), size=Size(**size), features=features, crops=None)


@dataclass(frozen=True, kw_only=True)
class PixtralImages(ImageProcessor):
    """Pixtral, Mistral 3: no longer than `longest`, both sides multiples of `unit`, which is p m."""

    longest: Size
    unit: int

    @classmethod
    def from_settings(cls, settings: ImageSettings) -> "PixtralImages":
        if "longest_edge" in settings.image.get("size", dict, {"longest_edge": 1024}):
            side = settings.sides("size", {"longest_edge": 1024})["longest_edge"]
            longest = Size(side, side)
        else:
            longest = Size(**settings.sides("size", {"height": 1024, "width": 1024}))
        unit = read_integer(settings.text, "patch_size", 16) * read_integer(settings.text, "spatial_merge_size", 1)
        return cls(**settings.pixels(CLIP_MEAN, CLIP_STD, resample=3), longest=longest, unit=unit)

    @property
    def token_range(self) -> tuple[int, int]:
        return 1, math.prod(math.ceil(side / self.unit) for side in self.longest)

    def with_token_range(self, fewest: int, most: int) -> "PixtralImages":
        """Images of so many features: a square as large as the longest one has the most. They are never enlarged."""
        if fewest > 1:
            raise InputError("the images of this model are never enlarged; give the most tokens alone")
        side = math.isqrt(most) * self.unit
        return replace(self, longest=Size(side, side))

    def plan(self, height: int, width: int) -> ImagePlan:
        size = within(height, width, self.longest, self.unit)
        rows, columns = (side // self.unit for side in size)
        return ImagePlan(size, (rows, columns), rows * columns)

    def pixels(self, image: Tensor, plan: ImagePlan) -> Tensor:
        """[3, H, W]"""
        return self.resized(image, plan.resized)

    def collate(self, rows: Sequence[Sequence[Prepared]], tokens: Tensor) -> dict[str, Tensor]:
        """pixel_values [images, 3, H, W], zeros at the bottom and on the right of smaller images."""
        plans, pixels = zip(*flat(rows), strict=True)
        sizes = torch.tensor([plan.resized for plan in plans])  # [images, 2]
        padded = torch.zeros(len(plans), 3, *sizes.amax(0).tolist())
        for number, image in enumerate(pixels):
            padded[number, :, : image.shape[1], : image.shape[2]] = image
        return {"pixel_values": padded, "image_sizes": sizes}


@dataclass(frozen=True, kw_only=True)
class ClipImages(ImageProcessor):
    """CLIP, LLaVA: the shorter side becomes `side`; of the result the centre, a square of `crop` pixels."""

    side: int
    crop: int
    features: int

    @classmethod
    def from_settings(cls, settings: ImageSettings) -> "ClipImages":
        settings.check_switch("do_center_crop", True)
        settings.check_switch("do_pad", False)
        side, crop = settings.sides("size", {"shortest_edge": 224})["shortest_edge"], settings.square("crop_size", 224)
        if crop > side:
            raise settings.image.error("crop_size", crop, f"must be at most size.shortest_edge, {side}")
        text = settings.text
        patch = read_integer(text, "patch_size", None)
        if patch > crop:
            raise text.error("patch_size", patch, f"must be at most crop_size, {crop}")
        drops_first = text.get("vision_feature_select_strategy", str, "full") == "default"
        features = (crop // patch) ** 2 + read_integer(text, "num_additional_image_tokens", 0) - drops_first
        return cls(**settings.pixels(CLIP_MEAN, CLIP_STD, resample=3), side=side, crop=crop, features=features)

    def plan(self, height: int, width: int) -> ImagePlan:
        return ImagePlan(shortest_side(height, width, self.side), (0, 0), self.features)

    def picture_size(self, plan: ImagePlan) -> Size:
        return Size(self.crop, self.crop)

    def pixels(self, image: Tensor, plan: ImagePlan) -> Tensor:
        """[3, crop, crop]"""
        top, left = ((side - self.crop) // 2 for side in plan.resized)
        resized = resize(image, plan.resized, self.how)
        return self.normalized(resized[:, top : top + self.crop, left : left + self.crop])

    def collate(self, rows: Sequence[Sequence[Prepared]], tokens: Tensor) -> dict[str, Tensor]:
        return {"pixel_values": torch.stack([pixels for _, pixels in flat(rows)])}


def tiles(image: Tensor, side: int) -> Tensor:
    """An image [3, rows * side, columns * side] as tiles [rows * columns, 3, side, side], row by row."""
    rows, columns = (length // side for length in image.shape[1:])
    return image.view(3, rows, side, columns, side).permute(1, 3, 0, 2, 4).reshape(-1, 3, side, side)


@dataclass(frozen=True, kw_only=True)
class MllamaImages(ImageProcessor):
    """Llama 3.2 Vision: on a black canvas of at most `most` tiles. An image is one token of the text."""

    tile: int
    most: int

    @classmethod
    def from_settings(cls, settings: ImageSettings) -> "MllamaImages":
        settings.check_switch("do_pad", True)
        tile = settings.square("size", 224)
        most = settings.pictures("max_image_tiles", 4, Size(tile, tile))
        return cls(**settings.pixels(HALVES, HALVES, resample=2), tile=tile, most=most)

    def plan(self, height: int, width: int) -> ImagePlan:
        grid = best_grid(height, width, self.tile, self.most)
        canvas = Size(grid[0] * self.tile, grid[1] * self.tile)
        return ImagePlan(in_canvas(height, width, canvas, self.tile), grid, features=1)

    def picture_size(self, plan: ImagePlan) -> Size:
        """The size of the canvas."""
        return Size(plan.grid[0] * self.tile, plan.grid[1] * self.tile)

    def pixels(self, image: Tensor, plan: ImagePlan) -> Tensor:
        """[tiles, 3, s, s]: what is not the image is black, not zero."""
        size, (rows, columns) = plan.resized, plan.grid
        bottom, right = rows * self.tile - size.height, columns * self.tile - size.width
        return self.normalized(tiles(F.pad(resize(image, size, self.how), (0, right, 0, bottom)), self.tile))

    def collate(self, rows: Sequence[Sequence[Prepared]], tokens: Tensor) -> dict[str, Tensor]:
        """pixel_values [B, I, most, 3, s, s], aspect_ratio_ids [B, I], aspect_ratio_mask [B, I, most],
        cross_attention_mask [B, T, I, most]: which tiles a token sees.

        Tiles and images that a row lacks are zeros; of each image at least one tile counts in the mask.
        """
        batch, images = len(rows), max(map(len, rows))
        pixel_values = torch.zeros(batch, images, self.most, 3, self.tile, self.tile)
        ids = torch.zeros(batch, images, dtype=torch.int64)
        mask = torch.zeros(batch, images, self.most, dtype=torch.int64)
        mask[:, :, 0] = 1
        seen = torch.zeros(*tokens.shape, images, self.most, dtype=torch.int64)
        for row, prepared in enumerate(rows):
            spans = seeing_tokens(tokens[row].nonzero().flatten().tolist(), tokens.shape[1])
            for number, ((plan, pixels), (start, stop)) in enumerate(zip(prepared, spans, strict=True)):
                seen[row, start:stop, number, : len(pixels)] = 1
                pixel_values[row, number, : len(pixels)] = pixels
                ids[row, number] = tile_grids(self.most).index(plan.grid) + 1
                mask[row, number, : len(pixels)] = 1
        return {
            "pixel_values": pixel_values, "aspect_ratio_ids": ids, "aspect_ratio_mask": mask,
            "cross_attention_mask": seen,
        }  # fmt: skip


def seeing_tokens(images: list[int], length: int) -> list[tuple[int, int]]:
    """The span of tokens [start, stop) that see each image, given the places of the image tokens. An image is seen up
    to the next one; images whose tokens follow one another are seen up to the end of the last."""
    stops = [*images[1:], *([length] if images else [])]
    for number in reversed(range(len(images) - 1)):
        if stops[number] == images[number] + 1:
            stops[number] = stops[number + 1]
    return list(zip(images, stops, strict=True))


@dataclass(frozen=True, kw_only=True)
class SmolVlmImages(ImageProcessor):
    """SmolVLM, Idefics 3: the longer side becomes `side`, both are rounded up to whole tiles; then the whole as a tile.

    split: False for the whole alone. features: of a tile.
    """

    side: int
    tile: int
    split: bool
    features: int

    @classmethod
    def from_settings(cls, settings: ImageSettings) -> "SmolVlmImages":
        settings.check_switch("do_pad", True)
        return cls(
            **settings.pixels(HALVES, HALVES, resample=1), features=read_integer(settings.text, "image_seq_len", 169),
            side=settings.sides("size", {"longest_edge": 4 * 364})["longest_edge"],
            tile=settings.sides("max_image_size", {"longest_edge": 364})["longest_edge"],
            split=settings.image.get("do_image_splitting", bool, True),
        )  # fmt: skip

    def plan(self, height: int, width: int) -> ImagePlan:
        size = longest_side(height, width, self.side)
        cut = whole_tiles(*size, self.tile)
        rows, columns = (length // self.tile for length in cut)
        if not self.split or (rows, columns) == (1, 1):
            return ImagePlan(size, (0, 0), self.features)
        count = rows * columns + 1
        return ImagePlan(size, (rows, columns), self.features * count, read=count * self.tile**2)

    def picture_size(self, plan: ImagePlan) -> Size:
        return Size(self.tile, self.tile)

    def pixels(self, image: Tensor, plan: ImagePlan) -> Tensor:
        """[tiles, 3, s, s], the whole image last. Each size is made of the one before it, as in the reference."""
        rows, columns = plan.grid
        image = resize(image, plan.resized, self.how)
        if plan.grid == (0, 0):
            return self.normalized(resize(image, Size(self.tile, self.tile), self.how)[None])
        cut = resize(image, Size(rows * self.tile, columns * self.tile), self.how)
        whole = resize(cut, Size(self.tile, self.tile), self.how)
        return self.normalized(torch.cat([tiles(cut, self.tile), whole[None]]))

    def collate(self, rows: Sequence[Sequence[Prepared]], tokens: Tensor) -> dict[str, Tensor]:
        """pixel_values [B, N, 3, s, s], pixel_attention_mask [B, N, s, s], N the most tiles of a row; else zeros."""
        stacked = [torch.cat([pixels for _, pixels in row]) if row else torch.zeros(0) for row in rows]
        shape = len(rows), max(map(len, stacked)), 3, self.tile, self.tile
        pixel_values, mask = torch.zeros(shape), torch.zeros(*shape[:2], *shape[3:], dtype=torch.int64)
        for row, pixels in enumerate(stacked):
            if len(pixels):
                pixel_values[row, : len(pixels)], mask[row, : len(pixels)] = pixels, 1
        return {"pixel_values": pixel_values, "pixel_attention_mask": mask}
