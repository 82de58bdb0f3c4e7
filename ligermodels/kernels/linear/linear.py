"""Linear layer with a low-rank (LoRA) update, y = x Wᵀ + b + update: an autograd node, and parts for other nodes.

`norm_linear.py` and `gated_linear.py` build their fused nodes from these parts.

W may pack several projections along its rows, each with its own update. Projection i of P owns the columns start_i to
stop_i of y and adds s low_i B_iᵀ to them, where low_i = x A_iᵀ. With dy_i = dy[..., start_i:stop_i]:
    dlow_i = s dy_i B_i    dx = dy W + dlow A    dA = dlowᵀ x    dB_i = s dy_iᵀ low_i    dW = dyᵀ x    db = Σ dy
x [..., K], W [N, K], b [N], A [P r, K], B [Σ (stop_i - start_i), r], low [..., P r] -> y [..., N], in one float dtype.
The products are torch GEMMs, which accumulate in fp32.
Extra memory traffic of an update: forward reads x once more and updates its columns of y in place; backward reads those
columns of dy twice and x once, and updates dx in place.
Saved for backward: x and low; only low in a node that can recompute x. Frozen tensors cost no GEMM.
Hu et al. 2021, https://arxiv.org/abs/2106.09685.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.kernels.dispatch import Node, autocast, is_traced, runs_kernels
from ligermodels.kernels.launch import as_matrix
from ligermodels.kernels.quant.quantised_weight import Weight, dense, frozen_linear, operand

Columns = tuple[tuple[int, int], ...]


class LowRank(NamedTuple):
    """Low-rank update of a linear layer that packs P projections."""

    a: Tensor  # [P r, K], the A_i one after another
    b: Tensor  # [Σ (stop - start), r], the B_i one after another
    columns: Columns  # (start, stop) of each projection, ascending; columns of y outside all of them get no update
    scale: float


NO_LOW_RANK = None, None, (), 1.0  # passed to a node in place of LowRank's fields


def low_rank_update(x: Tensor, low_rank: LowRank, width: int) -> Tensor:
    """The update alone, in plain PyTorch: x [..., K] -> [..., width]."""
    a, b, columns, scale = low_rank
    if columns[-1][1] > width:
        raise ValueError(f"a low-rank update is of columns up to {columns[-1][1]}, but the weight has {width} rows")
    factors = zip(columns, split_b(b, columns), strict=True)
    blocks = torch.cat([F.pad(b_i, (0, 0, start, width - stop)) for (start, stop), b_i in factors], 1)  # [width, P r]
    return scale * F.linear(F.linear(x, a), blocks)


def low_rank_linear_reference(x: Tensor, weight: Weight, bias: Tensor | None, low_rank: LowRank | None) -> Tensor:
    y = F.linear(x, weight, bias) if isinstance(weight, Tensor) else frozen_linear(x, weight, bias)
    return y if low_rank is None else y + low_rank_update(x, low_rank, weight.shape[0])


def split_b(b: Tensor, columns: Columns) -> tuple[Tensor, ...]:
    """The B_i [stop_i - start_i, r], as views."""
    return b.split([stop - start for start, stop in columns])


def split_by_projection(y: Tensor, low: Tensor, b: Tensor, columns: Columns) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Views of each projection: its columns of y [rows, N], its columns of low [rows, P r] and its rows of b."""
    y, low = as_matrix(y), as_matrix(low)
    for (start, stop), low_i, b_i in zip(columns, low.chunk(len(columns), 1), split_b(b, columns), strict=True):
        yield y[:, start:stop], low_i, b_i


def linear_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor | None, b: Tensor | None, columns: Columns, scale: float
) -> tuple[Tensor, Tensor | None]:
    """y [..., N], and low [..., P r], which is None without an update. Call it only where autograd does not record."""
    y = F.linear(x, weight, bias)
    if a is None or b is None:
        return y, None
    low = F.linear(x, a)
    if is_traced((x,)):  # not in place: selective checkpointing may have saved what F.linear returned
        return add_update(y, low, b, columns, scale), low
    for y_i, low_i, b_i in split_by_projection(y, low, b, columns):
        y_i.addmm_(low_i, b_i.t(), alpha=scale)
    return y, low


def add_update(y: Tensor, low: Tensor, b: Tensor, columns: Columns, scale: float) -> Tensor:
    """y plus the update, in new memory."""
    rows, blocks, end = as_matrix(y), [], 0
    for (start, stop), (y_i, low_i, b_i) in zip(columns, split_by_projection(y, low, b, columns), strict=True):
        blocks += [rows[:, end:start], torch.addmm(y_i, low_i, b_i.t(), alpha=scale)]
        end = stop
    return torch.cat([*blocks, rows[:, end:]], 1).view(y.shape)


def low_gradient(dy: Tensor, a: Tensor, b: Tensor, columns: Columns, scale: float) -> Tensor:
    """dlow [..., P r]."""
    dlow = dy.new_empty(*dy.shape[:-1], a.shape[0])
    for dy_i, dlow_i, b_i in split_by_projection(dy, dlow, b, columns):
        dlow_i.addmm_(dy_i, b_i, beta=0, alpha=scale)
    return dlow


def input_gradient(dy: Tensor, weight: Tensor, dlow: Tensor | None = None, a: Tensor | None = None) -> Tensor:
    """dx [..., K] = dy W + dlow A; without an update dy W."""
    dx = torch.mm(as_matrix(dy), weight)
    if dlow is not None and a is not None:
        dx.addmm_(as_matrix(dlow), a)
    return dx if dy.ndim == 2 else dx.view(*dy.shape[:-1], weight.shape[1])


def weight_gradient(dy: Tensor, x: Tensor) -> Tensor:
    """dW [N, K] = dyᵀ x; with dlow in place of dy, dA [P r, K]."""
    return torch.mm(as_matrix(dy).t(), as_matrix(x))


def bias_gradient(dy: Tensor) -> Tensor:
    """db [N] = Σ dy over all rows."""
    return as_matrix(dy).sum(0)


def up_gradient(dy: Tensor, low: Tensor, b: Tensor, columns: Columns, scale: float) -> Tensor:
    """dB, the gradient of the up-projections, in the shape of b."""
    db = torch.empty_like(b)
    for dy_i, low_i, db_i in split_by_projection(dy, low, db, columns):
        db_i.addmm_(dy_i.t(), low_i, beta=0, alpha=scale)
    return db


class _LowRankLinear(Node):
    @staticmethod
    def forward(ctx, x, weight, layout, bias, a, b, columns, scale):
        y, low = linear_forward(x, dense(weight, layout), bias, a, b, columns, scale)
        ctx.save_for_backward(x, weight, a, b, low)
        ctx.layout, ctx.update = layout, (columns, scale)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, weight, a, b, low = ctx.saved_tensors
        needs_x, needs_weight, _, needs_bias, needs_a, needs_b, _, _ = ctx.needs_input_grad
        dlow = low_gradient(dy, a, b, *ctx.update) if a is not None and (needs_x or needs_a) else None
        return (
            input_gradient(dy, dense(weight, ctx.layout), dlow, a) if needs_x else None,
            weight_gradient(dy, x) if needs_weight else None,
            None,
            bias_gradient(dy) if needs_bias else None,
            weight_gradient(dlow, x) if needs_a else None,
            up_gradient(dy, low, b, *ctx.update) if needs_b else None,
            None,
            None,
        )


class _GradientsOfLinear(_LowRankLinear):
    """Backward alone: forward computes what backward reads, and leaves its output as the memory is."""

    @staticmethod
    def forward(ctx, x, weight, layout, bias, a, b, columns, scale):
        ctx.save_for_backward(x, weight, a, b, None if a is None else F.linear(x, a))
        ctx.layout, ctx.update = layout, (columns, scale)
        return x.new_empty(*x.shape[:-1], (weight if layout is None else layout).shape[0])


def gradients_of_linear(x: Tensor, weight: Weight, bias: Tensor | None, low_rank: LowRank | None) -> Tensor:
    """Is `low_rank_linear` without the product, also without an update: the output has no values, but its gradients
    are those of the linear. For a backward pass that recomputes what is before the linear, and reads no output."""
    x, weight, bias, low_rank = autocast(x, weight, bias, low_rank)
    return _GradientsOfLinear.apply(x, *operand(weight), bias, *(low_rank or NO_LOW_RANK))


def low_rank_linear(x: Tensor, weight: Weight, bias: Tensor | None, low_rank: LowRank) -> Tensor:
    """linear(x, weight, bias) plus the low-rank update.

    x [..., K] float, weight [N, K], a tensor or quantised, bias [N] or None, low_rank.a [P r, K],
    low_rank.b [Σ (stop - start), r] -> [..., N]. Frozen arguments cost no gradient.
    """
    x, weight, bias, low_rank = autocast(x, weight, bias, low_rank)
    if not runs_kernels(x):
        return low_rank_linear_reference(x, weight, bias, low_rank)
    return _LowRankLinear.apply(x, *operand(weight), bias, *low_rank)
