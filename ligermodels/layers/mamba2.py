"""Mamba-2: a causal convolution, a state-space scan and a gated norm.

Dao & Gu 2024, https://arxiv.org/abs/2405.21060. The scan is that of kernels/linear_attention/mamba2_scan.py.
"""

from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligermodels.configs.hybrid import Mamba2Config
from ligermodels.generation.cache import LayerStates, PerRow
from ligermodels.kernels.dispatch import widen
from ligermodels.kernels.norms.gated_rms_norm import gated_rms_norm
from ligermodels.layers.fused import apply_linear, norm_then_linear
from ligermodels.layers.inputs import Positions
from ligermodels.layers.mixer import Mixer
from ligermodels.layers.norm import PreNorm
from ligermodels.layers.states import CausalConv, begin, state_space
from ligermodels.weights.module import Fp32Module

CONV, SCAN = 0, 1  # numbers of the states


class GroupedGatedNorm(nn.Module):
    """y = h * rsqrt(mean(h²) + eps) * weight, h = x * silu(z), the mean over each of `groups` parts of a row."""

    def __init__(self, size: int, groups: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.groups, self.eps = groups, eps

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        """x, z [B, T, N] -> the same shape, in the dtype of x."""
        if self.groups == 1:
            return gated_rms_norm(x, z, self.weight, self.eps, gate_first=True)
        parts = zip(*(each.chunk(self.groups, -1) for each in (x, z, self.weight)), strict=True)
        return torch.cat([gated_rms_norm(x, z, weight, self.eps, gate_first=True) for x, z, weight in parts], -1)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, groups={self.groups}, eps={self.eps}"


def log_of_numbers(value: Tensor, generator: torch.Generator) -> Tensor:
    """Fills A_log: A is 1, 2, 3, ... by head."""
    return value.copy_(torch.arange(1, len(value) + 1, device=value.device).log())


def ones(value: Tensor, generator: torch.Generator) -> Tensor:
    return value.fill_(1.0)


class Mamba2(Fp32Module, Mixer):
    """Mamba-2 with H heads of P elements, and states of N for each; G groups of heads share B and C.

    Weights: in_proj [2 H P + 2 G N + H, hidden], the rows of z, x, B, C, dt; conv1d over the channels of x, B and C;
    A_log, D (both fp32), dt_bias [H]; norm [H P]; out_proj [hidden, H P].
        δ = clamp(softplus(dt + dt_bias), time_step_limit);  a = -exp(A_log);  y = scan(silu(conv(x, B, C)), δ, a, D)
        output = out_proj(norm(y, z))
    """

    name_in_block = "mamba"
    fp32_tensors = ("A_log", "D")
    initial_values: ClassVar[Mapping[str, Callable[[Tensor, torch.Generator], Tensor]]] = {
        "A_log": log_of_numbers, "D": ones, "dt_bias": ones,
    }  # fmt: skip

    def __init__(self, config: Mamba2Config) -> None:
        super().__init__()
        self.hidden_size, self.size = config.hidden_size, config.mamba_size
        self.heads, self.head_size = config.mamba_n_heads, config.mamba_head_size
        self.groups, self.state_size = config.mamba_n_groups, config.mamba_d_state
        self.limit = config.time_step_limit
        self.channels = self.size + 2 * self.groups * self.state_size
        self.in_proj = nn.Linear(self.hidden_size, sum(self.projection_rows), bias=config.mamba_proj_bias)
        bias = config.mamba_conv_bias
        self.conv1d = CausalConv(self.channels, config.mamba_d_conv, CONV, activation="silu", bias=bias)
        self.A_log = nn.Parameter(torch.arange(1.0, self.heads + 1).log())
        self.D = nn.Parameter(torch.ones(self.heads))
        self.dt_bias = nn.Parameter(torch.ones(self.heads))
        self.norm = GroupedGatedNorm(self.size, self.groups, config.rms_norm_eps)
        self.out_proj = nn.Linear(self.size, self.hidden_size, bias=config.mamba_proj_bias)

    def forward(
        self, norm: PreNorm | None, x: Tensor, residual: Tensor | None, positions: Positions, cache: LayerStates | None
    ) -> tuple[Tensor, Tensor]:
        projected, residual = norm_then_linear(norm, self.in_proj, x, residual)
        z, xbc, dt = projected.split(self.projection_rows, -1)
        delta = F.softplus(widen(dt) + widen(self.dt_bias)).clamp(*self.limit)  # [B, T, H]
        a = -widen(self.A_log).exp()
        call = begin(x, positions, cache)
        xbc, sizes = self.conv1d(xbc, call), (self.groups, self.state_size)
        y = state_space(xbc, delta, a, self.D, *sizes, call, SCAN)  # [B, T, H, P]
        return apply_linear(self.out_proj, self.norm(y.flatten(2), z)), residual

    @property
    def projection_rows(self) -> list[int]:
        """The rows of in_proj: of z, of what the convolution reads, and of dt."""
        return [self.size, self.channels, self.heads]

    @property
    def state_flops(self) -> int:
        """An outer product that is added to the state, and a product with it."""
        return 4 * self.size * self.state_size

    def kept(self) -> PerRow:
        inputs = self.channels * (self.conv1d.weight.shape[2] - 1)
        return PerRow(inputs, self.size * self.state_size)

    def implementation(self, device: torch.device, dtype: torch.dtype) -> str:
        return "Mamba-2 scan"
