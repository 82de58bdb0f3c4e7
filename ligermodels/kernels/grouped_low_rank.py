"""The low-rank update of a grouped linear: in group g, y += s (x A_gᵀ) B_gᵀ. Parts of a node.

With low = s x A_gᵀ:   dlow = s dy B_g    dx = dy W_g + dlow A_g    dA_g = dlow_gᵀ x_g    dB_g = dy_gᵀ low_g
x [R, K], W [E, N, K], A [E, r, K], B [E, N, r], low [R, r] -> y [R, N], in one float dtype, rows sorted by group as
grouped_linear.py has them. An update is two more grouped products, and reads y once more; low alone is kept for it.
Hu et al. 2021, https://arxiv.org/abs/2106.09685.
"""

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from ligermodels.kernels.grouped_gemm import grouped_input_gradient, grouped_linear


class GroupedLowRank(NamedTuple):
    """The update of a grouped linear."""

    a: Tensor  # [E, r, K]
    b: Tensor  # [E, N, r]
    scale: float


NO_UPDATE = None, None, 1.0  # what a node takes in place of GroupedLowRank's fields


def group_reference(x: Tensor, weight: Tensor, group: int, low_rank: GroupedLowRank | None) -> Tensor:
    """One group's linear with its update: x [R_g, K] -> [R_g, N]."""
    y = F.linear(x, weight[group])
    if low_rank is None:
        return y
    a, b, scale = low_rank
    return y + scale * F.linear(F.linear(x, a[group]), b[group])


def grouped_forward(
    x: Tensor, weight: Tensor, offsets: Tensor, a: Tensor | None, b: Tensor | None, scale: float
) -> tuple[Tensor, Tensor | None]:
    """y [R, N], and low [R, r] where there is an update."""
    y = grouped_linear(x, weight, offsets)
    if a is None or b is None:
        return y, None
    low = scale * grouped_linear(x, a, offsets)
    # Not in place: selective checkpointing may keep what a product returned, and would add to it twice.
    return y + grouped_linear(low, b, offsets), low


def grouped_low_gradient(dy: Tensor, offsets: Tensor, b: Tensor | None, scale: float) -> Tensor | None:
    """dlow [R, r], where there is an update."""
    return None if b is None else scale * grouped_input_gradient(dy, b, offsets)


def grouped_backward(dy: Tensor, weight: Tensor, offsets: Tensor, dlow: Tensor | None, a: Tensor | None) -> Tensor:
    """dx [R, K]."""
    dx = grouped_input_gradient(dy, weight, offsets)
    return dx if dlow is None or a is None else dx + grouped_input_gradient(dlow, a, offsets)
