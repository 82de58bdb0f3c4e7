"""Grouped-query self-attention with a packed QKV projection, RoPE and optional QK-norm."""

from typing import Any

import torch
from torch import Tensor, nn

from ligermodels.configs.base import Config
from ligermodels.configs.rope import FULL_ATTENTION
from ligermodels.generation.cache import LayerCache
from ligermodels.kernels.attention.sigmoid_gate import sigmoid_gate
from ligermodels.kernels.decoding.cache_write import CacheSlots, write_cache
from ligermodels.layers.fused import apply_linear, norm_then_linear, qk_norm_then_rope, rope_then_write
from ligermodels.layers.inputs import Positions
from ligermodels.layers.mixer import AttentionMixer
from ligermodels.layers.norm import PreNorm, RMSNorm


class Attention(AttentionMixer):
    """Grouped-query attention (GQA) with RoPE.

    Weights: qkv_proj [(Hq + 2 Hkv) D, H], the rows of all query heads first, then all keys, then all values;
    o_proj [H, Hq D].

    window: number of keys that a query attends to, including its own; None for all earlier ones.
    scale: factor of the scores; None for D^-1/2.
    softcap: scores = softcap * tanh(scores / softcap); None for no softcap.
    rope: key of `config.ropes`, the rotary embedding of queries and keys; None for no positional embedding (NoPE).
    interleaved: RoPE rotates neighbouring pairs instead of pairs half a head apart.
    sinks: whether each query head has a learnable score `sinks` [Hq] that joins its softmax without a value.
    """

    query_parts = 1  # what the projection has of each query head: the query
    sinks: nn.Parameter | None

    def __init__(
        self, config: Config, *, qkv_bias: bool = False, o_bias: bool = False, window: int | None = None,
        scale: float | None = None, softcap: float | None = None, rope: str | None = FULL_ATTENTION,
        interleaved: bool = False, sinks: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.hidden_size = config.hidden_size
        self.num_heads = config.num_attention_heads
        self.num_key_value_heads = config.num_key_value_heads
        self.head_dim = config.head_dim
        self.window = window
        self.scale = config.head_dim**-0.5 if scale is None else scale
        self.softcap = softcap
        self.rope = rope
        self.scales_queries = config.query_scale is not None
        self.interleaved = interleaved
        self.dropout = config.attention_dropout
        packed = self.query_parts * config.query_size + 2 * config.key_value_size
        self.qkv_proj = nn.Linear(config.hidden_size, packed, bias=qkv_bias)
        self.o_proj = nn.Linear(config.query_size, config.hidden_size, bias=o_bias)
        self.sinks = None
        if sinks:
            self.sinks = nn.Parameter(nn.init.normal_(torch.empty(self.num_heads), 0.0, config.initializer_range))

    def forward(
        self, norm: PreNorm | None, x: Tensor, residual: Tensor | None, positions: Positions, cache: LayerCache | None
    ) -> tuple[Tensor, Tensor]:
        qkv, residual = norm_then_linear(norm, self.qkv_proj, x, residual)
        return apply_linear(self.o_proj, self.attend(qkv, positions, cache)), residual

    def attend(self, qkv: Tensor, positions: Positions, cache: LayerCache | None) -> Tensor:
        """Packed qkv [B, T, (Hq + 2 Hkv) D] -> the heads' outputs [B, T, Hq D]."""
        q, k, v = self.split_and_rotate(qkv, positions, None if cache is None else cache.slots)
        return self.weighted_values(q, k, v, positions, cache).flatten(2)

    def weighted_values(
        self, q: Tensor, k: Tensor, v: Tensor, positions: Positions, cache: LayerCache | None
    ) -> Tensor:
        """q [B, T, Hq, D], k and v [B, T, Hkv, D] -> [B, T, Hq, D]."""
        if positions.query_scale is not None:
            q = q * positions.query_scale
        options: dict[str, Any] = {"scale": self.scale, "window": self.window, "softcap": self.softcap}
        options |= {} if self.sinks is None else {"sinks": self.sinks}
        options |= {} if positions.ahead is None else {"ahead": positions.ahead}
        if cache is not None:
            return cache.attend(q, k, v, positions.position_ids, **options)
        return positions.sequences.attend(q, k, v, dropout=self.dropout if self.training else 0.0, **options)

    @property
    def packed_heads(self) -> tuple[int, ...]:
        """The heads that qkv_proj packs: of queries, keys and values."""
        return self.query_parts * self.num_heads, self.num_key_value_heads, self.num_key_value_heads

    def split_and_rotate(self, qkv: Tensor, positions: Positions, slots: CacheSlots | None) -> tuple[Tensor, ...]:
        """Packed qkv [B, T, (Hq + 2 Hkv) D] -> q [B, T, Hq, D], k and v [B, T, Hkv, D]; RoPE is applied to q and k.

        slots: where k and v are also written, None for nowhere.
        """
        heads = self.num_heads, self.num_key_value_heads
        angles = None if self.rope is None else positions.angles[self.rope]
        return rope_then_write(qkv, angles, *heads, self.interleaved, slots)


class QKNormAttention(Attention):
    """Attention with QK-norm: an RMSNorm over each query head and each key head, before RoPE."""

    whole_rows = False  # the norms are over each head

    def __init__(self, config: Config, **options) -> None:
        super().__init__(config, **options)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, config.norm_offset)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, config.norm_offset)

    def split_and_rotate(self, qkv: Tensor, positions: Positions, slots: CacheSlots | None) -> tuple[Tensor, ...]:
        heads = self.num_heads, self.num_key_value_heads
        angles = None if self.rope is None else positions.angles[self.rope]
        gated = self.query_parts == 2
        return qk_norm_then_rope(self.q_norm, self.k_norm, qkv, angles, *heads, self.whole_rows, slots, gated)


class GatedQKNormAttention(QKNormAttention):
    """Attention with QK-norm, whose output a sigmoid gates: o_proj(attention * sigmoid(gate)).

    The gate is in qkv_proj [(2 Hq + 2 Hkv) D, H], as on the Hub: each query head's rows are those of its query, then
    those of its gate.
    """

    query_parts = 2

    def attend(self, qkv: Tensor, positions: Positions, cache: LayerCache | None) -> Tensor:
        q, k, v, gate = self.split_and_rotate(qkv, positions, None if cache is None else cache.slots)
        return sigmoid_gate(self.weighted_values(q, k, v, positions, cache), gate).flatten(2)


class JointQKNormAttention(QKNormAttention):
    """Attention with QK-norm over all query heads together and over all key heads together."""

    whole_rows = True

    def __init__(self, config: Config, **options) -> None:
        super().__init__(config, **options)
        self.q_norm = RMSNorm(config.query_size, config.rms_norm_eps, config.norm_offset)
        self.k_norm = RMSNorm(config.key_value_size, config.rms_norm_eps, config.norm_offset)


class RotatedQKNormAttention(QKNormAttention):
    """Attention with QK-norm over each head after RoPE."""

    def split_and_rotate(self, qkv: Tensor, positions: Positions, slots: CacheSlots | None) -> tuple[Tensor, ...]:
        q, k, v = Attention.split_and_rotate(self, qkv, positions, None)
        q, k = self.q_norm(q), self.k_norm(k)
        if slots is not None:
            write_cache(k, v, slots)
        return q, k, v
