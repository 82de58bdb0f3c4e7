"""Pictures of one size that SigLIP encodes: the tower, its pooled features.

All tokens of a picture see all of their picture. Source: SigLIP, https://arxiv.org/abs/2303.15343; the pooling and the
attention of Gemma 3, https://arxiv.org/abs/2503.19786.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ligermodels.configs.vision import PictureConfig, SiglipConfig
from ligermodels.generation.image_features import SeenAhead
from ligermodels.layers.fused import apply_linear
from ligermodels.layers.norm import RMSNorm
from ligermodels.vision.fixed_size import PicturePlacer, picture_blocks
from ligermodels.vision.image_placer import Images
from ligermodels.vision.patch_positions import Grid, PatchLayout, patch_layout
from ligermodels.vision.tower import VisionTower


class PooledProjector(nn.Module):
    """norm(mean over each square of patches) W: one feature of the text model for the patches of a square.

    mm_input_projection_weight, W [E, H]: not transposed as that of a linear.
    """

    def __init__(self, config: SiglipConfig, hidden_size: int) -> None:
        super().__init__()
        self.patches = config.patches_per_feature
        self.mm_input_projection_weight = nn.Parameter(torch.empty(config.hidden_size, hidden_size))
        self.mm_soft_emb_norm = RMSNorm(config.hidden_size, config.norm_eps, offset=1.0)

    def forward(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """The tower's normed output [1, P, E] -> features [N, H]."""
        pooled = x.view(-1, self.patches, x.shape[-1]).mean(1)
        return self.mm_soft_emb_norm(pooled) @ self.mm_input_projection_weight


class PatchProjector(nn.Module):
    """linear of the rows of a tower: one feature of the text model for each patch."""

    def __init__(self, config: SiglipConfig, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(config.hidden_size, hidden_size)

    def forward(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """The tower's normed output [1, P, E] -> features [P, H]."""
        return apply_linear(self.linear, x.view(-1, x.shape[-1]))


def siglip_tower(config: PictureConfig) -> VisionTower:
    """Builds the tower: learned positions, no class token, a norm behind the blocks."""
    return VisionTower(config, picture_blocks(config), patch_bias=True, table=config.table_side**2, final_norm=True)


class SiglipPlacer(PicturePlacer):
    """Places pictures for SigLIP. `config.vision` is a `SiglipConfig`."""

    @property
    def settings(self) -> tuple[dict[str, Any], dict[str, Any]]:
        vision = self.config.vision
        size = {"height": vision.image_size, "width": vision.image_size}
        return {"image_processor_type": self.image_processor_type, "size": size}, {}

    def layout(self, grids: Sequence[Grid]) -> tuple[PatchLayout, Tensor | None]:
        vision = self.config.vision
        return patch_layout(grids, vision.spatial_merge_size, table=vision.table_side)


class PooledPlacer(SiglipPlacer):
    """Places pictures with pooled features. The tokens of a picture see its later ones too."""

    image_processor_type = "Gemma3ImageProcessor"

    @property
    def settings(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return super().settings[0], {"image_seq_length": self.config.vision.mm_tokens_per_image}

    def prepare(self, input_ids: Tensor, **inputs: Any) -> Images:
        images = super().prepare(input_ids, **inputs)
        counts = seen_ahead(self.config.vision.mm_tokens_per_image, images.places)
        return images._replace(ahead=SeenAhead(images.places, counts))


def seen_ahead(count: int, places: Tensor) -> Tensor:
    """How many tokens behind it each token at `places` [N] sees, those of its picture of `count` tokens: int64 [N]."""
    return torch.arange(count - 1, -1, -1, device=places.device).repeat(len(places) // count)
