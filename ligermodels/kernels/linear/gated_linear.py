"""Gated activation and the following linear as one autograd node: y = p Wᵀ + b, p = d act(m gate) * up.

The node is that of activated_linear.py, which keeps gate_up for backward and recomputes the product.
gate_up [..., 2 I], W [N, I], b [N] -> y [..., N], all in one float dtype; the multipliers m and d are numbers.
"""

from torch import Tensor

from ligermodels.kernels.activations.gated_activation import check_gate_up, gated_activation_reference
from ligermodels.kernels.dispatch import autocast, runs_kernels
from ligermodels.kernels.linear.activated_linear import ActivatedLinear
from ligermodels.kernels.linear.linear import NO_LOW_RANK, LowRank, low_rank_linear_reference
from ligermodels.kernels.quant.quantised_weight import Weight, operand


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
    gate_up, weight, bias, low_rank = autocast(gate_up, weight, bias, low_rank)
    if not runs_kernels(gate_up):
        return gated_linear_reference(gate_up, weight, bias, activation, low_rank, gate_multiplier, down_multiplier)
    return ActivatedLinear.apply(
        gate_up, *operand(weight), bias, *(low_rank or NO_LOW_RANK), activation, inplace, gate_multiplier,
        down_multiplier,
    )  # fmt: skip
