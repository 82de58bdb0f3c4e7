"""Images in square tiles, which SigLIP encodes one by one: their places, layout, projector, names.

A tile may be padded: its patches of padding have features too, but no other patch sees them. Every tile has the same
number of tokens, causal as those of text.
Sources: Idefics 3, https://arxiv.org/abs/2408.12637; positions of parts of tiles NaViT,
https://arxiv.org/abs/2307.06304.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ligermodels.configs.vision import Idefics3VisionConfig
from ligermodels.errors import InputError
from ligermodels.kernels.attention.shared_keys import SharedKeys
from ligermodels.layers.fused import apply_linear
from ligermodels.vision.fixed_size import PICTURE_TOWER, PicturePlacer, picture_patches
from ligermodels.vision.hub_names import NamesBesideText, PackedNames
from ligermodels.vision.image_placer import Documents, Images, TokenGrid, place_images
from ligermodels.vision.patch_positions import Grid, PatchLayout, TableReads, make_spans, offsets_from, patch_positions

TILE_TOWER: PackedNames = {
    ours: f"vision_model.{hub}" if isinstance(hub, str) else tuple(f"vision_model.{part}" for part in hub)
    for ours, hub in PICTURE_TOWER.items()
}
TILE_NAMES = NamesBesideText(
    {"projector": "connector.modality_projection", **TILE_TOWER}, (("model.text_model", "model."),)
)


class SquareProjector(nn.Module):
    """proj of the rows of a square of patches side by side: one feature of the text model, [D], for each square.

    proj [D, m² E], m² patches of a square, row by row.
    """

    def __init__(self, config: Idefics3VisionConfig, hidden_size: int) -> None:
        super().__init__()
        self.proj = nn.Linear(config.patches_per_feature * config.hidden_size, hidden_size, bias=False)

    def forward(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """The tower's normed output [1, P, E] -> features [N, D]."""
        return apply_linear(self.proj, x.view(-1, self.proj.in_features))


class TilePlacer(PicturePlacer):
    """Places images in tiles. `config.vision` is an `Idefics3VisionConfig`, image_size its tiles' side."""

    image_processor_type = "Idefics3ImageProcessor"
    other_inputs = ("pixel_attention_mask",)

    def layout(self, grids: Sequence[Grid]) -> tuple[PatchLayout, None]:
        """The layout of tiles, each of which begins with its grid of patches; the others are padding."""
        vision = self.config.vision
        return padded_tile_layout(grids, vision.table_side, vision.spatial_merge_size), None

    @property
    def smallest_grid(self) -> Grid:
        return Grid(1, *[self.config.vision.table_side] * 2)

    @property
    def settings(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """At most 2 × 2 tiles and the whole, where published models have 4 × 4: new models are small."""
        vision = self.config.vision
        image = {
            "image_processor_type": self.image_processor_type, "size": {"longest_edge": 2 * vision.image_size},
            "max_image_size": {"longest_edge": vision.image_size},
        }  # fmt: skip
        return image, {"image_seq_len": vision.features_per_picture}

    def example(self, rows: int) -> tuple[int, dict[str, Tensor]]:
        features, inputs = super().example(rows)
        return features, {"pixel_values": inputs["pixel_values"][:, None]}

    def place(
        self, documents: Documents, pixels: Tensor, *, pixel_attention_mask: Tensor | None = None, **others: Any
    ) -> Images:
        """pixels: [B, N, C, side, side], the tiles of each row of text, N at most; those of zeros alone are none.
        pixel_attention_mask: [B, N, side, side], 0 at padding, which is on the right and below; None for no padding.
        """
        vision, token = self.config.vision, self.config.image_token_id
        expected = [documents.shape[0], vision.in_channels, vision.image_size, vision.image_size]
        if pixels.ndim != 5 or [len(pixels), *pixels.shape[2:]] != expected:
            rule = f"must be {[expected[0], 'tiles', *expected[1:]]}"
            raise InputError(f"pixel_values: has shape {list(pixels.shape)}; {rule}")
        real = pixels.flatten(2).any(-1)
        grids = [self.smallest_grid] * int(real.sum())
        if pixel_attention_mask is not None:
            if pixel_attention_mask.shape != pixels[:, :, 0].shape:
                rule = f"must be {list(pixels[:, :, 0].shape)}"
                raise InputError(f"pixel_attention_mask: has shape {list(pixel_attention_mask.shape)}; {rule}")
            grids = read_parts(pixel_attention_mask[real], vision)
        check_rows(documents, token, real.sum(1).tolist(), vision.features_per_picture)
        if not grids:
            raise InputError("pixel_values: all tiles are zeros, which is padding; leave them out")
        features = TokenGrid(token, Grid(1, 1, vision.features_per_picture))
        patches = picture_patches(pixels[real], vision.patch_size, vision.spatial_merge_size)
        layout, _ = self.layout(grids)
        return Images(patches, layout, place_images(documents, [features] * len(grids)).places)

    def split_by_row(self, pixels: Mapping[str, Any], ids: Tensor) -> list[dict[str, Any]]:
        needed = (ids == self.config.image_token_id).any(1) | pixels["pixel_values"].flatten(1).any(1).cpu()
        return [
            {name: value[row : row + 1] for name, value in pixels.items()} if needed[row] else {}
            for row in range(len(ids))
        ]


def read_parts(mask: Tensor, vision: Idefics3VisionConfig) -> list[Grid]:
    """The patches of tiles that are not all padding, from their mask [n, side, side]: a grid each.

    Raises InputError if they are no rectangle that begins with the first patch.
    """
    side, patch = vision.table_side, vision.patch_size
    shown = mask[:, : side * patch, : side * patch].unflatten(2, (side, patch)).unflatten(1, (side, patch))
    shown = (shown != 0).any(4).any(2).cpu()  # [n, patches down, patches across]
    heights, widths = shown[:, :, 0].sum(1), shown[:, 0].sum(1)
    count = torch.arange(side)
    if not torch.equal(shown, (count < heights[:, None])[:, :, None] & (count < widths[:, None])[:, None]) or (
        len(shown) and not shown[:, 0, 0].all()
    ):
        raise InputError(
            "pixel_attention_mask: must be 1 in a rectangle from the first pixel of each tile, 0 elsewhere"
        )
    return [Grid(1, *size) for size in zip(heights.tolist(), widths.tolist(), strict=True)]


def check_rows(documents: Documents, token: int, tiles: Sequence[int], features: int) -> None:
    """Raises InputError if a row of text has image tokens of other than its own tiles. tiles: of each row."""
    rows = documents.places[documents.ids == token] // documents.shape[1]
    counts = torch.bincount(rows, minlength=len(tiles)).tolist()
    for row, (count, own) in enumerate(zip(counts, tiles, strict=True)):
        if count != own * features:
            raise InputError(
                f"pixel_values: row {row} has {own} tiles of {features} features, but {count} image tokens"
            )


def padded_tile_layout(grids: Sequence[Grid], side: int, square: int) -> PatchLayout:
    """The layout of tiles of side × side patches, in order of squares of square × square; padding behind the grids.

    A table of side × side positions is stretched over the grid of a tile; each patch reads the entry it lies in, those
    of padding the first.
    """
    place = patch_positions(Grid(1, side, side), square)  # [2, patches of a tile]
    sizes = torch.tensor([grid[1:] for grid in grids]).view(-1, 2, 1)
    shown = (place < sizes).all(1)  # [tiles, patches of a tile]
    down, across = (place * side // sizes).unbind(1)
    entries = torch.where(shown, down * side + across, 0).view(-1, 1)
    reads = TableReads(entries, torch.ones(entries.shape))
    keys = None if bool(shown.all()) else shown_keys(shown)
    return PatchLayout(place.repeat(1, len(grids)), make_spans([side * side] * len(grids)), table=reads, keys=keys)


def shown_keys(shown: Tensor) -> SharedKeys:
    """The keys of attention within each tile. shown: bool [tiles, patches of a tile], the patches that are read."""
    lengths = shown.sum(1).tolist()
    places = torch.arange(sum(lengths), dtype=torch.int32)
    return SharedKeys(offsets_from(shown.flatten().int()), places, *make_spans(lengths))
