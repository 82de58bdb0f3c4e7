"""Gated activation and the following linear as one autograd node: y = p Wᵀ + b, p = d act(m gate) * up.

The linear may have a low-rank update (kernels/linear.py). The node saves gate_up, the weights and the update's r
columns for backward. It does not save the product: the activation's backward kernel recomputes it for dW = dyᵀ product
and for dA of the update, which costs one write of I elements per token. No full-width GEMM is recomputed.
gate_up [..., 2 I], W [N, I], b [N] -> y [..., N], all in one float dtype; the multipliers m and d are numbers.
"""

from torch import Tensor

from ligermodels.kernels.dispatch import Node, autocast, runs_kernels
from ligermodels.kernels.gated_activation import (
    backward_from_saved,
    check_gate_up,
    gated_activation_forward,
    gated_activation_reference,
)
from ligermodels.kernels.linear import (
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
from ligermodels.kernels.quantised_weight import Weight, autocast_weight, dense, operand


def gated_linear_reference(
    gate_up: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    activation: str = "silu",
    low_rank: LowRank | None = None,
    gate_multiplier: float = 1.0,
    down_multiplier: float = 1.0,
) -> Tensor:
    product = gated_activation_reference(gate_up, activation, None, gate_multiplier, down_multiplier)
    return low_rank_linear_reference(product, weight, bias, low_rank)


class _GatedLinear(Node):
    @staticmethod
    def forward(
        ctx, gate_up, weight, layout, bias, a, b, columns, scale, activation, gate_multiplier, down_multiplier, inplace
    ):
        product = gated_activation_forward(gate_up, activation, gate_multiplier, down_multiplier)
        y, low = linear_forward(product, dense(weight, layout), bias, a, b, columns, scale)
        ctx.save_for_backward(gate_up, weight, a, b, low)
        ctx.layout, ctx.update = layout, (columns, scale)
        ctx.activation, ctx.multipliers, ctx.inplace = activation, (gate_multiplier, down_multiplier), inplace
        return y

    @staticmethod
    def backward(ctx, dy):
        gate_up, weight, a, b, low = ctx.saved_tensors
        needs_gate_up, needs_weight, _, needs_bias, needs_a, needs_b, *_ = ctx.needs_input_grad
        reads_product = needs_weight or needs_a
        dgate_up = product = dlow = None
        if a is not None and (needs_gate_up or needs_a):
            dlow = low_gradient(dy, a, b, *ctx.update)
        if needs_gate_up:  # dproduct is not bound to a name: its memory is freed before dW is computed
            dgate_up, product = backward_from_saved(
                input_gradient(dy, dense(weight, ctx.layout), dlow, a), gate_up, ctx.activation, reads_product,
                *ctx.multipliers, ctx.inplace,
            )  # fmt: skip
        elif reads_product:
            product = gated_activation_forward(gate_up, ctx.activation, *ctx.multipliers)
        return (
            dgate_up,
            weight_gradient(dy, product) if needs_weight else None,
            None,
            bias_gradient(dy) if needs_bias else None,
            weight_gradient(dlow, product) if needs_a else None,
            up_gradient(dy, low, b, *ctx.update) if needs_b else None,
            None,
            None,
            None,
            None,
            None,
            None,
        )


def gated_linear(
    gate_up: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    activation: str = "silu",
    low_rank: LowRank | None = None,
    *,
    gate_multiplier: float = 1.0,
    down_multiplier: float = 1.0,
    inplace: bool = False,
) -> Tensor:
    """linear(down_multiplier * activation(gate_multiplier * gate) * up, weight, bias), where gate is the first half of
    gate_up's columns, up the second.

    gate_up [..., 2 I] float, weight [N, I], a tensor or quantised, bias [N] or None, activation "silu", "gelu_tanh" or
    "gelu", low_rank: the linear's update -> [..., N]. The multipliers are constants of a model: see `gated_activation`.
    inplace: as in `gated_activation`; the recomputed product also takes the memory of its gradient.
    Frozen arguments cost no gradient. Raises ValueError for any other activation and for an odd width.
    """
    check_gate_up(gate_up, activation)
    gate_up, bias, low_rank = autocast(gate_up, bias, low_rank)
    weight = autocast_weight(weight)
    if not runs_kernels(gate_up):
        return gated_linear_reference(gate_up, weight, bias, activation, low_rank, gate_multiplier, down_multiplier)
    return _GatedLinear.apply(
        gate_up,
        *operand(weight),
        bias,
        *(low_rank or NO_LOW_RANK),
        activation,
        gate_multiplier,
        down_multiplier,
        inplace,
    )
