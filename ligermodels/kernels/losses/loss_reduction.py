"""Sum or mean of the losses of rows, by one program, without torch ops around it.

    mean = Σ loss / Σ w_target over the supervised targets        w: class weights, 1 without them

A target is supervised if it is not ignore_index; one outside the vocabulary counts with weight 1. The mean over no
target, or over weights that are all zero, is 0. losses [...] fp32, targets [...] int64, class_weight [V] fp32.
"""

import functools

import torch
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.dispatch import register_op
from ligermodels.kernels.launch import Launcher, kernel
from ligermodels.kernels.pdl import launch_dependents, pdl_constants, wait_for_previous_kernel

REDUCTIONS = ("mean", "sum", "none")
REDUCE_TILE = 1024  # losses per step


def reduce_rows(
    losses: Tensor, targets: Tensor, class_weight: Tensor | None, ignore_index: int, reduction: str
) -> Tensor:
    """Row losses -> their "mean" over supervised targets, their "sum", or unchanged ("none"). In plain PyTorch."""
    if reduction == "none":
        return losses
    total = losses.sum()
    if reduction == "sum":
        return total
    supervised = targets != ignore_index
    if class_weight is None:
        return total / supervised.sum().clamp_min(1)
    weights = torch.where(supervised, target_weights(targets, class_weight), 0.0).sum()
    return total / torch.where(weights == 0, 1.0, weights)


def target_weights(targets: Tensor, class_weight: Tensor) -> Tensor:
    """The class weight of each target; 1 outside the vocabulary, as ignore_index may be."""
    exists = (targets >= 0) & (targets < class_weight.shape[0])
    return torch.where(exists, class_weight[torch.where(exists, targets, 0)], 1.0)


@kernel(do_not_specialize=["rows", "ignore_index"])
def _reduce_kernel(
    losses_ptr, targets_ptr, class_weights_ptr, total_ptr, factor_ptr, rows, vocab, ignore_index,
    COUNT: tl.constexpr, WEIGHTED: tl.constexpr, SUM: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program. COUNT: factor = 1 / number of supervised targets (WEIGHTED: sum of their weights), otherwise 1.
    SUM: total = factor * Σ losses."""
    wait_for_previous_kernel(PDL)
    launch_dependents(PDL)
    count = tl.zeros([TILE], tl.float32 if WEIGHTED else tl.int32)
    total = tl.zeros([TILE], tl.float32)
    for start in range(0, rows, TILE):
        row = start + tl.arange(0, TILE)
        if COUNT:
            target = tl.load(targets_ptr + row, row < rows, other=ignore_index)
            if WEIGHTED:
                exists = (target >= 0) & (target < vocab)
                weights = tl.load(class_weights_ptr + target, exists, other=1.0)
                count += tl.where(target != ignore_index, weights, 0.0)
            else:
                count += (target != ignore_index).to(tl.int32)
        if SUM:
            total += tl.load(losses_ptr + row, row < rows, other=0.0)
    if WEIGHTED:
        weight = tl.sum(count, 0)
        factor = 1.0 / tl.where(weight == 0, 1.0, weight)
    else:
        factor = 1.0 / tl.maximum(tl.sum(count, 0), 1).to(tl.float32)
    tl.store(factor_ptr, factor)
    if SUM:
        tl.store(total_ptr, tl.sum(total, 0) * factor)


@functools.cache
def _reduce_launcher(count: bool, weighted: bool, total: bool, device: torch.device) -> Launcher:
    constants = pdl_constants(device)
    return _reduce_kernel.bind(COUNT=count, WEIGHTED=weighted, SUM=total, TILE=REDUCE_TILE, **constants)


def _launch(
    losses: Tensor, targets: Tensor, class_weight: Tensor | None, total: Tensor | None, factor: Tensor,
    ignore_index: int, mean: bool,
) -> None:  # fmt: skip
    weights, vocab = (factor, 0) if class_weight is None or not mean else (class_weight, class_weight.shape[0])
    launch = _reduce_launcher(mean, vocab > 0, total is not None, targets.device)
    launch(
        1, losses.contiguous(), targets.contiguous(), weights, factor if total is None else total, factor,
        targets.numel(), vocab, ignore_index,
    )  # fmt: skip


def _launch_mean_factor(targets: Tensor, class_weight: Tensor | None, ignore_index: int) -> Tensor:
    factor = _fake_mean_factor(targets, class_weight, ignore_index)
    _launch(factor, targets, class_weight, None, factor, ignore_index, True)
    return factor


def _launch_reduce(
    losses: Tensor, targets: Tensor, class_weight: Tensor | None, ignore_index: int, mean: bool
) -> tuple[Tensor, Tensor]:
    total, factor = _fake_reduce(losses, targets, class_weight, ignore_index, mean)
    _launch(losses, targets, class_weight, total, factor, ignore_index, mean)
    return total, factor


def _fake_mean_factor(targets, class_weight, ignore_index):
    return targets.new_empty((), dtype=torch.float32)


def _fake_reduce(losses, targets, class_weight, ignore_index, mean):
    return losses.new_empty(()), losses.new_empty(())


mean_factor = register_op("mean_factor", _launch_mean_factor, _fake_mean_factor)
reduce_losses = register_op("reduce_losses", _launch_reduce, _fake_reduce)
