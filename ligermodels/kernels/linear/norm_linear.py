"""Residual add, RMSNorm and the following linear as one autograd node: h = x + residual, y = rms_norm(h) Wᵀ + b.

The linear may have a low-rank update (linear.py). The node saves h, rstd, the weights and the update's r
columns for backward. It does not save rms_norm(h): the norm's backward kernel recomputes it for dW = dyᵀ rms_norm(h)
and for dA of the update, which costs one write of H elements per token. The same kernel adds the gradient that reaches
h through the residual stream. No full-width GEMM is recomputed. layer_norm_linear.py is the same with a LayerNorm.
x, residual, h [..., H], norm's weight [H], W [N, H], b [N] -> y [..., N], all in one float dtype; rstd [rows] fp32.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from ligermodels.kernels.dispatch import Node, autocast, runs_kernels
from ligermodels.kernels.linear.linear import (
    NO_LOW_RANK,
    LowRank,
    bias_gradient,
    input_gradient,
    linear_forward,
    low_gradient,
    low_rank_linear_reference,
    up_gradient,
    weight_gradient,
)
from ligermodels.kernels.norms.norm_tiles import added
from ligermodels.kernels.norms.rms_norm import (
    add_rms_norm_forward,
    check_offset,
    rms_norm_backward,
    rms_norm_forward,
    rms_norm_reference,
)
from ligermodels.kernels.quant.quantised_weight import Weight, dense, dense_dtype, operand


def norm_linear_reference(
    x: Tensor, residual: Tensor | None, norm_weight: Tensor | None, weight: Weight, bias: Tensor | None = None,
    eps: float = 1e-6, offset: float = 0.0, low_rank: LowRank | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    hidden = added("add_rms_norm", x, residual)
    normed = rms_norm_reference(hidden, norm_weight, eps, offset)
    return low_rank_linear_reference(normed.to(weight.dtype), weight, bias, low_rank), hidden


class Norm(NamedTuple):
    """The ops of a norm, as `NormLinear` calls them.

    parameters: of the norm, its weight first. offset: what is added to the weight, for a norm that takes one.
    """

    # (x, *parameters, eps, *offset, dtype) -> (normed, statistics)
    forward: Callable[..., tuple[Tensor, Tensor]]
    # (x, residual, *parameters, eps, *offset, dtype) -> (normed, hidden, statistics)
    add_forward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    # (dnormed, dhidden, hidden, statistics, *parameters, *offset, which gradients are needed, whether normed is) ->
    # (dx, gradients of the parameters, normed)
    backward: Callable[..., tuple[Tensor, ...]]


RMS_NORM = Norm(rms_norm_forward, add_rms_norm_forward, rms_norm_backward)


class NormLinear(Node):
    """offset: one number or none, and parameters: as in `Norm`."""

    @staticmethod
    def forward(ctx, x, residual, weight, layout, bias, a, b, columns, scale, norm, eps, offset, *parameters):
        dtype = dense_dtype(weight, layout)
        if residual is None:
            normed, statistics = norm.forward(x, *parameters, eps, *offset, dtype)
            hidden = x.view_as(x)  # a new output, so that its gradient arrives at this node
        else:
            normed, hidden, statistics = norm.add_forward(x, residual, *parameters, eps, *offset, dtype)
        y, low = linear_forward(normed, dense(weight, layout), bias, a, b, columns, scale)
        ctx.save_for_backward(hidden, statistics, weight, a, b, low, *parameters)
        ctx.layout, ctx.update = layout, (columns, scale)
        ctx.norm, ctx.eps, ctx.offset = norm, eps, offset
        return y, hidden

    @staticmethod
    def backward(ctx, dy, dhidden):
        hidden, statistics, weight, a, b, low, *parameters = ctx.saved_tensors
        needs_x, needs_residual, needs_weight, _, needs_bias, needs_a, needs_b, *others = ctx.needs_input_grad
        needs_hidden, needs_parameters = needs_x or needs_residual, others[-len(parameters) :]
        needs_normed, reads_normed = needs_hidden or any(needs_parameters), needs_weight or needs_a
        dx = normed = dlow = None
        gradients = [None] * len(parameters)
        if a is not None and (needs_normed or needs_a):
            dlow = low_gradient(dy, a, b, *ctx.update)
        if needs_normed:  # dnormed is not bound to a name: its memory is freed before the weight gradients are computed
            dx, *gradients, normed = ctx.norm.backward(
                input_gradient(dy, dense(weight, ctx.layout), dlow, a), dhidden, hidden, statistics, *parameters,
                *ctx.offset, needs_hidden, *needs_parameters, reads_normed,
            )  # fmt: skip
        elif reads_normed:
            dtype = dense_dtype(weight, ctx.layout)
            normed, _ = ctx.norm.forward(hidden, *parameters, ctx.eps, *ctx.offset, dtype)
        return (
            dx if needs_x else None,
            dx if needs_residual else None,
            weight_gradient(dy, normed) if needs_weight else None,
            None,
            bias_gradient(dy) if needs_bias else None,
            weight_gradient(dlow, normed) if needs_a else None,
            up_gradient(dy, low, b, *ctx.update) if needs_b else None,
            *(None,) * 5,
            *(x if needed else None for x, needed in zip(gradients, needs_parameters, strict=True)),
        )


def norm_linear(
    x: Tensor, residual: Tensor | None, norm_weight: Tensor | None, weight: Weight, bias: Tensor | None = None,
    eps: float = 1e-6, offset: float = 0.0, low_rank: LowRank | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns linear(rms_norm(hidden), weight, bias) and hidden = x + residual, the updated residual stream.

    x, residual [..., H] float (hidden is x if residual is None), norm_weight [H] or None, weight [N, H], a tensor or
    quantised, bias [N] or None, low_rank: the linear's update -> (y [..., N] in weight's dtype, hidden [..., H] in the
    dtype of the sum).
    Frozen arguments cost no gradient.
    Raises ValueError if the norm's shapes disagree, if H exceeds 65536, and for an offset without a norm's weight.
    """
    if norm_weight is None:
        check_offset("norm_linear", offset)
    weight, bias, low_rank = autocast(weight, bias, low_rank)
    if not runs_kernels(x):
        return norm_linear_reference(x, residual, norm_weight, weight, bias, eps, offset, low_rank)
    return NormLinear.apply(
        x, residual, *operand(weight), bias, *(low_rank or NO_LOW_RANK), RMS_NORM, eps, (offset,), norm_weight
    )
