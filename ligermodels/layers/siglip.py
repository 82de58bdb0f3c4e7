"""Language models with pictures of one size, which SigLIP encodes: the tower, its pooled features, their places.

Every picture has the same number of tokens, all of which see all of their picture. Must not know any text model.
Source: SigLIP, https://arxiv.org/abs/2303.15343; the pooling and the attention of Gemma 3, https://arxiv.org/abs/2503.19786.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from ligermodels.configs.vision import SiglipConfig
from ligermodels.errors import InputError
from ligermodels.generation.image_features import ImageFeatures
from ligermodels.layers.attention import Attention
from ligermodels.layers.block import DecoderLayer
from ligermodels.layers.image_places import TokenGrid, documents_of, place_images
from ligermodels.layers.mlp import MLP
from ligermodels.layers.multimodal import Images, VisionLanguageModel
from ligermodels.layers.norm import RMSNorm
from ligermodels.layers.vision import VisionTower
from ligermodels.layers.vision_positions import Grid, PatchLayout, patch_layout
from ligermodels.weights.mapping import Concat, Rename, Rule

LAYER = "encoder.layers.{}"
# Names below the tower: ours -> those on the Hub.
SIGLIP_NAMES = {
    "patch_embed": "embeddings.patch_embedding",
    "pos_embed": "embeddings.position_embedding",
    "norm": "post_layernorm",
    "blocks.{}.input_layernorm": f"{LAYER}.layer_norm1",
    "blocks.{}.post_attention_layernorm": f"{LAYER}.layer_norm2",
    "blocks.{}.self_attn.o_proj": f"{LAYER}.self_attn.out_proj",
    "blocks.{}.mlp.up_proj": f"{LAYER}.mlp.fc1",
    "blocks.{}.mlp.down_proj": f"{LAYER}.mlp.fc2",
}


def siglip_rules(hub: str) -> tuple[Rule, ...]:
    """The weight rules of `visual`, a tower whose name on the Hub is `hub`."""
    heads = tuple(f"{hub}.{LAYER}.self_attn.{part}_proj" for part in "qkv")
    renamed = (Rename(f"{hub}.{theirs}", f"visual.{ours}") for ours, theirs in SIGLIP_NAMES.items())
    return Concat("visual.blocks.{}.self_attn.qkv_proj", heads), *renamed


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


class PictureLanguageModel(VisionLanguageModel):
    """A causal language model with pictures of one size. The tokens of a picture see those behind them in it too."""

    image_processor_type = "Gemma3ImageProcessor"

    def tower(self, config: SiglipConfig) -> VisionTower:
        def block() -> DecoderLayer:
            attention = Attention(config, qkv_bias=True, o_bias=True, rope=None)
            return DecoderLayer(config, attention, MLP(config, bias=True))

        blocks = [block() for _ in range(config.num_hidden_layers)]
        return VisionTower(config, blocks, patch_bias=True, table=config.table_side**2, final_norm=True)

    def merger(self, config: SiglipConfig) -> PooledProjector:
        return PooledProjector(config, self.config.hidden_size)

    @property
    def processor_settings(self) -> tuple[dict[str, Any], dict[str, Any]]:
        vision = self.config.vision
        size = {"height": vision.image_size, "width": vision.image_size}
        image = {"image_processor_type": self.image_processor_type, "size": size}
        return image, {"image_seq_length": vision.mm_tokens_per_image}

    def example_images(self, rows: int) -> tuple[int, dict[str, Tensor]]:
        vision = self.config.vision
        shape = rows, vision.in_channels, vision.image_size, vision.image_size
        pixels = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
        return vision.mm_tokens_per_image, {"pixel_values": pixels}

    def patch_layout(self, grids: Sequence[Grid]) -> tuple[PatchLayout, Tensor | None]:
        vision = self.config.vision
        return patch_layout(grids, vision.spatial_merge_size, table=vision.table_side)

    def encode_images(self, images: Images) -> ImageFeatures:
        ahead = seen_ahead(self.config.vision.mm_tokens_per_image, images.places)
        return super().encode_images(images)._replace(ahead=ahead)

    @_disable_dynamo
    def prepare_images(
        self,
        input_ids: Tensor,
        *,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        pixel_values: Tensor | None = None,
        **others: Any,
    ) -> Images:
        """As `VisionLanguageModel.prepare_images`. pixel_values: [pictures, C, side, side], crops as pictures."""
        if pixel_values is None or others:
            raise InputError(f"{', '.join(others) or 'images'}: the model takes pixel_values alone, of pictures")
        vision, side = self.config.vision, self.config.vision.image_size
        expected = [vision.in_channels, side, side]
        if pixel_values.ndim != 4 or list(pixel_values.shape[1:]) != expected:
            raise InputError(f"pixel_values: has shape {list(pixel_values.shape)}; must be [pictures, *{expected}]")
        count, token = len(pixel_values), TokenGrid(self.config.image_token_id, Grid(1, *[vision.feature_side] * 2))
        documents = documents_of(input_ids.cpu(), attention_mask, position_ids, cu_seqlens)
        layout, _ = self.patch_layout([Grid(1, *[vision.table_side] * 2)] * count)
        patches = picture_patches(pixel_values, vision.patch_size, vision.spatial_merge_size)
        return Images(patches, layout, place_images(documents, [token] * count).places)

    def split_by_row(self, pixels: Mapping[str, Any], ids: Tensor) -> list[dict[str, Any]]:
        pictures, rows = pixels["pixel_values"], []
        for row in ids:
            count = int((row == self.config.image_token_id).sum()) // self.config.vision.mm_tokens_per_image
            rows.append({"pixel_values": pictures[:count]} if count else {})
            pictures = pictures[count:]
        if len(pictures):
            raise InputError(f"pixel_values: {len(pictures)} pictures have no tokens in the text; remove them")
        return rows


def seen_ahead(count: int, places: Tensor) -> Tensor:
    """How many tokens behind it each token at `places` [N] sees, those of its picture of `count` tokens: int64 [N]."""
    return torch.arange(count - 1, -1, -1, device=places.device).repeat(len(places) // count)


def picture_patches(pixels: Tensor, patch: int, side: int) -> Tensor:
    """Pictures [n, C, H, W] -> patches [n patches, C patch patch], square by square of side × side patches."""
    squares = pixels.unflatten(3, (-1, side, patch)).unflatten(2, (-1, side, patch))  # [n, C, H', s, p, W', s, p]
    return squares.permute(0, 2, 5, 3, 6, 1, 4, 7).reshape(-1, pixels.shape[1] * patch**2)
