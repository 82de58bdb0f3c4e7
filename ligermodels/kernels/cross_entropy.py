"""Cross-entropy of logits, with softcap, logit scale, z-loss and label smoothing. For each row with target t

    loss = (1 - ε) (lse - l_t) + ε (lse - mean(l)) + z lse²        lse = log Σ exp(l), ε label smoothing, z z-loss
    dlogits = g s (exp(l - lse) (1 + 2 z lse) - (1 - ε) [column = t] - ε / V) (1 - (l / softcap)²)

where l = softcap * tanh(s * logits / softcap), without a softcap l = s * logits, and s = logit_scale. Both are zero if
t is ignore_index. logits [rows, V] any float dtype, targets [rows] int64; loss, lse and the row's upstream gradient g
[rows] fp32. Computed in fp32; dlogits is rounded once, because p_t - 1 would cancel in half precision.
Moves R V elements forward and 2 R V backward. In place, the forward writes dlogits over the logits and moves 2 R V in
all, provided that the second read of a row hits a cache.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.dispatch import Node, is_last_use, is_traced, register, runs_kernels, widen
from ligermodels.kernels.launch import Launcher, as_rows, cdiv, kernel
from ligermodels.kernels.pdl import launch_dependents, pdl_constants, wait_for_previous_kernel
from ligermodels.kernels.rescale import scale_gradient_

# Scale of fp16 gradients stored before the upstream gradient is known. Keeps them out of fp16's subnormals; exact.
FP16_SCALE = 2.0**10
REDUCTIONS = ("mean", "sum", "none")
REDUCE_TILE = 1024  # losses per step of the reduction, which is one program
LOG2_E = tl.constexpr(1.4426950408889634)
# Below any logit, and finite also after the conversion to base 2: exp(-inf - LOWEST) is 0, but exp(-inf - -inf) is NaN.
LOWEST = tl.constexpr(-1.0e38)


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


def cross_entropy_reference(
    logits: Tensor, targets: Tensor, *, ignore_index: int = -100, softcap: float | None = None,
    logit_scale: float = 1.0, z_loss: float = 0.0, label_smoothing: float = 0.0, reduction: str = "mean",
) -> Tensor:  # fmt: skip
    logits = widen(logits)
    if logit_scale != 1.0:
        logits = logits * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    supervised = targets != ignore_index
    log_probs = logits.log_softmax(-1)
    loss = (label_smoothing - 1) * log_probs.gather(-1, torch.where(supervised, targets, 0)[..., None]).squeeze(-1)
    if label_smoothing:
        loss = loss - label_smoothing * log_probs.mean(-1)
    if z_loss:
        loss = loss + z_loss * logits.logsumexp(-1).square()
    return reduce_rows(torch.where(supervised, loss, 0.0), targets, ignore_index, reduction)


def check_cross_entropy(inputs: Tensor, targets: Tensor, reduction: str) -> None:
    if inputs.shape[:-1] != targets.shape:
        raise ValueError(
            f"cross_entropy: targets have shape {tuple(targets.shape)}; expected {tuple(inputs.shape[:-1])},"
            " the shape of the input without its last dimension"
        )
    if reduction not in REDUCTIONS:
        raise ValueError(f"cross_entropy: unknown reduction {reduction!r}; supported: {', '.join(REDUCTIONS)}")


def reduce_rows(losses: Tensor, targets: Tensor, ignore_index: int, reduction: str) -> Tensor:
    """Row losses -> their "mean" over supervised targets, their "sum", or unchanged ("none"). In plain PyTorch."""
    if reduction == "none":
        return losses
    total = losses.sum()
    return total / (targets != ignore_index).sum().clamp_min(1) if reduction == "mean" else total


@triton.jit
def _softcap(x, softcap, FP32: tl.constexpr):
    """softcap * tanh(x / softcap)."""
    if FP32:
        # The exponential form cancels near zero: accurate enough for half precision; fp32 takes a series there.
        y = x * (1 / softcap)
        decay = tl.exp2(tl.abs(y) * (-2 * LOG2_E))
        size = 1 - 2 * decay / (1 + decay)
        square = y * y
        series = y + y * square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835))))
        return softcap * tl.where(tl.abs(y) < 0.3, series, tl.where(y < 0, -size, size))
    # One reciprocal square root and its square are cheaper than a division.
    root = tl.rsqrt(1 + tl.exp2(x * (2 * LOG2_E / softcap)))
    return softcap - 2 * softcap * (root * root)


@triton.jit
def _load_logits(row_ptr, column, inside, logit_scale, softcap, SOFTCAP: tl.constexpr, POLICY: tl.constexpr):
    """The scaled and softcapped logits at `column`; outside the mask the values are meaningless."""
    logits = tl.load(row_ptr + column, inside, other=0.0, eviction_policy=POLICY).to(tl.float32) * logit_scale
    return _softcap(logits, softcap, row_ptr.dtype.element_ty == tl.float32) if SOFTCAP else logits


@triton.jit
def _log_sum_exp(
    row_ptr, columns, logit_scale, softcap,
    SOFTCAP: tl.constexpr, SMOOTHING: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """(log Σ exp(l), Σ l) of a row.

    Online softmax. Each thread keeps its own running maxima and sums, one pair per vector load of VECTOR logits, so
    that no step waits for another warp.
    """
    maxima = tl.full([BLOCK // VECTOR], LOWEST, tl.float32)
    totals = tl.zeros([BLOCK // VECTOR], tl.float32)
    sums = tl.zeros([BLOCK // VECTOR], tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        logits = _load_logits(row_ptr, column, column < columns, logit_scale, softcap, SOFTCAP, "")
        if SMOOTHING:
            sums += tl.sum(tl.reshape(tl.where(column < columns, logits, 0.0), [BLOCK // VECTOR, VECTOR]), 1)
        logits = tl.reshape(tl.where(column < columns, logits, -float("inf")), [BLOCK // VECTOR, VECTOR])
        higher = tl.maximum(maxima, tl.max(logits, 1))
        powers = tl.exp2(logits * LOG2_E - (higher * LOG2_E)[:, None])
        totals = totals * tl.exp2((maxima - higher) * LOG2_E) + tl.sum(powers, 1)
        maxima = higher
    maximum = tl.max(maxima, 0)
    return maximum + tl.log(tl.sum(totals * tl.exp(maxima - maximum), 0)), tl.sum(sums, 0)


@kernel(do_not_specialize=["scale_stride", "row_blocks", "first_class", "ignore_index"])
def _kernel(
    logits_ptr, targets_ptr, loss_ptr, lse_ptr, scale_ptr, factor_ptr, dlogits_ptr,
    logits_stride, dlogits_stride, scale_stride, columns, row_blocks, first_class,
    ignore_index, softcap, logit_scale, z_loss, label_smoothing, smoothing_share, upstream,
    SOFTCAP: tl.constexpr, SMOOTHING: tl.constexpr, LOSS: tl.constexpr, GRADIENT: tl.constexpr,
    SCALED: tl.constexpr, FACTOR: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """LOSS: one program per row computes loss and lse. Otherwise lse is read and a program handles one BLOCK of a row.

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
    if target == ignore_index:
        if LOSS:
            tl.store(loss_ptr + row, 0.0)
            tl.store(lse_ptr + row, 0.0)
        if GRADIENT:
            zeros = tl.zeros([BLOCK], dlogits_ptr.dtype.element_ty)
            for start in range(begin, end, BLOCK):
                tl.store(dlogits_ptr + start + block, zeros, start + block < end)
        return

    target -= first_class
    if LOSS:
        # Read before the reductions: their barriers guarantee that no thread has overwritten it with dlogits yet.
        exists = (target >= 0) & (target < columns)
        target_logit = _load_logits(logits_ptr, target, exists, logit_scale, softcap, SOFTCAP, "")
        lse, logit_sum = _log_sum_exp(logits_ptr, columns, logit_scale, softcap, SOFTCAP, SMOOTHING, BLOCK, VECTOR)
        loss = lse - (1 - label_smoothing) * tl.where(exists, target_logit, -float("inf")) + z_loss * lse * lse
        if SMOOTHING:
            loss -= smoothing_share * logit_sum
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
        steps = tl.cdiv(end - begin, BLOCK)
        for step in range(steps):
            start = begin + (steps - 1 - step) * BLOCK
            column = start + block
            logits = _load_logits(logits_ptr, column, column < end, logit_scale, softcap, SOFTCAP, "evict_first")
            gradient = tl.exp2(logits * LOG2_E - lse * LOG2_E) * (scale * (1 + 2 * z_loss * lse))
            if SMOOTHING:
                gradient -= scale * smoothing_share
            if (target >= start) & (target < start + BLOCK):
                gradient -= tl.where(column == target, scale * (1 - label_smoothing), 0.0)
            if SOFTCAP:
                tanh = logits * (1 / softcap)
                gradient *= 1 - tanh * tanh
            gradient = gradient.to(dlogits_ptr.dtype.element_ty)
            tl.store(dlogits_ptr + column, gradient, column < end, eviction_policy="evict_first")


@kernel(do_not_specialize=["rows", "ignore_index"])
def _reduce_kernel(
    losses_ptr, targets_ptr, total_ptr, factor_ptr, rows, ignore_index,
    COUNT: tl.constexpr, SUM: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program. COUNT: factor = 1 / number of supervised targets, otherwise 1. SUM: total = factor * Σ losses."""
    wait_for_previous_kernel(PDL)
    launch_dependents(PDL)
    count = tl.zeros([TILE], tl.int32)
    total = tl.zeros([TILE], tl.float32)
    for start in range(0, rows, TILE):
        row = start + tl.arange(0, TILE)
        if COUNT:
            count += (tl.load(targets_ptr + row, row < rows, other=ignore_index) != ignore_index).to(tl.int32)
        if SUM:
            total += tl.load(losses_ptr + row, row < rows, other=0.0)
    factor = 1.0 / tl.maximum(tl.sum(count, 0), 1).to(tl.float32)
    tl.store(factor_ptr, factor)
    if SUM:
        tl.store(total_ptr, tl.sum(total, 0) * factor)


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
    logits: Tensor, targets: Tensor, loss: Tensor | None, lse: Tensor, scale: Tensor | float, dlogits: Tensor | None,
    ignore_index: int, softcap: float | None, logit_scale: float, z_loss: float, label_smoothing: float,
    *, first_class: int = 0, vocab: int | None = None, factor: Tensor | None = None,
) -> None:  # fmt: skip
    """One launch that fills `loss` and `lse` (only reads `lse` if `loss` is None), and `dlogits` if it is given.

    logits, dlogits [rows, V] with unit stride along V, the same tensor or disjoint; targets, loss and lse contiguous,
    with `rows` elements each, the last two fp32; scale of the gradient: a number, an fp32 scalar, or fp32 [rows] of any
    stride; factor: an optional scalar tensor that also multiplies the gradient. If `lse` is read, logits may be a part
    of the vocabulary: the classes from `first_class` on, of `vocab` in all.
    """
    rows, columns = logits.shape
    if not rows:
        return
    aligned = not (logits.stride(0) | logits.data_ptr()) % 16
    number, scale = (scale, lse) if isinstance(scale, float) else (None, scale)
    launch, block = _row_launcher(
        vocab or columns,  # the same for every chunk of a vocabulary
        loss is not None, dlogits is not None, aligned, logits.element_size(), logits.device,
        SOFTCAP=softcap is not None, SMOOTHING=label_smoothing != 0, SCALED=number is None, FACTOR=factor is not None,
    )  # fmt: skip
    row_blocks = cdiv(columns, block) if loss is None else 1
    launch(
        rows * row_blocks, logits, targets, lse if loss is None else loss, lse,
        scale, lse if factor is None else factor, logits if dlogits is None else dlogits,
        logits.stride(0), 0 if dlogits is None else dlogits.stride(0), scale.stride(0) if scale.ndim else 0,
        columns, row_blocks, first_class, ignore_index, softcap or 1.0, logit_scale, z_loss, label_smoothing,
        label_smoothing / (vocab or columns), 1.0 if number is None else number,
    )  # fmt: skip


def _launch_forward(logits: Tensor, targets: Tensor, *options) -> tuple[Tensor, Tensor]:
    loss = torch.empty_like(targets, dtype=torch.float32, memory_format=torch.contiguous_format)
    lse = torch.empty_like(loss)
    launch_cross_entropy(as_rows(logits), targets.contiguous(), loss, lse, 1.0, None, *options)
    return loss, lse


def _launch_backward(
    logits: Tensor, targets: Tensor, lse: Tensor, scale: Tensor, factor: Tensor | None, *options, inplace: bool = False
) -> Tensor:
    dlogits = logits.detach() if inplace else torch.empty_like(logits, memory_format=torch.contiguous_format)
    scale = scale.reshape(-1) if scale.ndim > 1 else scale
    launch_cross_entropy(
        as_rows(logits), targets.contiguous(), None, lse, scale, as_rows(dlogits), *options, factor=factor
    )
    return dlogits


def cross_entropy_in_place(logits: Tensor, targets: Tensor, scale: Tensor | float, *options) -> Tensor:
    """Row losses; overwrites the logits with scale * their gradient. logits [rows, V] with unit stride along V.

    Not a registered op: only called when nothing is traced.
    """
    loss = torch.empty_like(targets, dtype=torch.float32, memory_format=torch.contiguous_format)
    launch_cross_entropy(logits, targets.contiguous(), loss, torch.empty_like(loss), scale, logits, *options)
    return loss


@functools.cache
def _reduce_launcher(count: bool, total: bool, device: torch.device) -> Launcher:
    return _reduce_kernel.bind(COUNT=count, SUM=total, TILE=REDUCE_TILE, **pdl_constants(device))


def _launch_mean_factor(targets: Tensor, ignore_index: int) -> Tensor:
    factor = _fake_mean_factor(targets, ignore_index)
    launch = _reduce_launcher(True, False, targets.device)
    launch(1, factor, targets.contiguous(), factor, factor, targets.numel(), ignore_index)
    return factor


def _launch_reduce(losses: Tensor, targets: Tensor, ignore_index: int, mean: bool) -> tuple[Tensor, Tensor]:
    total, factor = _fake_reduce(losses, targets, ignore_index, mean)
    launch = _reduce_launcher(mean, True, targets.device)
    launch(1, losses.contiguous(), targets.contiguous(), total, factor, losses.numel(), ignore_index)
    return total, factor


def _fake_forward(logits, targets, *options):
    loss = targets.new_empty(targets.shape, dtype=torch.float32)
    return loss, torch.empty_like(loss)


def _fake_backward(logits, targets, lse, scale, factor, *options):
    return logits.new_empty(logits.shape)


def _fake_mean_factor(targets, ignore_index):
    return targets.new_empty((), dtype=torch.float32)


def _fake_reduce(losses, targets, ignore_index, mean):
    return losses.new_empty(()), losses.new_empty(())


OPTIONS = "int ignore_index, float? softcap, float logit_scale, float z_loss, float label_smoothing"
cross_entropy_forward = register(
    f"cross_entropy(Tensor logits, Tensor targets, {OPTIONS}) -> (Tensor loss, Tensor lse)",
    _launch_forward,
    _fake_forward,
)
cross_entropy_backward = register(
    "cross_entropy_backward(Tensor logits, Tensor targets, Tensor lse, Tensor scale, Tensor? factor,"
    f" {OPTIONS}) -> Tensor dlogits",
    _launch_backward,
    _fake_backward,
)
mean_factor = register(
    "mean_factor(Tensor targets, int ignore_index) -> Tensor factor", _launch_mean_factor, _fake_mean_factor
)
reduce_losses = register(
    "reduce_losses(Tensor losses, Tensor targets, int ignore_index, bool mean) -> (Tensor total, Tensor factor)",
    _launch_reduce,
    _fake_reduce,
)


class _CrossEntropy(Node):
    @staticmethod
    def forward(ctx, logits, targets, reduction, temporary, *options):
        loss, lse = cross_entropy_forward(logits, targets, *options)
        factor = None
        if reduction != "none":
            loss, factor = reduce_losses(loss, targets, options[0], reduction == "mean")
        ctx.save_for_backward(logits, targets, lse, factor)
        ctx.temporary, ctx.options = temporary, options
        return loss

    @staticmethod
    def backward(ctx, dloss):
        logits, targets, lse, factor = ctx.saved_tensors
        saved = logits, targets, lse, dloss, factor, *ctx.options
        inplace = ctx.temporary and is_last_use(logits, dloss)
        dlogits = _launch_backward(*saved, inplace=True) if inplace else cross_entropy_backward(*saved)
        return dlogits, *[None] * 8


class _CrossEntropyInPlace(Node):
    """The loss; the forward overwrites the logits with their gradient."""

    @staticmethod
    def forward(ctx, logits, targets, reduction, *options):
        gradient, mean = logits.detach(), reduction == "mean"
        # In fp16, gradients times 1 / N may round to zero: 1 / N is applied in backward, together with the upstream
        # gradient, which may be a loss scale.
        ctx.defers_factor = logits.dtype == torch.float16
        scale = FP16_SCALE if ctx.defers_factor else mean_factor(targets, options[0]) if mean else 1.0
        loss = cross_entropy_in_place(gradient, targets, scale, *options)
        torch.autograd.graph.increment_version(gradient)  # so that autograd raises if another node saved the logits
        factor = None
        if reduction != "none":
            loss, factor = reduce_losses(loss, targets, options[0], mean)
        ctx.save_for_backward(gradient, factor if ctx.defers_factor else None)
        return loss

    @staticmethod
    def backward(ctx, dloss):
        gradient, factor = ctx.saved_tensors
        scale = dloss if factor is None else dloss * factor
        return scale_gradient_(gradient, scale / FP16_SCALE if ctx.defers_factor else scale), *[None] * 7


def cross_entropy_of_temporary(logits: Tensor, targets: Tensor, reduction: str, *options) -> Tensor:
    """The loss of logits to which no one else holds a reference. Backward overwrites them with their gradient, unless
    the graph is retained or being traced. logits [rows, V], targets [rows]; options in the order of OPTIONS."""
    return _CrossEntropy.apply(logits, targets, reduction, True, *options)


def cross_entropy(
    logits: Tensor, targets: Tensor, *, ignore_index: int = -100, softcap: float | None = None,
    logit_scale: float = 1.0, z_loss: float = 0.0, label_smoothing: float = 0.0, reduction: str = "mean",
    inplace: bool = False,
) -> Tensor:  # fmt: skip
    """Cross-entropy of logits against class indices; the module's docstring has the formula.

    logits [..., V] float, targets [...] int64 in [0, V) or ignore_index -> fp32: a scalar, or [...] for "none". "mean"
    divides by the number of targets that are not ignored, and is 0 if all are. An ignored row has loss 0 and
    gradient 0; a target out of range gives an infinite loss.

    inplace: if logits require a gradient, the forward overwrites them with it (their values are lost). Backward then
    multiplies it by the upstream gradient, unless that is 1, with a second rounding, and can run only once. Has no
    effect while tracing: memory is then left to the compiler.
    Raises ValueError if the shapes disagree and for any other reduction.
    """
    check_cross_entropy(logits, targets, reduction)
    if not runs_kernels(logits):
        return cross_entropy_reference(
            logits, targets, ignore_index=ignore_index, softcap=softcap, logit_scale=logit_scale, z_loss=z_loss,
            label_smoothing=label_smoothing, reduction=reduction,
        )  # fmt: skip
    options = ignore_index, softcap, logit_scale, z_loss, label_smoothing
    if inplace and torch.is_grad_enabled() and logits.requires_grad and not is_traced((logits,)):
        rows = as_rows(logits)
        if rows.stride(0) < rows.shape[1]:  # expanded: rows share memory
            rows = rows.contiguous()
        loss = _CrossEntropyInPlace.apply(rows, targets.reshape(-1), reduction, *options)
        return loss.reshape(targets.shape) if reduction == "none" else loss
    return _CrossEntropy.apply(logits, targets, reduction, False, *options)
