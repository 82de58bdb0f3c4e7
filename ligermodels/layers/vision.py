"""A vision tower: packed patches of images through the blocks of `block.py`, and the merger to the text model's width.

The patches of all images of a batch are one row [1, P, E]. Attention is not causal, within spans. Must not know any
family, nor where features go in a text.
"""

from collections.abc import Collection, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligermodels.configs.rope import FULL_ATTENTION
from ligermodels.configs.vision import VisionConfig
from ligermodels.layers.block import Block
from ligermodels.layers.fused import activation_then_linear, add_then_norm, apply_linear
from ligermodels.layers.mixer import Positions
from ligermodels.layers.norm import hidden_norm
from ligermodels.layers.rope import rotary_embedding
from ligermodels.layers.vision_positions import PatchLayout


class PatchEmbedding(nn.Module):
    """A convolution whose stride is its kernel, as a matrix product. weight [E, channels, frames, p, p]."""

    bias: nn.Parameter | None

    def __init__(self, config: VisionConfig, bias: bool) -> None:
        super().__init__()
        shape = config.in_channels, config.temporal_patch_size, config.patch_size, config.patch_size
        self.weight = nn.Parameter(torch.empty(config.hidden_size, *shape))
        self.register_parameter("bias", nn.Parameter(torch.empty(config.hidden_size)) if bias else None)

    def forward(self, pixels: Tensor) -> Tensor:
        """Patches [P, channels frames p p] -> [1, P, E], in the weight's dtype."""
        return F.linear(pixels.to(self.weight.dtype), self.weight.flatten(1), self.bias)[None]


class VisionTower(nn.Module):
    """Patch embedding and blocks.

    windowed: the indices of the blocks whose attention is within windows; the others attend within frames.
    """

    def __init__(
        self, config: VisionConfig, blocks: Sequence[Block], *, patch_bias: bool = False, windowed: Collection[int] = ()
    ) -> None:
        super().__init__()
        self.patch_embed = PatchEmbedding(config, patch_bias)
        self.blocks = nn.ModuleList(blocks)
        self.rotary_emb = rotary_embedding(config.ropes[FULL_ATTENTION], config.head_dim, 1)
        self.patches_per_feature = config.patches_per_feature
        self.windowed = frozenset(windowed)

    def forward(self, pixels: Tensor, layout: PatchLayout) -> tuple[Tensor, Tensor | None]:
        """Patches [P, channels frames p p] -> the pair (x, residual) behind the last block, [1, P, E] each."""
        x, residual = self.patch_embed(pixels), None
        angles = {FULL_ATTENTION: self.rotary_emb(layout.positions[:, None])}
        frames, windows = (
            None if spans is None else Positions(layout.positions, angles, *spans, causal=False)
            for spans in (layout.frames, layout.windows)
        )
        for index, block in enumerate(self.blocks):
            x, residual, _ = block(x, residual, windows if index in self.windowed else frames)
        return x, residual


class PatchMerger(nn.Module):
    """fc2(gelu(fc1(squares of normed patches))): one feature of the text model for the patches of a square.

    hidden_size: of the text model, D. fc1 [m² E, m² E], fc2 [D, m² E].
    """

    def __init__(self, config: VisionConfig, hidden_size: int) -> None:
        super().__init__()
        self.width = config.patches_per_feature * config.hidden_size
        self.norm = hidden_norm(config)
        self.fc1 = nn.Linear(self.width, self.width)
        self.fc2 = nn.Linear(self.width, hidden_size)

    def forward(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """The tower's output, [1, P, E] each -> features [N, D]."""
        normed, _ = add_then_norm(self.norm, x, residual)
        return activation_then_linear(apply_linear(self.fc1, normed.view(-1, self.width)), "gelu", self.fc2, fused=True)
