"""Self-attention on one packed projection."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from ligermodels.configs.base import Config
from ligermodels.configs.rope import FULL
from ligermodels.kernels.attention import attention
from ligermodels.kernels.qk_norm_rope import qk_norm_rope
from ligermodels.kernels.rope import rope_, split_heads
from ligermodels.layers.fused import linear, norm_then_linear
from ligermodels.layers.kv_cache import LayerCache
from ligermodels.layers.norm import RMSNorm


@dataclass(frozen=True)
class Positions:
    """Where the tokens of a batch stand, shared by all layers."""

    position_ids: Tensor  # [B or 1, T]
    angles: Mapping[str, tuple[Tensor, Tensor]]  # cos, sin of each of the config's ropes, [B * T or T, R / 2] fp32
    cu_seqlens: Tensor | None = None
    max_seqlen: int | None = None


class Attention(nn.Module):
    """Grouped-query attention with RoPE: qkv_proj [(Hq + 2 Hkv) D, H], rows all q, all k, all v; o_proj [H, Hq D].

    window: how many keys a query sees, itself included; None for all before it.
    scale: of the scores; None for D^-1/2. softcap: bounds the scores, softcap * tanh(scores / softcap).
    rope: which of the config's ropes rotates queries and keys; None for no rotation. interleaved: RoPE's pairs are
    neighbours instead of lying half a head apart.
    """

    def __init__(
        self,
        config: Config,
        *,
        qkv_bias: bool = False,
        o_bias: bool = False,
        window: int | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        rope: str | None = FULL,
        interleaved: bool = False,
    ) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.num_key_value_heads = config.num_key_value_heads
        self.window = window
        self.scale = config.head_dim**-0.5 if scale is None else scale
        self.softcap = softcap
        self.rope = rope
        self.interleaved = interleaved
        self.dropout = config.attention_dropout
        packed = config.query_size + 2 * config.key_value_size
        self.qkv_proj = nn.Linear(config.hidden_size, packed, bias=qkv_bias)
        self.o_proj = nn.Linear(config.query_size, config.hidden_size, bias=o_bias)

    def forward(
        self, norm: RMSNorm | None, x: Tensor, residual: Tensor | None, positions: Positions, cache: LayerCache | None
    ) -> tuple[Tensor, Tensor]:
        """x, residual [B, T, H] -> (attention's output [B, T, H], the residual stream x + residual).

        Without a norm the layer reads the residual stream itself.
        """
        qkv, residual = norm_then_linear(norm, self.qkv_proj, x, residual)
        q, k, v = self.heads(qkv, positions)
        if cache is None:
            out = attention(
                q, k, v, scale=self.scale, window=self.window, softcap=self.softcap,
                dropout=self.dropout if self.training else 0.0,
                cu_seqlens=positions.cu_seqlens, max_seqlen=positions.max_seqlen,
            )  # fmt: skip
        else:
            k, v = cache.update(k, v, positions.position_ids)
            out = attention(
                q, k, v, scale=self.scale, window=self.window, softcap=self.softcap, position_ids=positions.position_ids
            )
        return linear(self.o_proj, out.flatten(2)), residual

    def heads(self, qkv: Tensor, positions: Positions) -> tuple[Tensor, Tensor, Tensor]:
        """Packed projection -> q [B, T, Hq, D], k and v [B, T, Hkv, D], the first two rotated."""
        if self.rope is None:
            return split_heads(qkv, self.num_heads, self.num_key_value_heads)
        cos, sin = positions.angles[self.rope]
        return rope_(qkv, cos, sin, self.num_heads, self.num_key_value_heads, self.interleaved)


class NormedAttention(Attention):
    """Attention whose queries and keys are normed before they are rotated, each head by itself."""

    rope: str

    def __init__(self, config: Config, **options) -> None:
        super().__init__(config, **options)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, config.norm_offset)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, config.norm_offset)

    def heads(self, qkv: Tensor, positions: Positions) -> tuple[Tensor, Tensor, Tensor]:
        q_norm, k_norm, heads = self.q_norm, self.k_norm, (self.num_heads, self.num_key_value_heads)
        angles = positions.angles[self.rope]
        return qk_norm_rope(qkv, q_norm.weight, k_norm.weight, *angles, *heads, q_norm.eps, q_norm.offset)


class RowNormedAttention(NormedAttention):
    """Attention whose queries are normed all heads together, and so are its keys."""

    def __init__(self, config: Config, **options) -> None:
        super().__init__(config, **options)
        self.q_norm = RMSNorm(config.query_size, config.rms_norm_eps, config.norm_offset)
        self.k_norm = RMSNorm(config.key_value_size, config.rms_norm_eps, config.norm_offset)
