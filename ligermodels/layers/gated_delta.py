"""Linear attention with the gated delta rule (Gated DeltaNet).

A causal convolution, then the rule of kernels/linear_attention/gated_delta_rule.py, then a gated norm over each head.
Yang, Kautz & Hatamizadeh 2024, https://arxiv.org/abs/2412.06464.
"""

from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligermodels.configs.hybrid import GatedDeltaConfig
from ligermodels.generation.cache import LayerStates, PerRow
from ligermodels.kernels.dispatch import widen
from ligermodels.kernels.norms.gated_rms_norm import gated_rms_norm
from ligermodels.layers.attention import GatedQKNormAttention
from ligermodels.layers.fused import apply_linear, norm_then_linear
from ligermodels.layers.inputs import Positions
from ligermodels.layers.mixer import Mixer
from ligermodels.layers.norm import PreNorm
from ligermodels.layers.states import CausalConv, begin, delta_rule
from ligermodels.weights.module import Fp32Module

CONV, RULE = 0, 1  # numbers of the states
Fill = Callable[[Tensor, torch.Generator], Tensor]


class GatedRMSNorm(Fp32Module):
    """y = x * rsqrt(mean(x²) + eps) * weight * silu(z), with the weight in fp32."""

    fp32_tensors = ("weight",)

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        """x, z [..., N] -> the same shape, in the dtype of x."""
        return gated_rms_norm(x, z, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


class GatedDeltaNet(Fp32Module, Mixer):
    """Linear attention with Hk key heads of hk and Hv value heads of hv elements.

    Weights: in_proj [2 Hk hk + 2 Hv hv + 2 Hv, H], the rows of queries, keys, values, z, b, a; conv1d over the channels
    of queries, keys and values; A_log (fp32), dt_bias [Hv]; norm [hv]; out_proj [H, Hv hv].
        g = -exp(A_log) softplus(a + dt_bias);  β = sigmoid(b);  o = rule(silu(conv(q, k, v)), g, β)
        output = out_proj(norm(o, z))
    """

    name_in_block = "linear_attn"
    fp32_tensors = ("A_log",)
    initial_values: ClassVar[Mapping[str, Fill]] = {
        "A_log": lambda value, generator: value.uniform_(0.01, 16.0, generator=generator).log_(),
        "dt_bias": lambda value, generator: value.fill_(1.0),
    }

    def __init__(self, config: GatedDeltaConfig) -> None:
        super().__init__()
        self.hidden_size = config.hidden_size
        self.key_heads, self.key_size = config.linear_num_key_heads, config.linear_key_head_dim
        self.value_heads, self.value_size = config.linear_num_value_heads, config.linear_value_head_dim
        values = config.linear_value_size
        self.channels = 2 * config.linear_key_size + values
        self.in_proj = nn.Linear(config.hidden_size, self.channels + values + 2 * self.value_heads, bias=False)
        self.conv1d = CausalConv(self.channels, config.linear_conv_kernel_dim, CONV, activation="silu")
        self.A_log = nn.Parameter(torch.empty(self.value_heads).uniform_(0.01, 16.0).log_())
        self.dt_bias = nn.Parameter(torch.ones(self.value_heads))
        self.norm = GatedRMSNorm(self.value_size, config.rms_norm_eps)
        self.out_proj = nn.Linear(values, config.hidden_size, bias=False)

    def forward(
        self, norm: PreNorm | None, x: Tensor, residual: Tensor | None, positions: Positions, cache: LayerStates | None
    ) -> tuple[Tensor, Tensor]:
        projected, residual = norm_then_linear(norm, self.in_proj, x, residual)
        qkv, z, b, a = self.split(projected)
        g = -widen(self.A_log).exp() * F.softplus(widen(a) + widen(self.dt_bias))  # [B, T, Hv]
        call = begin(x, positions, cache)
        qkv = self.conv1d(qkv, call)
        o = delta_rule(qkv, g, widen(b).sigmoid(), self.key_heads, self.key_size, call, RULE)  # [B, T, Hv, hv]
        out = self.norm(o, z.unflatten(-1, (self.value_heads, self.value_size)))
        return apply_linear(self.out_proj, out.flatten(2)), residual

    def split(self, projected: Tensor) -> tuple[Tensor, ...]:
        """The output of in_proj -> queries, keys and values packed [B, T, C], z [B, T, Hv hv], b, a [B, T, Hv]."""
        return projected.split(self.projection_rows, -1)

    @property
    def projection_rows(self) -> list[int]:
        """The rows of in_proj that the Hub stores together."""
        return [self.channels, self.value_heads * self.value_size, self.value_heads, self.value_heads]

    @property
    def state_flops(self) -> int:
        """Two products with the state, and an outer product that is added to it."""
        return 6 * self.value_heads * self.key_size * self.value_size

    def kept(self) -> PerRow:
        inputs = self.channels * (self.conv1d.weight.shape[2] - 1)
        return PerRow(inputs, self.value_heads * self.key_size * self.value_size)

    def implementation(self, device: torch.device, dtype: torch.dtype) -> str:
        return "gated delta rule"


class GroupedGatedDeltaNet(GatedDeltaNet):
    """Gated delta net with the rows of in_proj in another order: of each key head its query, its key, its value heads
    and their z; behind all of these, of each key head its value heads' b and their a."""

    def split(self, projected: Tensor) -> tuple[Tensor, ...]:
        heads, group = self.key_heads, self.value_heads // self.key_heads
        values = group * self.value_size
        qkvz, ba = projected.split(self.projection_rows, -1)
        q, k, v, z = qkvz.unflatten(-1, (heads, -1)).split([self.key_size, self.key_size, values, values], -1)
        b, a = ba.unflatten(-1, (heads, 2, group)).unbind(-2)
        return torch.cat([q.flatten(2), k.flatten(2), v.flatten(2)], -1), z.flatten(2), b.flatten(2), a.flatten(2)

    @property
    def projection_rows(self) -> list[int]:
        return [self.channels + self.value_heads * self.value_size, 2 * self.value_heads]


def delta_or_attention(config: GatedDeltaConfig, index: int, delta: type[GatedDeltaNet] = GatedDeltaNet) -> Mixer:
    """What mixes the tokens of block `index`: linear attention, or attention with an output gate."""
    if config.is_linear(index):
        return delta(config)
    return GatedQKNormAttention(config, **config.attention_biases)
