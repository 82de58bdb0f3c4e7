"""Linear layer whose outputs are fp32, of operands in half precision too: y = x Wᵀ. For the logits of a router.

The product of two numbers in half precision is exact in fp32, so that the operands need no copies in fp32: tensor cores
take them as they are, and sum in fp32. Backward has dy in fp32. Beside bf16 operands it enters the products as two bf16
numbers, dy = high + low + rest with |rest| <= 2^-17 |dy|, which makes them twice as deep:
    dx = [high, low] [W; W];    dW = highᵀ x + lowᵀ x
fp16 has no room for small dy: its operands are widened there.
x [R, K], W [N, K] fp32, bf16 or fp16, y [R, N] fp32; sums in fp32, one rounding of each gradient. Saved for backward: x
as it is. 2 R N K FLOP forward, twice that backward, in bf16 four times.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ligermodels.kernels.dispatch import Node, register_op, runs_kernels, widen
from ligermodels.kernels.launch import empty_where
from ligermodels.kernels.losses.logits_chunks import accumulate_


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
    dtype, shape = x.dtype, weight.shape
    if dtype == torch.bfloat16:
        high = dy.bfloat16()
        dy = torch.cat([high, (dy - high.float()).bfloat16()], 1)  # [R, 2 N]
        weight = torch.cat([weight, weight])
    else:
        x, weight = widen(x), widen(weight)
    dx = (dy @ weight).to(dtype) if x_grad else None
    if not weight_grad:
        return dx, None
    sums = dy.new_empty(dy.shape[1], x.shape[1], dtype=torch.float32)
    accumulate_(sums, dy.t(), x, beta=0)
    return dx, sums.view(-1, *shape).sum(0).to(dtype)


def _fake_forward(x, weight):
    return x.new_empty(x.shape[0], weight.shape[0], dtype=torch.float32)


def _fake_backward(dy, x, weight, *needed):
    return empty_where(needed, x, weight)


_linear = register_op("fp32_linear", _launch_forward, _fake_forward)
_linear_backward = register_op("fp32_linear_backward", _launch_backward, _fake_backward)


@register_flop_formula(torch.ops.ligermodels.fp32_linear)
def _forward_flops(x, weight, **_) -> int:
    return 2 * x[0] * x[1] * weight[0]


@register_flop_formula(torch.ops.ligermodels.fp32_linear_backward)
def _backward_flops(dy, x, weight, x_grad, weight_grad, **_) -> int:
    """Counts the products, whether dy enters them in one part or in two."""
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
    if runs_kernels(x) and x.dtype == weight.dtype != torch.float64:
        return _Fp32Linear.apply(x, weight)
    return fp32_linear_reference(x, weight)
