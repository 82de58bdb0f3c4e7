"""Linear layer with outputs in fp32, of operands in bf16: y = x Wᵀ. For logits of which some are compared or exponentiated.

The product of two bf16 numbers is exact in fp32, so that the operands need no copies in fp32: tensor cores take them as
they are, and sum in fp32. Backward has dy in fp32. It enters the products as two bf16 numbers, dy = high + low + rest
with |rest| <= 2^-17 |dy|, which makes them twice as deep:
    dx = [high, low] [W; W];    dW = highᵀ x + lowᵀ x
x [R, K], W [N, K] bf16, y [R, N] fp32; sums in fp32, one rounding of each gradient. Saved for backward: x, which is the
caller's. 2 R N K FLOP forward, up to four times that backward. Other dtypes take the products of widened operands.
Must not know what the outputs are.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ligermodels.kernels.chunk_gradients import accumulate_
from ligermodels.kernels.dispatch import Node, register_op, runs_kernels, widen


def fp32_linear_reference(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(widen(x), widen(weight))


def _launch_forward(x: Tensor, weight: Tensor) -> Tensor:
    y = _fake_forward(x, weight)
    accumulate_(y, x, weight.t(), beta=0)
    return y


def _launch_backward(
    dy: Tensor, x: Tensor, weight: Tensor, x_grad: bool, weight_grad: bool
) -> tuple[Tensor | None, Tensor | None]:
    """(dx, dweight), each None where it is not needed."""
    high = dy.to(x.dtype)
    parts = torch.cat([high, (dy - high.float()).to(x.dtype)], 1)  # [R, 2 N]
    dx = torch.mm(parts, torch.cat([weight, weight])) if x_grad else None
    if not weight_grad:
        return dx, None
    sums = x.new_empty(parts.shape[1], x.shape[1], dtype=torch.float32)
    accumulate_(sums, parts.t(), x, beta=0)
    of_high, of_low = sums.chunk(2)
    return dx, (of_high + of_low).to(weight.dtype)


def _fake_forward(x, weight):
    return x.new_empty(x.shape[0], weight.shape[0], dtype=torch.float32)


def _fake_backward(dy, x, weight, x_grad, weight_grad):
    return x.new_empty(x.shape) if x_grad else None, weight.new_empty(weight.shape) if weight_grad else None


_linear = register_op("fp32_linear(Tensor x, Tensor weight) -> Tensor", _launch_forward, _fake_forward)
_linear_backward = register_op(
    "fp32_linear_backward(Tensor dy, Tensor x, Tensor weight, bool x_grad, bool weight_grad)"
    " -> (Tensor dx, Tensor dweight)",
    _launch_backward,
    _fake_backward,
)


@register_flop_formula(torch.ops.ligermodels.fp32_linear)
def _forward_flops(x, weight, **_) -> int:
    return 2 * x[0] * x[1] * weight[0]


@register_flop_formula(torch.ops.ligermodels.fp32_linear_backward)
def _backward_flops(dy, x, weight, x_grad, weight_grad, **_) -> int:
    return 2 * (x_grad + weight_grad) * x[0] * x[1] * weight[0]


class _Fp32Linear(Node):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return _linear(x, weight)

    @staticmethod
    def backward(ctx, dy):
        x_grad, weight_grad = ctx.needs_input_grad
        dx, dweight = _linear_backward(dy, *ctx.saved_tensors, x_grad, weight_grad)
        return dx if x_grad else None, dweight if weight_grad else None


def fp32_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [R, K] and weight [N, K], float, -> x weightᵀ [R, N] in fp32; of fp64 operands in fp64."""
    if runs_kernels(x) and x.dtype == weight.dtype == torch.bfloat16:
        return _Fp32Linear.apply(x, weight)
    return fp32_linear_reference(x, weight)
