"""The Triton kernel of cross-entropy: loss, metrics and gradient of rows; `cross_entropy.py` has the formulas.

One launch computes the losses of rows, their gradient, or both. What the caller leaves out (class weights, token
scaling, metrics) is a constant of the kernel and costs nothing.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.launch import Launcher, cdiv, kernel
from ligermodels.kernels.losses.softmax_sweep import LOG2_E, load_logits, online_softmax, through_softcap
from ligermodels.kernels.pdl import pdl_constants, wait_for_previous_kernel


class LogitsTile(NamedTuple):
    """One step of a program that walks along a row of logits."""

    columns: int
    warps: int
    vector: int  # elements of one load


# Half-precision rows that do not start at 16 bytes, by (computes the loss, computes the gradient).
UNALIGNED_TILES = {
    (True, False): LogitsTile(2048, 8, 1),
    (True, True): LogitsTile(2048, 16, 1),
    (False, True): LogitsTile(1024, 4, 1),
}


class RowResults(NamedTuple):
    """What the kernel computes for each row, fp32."""

    loss: Tensor | None  # [rows]; None: lse is given, and only the gradient is computed
    lse: Tensor  # [rows], log-sum-exp
    probability: Tensor | None = None  # [rows], of the target; if it is given, it scales the loss and its gradient
    metrics: Tensor | None = None  # [3, rows]: entropy, z-loss, predicted class (exact up to 2^24)

    def slice(self, rows: slice) -> "RowResults":
        if rows.stop - rows.start == self.lse.shape[0]:  # a view costs microseconds
            return self
        return RowResults._make(None if x is None else x[..., rows] for x in self)


def empty_results(targets: Tensor, metrics: bool, token_scaling: bool) -> RowResults:
    """Uninitialised results for targets of any shape."""
    loss = torch.empty_like(targets, dtype=torch.float32, memory_format=torch.contiguous_format)
    probability = torch.empty_like(loss) if token_scaling else None
    return RowResults(loss, torch.empty_like(loss), probability, loss.new_empty(3, *loss.shape) if metrics else None)


@kernel(do_not_specialize=["scale_stride", "metrics_stride", "row_blocks", "first_class", "ignore_index"])
def _kernel(
    logits_ptr, targets_ptr, class_weights_ptr, weight_sum_ptr, loss_ptr, lse_ptr, probability_ptr, metrics_ptr,
    scale_ptr, factor_ptr, dentropy_ptr, dlogits_ptr,
    logits_stride, dlogits_stride, metrics_stride, scale_stride, dentropy_stride, columns, vocab, row_blocks,
    first_class, ignore_index, softcap, logit_scale, z_loss, label_smoothing, smoothing_share, upstream,
    SOFTCAP: tl.constexpr, SMOOTHING: tl.constexpr, WEIGHTED: tl.constexpr, LOSS: tl.constexpr,
    TOKEN_SCALING: tl.constexpr, METRICS: tl.constexpr, GRADIENT: tl.constexpr, SCALED: tl.constexpr,
    FACTOR: tl.constexpr, ENTROPY_GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr, VECTOR: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """LOSS: one program per row computes loss and lse, with TOKEN_SCALING the target's probability too, with METRICS
    the metrics. Otherwise lse (with ENTROPY_GRADIENT the entropy) is read and a program handles one BLOCK of a row.

    GRADIENT writes dlogits, which may overlap the logits: the same thread reads and writes each element. After LOSS it
    walks the row backwards, because the columns read last are the most likely to be still in a cache.
    """
    wait_for_previous_kernel(PDL)
    row = (tl.program_id(0) // row_blocks).to(tl.int64)
    begin = tl.program_id(0) % row_blocks * BLOCK
    end = columns if LOSS else tl.minimum(begin + BLOCK, columns)
    block = tl.arange(0, BLOCK)
    logits_ptr += row * logits_stride
    dlogits_ptr += row * dlogits_stride
    target = tl.load(targets_ptr + row)
    if (target == ignore_index) | (target < 0) | (target >= vocab):
        if LOSS:
            tl.store(loss_ptr + row, tl.where(target == ignore_index, 0.0, float("inf")))
            tl.store(lse_ptr + row, 0.0)
            if TOKEN_SCALING:
                tl.store(probability_ptr + row, 0.0)
            if METRICS:
                tl.store(metrics_ptr + row, 0.0)
                tl.store(metrics_ptr + metrics_stride + row, 0.0)
                tl.store(metrics_ptr + 2 * metrics_stride + row, -1.0)
        if GRADIENT:
            zeros = tl.zeros([BLOCK], dlogits_ptr.dtype.element_ty)
            for start in range(begin, end, BLOCK):
                tl.store(dlogits_ptr + start + block, zeros, start + block < end)
        return

    # The factors of the target's term and of the softmax in the gradient, without and with the z-loss.
    confidence = 1 - label_smoothing
    if WEIGHTED:
        target_weight = tl.load(class_weights_ptr + target)
        class_weights_ptr += first_class
        confidence *= target_weight
        z_loss *= target_weight
        softmax_factor = confidence
        if SMOOTHING:
            softmax_factor += smoothing_share * tl.load(weight_sum_ptr)
    else:
        softmax_factor = 1.0
    target -= first_class
    if LOSS:
        # Read before the reductions: their barriers guarantee that no thread has overwritten it with dlogits yet.
        target_logit = load_logits(logits_ptr, target, target < columns, logit_scale, softcap, SOFTCAP, "")
        maximum, log_total, logit_sum, entropy, argmax, _ = online_softmax(
            logits_ptr, class_weights_ptr, columns, 0, logit_scale, softcap, SOFTCAP, SMOOTHING, WEIGHTED, METRICS,
            METRICS, False, False, BLOCK, VECTOR,
        )  # fmt: skip
        lse = maximum + log_total
        loss = softmax_factor * lse - confidence * target_logit + z_loss * lse * lse
        if SMOOTHING:
            loss -= smoothing_share * logit_sum
        probability = 1.0
        if TOKEN_SCALING:
            probability = tl.exp(target_logit - lse)
            loss *= probability
            tl.store(probability_ptr + row, probability)
        if METRICS:
            tl.store(metrics_ptr + row, entropy)
            tl.store(metrics_ptr + metrics_stride + row, probability * z_loss * lse * lse)
            tl.store(metrics_ptr + 2 * metrics_stride + row, argmax.to(tl.float32))
        tl.store(loss_ptr + row, loss)
        tl.store(lse_ptr + row, lse)
    else:
        lse = tl.load(lse_ptr + row)

    if GRADIENT:
        scale = upstream * logit_scale
        if SCALED:
            scale *= tl.load(scale_ptr + row * scale_stride)
        if FACTOR:
            scale *= tl.load(factor_ptr)
        if LOSS and TOKEN_SCALING:
            scale *= probability
        steps = tl.cdiv(end - begin, BLOCK)
        for step in range(steps):
            start = begin + (steps - 1 - step) * BLOCK
            column = start + block
            logits = load_logits(logits_ptr, column, column < end, logit_scale, softcap, SOFTCAP, "evict_first")
            probabilities = tl.exp2(logits * LOG2_E - lse * LOG2_E)
            gradient = probabilities * (scale * (softmax_factor + 2 * z_loss * lse))
            if SMOOTHING:
                if WEIGHTED:
                    weights = tl.load(class_weights_ptr + column, column < end, other=0.0)
                    gradient -= (scale * smoothing_share) * weights
                else:
                    gradient -= scale * smoothing_share
            if ENTROPY_GRADIENT:
                dentropy = tl.load(dentropy_ptr + row * dentropy_stride) * logit_scale
                surprise = (lse - tl.load(metrics_ptr + row)) - logits
                gradient += tl.where(probabilities > 0, probabilities * surprise, 0.0) * dentropy
            if (target >= start) & (target < start + BLOCK):
                gradient -= tl.where(column == target, scale * confidence, 0.0)
            gradient = through_softcap(gradient, logits, softcap, SOFTCAP)
            gradient = gradient.to(dlogits_ptr.dtype.element_ty)
            tl.store(dlogits_ptr + column, gradient, column < end, eviction_policy="evict_first")


@functools.cache
def logits_tile(columns: int, loss: bool, gradient: bool, aligned: bool, itemsize: int) -> LogitsTile:
    """The fastest tile as measured on an H200.

    aligned: whether rows start at multiples of 16 bytes. If they do not, elements are loaded one by one. In half
    precision small steps in many programs hide that latency best; in fp32 they do not.
    """
    width = triton.next_power_of_2(columns)
    if not aligned and itemsize == 2:
        tile = UNALIGNED_TILES[loss, gradient]
        return tile._replace(columns=min(width, tile.columns))
    vector = 16 // itemsize
    if not loss:
        return LogitsTile(min(width, 4096), 4, vector)
    # Loss and gradient together: few rows at a time, so that caches still hold much of a row at its second read.
    # If elements are loaded one by one, 16 per thread do not fit the registers of 32 warps.
    threads, elements = (1024, 16 if aligned else 8) if gradient else (512, 16)
    block = min(width, threads * elements)
    return LogitsTile(block, max(4, block // (32 * elements)), vector)


@functools.cache
def _row_launcher(
    columns: int, loss: bool, gradient: bool, aligned: bool, itemsize: int, device: torch.device, **options: bool
) -> tuple[Launcher, int]:
    """(launcher, columns of one step) for rows of this kind."""
    block, warps, vector = logits_tile(columns, loss, gradient, aligned, itemsize)
    launch = _kernel.bind(
        LOSS=loss, GRADIENT=gradient, BLOCK=block, VECTOR=vector, num_warps=warps, **options, **pdl_constants(device)
    )
    return launch, block


def launch_cross_entropy(
    logits: Tensor, targets: Tensor, class_weight: Tensor | None, results: RowResults, scale: Tensor | float,
    dlogits: Tensor | None,
    ignore_index: int, softcap: float | None, logit_scale: float, z_loss: float, label_smoothing: float,
    *, dentropy: Tensor | None = None, factor: Tensor | None = None, first_class: int = 0, vocab: int | None = None,
) -> None:  # fmt: skip
    """One launch that fills `results`, unless its loss is None, and `dlogits` if it is given.

    logits, dlogits [rows, V] with unit stride along V, the same tensor or disjoint; targets [rows] and class_weight [V]
    contiguous; scale of the gradient: a number, an fp32 scalar, or fp32 [rows] of any stride; factor: an optional
    scalar tensor that also multiplies the gradient. If lse is read, `dentropy`, the upstream gradient of the entropies,
    may be given, fp32 [rows] of any stride, and logits may be a part of the vocabulary: the classes from `first_class`
    on, of `vocab` in all.
    """
    rows, columns = logits.shape
    if not rows:
        return
    loss, lse, probability, metrics = results
    vocab = vocab or columns
    aligned = not (logits.stride(0) | logits.data_ptr()) % 16
    number, scale = (scale, lse) if isinstance(scale, float) else (None, scale)
    smoothing = label_smoothing != 0
    launch, block = _row_launcher(
        vocab,  # the same for every chunk of a vocabulary
        loss is not None, dlogits is not None, aligned, logits.element_size(), logits.device,
        SOFTCAP=softcap is not None, SMOOTHING=smoothing, WEIGHTED=class_weight is not None,
        TOKEN_SCALING=probability is not None, METRICS=metrics is not None and loss is not None,
        SCALED=number is None, FACTOR=factor is not None, ENTROPY_GRADIENT=dentropy is not None,
    )  # fmt: skip
    row_blocks = cdiv(columns, block) if loss is None else 1
    launch(
        rows * row_blocks, logits, targets, lse if class_weight is None else class_weight,
        lse if class_weight is None or not smoothing else class_weight.sum(), lse if loss is None else loss, lse,
        lse if probability is None else probability, lse if metrics is None else metrics,
        scale, lse if factor is None else factor, lse if dentropy is None else dentropy,
        logits if dlogits is None else dlogits,
        logits.stride(0), 0 if dlogits is None else dlogits.stride(0), 0 if metrics is None else metrics.stride(0),
        scale.stride(0) if scale.ndim else 0, 0 if dentropy is None else dentropy.stride(0),
        columns, vocab, row_blocks, first_class, ignore_index, softcap or 1.0, logit_scale, z_loss, label_smoothing,
        label_smoothing / vocab, 1.0 if number is None else number,
    )  # fmt: skip
