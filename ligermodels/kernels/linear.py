"""y = x Wᵀ + b with a low-rank update: a node of its own, and the parts of the nodes that end in a linear.

W may be several projections packed along its rows, each with an update of its own. Piece i of P has its columns of y,
start_i to stop_i, to which it adds s low_i B_iᵀ, where low_i = x A_iᵀ. With dy_i those columns of dy:
    dlow_i = s dy_i B_i    dx = dy W + dlow A    dA = dlowᵀ x    dB_i = s dy_iᵀ low_i    dW = dyᵀ x    db = Σ dy
x [..., K], W [N, K], b [N], A [P r, K], B [Σ (stop_i - start_i), r], low [..., P r] -> y [..., N], in one float dtype;
the products go to torch's GEMM, which accumulates in fp32. Beside what the linear moves, an update reads x once more
forward, and reads and writes its columns of y in place; backward, it reads those of dy twice, x once, and reads and
writes dx in place.
Keeps x and low for backward, a node that can make x again low alone. What is frozen costs no product.
Hu et al. 2021, https://arxiv.org/abs/2106.09685.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.kernels.dispatch import Node, autocast, is_traced, runs_kernels
from ligermodels.kernels.launch import as_matrix

Columns = tuple[tuple[int, int], ...]


class LowRank(NamedTuple):
    """The update of a linear."""

    a: Tensor  # [P r, K], one piece after another
    b: Tensor  # [Σ (stop - start), r], likewise
    columns: Columns  # (start, stop) of each piece, ascending; columns of y in no piece get no update
    scale: float


NO_UPDATE = None, None, (), 1.0  # what a node takes in place of LowRank's fields


def low_rank_update(x: Tensor, low_rank: LowRank, width: int) -> Tensor:
    """The update alone, in plain PyTorch: x [..., K] -> [..., width]."""
    a, b, columns, scale = low_rank
    rows = zip(columns, up_factors(b, columns), strict=True)
    blocks = torch.cat([F.pad(b_i, (0, 0, start, width - stop)) for (start, stop), b_i in rows], 1)  # [width, P r]
    return scale * F.linear(F.linear(x, a), blocks)


def low_rank_linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None, low_rank: LowRank | None) -> Tensor:
    y = F.linear(x, weight, bias)
    return y if low_rank is None else y + low_rank_update(x, low_rank, weight.shape[0])


def up_factors(b: Tensor, columns: Columns) -> tuple[Tensor, ...]:
    """The B_i."""
    return b.split([stop - start for start, stop in columns])


def pieces(y: Tensor, low: Tensor, b: Tensor, columns: Columns) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Of each piece, as views: its columns of y [rows, N] and of low [rows, P r], and its rows of b."""
    y, low = as_matrix(y), as_matrix(low)
    for (start, stop), low_i, b_i in zip(columns, low.chunk(len(columns), 1), up_factors(b, columns), strict=True):
        yield y[:, start:stop], low_i, b_i


def linear_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor | None, b: Tensor | None, columns: Columns, scale: float
) -> tuple[Tensor, Tensor | None]:
    """y [..., N], and low [..., P r] where there is an update. For use where autograd does not record."""
    y = F.linear(x, weight, bias)
    if a is None or b is None:
        return y, None
    low = F.linear(x, a)
    if is_traced((x,)):  # and perhaps keeps what a product returned, as selective checkpointing does
        return with_update(y, low, b, columns, scale), low
    for y_i, low_i, b_i in pieces(y, low, b, columns):
        y_i.addmm_(low_i, b_i.t(), alpha=scale)
    return y, low


def with_update(y: Tensor, low: Tensor, b: Tensor, columns: Columns, scale: float) -> Tensor:
    """y with the update added, in new memory."""
    rows, blocks, end = as_matrix(y), [], 0
    for (start, stop), (y_i, low_i, b_i) in zip(columns, pieces(y, low, b, columns), strict=True):
        blocks += [rows[:, end:start], torch.addmm(y_i, low_i, b_i.t(), alpha=scale)]
        end = stop
    return torch.cat([*blocks, rows[:, end:]], 1).view(y.shape)


def low_gradient(dy: Tensor, a: Tensor, b: Tensor, columns: Columns, scale: float) -> Tensor:
    """dlow [..., P r]."""
    dlow = dy.new_empty(*dy.shape[:-1], a.shape[0])
    for dy_i, dlow_i, b_i in pieces(dy, dlow, b, columns):
        dlow_i.addmm_(dy_i, b_i, beta=0, alpha=scale)
    return dlow


def input_gradient(dy: Tensor, weight: Tensor, dlow: Tensor | None = None, a: Tensor | None = None) -> Tensor:
    """dx [..., K]."""
    dx = torch.mm(as_matrix(dy), weight)
    if dlow is not None and a is not None:
        dx.addmm_(as_matrix(dlow), a)
    return dx if dy.ndim == 2 else dx.view(*dy.shape[:-1], weight.shape[1])


def weight_gradient(dy: Tensor, x: Tensor) -> Tensor:
    """dW [N, K] = dyᵀ x; dA = dlowᵀ x."""
    return torch.mm(as_matrix(dy).t(), as_matrix(x))


def bias_gradient(dy: Tensor) -> Tensor:
    """db [N] = Σ dy."""
    return as_matrix(dy).sum(0)


def up_gradient(dy: Tensor, low: Tensor, b: Tensor, columns: Columns, scale: float) -> Tensor:
    """dB, of b's shape."""
    db = torch.empty_like(b)
    for dy_i, low_i, db_i in pieces(dy, low, db, columns):
        db_i.addmm_(dy_i.t(), low_i, beta=0, alpha=scale)
    return db


class _LowRankLinear(Node):
    @staticmethod
    def forward(ctx, x, weight, bias, a, b, columns, scale):
        y, low = linear_forward(x, weight, bias, a, b, columns, scale)
        ctx.save_for_backward(x, weight, a, b, low)
        ctx.update = columns, scale
        return y

    @staticmethod
    def backward(ctx, dy):
        x, weight, a, b, low = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, needs_a, needs_b, _, _ = ctx.needs_input_grad
        dlow = low_gradient(dy, a, b, *ctx.update) if needs_x or needs_a else None
        return (
            input_gradient(dy, weight, dlow, a) if needs_x else None,
            weight_gradient(dy, x) if needs_weight else None,
            bias_gradient(dy) if needs_bias else None,
            weight_gradient(dlow, x) if needs_a else None,
            up_gradient(dy, low, b, *ctx.update) if needs_b else None,
            None,
            None,
        )


def low_rank_linear(x: Tensor, weight: Tensor, bias: Tensor | None, low_rank: LowRank) -> Tensor:
    """linear(x, weight, bias) with a low-rank update of some of its columns.

    x [..., K] float, weight [N, K], bias [N] or None, low_rank's a [P r, K] and b [Σ (stop - start), r] -> [..., N].
    Frozen arguments cost no gradient.
    """
    x, weight, bias, low_rank = autocast(x, weight, bias, low_rank)
    if not runs_kernels(x):
        return low_rank_linear_reference(x, weight, bias, low_rank)
    return _LowRankLinear.apply(x, weight, bias, *low_rank)
