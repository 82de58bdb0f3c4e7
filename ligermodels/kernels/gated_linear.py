"""Gated activation and the linear after it as one autograd node: y = (act(gate) * up) Wᵀ + b.

Keeps gate_up and W for backward, not the product that the linear reads: the activation's backward kernel emits it again
for dW = dyᵀ product, at one write of I elements a token. No matrix product is recomputed.
gate_up [..., 2 I], W [N, I], b [N] -> y [..., N], all in one float dtype.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.kernels.gated_activation import (
    check_gated,
    gated_activation_backward,
    gated_activation_forward,
    gated_activation_reference,
)
from ligermodels.kernels.linear import bias_gradient, input_gradient, weight_gradient
from ligermodels.kernels.op import runs_kernels


def gated_linear_reference(gate_up: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    return F.linear(gated_activation_reference(gate_up, activation), weight, bias)


class _GatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up, weight, bias, activation):
        ctx.save_for_backward(gate_up, weight)
        ctx.activation = activation
        return F.linear(gated_activation_forward(gate_up, activation), weight, bias)

    @staticmethod
    def backward(ctx, dy):
        gate_up, weight = ctx.saved_tensors
        needs_gate_up, needs_weight, needs_bias, _ = ctx.needs_input_grad
        dgate_up = product = None
        if needs_gate_up:
            dproduct = input_gradient(dy, weight)
            dgate_up, product = gated_activation_backward(dproduct, gate_up, ctx.activation, needs_weight)
        elif needs_weight:
            product = gated_activation_forward(gate_up, ctx.activation)
        dweight = weight_gradient(dy, product) if needs_weight else None
        return dgate_up, dweight, bias_gradient(dy) if needs_bias else None, None


def gated_linear(gate_up: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """linear(activation(gate) * up, weight, bias), where gate and up are the halves of gate_up.

    gate_up [..., 2 I] float, weight [N, I], bias [N] or None, activation "silu", "gelu_tanh" or "gelu" -> [..., N].
    Frozen arguments cost no gradient. Raises ValueError for any other activation and for an odd width.
    """
    check_gated(gate_up, activation)
    if not runs_kernels(gate_up):
        return gated_linear_reference(gate_up, weight, bias, activation)
    return _GatedLinear.apply(gate_up, weight, bias, activation)
