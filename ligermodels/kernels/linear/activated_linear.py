"""Activation and the following linear as one autograd node: y = act(x) Wᵀ + b. gated_linear.py is the same with a gate.

The linear may have a low-rank update (linear.py). The node saves x, the weights and the update's r columns for
backward. It does not save the activated values: the activation's backward kernel recomputes them for dW = dyᵀ act(x)
and for dA of the update, which costs one write of I elements per token. No full-width GEMM is recomputed.
x [..., I], W [N, I], b [N] -> y [..., N], all in one float dtype.
"""

from torch import Tensor

from ligermodels.kernels.activations.gated_activation import backward_from_saved as gated_backward_from_saved
from ligermodels.kernels.activations.gated_activation import gated_activation_forward
from ligermodels.kernels.activations.plain_activation import (
    check_activation,
    plain_activation_forward,
    plain_activation_reference,
    plain_backward_from_saved,
)
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
from ligermodels.kernels.quant.quantised_weight import Weight, dense, operand


def activated_linear_reference(
    x: Tensor, weight: Weight, bias: Tensor | None = None, activation: str = "gelu", low_rank: LowRank | None = None
) -> Tensor:
    return low_rank_linear_reference(plain_activation_reference(x, activation), weight, bias, low_rank)


def _activate(x: Tensor, activation: str, multipliers: tuple[float, ...]) -> Tensor:
    forward = gated_activation_forward if multipliers else plain_activation_forward
    return forward(x, activation, *multipliers)


class ActivatedLinear(Node):
    """multipliers: the two of a gated activation; none for an activation without a gate."""

    @staticmethod
    def forward(ctx, x, weight, layout, bias, a, b, columns, scale, activation, inplace, *multipliers):
        activated = _activate(x, activation, multipliers)
        y, low = linear_forward(activated, dense(weight, layout), bias, a, b, columns, scale)
        ctx.save_for_backward(x, weight, a, b, low)
        ctx.layout, ctx.update = layout, (columns, scale)
        ctx.activation, ctx.inplace, ctx.multipliers = activation, inplace, multipliers
        return y

    @staticmethod
    def backward(ctx, dy):
        x, weight, a, b, low = ctx.saved_tensors
        needs_x, needs_weight, _, needs_bias, needs_a, needs_b, *_ = ctx.needs_input_grad
        reads_activated = needs_weight or needs_a
        dx = activated = dlow = None
        if a is not None and (needs_x or needs_a):
            dlow = low_gradient(dy, a, b, *ctx.update)
        if needs_x:  # its gradient behind the activation is not bound to a name: the memory is freed before dW
            through_activation = gated_backward_from_saved if ctx.multipliers else plain_backward_from_saved
            dx, activated, *_ = through_activation(
                input_gradient(dy, dense(weight, ctx.layout), dlow, a), x, ctx.activation, reads_activated,
                *ctx.multipliers, ctx.inplace,
            )  # fmt: skip
        elif reads_activated:
            activated = _activate(x, ctx.activation, ctx.multipliers)
        return (
            dx,
            weight_gradient(dy, activated) if needs_weight else None,
            None,
            bias_gradient(dy) if needs_bias else None,
            weight_gradient(dlow, activated) if needs_a else None,
            up_gradient(dy, low, b, *ctx.update) if needs_b else None,
            *(None,) * (4 + len(ctx.multipliers)),
        )


def activated_linear(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    activation: str = "gelu",
    low_rank: LowRank | None = None,
    *,
    inplace: bool = False,
) -> Tensor:
    """linear(activation(x), weight, bias).

    x [..., I] float, weight [N, I], a tensor or quantised, bias [N] or None, activation: as those of
    `plain_activation`, low_rank: the linear's update -> [..., N].
    inplace: backward overwrites x with its gradient, unless the graph is retained for another backward or is being
    traced. Its values are then lost.
    Frozen arguments cost no gradient. Raises ValueError for any other activation.
    """
    check_activation(activation)
    x, weight, bias, low_rank = autocast(x, weight, bias, low_rank)
    if not runs_kernels(x):
        return activated_linear_reference(x, weight, bias, activation, low_rank)
    return ActivatedLinear.apply(x, *operand(weight), bias, *(low_rank or NO_LOW_RANK), activation, inplace)
