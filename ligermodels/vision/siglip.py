"""Pictures of one size that SigLIP encodes: the tower, its features, pooled or not, and which tokens see ahead.

All tokens of a picture see all of their picture. In PaliGemma each token of a text with pictures sees all of its
prompt, and what follows is causal.
Sources: SigLIP, https://arxiv.org/abs/2303.15343; the pooling and the attention of Gemma 3,
https://arxiv.org/abs/2503.19786; PaliGemma, https://arxiv.org/abs/2407.07726.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ligermodels.configs.vision import PictureConfig, SiglipConfig
from ligermodels.errors import InputError
from ligermodels.generation.image_features import SeenAhead
from ligermodels.layers.decoder import IGNORE_INDEX
from ligermodels.layers.fused import apply_linear
from ligermodels.layers.mlp import MLP
from ligermodels.layers.norm import RMSNorm
from ligermodels.vision.fixed_size import PicturePlacer
from ligermodels.vision.image_placer import Documents, Images, documents_of
from ligermodels.vision.patch_positions import Grid, PatchLayout, patch_layout
from ligermodels.vision.tower import VisionTower, vision_blocks


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
    blocks = vision_blocks(config, MLP, bias=True, rope=None)
    return VisionTower(config, blocks, patch_bias=True, table=config.table_side**2, final_norm=True)


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


class PrefixPlacer(SiglipPlacer):
    """Places pictures for SigLIP in prompts that see ahead, a feature for each patch."""

    image_processor_type = "SiglipImageProcessor"
    sees_prompt_ahead = True

    def prepare(
        self, input_ids: Tensor, *, labels: Tensor | None = None, token_type_ids: Tensor | None = None,
        attention_mask: Tensor | None = None, position_ids: Tensor | None = None, cu_seqlens: Tensor | None = None,
        **inputs: Any,
    ) -> Images:  # fmt: skip
        """Does what `PixelPlacer.prepare` does.

        The prompt of a row or packed document are its first tokens: those of token_type_ids 0, int [B, T], followed by
        1; without them, and with pictures, those before its first label, int [B, T]; without labels all of it.
        Raises InputError for a picture behind the prompt, which the model never saw in its training.
        """
        given: dict[str, Any] = {
            "attention_mask": attention_mask, "position_ids": position_ids, "cu_seqlens": cu_seqlens,
        }  # fmt: skip
        images = SiglipPlacer.prepare(self, input_ids, **given, **inputs)
        documents = documents_of(input_ids.cpu(), **given)
        behind = torch.zeros(input_ids.shape, dtype=torch.bool)
        if token_type_ids is not None:
            behind = token_type_ids.cpu() != 0
            check_types(documents, behind.flatten())
        elif labels is not None:
            behind = labels.cpu() != IGNORE_INDEX
        token = None if token_type_ids is not None else self.config.image_token_id
        ahead = prompts_seen(documents, behind.flatten(), token)
        check_pictures(images.places, ahead.places)
        self.check_window(ahead)
        return images._replace(ahead=ahead)

    def check_window(self, ahead: SeenAhead) -> None:
        """Raises InputError for a prompt longer than the window of a layer, which would not be seen as a whole."""
        window, longest = self.config.shortest_window, int(ahead.counts.max()) + 1 if len(ahead.counts) else 0
        if window is not None and longest > window:
            raise InputError(
                f"images: a prompt has {longest} tokens with those of its pictures, more than sliding_window "
                f"{window} of text_config, which is not supported; shorten it, or take a model of smaller pictures"
            )

    @property
    def settings(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return super().settings[0] | {"image_seq_length": self.config.vision.features_per_picture}, {}


def prompts_seen(documents: Documents, behind: Tensor, token: int | None) -> SeenAhead:
    """The tokens of prompts, with how many of them are behind each. behind: bool [B T], those that are no prompt,
    of each document from the first one on. token: documents without it see nothing ahead; None for all."""
    places, counts = [torch.zeros(0, dtype=torch.int64)], [torch.zeros(0, dtype=torch.int64)]
    for first, last in zip(documents.offsets, documents.offsets[1:], strict=False):
        if token is not None and not bool((documents.ids[first:last] == token).any()):
            continue
        mine = documents.places[first:last]
        others = behind[mine].nonzero()[:, 0]
        length = int(others[0]) if len(others) else len(mine)
        places.append(mine[:length])
        counts.append(torch.arange(length - 1, -1, -1))
    return SeenAhead(torch.cat(places), torch.cat(counts))


def check_pictures(pictures: Tensor, prompts: Tensor) -> None:
    """Raises InputError if the tokens of a picture are not among those of prompts."""
    outside = pictures[~torch.isin(pictures, prompts)]
    if len(outside):
        raise InputError(
            f"images: token {int(outside[0])} of the batch is a picture's, but behind the prompt; the labels of "
            "pictures and of what comes before them must be -100, their token_type_ids 0"
        )


def check_types(documents: Documents, behind: Tensor) -> None:
    """Raises InputError if a token of a prompt follows one that is none."""
    for number, (first, last) in enumerate(zip(documents.offsets, documents.offsets[1:], strict=False)):
        mine = behind[documents.places[first:last]].int()
        if bool((mine.diff() < 0).any()):
            raise InputError(f"token_type_ids: row or document {number} has 0 behind 1; the prompt, of 0, is first")
