"""A vision tower: packed patches of images through the blocks of `block.py`, and the merger to the text model's width.

The patches of all images of a batch are one row [1, P, E]. Attention is not causal, within spans.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligermodels.configs.rope import FULL_ATTENTION
from ligermodels.configs.vision import VisionConfig
from ligermodels.kernels.dispatch import widen
from ligermodels.layers.attention import Attention
from ligermodels.layers.block import Block, DecoderLayer
from ligermodels.layers.fused import activation_then_linear, add_then_norm, apply_linear
from ligermodels.layers.inputs import Positions, Sequences
from ligermodels.layers.mlp import MLP, GatedMLP
from ligermodels.layers.norm import LayerNorm, hidden_norm
from ligermodels.layers.rope import rotary_embedding
from ligermodels.vision.patch_positions import PatchLayout


class PatchEmbedding(nn.Module):
    """A convolution whose stride is its kernel, as a matrix product. weight [E, channels, (frames,) p, p]."""

    bias: nn.Parameter | None

    def __init__(self, config: VisionConfig, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.hidden_size, *config.patch_shape))
        self.register_parameter("bias", nn.Parameter(torch.empty(config.hidden_size)) if bias else None)

    def forward(self, pixels: Tensor) -> Tensor:
        """Patches [P, values of a patch] -> [1, P, E], in the weight's dtype."""
        return F.linear(pixels.to(self.weight.dtype), self.weight.flatten(1), self.bias)[None]


class TowerOutput(NamedTuple):
    """The pair (x, residual) behind the last block, [1, P, E] each, or the hidden states of joined blocks, [1, P, n E];
    the hidden states behind the tapped blocks."""

    x: Tensor
    residual: Tensor | None
    tapped: list[Tensor]


class VisionTower(nn.Module):
    """Patch embedding and blocks.

    windowed: the indices of the blocks whose attention is within windows; the others attend within frames.
    table: the number of positions of a learned square table, which is added to the patches; 0 for none.
    tapped: the indices of the blocks whose hidden states are returned too.
    first_norm, final_norm: whether the input of the first block and the output are normed.
    joined: the indices of the blocks whose hidden states, concatenated in this order, are the output; () for the last.
    class_token: whether the blocks read a learned row before the patches of each image, all of which have one size.
    """

    def __init__(
        self, config: VisionConfig, blocks: Sequence[Block], *, patch_bias: bool = False,
        windowed: Collection[int] = (), table: int = 0, tapped: Collection[int] = (), first_norm: bool = False,
        final_norm: bool = False, class_token: bool = False, joined: Sequence[int] = (),
    ) -> None:  # fmt: skip
        super().__init__()
        self.patch_embed = PatchEmbedding(config, patch_bias)
        self.class_embedding = nn.Parameter(torch.randn(config.hidden_size)) if class_token else None
        self.pos_embed = nn.Embedding(table, config.hidden_size) if table else None
        self.first_norm = hidden_norm(config) if first_norm else None
        self.blocks = nn.ModuleList(blocks)
        self.norm = hidden_norm(config) if final_norm else None
        rope = config.ropes.get(FULL_ATTENTION)
        self.rotary_emb = None if rope is None else rotary_embedding(rope, config.head_dim, 1)
        self.patches_per_feature = config.patches_per_feature
        self.windowed, self.tapped, self.joined = frozenset(windowed), frozenset(tapped), tuple(joined)

    def forward(self, pixels: Tensor, layout: PatchLayout) -> TowerOutput:
        """Patches [P, values of a patch]; see `TowerOutput`."""
        x, residual, states = self.patch_embed(pixels), None, {}
        if self.class_embedding is not None:
            images = x.view(len(layout.frames.cu_seqlens) - 1, -1, x.shape[-1])
            x = torch.cat([self.class_embedding.expand(len(images), 1, -1), images], 1).view(1, -1, x.shape[-1])
        if self.pos_embed is not None and layout.table is not None:
            entries, weights = layout.table  # interpolated in fp32, rounded once
            table = widen(self.pos_embed.weight)
            weights = weights.to(table.dtype)
            x = x + F.embedding_bag(entries, table, per_sample_weights=weights, mode="sum").to(x.dtype)
        if self.first_norm is not None:
            x = self.first_norm(x)
        rotary = self.rotary_emb
        angles = {} if rotary is None else {FULL_ATTENTION: rotary(layout.positions[:, None])}
        frames, windows = (
            None if spans is None else Positions(layout.positions, angles, Sequences(*spans, keys, causal=False))
            for spans, keys in ((layout.frames, layout.keys), (layout.windows, None))
        )
        for index, block in enumerate(self.blocks):
            x, residual, _ = block(x, residual, windows if index in self.windowed else frames)
            if index in self.tapped or index in self.joined:
                states[index] = x + residual
        if self.joined:
            x, residual = torch.cat([states[index] for index in self.joined], -1), None
        if self.norm is not None:
            x, residual = add_then_norm(self.norm, x, residual)[0], None
        return TowerOutput(x, residual, [states[index] for index in sorted(self.tapped)])


def vision_blocks(
    config: VisionConfig, mlp: type[GatedMLP] | type[MLP], *, bias: bool, rope: str | None = FULL_ATTENTION
) -> list[DecoderLayer]:
    """The computed blocks of a tower. bias: in all linears or in none. rope: as that of `Attention`."""

    def block() -> DecoderLayer:
        return DecoderLayer(config, Attention(config, qkv_bias=bias, o_bias=bias, rope=rope), mlp(config, bias=bias))

    return [block() for _ in range(config.computed_blocks)]


class PatchMerger(nn.Module):
    """fc2(gelu(fc1(squares of normed patches))): one feature of the text model for the patches of a square.

    hidden_size: of the text model, D. fc1 [m² E, m² E], fc2 [D, m² E]. norm_squares: the norm is over the patches of a
    square together, not over each.
    """

    def __init__(self, config: VisionConfig, hidden_size: int, *, norm_squares: bool = False) -> None:
        super().__init__()
        self.width = config.patches_per_feature * config.hidden_size
        self.norm_squares = norm_squares
        self.norm = LayerNorm(self.width, config.norm_eps, bias=True) if norm_squares else hidden_norm(config)
        self.fc1 = nn.Linear(self.width, self.width)
        self.fc2 = nn.Linear(self.width, hidden_size)

    def forward(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """The tower's output, [1, P, E] each -> features [N, D]."""
        if self.norm_squares:
            x = x.view(-1, self.width)
        normed, _ = add_then_norm(self.norm, x, residual)
        return activation_then_linear(apply_linear(self.fc1, normed.view(-1, self.width)), "gelu", self.fc2, fused=True)


class LinearProjector(nn.Module):
    """linear_2(activation(linear_1(hidden states))): one feature of the text model, [D], for each row of the tower.

    width, hidden_size: of the tower's rows, E, and of the features, D. rows_per_image: rows of an image, the first of
    which is a class token that has no feature; None if all rows have one.
    """

    def __init__(
        self, width: int, hidden_size: int, activation: str, *, bias: bool, rows_per_image: int | None = None
    ) -> None:
        super().__init__()
        self.activation, self.rows_per_image = activation, rows_per_image
        self.linear_1 = nn.Linear(width, hidden_size, bias=bias)
        self.linear_2 = nn.Linear(hidden_size, hidden_size, bias=bias)

    def forward(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """The tower's output, [1, P, E] each -> features [N, D]."""
        states = x if residual is None else x + residual
        if self.rows_per_image is not None:
            states = states.view(-1, self.rows_per_image, states.shape[-1])[:, 1:]
        hidden = apply_linear(self.linear_1, states.reshape(-1, states.shape[-1]))
        return activation_then_linear(hidden, self.activation, self.linear_2, fused=True)
