"""Self-attention on one packed projection."""

from dataclasses import dataclass

from torch import Tensor, nn

from ligermodels.kernels.attention import attention
from ligermodels.kernels.rope import rope_
from ligermodels.layers.config import Config
from ligermodels.layers.fused import norm_then_linear
from ligermodels.layers.kv_cache import LayerCache
from ligermodels.layers.norm import RMSNorm


@dataclass(frozen=True)
class Positions:
    """Where the tokens of a batch stand, shared by all layers."""

    position_ids: Tensor  # [B or 1, T]
    cos: Tensor  # [B * T or T, head_dim / 2] fp32
    sin: Tensor
    cu_seqlens: Tensor | None = None
    max_seqlen: int | None = None


class Attention(nn.Module):
    """Grouped-query attention with RoPE: qkv_proj [(Hq + 2 Hkv) D, H], rows all q, all k, all v; o_proj [H, Hq D].

    window: how many keys a query sees, itself included; None for all before it.
    """

    def __init__(self, config: Config, *, qkv_bias: bool, o_bias: bool, window: int | None = None) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.num_key_value_heads = config.num_key_value_heads
        self.scale = config.head_dim**-0.5
        self.window = window
        self.dropout = config.attention_dropout
        packed = config.query_size + 2 * config.key_value_size
        self.qkv_proj = nn.Linear(config.hidden_size, packed, bias=qkv_bias)
        self.o_proj = nn.Linear(config.query_size, config.hidden_size, bias=o_bias)

    def forward(
        self, norm: RMSNorm, x: Tensor, residual: Tensor | None, positions: Positions, cache: LayerCache | None
    ) -> tuple[Tensor, Tensor]:
        """x, residual [B, T, H] -> (attention's output [B, T, H], the residual stream x + residual)."""
        qkv, residual = norm_then_linear(norm, self.qkv_proj, x, residual)
        q, k, v = rope_(qkv, positions.cos, positions.sin, self.num_heads, self.num_key_value_heads)
        if cache is None:
            out = attention(
                q, k, v, scale=self.scale, window=self.window, dropout=self.dropout if self.training else 0.0,
                cu_seqlens=positions.cu_seqlens, max_seqlen=positions.max_seqlen,
            )  # fmt: skip
        else:
            k, v = cache.update(k, v, positions.position_ids)
            out = attention(q, k, v, scale=self.scale, window=self.window, position_ids=positions.position_ids)
        return self.o_proj(out.flatten(2)), residual
