"""Chooses between a fused autograd node and the unfused operations. No other file makes this choice.

A fused node reads the weights of a plain `nn.Linear` or a whole `PackedLinear`, with or without LoRA. The unfused
operations run where the projection is another module (float8, PEFT), has hooks, has been taken apart, or has active
LoRA dropout. Both paths give the same numbers.
Must not know what a projection is used for.
"""

from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from ligermodels.kernels.gated_activation import gated_activation
from ligermodels.kernels.gated_linear import gated_linear
from ligermodels.kernels.linear import LowRank, low_rank_linear
from ligermodels.kernels.norm_linear import norm_linear
from ligermodels.layers.lora import LoRALinear
from ligermodels.layers.norm import RMSNorm
from ligermodels.layers.packed import PackedLinear, is_unmodified


class LinearWeights(NamedTuple):
    """The tensors of a projection that a fused node reads."""

    weight: Tensor
    bias: Tensor | None
    low_rank: LowRank | None


def is_plain(projection: nn.Module) -> TypeGuard[nn.Linear | PackedLinear]:
    """Whether a projection does nothing but a product with its weight, of which it may have given parts a name."""
    return is_unmodified(projection, nn.Linear) or (is_unmodified(projection, PackedLinear) and projection.is_whole)


def fusible_weights(projection: nn.Module, dtype: torch.dtype) -> LinearWeights | None:
    """The weights for a fused node; None if the projection must be called as a module. dtype: of its input."""
    if is_plain(projection):
        return LinearWeights(projection.weight, projection.bias, None)
    if is_unmodified(projection, LoRALinear) and is_plain(projection.base_layer) and not projection.dropout_active:
        return LinearWeights(projection.base_layer.weight, projection.base_layer.bias, projection.low_rank(dtype))
    return None


def apply_linear(projection: nn.Module, x: Tensor) -> Tensor:
    """x [..., K] -> projection(x) [..., N]; base and LoRA as one autograd node where possible."""
    weights = fusible_weights(projection, x.dtype)
    if weights is None or weights.low_rank is None:
        return projection(x)
    return low_rank_linear(x, weights.weight, weights.bias, weights.low_rank)


def norm_then_linear(
    norm: RMSNorm | None, projection: nn.Module, x: Tensor, residual: Tensor | None
) -> tuple[Tensor, Tensor]:
    """x, residual [B, T, H] -> (projection(norm(x + residual)) [B, T, N], x + residual).

    If norm is None, the projection reads x + residual.
    """
    if norm is None:
        hidden = x if residual is None else x + residual
        return apply_linear(projection, hidden), hidden
    weights = fusible_weights(projection, x.dtype)
    if weights is not None and type(norm) is RMSNorm:
        weight, bias, low_rank = weights
        return norm_linear(x, residual, norm.weight, weight, bias, norm.eps, norm.offset, low_rank)
    normed, hidden = norm(x, residual)
    return projection(normed), hidden


def gated_activation_then_linear(gate_up: Tensor, activation: str, projection: nn.Module, fused: bool) -> Tensor:
    """gate_up [B, T, 2 I] -> projection(activation(gate) * up) [B, T, H].

    fused: use one autograd node where possible. No other code may use gate_up: backward overwrites it with its
    gradient.
    """
    weights = fusible_weights(projection, gate_up.dtype) if fused else None
    if weights is None:
        return projection(gated_activation(gate_up, activation, inplace=True))
    weight, bias, low_rank = weights
    return gated_linear(gate_up, weight, bias, activation, low_rank, inplace=True)
