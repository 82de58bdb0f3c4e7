"""The one place that decides between a fused node and its parts.

A fused node reads the weights of an ordinary `Linear`. Where a projection has been replaced (LoRA, float8) or is
watched by a hook, the parts run one after the other, with the same numbers.
"""

from typing import TypeGuard

from torch import Tensor, nn

from ligermodels.kernels.gated_activation import gated_activation
from ligermodels.kernels.gated_linear import gated_linear
from ligermodels.kernels.norm_linear import norm_linear
from ligermodels.layers.norm import RMSNorm


def is_plain(linear: nn.Module) -> TypeGuard[nn.Linear]:
    return type(linear) is nn.Linear and not linear._forward_hooks and not linear._forward_pre_hooks


def norm_then_linear(
    norm: RMSNorm | None, linear: nn.Module, x: Tensor, residual: Tensor | None
) -> tuple[Tensor, Tensor]:
    """x, residual [B, T, H] -> (linear(norm(x + residual)) [B, T, N], x + residual); without a norm, of the sum."""
    if norm is None:
        hidden = x if residual is None else x + residual
        return linear(hidden), hidden
    if is_plain(linear) and type(norm) is RMSNorm:
        return norm_linear(x, residual, norm.weight, linear.weight, linear.bias, norm.eps, norm.offset)
    normed, hidden = norm(x, residual)
    return linear(normed), hidden


def gated_activation_then_linear(gate_up: Tensor, activation: str, linear: nn.Module, fused: bool) -> Tensor:
    """gate_up [B, T, 2 I] -> linear(activation(gate) * up) [B, T, H]; fused: as one node where the linear allows it."""
    if fused and is_plain(linear):
        return gated_linear(gate_up, linear.weight, linear.bias, activation)
    return linear(gated_activation(gate_up, activation))
