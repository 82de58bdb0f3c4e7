"""Image processors that cut an image into square tiles: Mllama's and SmolVLM's. See `processors.py`.

B rows of text with at most I images each; s pixels of a tile's side.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.images.processors import ImagePlan, ImageProcessor, Prepared
from ligermodels.images.resizing import Size, best_grid, in_canvas, longest_side, resize, tile_grids, whole_tiles
from ligermodels.images.settings import HALVES, ImageSettings, read_integer


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
