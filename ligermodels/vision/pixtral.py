"""Images of any size, which the tower of Pixtral encodes: their places, the tower, its merger, their names.

Each row of an image's features stands in the text by itself: a token that is not an image's ends it.
Source: Pixtral, https://arxiv.org/abs/2410.07073; the merger, the model card of Mistral Small 3.1.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ligermodels.configs.vision import PixtralVisionConfig
from ligermodels.errors import InputError
from ligermodels.layers.fused import add_then_norm, apply_linear
from ligermodels.layers.mlp import GatedMLP
from ligermodels.layers.norm import RMSNorm
from ligermodels.vision.fixed_size import picture_patches
from ligermodels.vision.hub_names import PackedNames, WrappedNames
from ligermodels.vision.image_placer import Documents, Images, PixelPlacer, TokenGrid, place_images
from ligermodels.vision.patch_positions import Grid
from ligermodels.vision.tower import LinearProjector, VisionTower, vision_blocks

PIXTRAL_BLOCK = "transformer.layers.{}"
# Names of the tower: ours -> those on the Hub, below the tower.
PIXTRAL_TOWER: PackedNames = {
    "visual.patch_embed": "patch_conv",
    "visual.first_norm": "ln_pre",
    "visual.blocks.{}.input_layernorm": f"{PIXTRAL_BLOCK}.attention_norm",
    "visual.blocks.{}.post_attention_layernorm": f"{PIXTRAL_BLOCK}.ffn_norm",
    "visual.blocks.{}.self_attn.qkv_proj": tuple(f"{PIXTRAL_BLOCK}.attention.{part}_proj" for part in "qkv"),
    "visual.blocks.{}.self_attn.o_proj": f"{PIXTRAL_BLOCK}.attention.o_proj",
    "visual.blocks.{}.mlp.gate_up_proj": tuple(f"{PIXTRAL_BLOCK}.feed_forward.{x}_proj" for x in ("gate", "up")),
    "visual.blocks.{}.mlp.down_proj": f"{PIXTRAL_BLOCK}.feed_forward.down_proj",
}
PIXTRAL_NAMES = WrappedNames(PIXTRAL_TOWER, PIXTRAL_BLOCK)


def pixtral_tower(config: PixtralVisionConfig) -> VisionTower:
    blocks = vision_blocks(config, GatedMLP, bias=False)
    return VisionTower(config, blocks, first_norm=True, joined=config.joined_blocks)


class PixtralPlacer(PixelPlacer):
    """Places images of any size. `config.vision` is a `PixtralVisionConfig`."""

    image_processor_type = "PixtralImageProcessor"
    other_inputs = ("image_sizes",)

    @property
    def settings(self) -> tuple[dict[str, Any], dict[str, Any]]:
        vision = self.config.vision
        image = {
            "image_processor_type": self.image_processor_type, "size": {"longest_edge": vision.image_size},
            "patch_size": {"height": vision.patch_size, "width": vision.patch_size},
        }  # fmt: skip
        return image, {"patch_size": vision.patch_size, "spatial_merge_size": vision.spatial_merge_size}

    def example(self, rows: int) -> tuple[int, dict[str, Tensor]]:
        """One row of features an image."""
        vision, count = self.config.vision, 6
        size = vision.feature_side, count * vision.feature_side
        pixels = torch.randn(rows, vision.in_channels, *size, generator=torch.Generator().manual_seed(0))
        return count, {"pixel_values": pixels, "image_sizes": torch.tensor([size] * rows)}

    def place(
        self, documents: Documents, pixels: Tensor, *, image_sizes: Tensor | None = None, **others: Any
    ) -> Images:
        """pixels: [images, C, H, W]. image_sizes: int [images, 2], the height and the width of each in pixels; what
        is below or to the right of it is padding. None for images of the whole size.
        """
        vision, token = self.config.vision, self.config.image_token_id
        grids = read_sizes(pixels, image_sizes, vision)
        merged = [grid.merged(vision.spatial_merge_size) for grid in grids]
        rows = [Grid(1, 1, grid.w) for grid in merged for _ in range(grid.h)]
        found, features = int((documents.ids == token).sum()), sum(row.w for row in rows)
        if found != features:
            raise InputError(
                f"images: {len(grids)} images have {features} features, but the text has {found} tokens {token}; let "
                "the processor expand the text, and cut no image off"
            )
        places = place_images(documents, [TokenGrid(token, row) for row in rows]).places
        layout, _ = self.layout(grids)
        size = vision.patch_size
        patches = [
            picture_patches(image[None, :, : grid.h * size, : grid.w * size], size, vision.spatial_merge_size)
            for image, grid in zip(pixels, grids, strict=True)
        ]
        return Images(torch.cat(patches), layout, places)

    def split_by_row(self, pixels: Mapping[str, Any], ids: Tensor) -> list[dict[str, Any]]:
        vision, values, sizes = self.config.vision, pixels["pixel_values"], pixels.get("image_sizes")
        grids = read_sizes(values, sizes, vision)
        counts = [grid.patches // vision.patches_per_feature for grid in grids]
        rows: list[dict[str, Any]] = []
        first = 0
        for row in ids:
            last, left = first, int((row == self.config.image_token_id).sum())
            while last < len(counts) and left > 0:
                left -= counts[last]
                last += 1
            of_row = {"pixel_values": values[first:last]}
            of_row |= {} if sizes is None else {"image_sizes": sizes[first:last]}
            rows.append(of_row if last > first else {})
            first = last
        if first < len(counts):
            raise InputError(f"pixel_values: {len(counts) - first} images have no tokens in the text; remove them")
        return rows


def read_sizes(pixels: Tensor, sizes: Tensor | None, vision: PixtralVisionConfig) -> list[Grid]:
    """The grids of patches of images [images, C, H, W] with these sizes. Raises InputError if they do not fit."""
    if pixels.ndim != 4 or pixels.shape[1] != vision.in_channels:
        raise InputError(
            f"pixel_values: has shape {list(pixels.shape)}; must be [images, {vision.in_channels}, height, width]"
        )
    whole = list(pixels.shape[2:])
    listed = [whole] * len(pixels) if sizes is None else torch.as_tensor(sizes).tolist()
    if len(listed) != len(pixels) or any(not isinstance(size, list) or len(size) != 2 for size in listed):
        raise InputError(f"image_sizes: must be [{len(pixels)}, 2], the height and the width of each of pixel_values")
    side = vision.feature_side
    for size in listed:
        if any(length < 1 or length % side or length > most for length, most in zip(size, whole, strict=True)):
            raise InputError(f"image_sizes: {size} must be positive multiples of {side} pixels, and at most {whole}")
    return [Grid(1, height // vision.patch_size, width // vision.patch_size) for height, width in listed]


class MergingProjector(LinearProjector):
    """linear_2(activation(linear_1(W squares of normed patches))): one feature for the patches of a square.

    patch_merger, W [E, E m²]: the columns of a channel follow one another. eps: of the norm.
    """

    def __init__(
        self, config: PixtralVisionConfig, hidden_size: int, activation: str, *, bias: bool, eps: float
    ) -> None:
        super().__init__(config.hidden_size, hidden_size, activation, bias=bias)
        self.patches = config.patches_per_feature
        self.norm = RMSNorm(config.hidden_size, eps)
        self.patch_merger = nn.Linear(self.patches * config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, residual: Tensor | None) -> Tensor:
        return super().forward(self.merged(x, residual), None)

    def merged(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """The tower's output, [1, P, E] each -> what becomes of its squares, [N, E]."""
        normed, _ = add_then_norm(self.norm, x, residual)
        squares = normed.view(-1, self.patches, normed.shape[-1]).transpose(1, 2)  # [N, E, m²]
        return apply_linear(self.patch_merger, squares.flatten(1))
