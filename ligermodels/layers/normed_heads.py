"""Attention whose heads are all normed, and whose keys and values later layers may read. Must not know any family."""

from typing import Any

import torch
from torch import Tensor, nn

from ligermodels.configs.base import Config
from ligermodels.generation.cache import LayerCache, PerToken
from ligermodels.kernels.attention import packed_attention_name
from ligermodels.kernels.cache_write import write_cache
from ligermodels.kernels.rms_norm import rms_norm
from ligermodels.kernels.rope import rope_
from ligermodels.layers.fused import apply_linear, norm_then_linear, qk_norm_then_rope
from ligermodels.layers.inputs import Positions
from ligermodels.layers.mixer import Mixer
from ligermodels.layers.norm import PreNorm, RMSNorm


class NormedHeadsAttention(Mixer):
    """Grouped-query attention with an RMSNorm over each query, key and value head; that of values has no weight.

    Weights: qkv_proj, the rows of all query heads first, then all keys, then all values; o_proj [H, Hq D].

    head_dim, num_key_value_heads: D and Hkv, in which layers may differ.
    window: number of keys that a query attends to, including its own; None for all earlier ones.
    rope: key of `config.ropes`, the rotary embedding of queries and keys.
    keys_are_values: the values are the keys before norm and RoPE, and have no rows in qkv_proj.
    is_read: whether later layers read the keys and values.
    """

    name_in_block = "self_attn"
    scale = 1.0

    def __init__(
        self,
        config: Config,
        *,
        head_dim: int,
        num_key_value_heads: int,
        window: int | None,
        rope: str,
        keys_are_values: bool = False,
        is_read: bool = False,
    ) -> None:
        super().__init__()
        self.hidden_size = config.hidden_size
        self.num_heads, self.num_key_value_heads = config.num_attention_heads, num_key_value_heads
        self.head_dim, self.window, self.rope = head_dim, window, rope
        self.keys_are_values, self.is_read = keys_are_values, is_read
        self.dropout, self.eps = config.attention_dropout, config.rms_norm_eps
        bias = config.attention_bias
        self.qkv_proj = nn.Linear(config.hidden_size, sum(self.packed_heads) * head_dim, bias=bias)
        self.q_norm = RMSNorm(head_dim, self.eps)
        self.k_norm = RMSNorm(head_dim, self.eps)
        self.o_proj = nn.Linear(self.num_heads * head_dim, config.hidden_size, bias=bias)

    def forward(
        self, norm: PreNorm | None, x: Tensor, residual: Tensor | None, positions: Positions, cache: LayerCache | None
    ) -> tuple[Tensor, Tensor]:
        """x, residual [B, T, H] -> (output [B, T, H], residual stream x + residual [B, T, H])."""
        qkv, residual = norm_then_linear(norm, self.qkv_proj, x, residual)
        if self.keys_are_values:
            qkv = torch.cat([qkv, qkv[..., self.num_heads * self.head_dim :]], -1)
        heads, angles = (self.num_heads, self.num_key_value_heads), positions.angles[self.rope]
        q, k, v = qk_norm_then_rope(self.q_norm, self.k_norm, qkv, angles, *heads, False, None)
        v = rms_norm(v, v.new_ones(self.head_dim), self.eps)
        options: dict[str, Any] = {"scale": self.scale, "window": self.window}
        if cache is None:
            if self.is_read:
                assert positions.read_later is not None
                positions.read_later.of_type[self.rope] = k, v
            out = positions.sequences.attend(q, k, v, dropout=self.dropout if self.training else 0.0, **options)
        else:
            if cache.slots is not None:
                write_cache(k, v, cache.slots)
            out = cache.attend(q, k, v, positions.position_ids, is_read=self.is_read, **options)
        return apply_linear(self.o_proj, out.flatten(2)), residual

    @property
    def packed_heads(self) -> tuple[int, ...]:
        """The heads that qkv_proj packs: of queries, keys and values."""
        packed = self.num_heads, self.num_key_value_heads, self.num_key_value_heads
        return packed[:2] if self.keys_are_values else packed

    def kept(self) -> PerToken:
        return PerToken(2 * self.num_key_value_heads * self.head_dim, self.window)

    @property
    def score_width(self) -> int:
        return 2 * self.num_heads * self.head_dim

    def implementation(self, device: torch.device, dtype: torch.dtype) -> str:
        return packed_attention_name(device, dtype, self.head_dim, None)


class ReadingAttention(Mixer):
    """Attention of normed query heads over the keys and values of the last layer before it with the same `rope` that
    has its own.

    Weights: q_proj [Hq D, H]; o_proj [H, Hq D]. source: the index of that layer; other arguments as those of
    `NormedHeadsAttention`.
    """

    name_in_block = "self_attn"
    scale = 1.0

    def __init__(self, config: Config, *, head_dim: int, window: int | None, rope: str, source: int) -> None:
        super().__init__()
        self.hidden_size, self.num_heads = config.hidden_size, config.num_attention_heads
        self.head_dim, self.window, self.rope, self.source = head_dim, window, rope, source
        self.dropout = config.attention_dropout
        self.q_proj = nn.Linear(config.hidden_size, self.num_heads * head_dim, bias=config.attention_bias)
        self.q_norm = RMSNorm(head_dim, config.rms_norm_eps)
        self.o_proj = nn.Linear(self.num_heads * head_dim, config.hidden_size, bias=config.attention_bias)

    def forward(
        self, norm: PreNorm | None, x: Tensor, residual: Tensor | None, positions: Positions, cache: LayerCache | None
    ) -> tuple[Tensor, Tensor]:
        """x, residual [B, T, H] -> (output [B, T, H], residual stream x + residual [B, T, H]).

        cache: that of the layer `source`.
        """
        q, residual = norm_then_linear(norm, self.q_proj, x, residual)
        q = self.q_norm(q.unflatten(-1, (self.num_heads, self.head_dim))).flatten(2)
        q, _, _ = rope_(q, *positions.angles[self.rope], self.num_heads, 0)  # neither keys nor values
        options: dict[str, Any] = {"scale": self.scale, "window": self.window}
        if cache is None:
            assert positions.read_later is not None
            k, v = positions.read_later.of_type[self.rope]
            out = positions.sequences.attend(q, k, v, dropout=self.dropout if self.training else 0.0, **options)
        else:
            out = cache.attend_again(q, positions.position_ids, **options)
        return apply_linear(self.o_proj, out.flatten(2)), residual

    def kept(self) -> PerToken:
        """Nothing of its own."""
        return PerToken(0, self.window)

    @property
    def score_width(self) -> int:
        return 2 * self.num_heads * self.head_dim

    def implementation(self, device: torch.device, dtype: torch.dtype) -> str:
        return packed_attention_name(device, dtype, self.head_dim, None)
