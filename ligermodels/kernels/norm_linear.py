"""Residual add, RMSNorm and the linear after it as one autograd node: h = x + residual, y = rms_norm(h) Wᵀ + b.

Keeps h, rstd and the weights for backward, not the normed rows that the linear reads: the norm's backward kernel emits
them again for dW = dyᵀ normed, at one write of H elements a token, and adds the gradient that reaches h on the residual
stream. No matrix product is recomputed.
x, residual, h [..., H], norm's weight [H], W [N, H], b [N] -> y [..., N], all in one float dtype; rstd [rows] fp32.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.kernels.linear import bias_gradient, input_gradient, weight_gradient
from ligermodels.kernels.op import runs_kernels
from ligermodels.kernels.rms_norm import (
    add_rms_norm_forward,
    rms_norm_backward,
    rms_norm_forward,
    rms_norm_reference,
)


def norm_linear_reference(
    x: Tensor, residual: Tensor | None, norm_weight: Tensor, weight: Tensor, bias: Tensor | None, eps: float,
    offset: float = 0.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    hidden = x if residual is None else x + residual
    return F.linear(rms_norm_reference(hidden, norm_weight, eps, offset), weight, bias), hidden


class _NormLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, norm_weight, weight, bias, eps, offset):
        if residual is None:
            normed, rstd = rms_norm_forward(x, norm_weight, eps, offset)
            hidden = x.view_as(x)  # an output of its own, whose gradient comes back to this node
        else:
            normed, hidden, rstd = add_rms_norm_forward(x, residual, norm_weight, eps, offset)
        ctx.save_for_backward(hidden, rstd, norm_weight, weight)
        ctx.offset = offset
        return F.linear(normed, weight, bias), hidden

    @staticmethod
    def backward(ctx, dy, dhidden):
        hidden, rstd, norm_weight, weight = ctx.saved_tensors
        _, needs_residual, needs_norm_weight, needs_weight, needs_bias, _, _ = ctx.needs_input_grad
        dnormed = input_gradient(dy, weight)
        dx, dnorm_weight, normed = rms_norm_backward(
            dnormed, dhidden, hidden, rstd, norm_weight, ctx.offset, needs_norm_weight, needs_weight
        )
        return (
            dx,
            dx if needs_residual else None,
            dnorm_weight if needs_norm_weight else None,
            weight_gradient(dy, normed) if needs_weight else None,
            bias_gradient(dy) if needs_bias else None,
            None,
            None,
        )


def norm_linear(
    x: Tensor, residual: Tensor | None, norm_weight: Tensor, weight: Tensor, bias: Tensor | None, eps: float,
    offset: float = 0.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """linear(rms_norm(hidden), weight, bias), and hidden = x + residual itself: the residual stream that goes on.

    x, residual [..., H] float (residual None: hidden is x), norm_weight [H], weight [N, H], bias [N] or None
    -> (y [..., N], hidden [..., H]), both in x's dtype. Frozen weights cost no gradient.
    Raises ValueError where H exceeds 65536.
    """
    if not runs_kernels(x):
        return norm_linear_reference(x, residual, norm_weight, weight, bias, eps, offset)
    return _NormLinear.apply(x, residual, norm_weight, weight, bias, eps, offset)
