"""Grouped-query self-attention with a packed QKV projection, RoPE and optional QK-norm. Must not know any family."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from ligermodels.configs.base import Config
from ligermodels.configs.rope import FULL_ATTENTION
from ligermodels.generation.kv_cache import LayerCache
from ligermodels.kernels.attention import attention
from ligermodels.kernels.rope import rope_, split_heads
from ligermodels.layers.fused import apply_linear, norm_then_linear, qk_norm_then_rope
from ligermodels.layers.norm import PreNorm, RMSNorm
from ligermodels.layers.packed import PackingModule


@dataclass(frozen=True)
class Positions:
    """Positions of the tokens of a batch, with what depends on them alone; computed once for all layers."""

    position_ids: Tensor  # [B or 1, T]
    angles: Mapping[str, tuple[Tensor, Tensor]]  # layer type -> (cos, sin), each [B * T or T, R / 2] fp32
    cu_seqlens: Tensor | None = None
    max_seqlen: int | None = None
    query_scale: Tensor | None = None  # [B or 1, T, 1, 1] in the queries' dtype; None if queries are not scaled


class Attention(PackingModule):
    """Grouped-query attention (GQA) with RoPE.

    Weights: qkv_proj [(Hq + 2 Hkv) D, H], the rows of all query heads first, then all keys, then all values;
    o_proj [H, Hq D].

    window: number of keys that a query attends to, including its own; None for all earlier ones.
    scale: factor of the scores; None for D^-1/2.
    softcap: scores = softcap * tanh(scores / softcap); None for no softcap.
    rope: key of `config.ropes`, the rotary embedding of queries and keys; None for no positional embedding (NoPE).
    interleaved: RoPE rotates neighbouring pairs instead of pairs half a head apart.
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
        rope: str | None = FULL_ATTENTION,
        interleaved: bool = False,
    ) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.num_key_value_heads = config.num_key_value_heads
        self.window = window
        self.scale = config.head_dim**-0.5 if scale is None else scale
        self.softcap = softcap
        self.rope = rope
        self.scales_queries = config.query_scale is not None
        self.interleaved = interleaved
        self.dropout = config.attention_dropout
        packed = config.query_size + 2 * config.key_value_size
        self.qkv_proj = nn.Linear(config.hidden_size, packed, bias=qkv_bias)
        self.o_proj = nn.Linear(config.query_size, config.hidden_size, bias=o_bias)

    def forward(
        self, norm: PreNorm | None, x: Tensor, residual: Tensor | None, positions: Positions, cache: LayerCache | None
    ) -> tuple[Tensor, Tensor]:
        """x, residual [B, T, H] -> (output [B, T, H], residual stream x + residual [B, T, H]).

        Attention reads norm(x + residual), or x + residual if norm is None.
        """
        qkv, residual = norm_then_linear(norm, self.qkv_proj, x, residual)
        q, k, v = self.split_and_rotate(qkv, positions)
        if positions.query_scale is not None:
            q = q * positions.query_scale
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
        return apply_linear(self.o_proj, out.flatten(2)), residual

    def split_and_rotate(self, qkv: Tensor, positions: Positions) -> tuple[Tensor, Tensor, Tensor]:
        """Packed qkv [B, T, (Hq + 2 Hkv) D] -> q [B, T, Hq, D], k and v [B, T, Hkv, D]; RoPE is applied to q and k."""
        if self.rope is None:
            return split_heads(qkv, self.num_heads, self.num_key_value_heads)
        cos, sin = positions.angles[self.rope]
        return rope_(qkv, cos, sin, self.num_heads, self.num_key_value_heads, self.interleaved)


class QKNormAttention(Attention):
    """Attention with QK-norm: an RMSNorm over each query head and each key head, before RoPE."""

    whole_rows = False  # the norms are over each head

    def __init__(self, config: Config, **options) -> None:
        super().__init__(config, **options)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, config.norm_offset)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, config.norm_offset)

    def split_and_rotate(self, qkv: Tensor, positions: Positions) -> tuple[Tensor, Tensor, Tensor]:
        heads = self.num_heads, self.num_key_value_heads
        angles = None if self.rope is None else positions.angles[self.rope]
        return qk_norm_then_rope(self.q_norm, self.k_norm, qkv, angles, *heads, whole_rows=self.whole_rows)


class JointQKNormAttention(QKNormAttention):
    """Attention with QK-norm over all query heads together and over all key heads together."""

    whole_rows = True

    def __init__(self, config: Config, **options) -> None:
        super().__init__(config, **options)
        self.q_norm = RMSNorm(config.query_size, config.rms_norm_eps, config.norm_offset)
        self.k_norm = RMSNorm(config.key_value_size, config.rms_norm_eps, config.norm_offset)


class RotatedQKNormAttention(QKNormAttention):
    """Attention with QK-norm over each head after RoPE."""

    def split_and_rotate(self, qkv: Tensor, positions: Positions) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = Attention.split_and_rotate(self, qkv, positions)
        return self.q_norm(q), self.k_norm(k), v
