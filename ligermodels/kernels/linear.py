"""Backward of y = x Wᵀ + b, for the autograd nodes that end in a linear and recompute x instead of keeping it.

y, dy [..., N], x [..., K], W [N, K], b [N]; the products go to torch's GEMM, which accumulates in fp32.
"""

import torch
from torch import Tensor


def input_gradient(dy: Tensor, weight: Tensor) -> Tensor:
    """dx [..., K] = dy W."""
    return torch.mm(dy.flatten(0, -2), weight).unflatten(0, dy.shape[:-1])


def weight_gradient(dy: Tensor, x: Tensor) -> Tensor:
    """dW [N, K] = dyᵀ x."""
    return torch.mm(dy.flatten(0, -2).t(), x.flatten(0, -2))


def bias_gradient(dy: Tensor) -> Tensor:
    """db [N] = Σ dy."""
    return dy.flatten(0, -2).sum(0)
