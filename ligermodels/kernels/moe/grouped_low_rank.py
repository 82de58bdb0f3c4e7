"""Grouped GEMM with a low-rank (LoRA) update per group: y_g = x_g W_gᵀ + s (x_g A_gᵀ) B_gᵀ. Parts of an autograd node.

With low = s x A_gᵀ:   dlow = s dy B_g    dx = dy W_g + dlow A_g    dA_g = dlow_gᵀ x_g    dB_g = dy_gᵀ low_g
x [R, K], W [E, N, K], A [E, r, K], B [E, N, r], low [R, r] -> y [R, N], in one float dtype; rows sorted by group as in
grouped_gemm.py. An update costs two more grouped GEMMs and one more read of y. It saves only low for backward.
Hu et al. 2021, https://arxiv.org/abs/2106.09685.
"""

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from ligermodels.kernels.moe.grouped_gemm import grouped_gemm, grouped_input_gradient
from ligermodels.kernels.quant.quantised_weight import Weight, WeightLayout, dense, operand


class GroupedLowRank(NamedTuple):
    """Low-rank update of a stacked weight [E, N, K]."""

    a: Tensor  # [E, r, K]
    b: Tensor  # [E, N, r]
    scale: float


def group_linear_reference(
    x: Tensor, weight: Tensor, group: int, low_rank: GroupedLowRank | None, bias: Tensor | None = None
) -> Tensor:
    """The linear of one group with its update: x [R_g, K] -> [R_g, N]. bias: [E, N]."""
    y = F.linear(x, weight[group], None if bias is None else bias[group])
    if low_rank is None:
        return y
    a, b, scale = low_rank
    return y + scale * F.linear(F.linear(x, a[group]), b[group])


class Projection(NamedTuple):
    """A linear of all experts as the arguments of a node: autograd sees only those tensors that are arguments
    themselves. In a node the same fields say which of their gradients are needed."""

    weight: Tensor  # [E, N, K], or its bytes
    a: Tensor | None  # of the update, and b
    b: Tensor | None
    bias: Tensor | None  # [E, N]
    layout: WeightLayout | None  # of the bytes
    scale: float  # of the update

    @classmethod
    def of(cls, weight: Weight, update: GroupedLowRank | None, bias: Tensor | None) -> "Projection":
        (data, layout), (a, b, scale) = operand(weight), update or (None, None, 1.0)
        return cls(data, a, b, bias, layout, scale)


TENSORS = 4  # the first fields of a projection; the others are constants


def low_rank_grouped_gemm(x: Tensor, offsets: Tensor, projection: Projection) -> tuple[Tensor, Tensor | None]:
    """y [R, N] without the bias, and low [R, r], which is None without an update."""
    weight = dense(projection.weight, projection.layout)
    y = grouped_gemm(x, weight, offsets)
    if projection.a is None or projection.b is None:
        return y, None
    low = projection.scale * grouped_gemm(x, projection.a, offsets)
    # Not in place: selective checkpointing may save the output of the grouped GEMM and would then add to it twice.
    return y + grouped_gemm(low, projection.b, offsets), low


def grouped_low_gradient(dy: Tensor, offsets: Tensor, projection: Projection) -> Tensor | None:
    """dlow [R, r]; None without an update."""
    return None if projection.b is None else projection.scale * grouped_input_gradient(dy, projection.b, offsets)


def low_rank_grouped_input_gradient(dy: Tensor, offsets: Tensor, dlow: Tensor | None, projection: Projection) -> Tensor:
    """dx [R, K], including the update's share if there is one."""
    weight = dense(projection.weight, projection.layout)
    dx = grouped_input_gradient(dy, weight, offsets)
    return dx if dlow is None or projection.a is None else dx + grouped_input_gradient(dlow, projection.a, offsets)
