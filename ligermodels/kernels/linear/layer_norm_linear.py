"""Residual add, LayerNorm and the following linear as one autograd node: h = x + residual, y = layer_norm(h) Wᵀ + b.

The node is that of norm_linear.py, which keeps h, mean and rstd for backward and recomputes layer_norm(h).
x, residual, h [..., H], norm's weight and bias [H], W [N, H], b [N] -> y [..., N], all in one float dtype.
"""

from torch import Tensor

from ligermodels.kernels.dispatch import autocast, runs_kernels
from ligermodels.kernels.linear.linear import NO_LOW_RANK, LowRank, low_rank_linear_reference
from ligermodels.kernels.linear.norm_linear import Norm, NormLinear
from ligermodels.kernels.norms.layer_norm import (
    add_layer_norm_forward,
    layer_norm_backward,
    layer_norm_forward,
    layer_norm_reference,
)
from ligermodels.kernels.norms.norm_tiles import added
from ligermodels.kernels.quant.quantised_weight import Weight, operand

LAYER_NORM = Norm(layer_norm_forward, add_layer_norm_forward, layer_norm_backward)


def layer_norm_linear_reference(
    x: Tensor, residual: Tensor | None, norm_weight: Tensor, norm_bias: Tensor | None, weight: Weight,
    bias: Tensor | None = None, eps: float = 1e-5, low_rank: LowRank | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    hidden = added("layer_norm", x, residual)
    normed = layer_norm_reference(hidden, norm_weight, norm_bias, eps)
    return low_rank_linear_reference(normed.to(weight.dtype), weight, bias, low_rank), hidden


def layer_norm_linear(
    x: Tensor, residual: Tensor | None, norm_weight: Tensor, norm_bias: Tensor | None, weight: Weight,
    bias: Tensor | None = None, eps: float = 1e-5, low_rank: LowRank | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns linear(layer_norm(hidden), weight, bias) and hidden = x + residual, the updated residual stream.

    x, residual [..., H] float (hidden is x if residual is None), norm_weight [H], norm_bias [H] or None, weight [N, H],
    a tensor or quantised, bias [N] or None, low_rank: the linear's update -> (y [..., N] in weight's dtype, hidden
    [..., H] in the dtype of the sum).
    Frozen arguments cost no gradient. Raises ValueError if the norm's shapes disagree or if H exceeds 65536.
    """
    weight, bias, low_rank = autocast(weight, bias, low_rank)
    if not runs_kernels(x):
        return layer_norm_linear_reference(x, residual, norm_weight, norm_bias, weight, bias, eps, low_rank)
    return NormLinear.apply(
        x, residual, *operand(weight), bias, *(low_rank or NO_LOW_RANK), LAYER_NORM, eps, (), norm_weight, norm_bias
    )
