"""Losses of one number a pair: of the margin x by which the chosen side is ahead. Must not know where x comes from.

All take and return tensors of one shape, are finite for |x| ≤ 10⁴, and have the gradient of the formula there.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

LARGEST_EXPONENT = 80.0  # e⁸⁰ is finite in fp32; beyond it exponentials stay constant, without a gradient


def logistic(x: Tensor, label_smoothing: float) -> Tensor:
    """−(1 − ε) log σ(x) − ε log σ(−x), where a label is wrong with probability ε (cDPO)."""
    return -(1 - label_smoothing) * F.logsigmoid(x) - label_smoothing * F.logsigmoid(-x)


def robust_logistic(x: Tensor, label_smoothing: float) -> Tensor:
    """(−(1 − ε) log σ(x) + ε log σ(−x)) / (1 − 2 ε): the unbiased loss where labels are wrong with probability ε."""
    return logistic(x, -label_smoothing / (1 - 2 * label_smoothing))


def hinge(x: Tensor) -> Tensor:
    """max(0, 1 − x)."""
    return F.relu(1 - x)


def squared(delta: Tensor, beta: float) -> Tensor:
    """(δ − 1 / (2 β))² of a margin δ that is not multiplied by β (IPO)."""
    return (delta - 1 / (2 * beta)).square()


def exo(x: Tensor, label_smoothing: float) -> Tensor:
    """KL divergence of (q, 1 − q) from (1 − ε, ε), where q = σ(x) (EXO)."""
    log_target = math.log1p(-label_smoothing), math.log(label_smoothing)
    chosen = torch.sigmoid(x) * (F.logsigmoid(x) - log_target[0])
    return chosen + torch.sigmoid(-x) * (F.logsigmoid(-x) - log_target[1])


def discopop(x: Tensor, tau: float) -> Tensor:
    """(1 − m) (−log σ(x)) + m e⁻ˣ, where m = σ(x / τ). m e⁻ˣ is one exponential: e⁻ˣ alone overflows."""
    exponential = (F.logsigmoid(x / tau) - x).clamp(max=LARGEST_EXPONENT).exp()
    return exponential - torch.sigmoid(-x / tau) * F.logsigmoid(x)


def power_score(ratios: Tensor, exponent: float) -> Tensor:
    """(e^(k r) − 1) / k; r for k → 0. The score of f-DPO and of AlphaPO: not a loss, but what a margin is taken of."""
    if abs(exponent) < 1e-6:
        return ratios
    return torch.expm1((exponent * ratios).clamp(max=LARGEST_EXPONENT)) / exponent
