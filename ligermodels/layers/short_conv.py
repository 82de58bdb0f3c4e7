"""Gated short convolution: out_proj(C * conv(B * u)) with B, C, u = in_proj(x)."""

import torch
from torch import Tensor, nn

from ligermodels.configs.hybrid import ShortConvConfig
from ligermodels.generation.cache import LayerStates, PerRow
from ligermodels.layers.attention import QKNormAttention
from ligermodels.layers.fused import apply_linear, norm_then_linear
from ligermodels.layers.inputs import Positions
from ligermodels.layers.mixer import Mixer
from ligermodels.layers.norm import PreNorm
from ligermodels.layers.states import CausalConv, begin


class ShortConv(Mixer):
    """Weights: in_proj [3 H, H], the rows of B, C, u; conv over H channels; out_proj [H, H]; biases in all or none."""

    name_in_block = "conv"

    def __init__(self, config: ShortConvConfig) -> None:
        super().__init__()
        self.hidden_size = hidden = config.hidden_size
        self.in_proj = nn.Linear(hidden, 3 * hidden, bias=config.conv_bias)
        self.conv = CausalConv(hidden, config.conv_L_cache, 0, activation=None, bias=config.conv_bias)
        self.out_proj = nn.Linear(hidden, hidden, bias=config.conv_bias)

    def forward(
        self, norm: PreNorm | None, x: Tensor, residual: Tensor | None, positions: Positions, cache: LayerStates | None
    ) -> tuple[Tensor, Tensor]:
        projected, residual = norm_then_linear(norm, self.in_proj, x, residual)
        b, c, u = projected.chunk(3, -1)
        return apply_linear(self.out_proj, c * self.conv(b * u, begin(x, positions, cache))), residual

    def kept(self) -> PerRow:
        return PerRow(self.hidden_size * (self.conv.weight.shape[2] - 1))

    def implementation(self, device: torch.device, dtype: torch.dtype) -> str:
        return "short convolution"


def conv_or_attention(config: ShortConvConfig, index: int) -> Mixer:
    """What mixes the tokens of block `index`."""
    return ShortConv(config) if config.is_conv(index) else QKNormAttention(config)
