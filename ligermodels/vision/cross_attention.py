"""Cross-attention of text to images, and the gated blocks around it and in vision towers."""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ligermodels.configs.base import Config
from ligermodels.generation.cache import LayerCache, LayerStates, PerRow
from ligermodels.generation.image_features import CrossFeatures, EarlierImages
from ligermodels.kernels.attention.attention import attention, packed_attention_name
from ligermodels.layers.block import BlockOutput, DecoderLayer
from ligermodels.layers.fused import apply_linear, norm_then_linear
from ligermodels.layers.inputs import Positions
from ligermodels.layers.mixer import Mixer
from ligermodels.layers.mlp import MLP, GatedMLP
from ligermodels.layers.norm import PreNorm, RMSNorm


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

    def forward_block(
        self, x: Tensor, residual: Tensor | None, positions: Positions, cache: LayerCache | LayerStates | None
    ) -> BlockOutput:
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
    output is zeros. states: how many of an image a row keeps in a cache, for plans.
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

    @property
    def score_width(self) -> int:
        return 0  # what a token sees depends on images, not on the length of its row

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
