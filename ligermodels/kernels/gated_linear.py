"""Gated activation and the linear after it as one autograd node: y = (act(gate) * up) Wᵀ + b.

The linear may have a low-rank update (kernels/linear.py). Keeps gate_up, the weights and the update's few columns for
backward, not the product that the linear reads: the activation's backward kernel emits it again for dW = dyᵀ product
and for the update's dA, at one write of I elements a token. No matrix product of the whole width is recomputed.
gate_up [..., 2 I], W [N, I], b [N] -> y [..., N], all in one float dtype.
"""

from torch import Tensor

from ligermodels.kernels.dispatch import Node, autocast, runs_kernels
from ligermodels.kernels.gated_activation import (
    backward_of_saved,
    check_gated,
    gated_activation_forward,
    gated_activation_reference,
)
from ligermodels.kernels.linear import (
    NO_UPDATE,
    LowRank,
    bias_gradient,
    input_gradient,
    linear_forward,
    low_gradient,
    low_rank_linear_reference,
    up_gradient,
    weight_gradient,
)


def gated_linear_reference(
    gate_up: Tensor, weight: Tensor, bias: Tensor | None, activation: str, low_rank: LowRank | None = None
) -> Tensor:
    return low_rank_linear_reference(gated_activation_reference(gate_up, activation), weight, bias, low_rank)


class _GatedLinear(Node):
    @staticmethod
    def forward(ctx, gate_up, weight, bias, a, b, columns, scale, activation, inplace):
        product = gated_activation_forward(gate_up, activation)
        y, low = linear_forward(product, weight, bias, a, b, columns, scale)
        ctx.save_for_backward(gate_up, weight, a, b, low)
        ctx.update = columns, scale
        ctx.activation, ctx.inplace = activation, inplace
        return y

    @staticmethod
    def backward(ctx, dy):
        gate_up, weight, a, b, low = ctx.saved_tensors
        needs_gate_up, needs_weight, needs_bias, needs_a, needs_b, *_ = ctx.needs_input_grad
        reads_product = needs_weight or needs_a
        dgate_up = product = dlow = None
        if a is not None and (needs_gate_up or needs_a):
            dlow = low_gradient(dy, a, b, *ctx.update)
        if needs_gate_up:  # the product's gradient has no name here: its memory is free before dW is made
            dgate_up, product = backward_of_saved(
                input_gradient(dy, weight, dlow, a), gate_up, ctx.activation, reads_product, ctx.inplace
            )
        elif reads_product:
            product = gated_activation_forward(gate_up, ctx.activation)
        return (
            dgate_up,
            weight_gradient(dy, product) if needs_weight else None,
            bias_gradient(dy) if needs_bias else None,
            weight_gradient(dlow, product) if needs_a else None,
            up_gradient(dy, low, b, *ctx.update) if needs_b else None,
            None,
            None,
            None,
            None,
        )


def gated_linear(
    gate_up: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    low_rank: LowRank | None = None,
    *,
    inplace: bool = False,
) -> Tensor:
    """linear(activation(gate) * up, weight, bias), where gate and up are the halves of gate_up.

    gate_up [..., 2 I] float, weight [N, I], bias [N] or None, activation "silu", "gelu_tanh" or "gelu", low_rank: the
    linear's update -> [..., N]. inplace: as in `gated_activation`, and the product takes its gradient's memory. Frozen
    arguments cost no gradient. Raises ValueError for any other activation and for an odd width.
    """
    check_gated(gate_up, activation)
    gate_up, weight, bias, low_rank = autocast(gate_up, weight, bias, low_rank)
    if not runs_kernels(gate_up):
        return gated_linear_reference(gate_up, weight, bias, activation, low_rank)
    return _GatedLinear.apply(gate_up, weight, bias, *(low_rank or NO_UPDATE), activation, inplace)
