"""The one place that decides between a fused node and its parts.

A fused node reads the weights of an ordinary `Linear`, with or without LoRA over it. Where a projection is anything
else (float8), is watched by a hook, or drops some of its adapter's input, the parts run one after the other, with the
same numbers.
"""

from typing import NamedTuple, TypeGuard, TypeVar

import torch
from torch import Tensor, nn

from ligermodels.kernels.gated_activation import gated_activation
from ligermodels.kernels.gated_linear import gated_linear
from ligermodels.kernels.linear import LowRank, low_rank_linear
from ligermodels.kernels.norm_linear import norm_linear
from ligermodels.layers.lora import LoRALinear
from ligermodels.layers.norm import RMSNorm

Kind = TypeVar("Kind", bound=nn.Module)


class Weights(NamedTuple):
    """What a fused node reads of a projection."""

    weight: Tensor
    bias: Tensor | None
    low_rank: LowRank | None


def is_plain(module: nn.Module, kind: type[Kind]) -> TypeGuard[Kind]:
    watched = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return type(module) is kind and not watched


def weights_of(projection: nn.Module, dtype: torch.dtype) -> Weights | None:
    """None where the projection has to be called. dtype: its input's."""
    if is_plain(projection, nn.Linear):
        return Weights(projection.weight, projection.bias, None)
    if is_plain(projection, LoRALinear) and is_plain(projection.base_layer, nn.Linear) and not projection.drops:
        return Weights(projection.base_layer.weight, projection.base_layer.bias, projection.low_rank(dtype))
    return None


def linear(projection: nn.Module, x: Tensor) -> Tensor:
    """x [..., K] -> projection(x) [..., N]; as one node where there is LoRA, which torch's linear knows nothing of."""
    weights = weights_of(projection, x.dtype)
    if weights is None or weights.low_rank is None:
        return projection(x)
    return low_rank_linear(x, weights.weight, weights.bias, weights.low_rank)


def norm_then_linear(
    norm: RMSNorm | None, projection: nn.Module, x: Tensor, residual: Tensor | None
) -> tuple[Tensor, Tensor]:
    """x, residual [B, T, H] -> (projection(norm(x + residual)) [B, T, N], x + residual); without a norm, of the sum."""
    if norm is None:
        hidden = x if residual is None else x + residual
        return linear(projection, hidden), hidden
    weights = weights_of(projection, x.dtype)
    if weights is not None and type(norm) is RMSNorm:
        weight, bias, low_rank = weights
        return norm_linear(x, residual, norm.weight, weight, bias, norm.eps, norm.offset, low_rank)
    normed, hidden = norm(x, residual)
    return projection(normed), hidden


def gated_activation_then_linear(gate_up: Tensor, activation: str, projection: nn.Module, fused: bool) -> Tensor:
    """gate_up [B, T, 2 I] -> projection(activation(gate) * up) [B, T, H]; fused: as one node where that is possible.

    gate_up must be nobody else's: backward writes its gradient over it.
    """
    weights = weights_of(projection, gate_up.dtype) if fused else None
    if weights is None:
        return projection(gated_activation(gate_up, activation, inplace=True))
    weight, bias, low_rank = weights
    return gated_linear(gate_up, weight, bias, activation, low_rank, inplace=True)
