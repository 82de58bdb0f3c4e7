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


class GroupedLowRank(NamedTuple):
    """Low-rank update of a stacked weight [E, N, K]."""

    a: Tensor  # [E, r, K]
    b: Tensor  # [E, N, r]
    scale: float


NO_GROUPED_LOW_RANK = None, None, 1.0  # passed to a node in place of GroupedLowRank's fields


def group_linear_reference(
    x: Tensor, weight: Tensor, group: int, low_rank: GroupedLowRank | None, bias: Tensor | None = None
) -> Tensor:
    """The linear of one group with its update: x [R_g, K] -> [R_g, N]. bias: [E, N]."""
    y = F.linear(x, weight[group], None if bias is None else bias[group])
    if low_rank is None:
        return y
    a, b, scale = low_rank
    return y + scale * F.linear(F.linear(x, a[group]), b[group])


def low_rank_grouped_gemm(
    x: Tensor, weight: Tensor, offsets: Tensor, a: Tensor | None, b: Tensor | None, scale: float
) -> tuple[Tensor, Tensor | None]:
    """y [R, N], and low [R, r], which is None without an update."""
    y = grouped_gemm(x, weight, offsets)
    if a is None or b is None:
        return y, None
    low = scale * grouped_gemm(x, a, offsets)
    # Not in place: selective checkpointing may save the output of the grouped GEMM and would then add to it twice.
    return y + grouped_gemm(low, b, offsets), low


def grouped_low_gradient(dy: Tensor, offsets: Tensor, b: Tensor | None, scale: float) -> Tensor | None:
    """dlow [R, r]; None without an update."""
    return None if b is None else scale * grouped_input_gradient(dy, b, offsets)


def low_rank_grouped_input_gradient(
    dy: Tensor, weight: Tensor, offsets: Tensor, dlow: Tensor | None, a: Tensor | None
) -> Tensor:
    """dx [R, K], including the update's share if there is one."""
    dx = grouped_input_gradient(dy, weight, offsets)
    return dx if dlow is None or a is None else dx + grouped_input_gradient(dlow, a, offsets)
