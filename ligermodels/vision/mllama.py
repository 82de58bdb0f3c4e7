"""The layers of Llama 3.2 Vision: a tower over square tiles of an image, and cross-attention of text to its states.

The tower has learned positions for each aspect ratio, and all tiles of an image attend to each other. An image has rows
for the most tiles it may have, and a tile has a few rows behind its own: these rows are zeros at first. A row of a tile
of the image sees all rows of the image, and a row of padding those of its tiles: the attention of the models' training.
Source: Llama 3, https://arxiv.org/abs/2407.21783.
"""

import math
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligermodels.configs.base import Config
from ligermodels.configs.mllama import ASPECT_RATIOS, MllamaVisionConfig
from ligermodels.generation.cache import BlockCache, PerRow
from ligermodels.generation.image_features import CrossFeatures, EarlierImages
from ligermodels.kernels.attention.attention import DocumentRun, attention, packed_attention_name
from ligermodels.kernels.attention.shared_keys import SharedKeys
from ligermodels.layers.attention import Attention
from ligermodels.layers.block import BlockOutput, DecoderLayer
from ligermodels.layers.fused import add_then_norm, apply_linear, norm_then_linear
from ligermodels.layers.inputs import Positions, Sequences
from ligermodels.layers.mixer import Mixer
from ligermodels.layers.mlp import MLP, GatedMLP
from ligermodels.layers.norm import LayerNorm, PreNorm, RMSNorm
from ligermodels.vision.patch_positions import offsets_from


class GatedLayer(DecoderLayer):
    """Pre-norm, with learned gates: x = x + tanh(gate_attn) attention(norm(x)); x = x + tanh(gate_ffn) mlp(norm(x)).

    gate_attn, gate_ffn: [1].
    """

    initial_gate: ClassVar[float] = math.pi / 4

    def __init__(self, config: Config, mixer: Mixer, mlp: GatedMLP | MLP) -> None:
        super().__init__(config, mixer, mlp)
        self.gate_attn, self.gate_ffn = (nn.Parameter(torch.full((1,), self.initial_gate)) for _ in range(2))

    @property
    def initial_values(self) -> dict[str, Any]:
        return {name: lambda value, _: value.fill_(self.initial_gate) for name in ("gate_attn", "gate_ffn")}

    def forward_block(self, x: Tensor, residual: Tensor | None, positions: Positions, cache: BlockCache) -> BlockOutput:
        x, residual = self.mixer(PreNorm(self.input_layernorm), x, residual, positions, cache)
        x, residual, _ = self.mlp(PreNorm(self.post_attention_layernorm), x * self.gate_attn.tanh(), residual)
        return x * self.gate_ffn.tanh(), residual, None


class CrossAttentionLayer(GatedLayer):
    """A gated block with cross-attention. It changes no token that sees no image; without images it is left out."""

    initial_gate = 0.0

    def forward_block(self, x: Tensor, residual: Tensor | None, positions: Positions, cache: Any) -> BlockOutput:
        earlier, cross = None if cache is None else cache.earlier_images(), positions.cross
        if cross is None and earlier is None:
            if cache is not None:
                cache.pass_images_by()
            return x, residual, None
        seen = seen_tokens(x.shape[:2], cross, earlier)
        x, residual = self.mixer(PreNorm(self.input_layernorm), x, residual, positions, cache)
        x, residual, _ = self.mlp(PreNorm(self.post_attention_layernorm), x * self.gate_attn.tanh(), residual)
        return x * seen[..., None] * self.gate_ffn.tanh(), residual, None


class CrossAttention(Mixer):
    """Attention of tokens to the states of images, which are no tokens: without RoPE and not causal.

    Weights: q_proj [Hq D, H]; kv_proj [2 Hkv D, H], all keys first; o_proj [H, Hq D]; norms over each head of queries
    and of keys. A token sees what `CrossFeatures` says, or what its row saw last in earlier calls; if nothing, the
    output is zeros. states: how many of an image a row keeps in a cache, for plans. `score_width` is 0: what a token
    sees depends on images, not on the length of its row.
    """

    name_in_block = "cross_attn"

    def __init__(self, config: Config, states: int) -> None:
        super().__init__()
        self.hidden_size, self.head_dim = config.hidden_size, config.head_dim
        self.num_heads, self.num_key_value_heads = config.num_attention_heads, config.num_key_value_heads
        self.dropout, self.states = config.attention_dropout, states
        self.q_proj = nn.Linear(config.hidden_size, config.query_size, bias=False)
        self.kv_proj = nn.Linear(config.hidden_size, 2 * config.key_value_size, bias=False)
        self.o_proj = nn.Linear(config.query_size, config.hidden_size, bias=False)
        self.q_norm, self.k_norm = (RMSNorm(config.head_dim, config.rms_norm_eps) for _ in range(2))

    def forward(
        self, norm: PreNorm | None, x: Tensor, residual: Tensor | None, positions: Positions, cache: Any
    ) -> tuple[Tensor, Tensor]:
        q, residual = norm_then_linear(norm, self.q_proj, x, residual)
        q = self.q_norm(q.unflatten(-1, (self.num_heads, self.head_dim)))
        earlier, cross = None if cache is None else cache.earlier_images(), positions.cross
        if cross is None:
            assert earlier is not None
            out = attend_earlier(q, earlier)
        else:
            out = self.attend(q, cross, cache)
            if earlier is not None:
                seen = cross.seen(q.shape[:2])[..., None, None]
                out = torch.where(seen, out, attend_earlier(q, earlier))
        return apply_linear(self.o_proj, out.flatten(2)), residual

    def attend(self, q: Tensor, cross: CrossFeatures, cache: Any) -> Tensor:
        """q [B, T, Hq, D] -> the same shape, from the images of this call; the cache keeps what rows see last."""
        kv = apply_linear(self.kv_proj, cross.values.to(q.dtype))
        k, v = kv.unflatten(-1, (2, self.num_key_value_heads, self.head_dim)).unbind(2)  # [R, N, Hkv, D]
        k = self.k_norm(k)
        if cache is not None:
            keys, values = (x[cross.last].flatten(1, 2) for x in (k, v))  # [rows, tiles N, Hkv, D]
            cache.keep_images(EarlierImages(keys, values, cross.counts * k.shape[1]))
        k, v = (x[cross.tiles].flatten(0, 1)[None] for x in (k, v))
        tokens = q.shape[0] * q.shape[1]
        out = attention(
            q.reshape(1, tokens, *q.shape[2:]), k, v, causal=False, dropout=self.dropout if self.training else 0.0,
            cu_seqlens=cross.query_offsets(tokens), max_seqlen=cross.longest,
            cu_seqlens_k=cross.key_offsets, max_seqlen_k=cross.most_keys,
        )  # fmt: skip
        return out.reshape(q.shape)

    def kept(self) -> PerRow:
        return PerRow(2 * self.states * self.num_key_value_heads * self.head_dim, grows=True)

    def implementation(self, device: torch.device, dtype: torch.dtype) -> str:
        return packed_attention_name(device, dtype, self.head_dim, None)


def attend_earlier(q: Tensor, earlier: EarlierImages) -> Tensor:
    """q [B, T, Hq, D] over the keys of each row, of which the first `lengths` count."""
    last = (earlier.lengths - 1)[:, None].expand(q.shape[:2])
    return attention(q, earlier.keys, earlier.values, position_ids=last)


def seen_tokens(shape: torch.Size, cross: CrossFeatures | None, earlier: EarlierImages | None) -> Tensor:
    """Which tokens of a batch of shape (B, T) see an image, bool [B, T] or [B, 1]."""
    if earlier is None:
        assert cross is not None
        return cross.seen(shape)
    seen = (earlier.lengths > 0)[:, None]
    return seen if cross is None else seen | cross.seen(shape)


OUTER_NORM_EPS = 1e-5  # of the norms around the blocks, whatever the file says


class TileLayout(NamedTuple):
    """The rows of the images of a batch: images with equally many tiles are neighbours, their own rows come before
    their padding.

    order: int64 [P], the place of each row among the tiles' rows. cu_seqlens: int32 [2 I + 1], offsets of the rows of
    each image's tiles and of its padding; longest: the most of them. runs: the same on the host. keys: which rows they
    see.
    """

    order: Tensor
    cu_seqlens: Tensor
    longest: int
    runs: tuple[DocumentRun, ...]
    keys: SharedKeys


def tile_layout(counts: Sequence[int], config: MllamaVisionConfig) -> TileLayout:
    """counts: of the tiles of each image."""
    rows, own = config.rows_per_tile, config.tokens_per_tile
    size = config.max_num_tiles * rows
    row, begin = torch.arange(size), 0
    orders, places = [], []
    copies: list[Tensor] = []
    runs: list[DocumentRun] = []
    for count in sorted(set(counts)):
        belongs = (row % rows < own) & (row < count * rows)
        images = torch.tensor([i for i, other in enumerate(counts) if other == count])[:, None]
        orders += [(images * size + part.nonzero()[:, 0]).flatten() for part in (belongs, ~belongs)]
        number, valid = len(images), int(belongs.sum())
        first = begin + torch.arange(number)[:, None] * size  # of the keys that an image's own rows see: all its rows
        second = begin + number * size + torch.arange(number)[:, None] * valid  # its padding sees its own rows
        places += [
            torch.stack([first + row[:valid], second + row[:valid]], -1).flatten(),
            (first + row[valid:]).flatten(),
        ]
        copies += [torch.full((number * valid,), 2), torch.ones(number * (size - valid), dtype=torch.int64)]
        runs += [DocumentRun(number, valid, size), DocumentRun(number, size - valid, valid)]
        begin += number * (size + valid)
    documents, queries, keys = torch.tensor(runs).unbind(1)
    queries, keys = (x.repeat_interleave(documents) for x in (queries, keys))
    seen = SharedKeys(offsets_from(torch.cat(copies)), torch.cat(places).int(), offsets_from(keys), int(keys.max()))
    return TileLayout(torch.cat(orders), offsets_from(queries), int(queries.max()), tuple(runs), seen)


class TilePositions(nn.Module):
    """Adds tanh(gate) times a learned vector for each tile of an image, by its aspect ratio."""

    def __init__(self, config: MllamaVisionConfig) -> None:
        super().__init__()
        self.tiles = config.max_num_tiles
        self.embedding = nn.Embedding(ASPECT_RATIOS + 1, self.tiles * config.hidden_size)
        self.gate = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor, ratios: Tensor) -> Tensor:
        """x [I, tiles, rows, E], ratios int64 [I] -> the same shape."""
        return x + self.embedding(ratios).view(-1, self.tiles, 1, x.shape[-1]) * self.gate.tanh()


class GatedPositions(nn.Module):
    """Adds (1 - tanh(gate)) times the vector of a row in any tile, and tanh(gate) times its vector in this one."""

    def __init__(self, config: MllamaVisionConfig) -> None:
        super().__init__()
        rows = config.tokens_per_tile
        self.gate = nn.Parameter(torch.zeros(1))
        self.embedding = nn.Parameter(torch.randn(rows, config.hidden_size) * config.hidden_size**-0.5)
        self.tile_embedding = nn.Embedding(ASPECT_RATIOS + 1, config.max_num_tiles * rows * config.hidden_size)

    def forward(self, x: Tensor, ratios: Tensor) -> Tensor:
        """Does what `TilePositions.forward` does."""
        gate = self.gate.tanh()
        x = x + (1 - gate) * self.embedding
        return x + gate * self.tile_embedding(ratios).view_as(x)


class TiledVisionTower(nn.Module):
    """Patches of tiles -> hidden states [I, tiles, rows, W]: of the last block, and of some others behind it.

    taps_after: the states of the blocks `intermediate_layers_indices` are taken behind them. transformers 5 does that;
    the models were trained with the states before them.
    """

    def __init__(self, config: MllamaVisionConfig) -> None:
        super().__init__()
        width, patch = config.hidden_size, config.patch_size
        self.config, self.taps_after = config, False
        self.patch_embedding = nn.Conv2d(config.in_channels, width, patch, patch, bias=False)
        self.class_embedding = nn.Parameter(torch.randn(width) * width**-0.5)
        self.pre_tile_positional_embedding = TilePositions(config)
        self.gated_positional_embedding = GatedPositions(config)
        self.post_tile_positional_embedding = TilePositions(config)
        self.layernorm_pre, self.layernorm_post = (LayerNorm(width, OUTER_NORM_EPS, bias=True) for _ in range(2))
        self.blocks = nn.ModuleList(
            DecoderLayer(config, Attention(config, rope=None), MLP(config, bias=True))
            for _ in range(config.num_hidden_layers)
        )
        self.global_blocks = nn.ModuleList(
            GatedLayer(config, Attention(config, rope=None), MLP(config, bias=True))
            for _ in range(config.num_global_layers)
        )

    def forward(self, pixels: Tensor, ratios: Tensor, layout: TileLayout) -> Tensor:
        """pixels [I, tiles, channels, s, s]; ratios int64 [I], the aspect ratio of each image, from 1."""
        x = self.embed(pixels, ratios)
        images, tiles, own, width = x.shape
        x = F.pad(x, (0, 0, 0, self.config.rows_per_tile - own))
        places = torch.arange(len(layout.order), device=x.device)[None]
        sequences = Sequences(layout.cu_seqlens, layout.longest, layout.keys, causal=False, runs=layout.runs)
        spans = Positions(places, {}, sequences)
        inverse = torch.empty_like(layout.order).index_copy(0, layout.order, places[0])
        x, residual, taps = x.view(1, -1, width)[:, layout.order], None, []
        for index, block in enumerate(self.blocks):
            is_tap = index in self.config.intermediate_layers_indices
            if is_tap and not self.taps_after:
                taps.append(x if residual is None else x + residual)
            x, residual, _ = block(x, residual, spans)
            if is_tap and self.taps_after:
                taps.append(x + residual)
        x, _ = add_then_norm(self.layernorm_post, x, residual)
        x = self.post_tile_positional_embedding(x[:, inverse].view(images, tiles, -1, width), ratios)
        x, residual = x.view(1, -1, width)[:, layout.order], None
        for block in self.global_blocks:
            x, residual, _ = block(x, residual, spans)
        x = x if residual is None else x + residual
        states = torch.cat([x, torch.stack(taps, -1).flatten(2)], -1) if taps else x
        return states[:, inverse].view(images, tiles, -1, states.shape[-1])[:, :, :own]

    def embed(self, pixels: Tensor, ratios: Tensor) -> Tensor:
        """The class token and the patches of each tile with their positions, normed: [I, tiles, rows, E]."""
        patch, dtype = self.config.patch_size, self.patch_embedding.weight.dtype
        grid = F.unfold(pixels.flatten(0, 1).to(dtype), patch, stride=patch).mT  # [I tiles, patches, values]
        x = F.linear(grid, self.patch_embedding.weight.flatten(1)).unflatten(0, pixels.shape[:2])
        x = self.pre_tile_positional_embedding(x, ratios)
        x = torch.cat([self.class_embedding.expand(*x.shape[:2], 1, -1), x], 2)
        return self.layernorm_pre(self.gated_positional_embedding(x, ratios))
