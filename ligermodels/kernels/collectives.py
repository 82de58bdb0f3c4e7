"""Collectives with gradients: all-to-all, the mean over ranks, and gradients summed over ranks.

    all-to-all   rank r sends its i-th part to rank i, and has received that of rank i as its i-th part
    backward     the gradient's parts go back: the same with the sizes of what is sent and received exchanged
    mean         y = Σ_r x_r / ranks;   backward dx = Σ_r dy_r / ranks
    summed gradient   y = x;   backward dx = Σ_r dy_r

They are torch's functional collectives, which torch.compile traces, waited for at once: kernels read addresses. Any
device and dtype that the group's backend has.
"""

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional

from ligermodels.kernels.dispatch import Node

Sizes = list[int] | None  # of the parts of each rank, in rows; None for equal parts


def all_to_all(x: Tensor, group: dist.ProcessGroup, sent: Sizes = None, received: Sizes = None) -> Tensor:
    """x [Σ sent, ...] -> [Σ received, ...]: parts of rows for each rank of the group, in rank order -> those of each.

    With equal parts the number of rows must be a multiple of the number of ranks. Every rank of the group must call it,
    with sizes that agree; also in backward.
    """
    return _AllToAll.apply(x, group, sent, received)


def mean_over_ranks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The mean of the ranks' x, of equal shapes, on each of them."""
    return _Mean.apply(x, group)


def sum_gradient(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """x, equal on all ranks; its gradient is the sum of theirs."""
    return _SumGradient.apply(x, group)


class _AllToAll(Node):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, sent: Sizes, received: Sizes) -> Tensor:
        ctx.arguments = group, received, sent
        return send_parts(x, group, sent, received)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        return send_parts(dy, *ctx.arguments), None, None, None


class _Mean(Node):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return average(x, group)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return average(dy, ctx.group), None


class _SumGradient(Node):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return functional.wait_tensor(functional.all_reduce(dy.contiguous(), "sum", ctx.group)), None


def send_parts(x: Tensor, group: dist.ProcessGroup, sent: Sizes, received: Sizes) -> Tensor:
    """`all_to_all` without a gradient."""
    return functional.wait_tensor(functional.all_to_all_single(x.contiguous(), received, sent, group))


def average(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`mean_over_ranks` without a gradient."""
    return functional.wait_tensor(functional.all_reduce(x, "sum", group)) / dist.get_world_size(group)
