"""Pictures of one size: which tokens stand for each, and the names of the towers that encode them.

Every picture has the same number of tokens.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.vision.hub_names import PackedNames, WrappedNames
from ligermodels.vision.image_placer import Documents, Images, PixelPlacer, TokenGrid, place_images
from ligermodels.vision.patch_positions import Grid, PatchLayout, class_token_layout

LAYER = "encoder.layers.{}"
# Names of a tower of CLIP's kind: ours -> those on the Hub, below the tower.
PICTURE_TOWER: PackedNames = {
    "visual.class_embedding": "embeddings.class_embedding",
    "visual.patch_embed": "embeddings.patch_embedding",
    "visual.pos_embed": "embeddings.position_embedding",
    "visual.first_norm": "pre_layrnorm",
    "visual.norm": "post_layernorm",
    "visual.blocks.{}.input_layernorm": f"{LAYER}.layer_norm1",
    "visual.blocks.{}.post_attention_layernorm": f"{LAYER}.layer_norm2",
    "visual.blocks.{}.self_attn.qkv_proj": tuple(f"{LAYER}.self_attn.{part}_proj" for part in "qkv"),
    "visual.blocks.{}.self_attn.o_proj": f"{LAYER}.self_attn.out_proj",
    "visual.blocks.{}.mlp.up_proj": f"{LAYER}.mlp.fc1",
    "visual.blocks.{}.mlp.down_proj": f"{LAYER}.mlp.fc2",
}
PICTURE_NAMES = WrappedNames(PICTURE_TOWER, LAYER, ("vision_tower.vision_model", "vision_tower"))


class PicturePlacer(PixelPlacer):
    """Places pictures of one size. `config.vision` is a `PictureConfig`."""

    def example(self, rows: int) -> tuple[int, dict[str, Tensor]]:
        vision = self.config.vision
        shape = rows, vision.in_channels, vision.image_size, vision.image_size
        pixels = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
        return vision.features_per_picture, {"pixel_values": pixels}

    def place(self, documents: Documents, pixels: Tensor, **others: Any) -> Images:
        """pixels: [pictures, C, side, side], crops as pictures."""
        vision, side = self.config.vision, self.config.vision.image_size
        expected = [vision.in_channels, side, side]
        if pixels.ndim != 4 or list(pixels.shape[1:]) != expected:
            raise InputError(f"pixel_values: has shape {list(pixels.shape)}; must be [pictures, *{expected}]")
        count, token = len(pixels), TokenGrid(self.config.image_token_id, Grid(1, 1, vision.features_per_picture))
        layout, _ = self.layout([Grid(1, *[vision.table_side] * 2)] * count)
        patches = picture_patches(pixels, vision.patch_size, vision.spatial_merge_size)
        return Images(patches, layout, place_images(documents, [token] * count).places)

    def split_by_row(self, pixels: Mapping[str, Any], ids: Tensor) -> list[dict[str, Any]]:
        pictures, rows = pixels["pixel_values"], []
        for row in ids:
            count = int((row == self.config.image_token_id).sum()) // self.config.vision.features_per_picture
            rows.append({"pixel_values": pictures[:count]} if count else {})
            pictures = pictures[count:]
        if len(pictures):
            raise InputError(f"pixel_values: {len(pictures)} pictures have no tokens in the text; remove them")
        return rows


class ClipPlacer(PicturePlacer):
    """Places pictures for CLIP, which reads a class token before the patches of each one."""

    image_processor_type = "CLIPImageProcessor"

    def layout(self, grids: Sequence[Grid]) -> tuple[PatchLayout, None]:
        return class_token_layout(len(grids), self.config.vision.table_side), None

    @property
    def smallest_grid(self) -> Grid:
        return Grid(1, *[self.config.vision.table_side] * 2)

    @property
    def settings(self) -> tuple[dict[str, Any], dict[str, Any]]:
        vision = self.config.vision
        side = vision.image_size
        text = {"vision_feature_select_strategy": vision.vision_feature_select_strategy}
        text |= {"patch_size": vision.patch_size, "num_additional_image_tokens": 1}
        return {
            "image_processor_type": self.image_processor_type, "size": {"shortest_edge": side},
            "crop_size": {"height": side, "width": side},
        }, text  # fmt: skip


def picture_patches(pixels: Tensor, patch: int, side: int) -> Tensor:
    """Pictures [n, C, H, W] -> patches [n patches, C patch patch], square by square of side × side patches.

    Rows and columns of pixels behind the last patches are left out.
    """
    pixels = pixels[..., : pixels.shape[2] // patch * patch, : pixels.shape[3] // patch * patch]
    squares = pixels.unflatten(3, (-1, side, patch)).unflatten(2, (-1, side, patch))  # [n, C, H', s, p, W', s, p]
    return squares.permute(0, 2, 5, 3, 6, 1, 4, 7).reshape(-1, pixels.shape[1] * patch**2)
