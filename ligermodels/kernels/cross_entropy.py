"""Cross-entropy of logits. With l = softcap * tanh(s * logits / softcap), or s * logits, s = logit_scale, for each row

    loss = (1 - ε) (lse - l_t) + ε (lse - mean(l)) + z lse²        lse = log Σ exp(l), ε label smoothing, z z-loss
    dlogits = g s (exp(l - lse) (1 + 2 z lse) - (1 - ε) [column = t] - ε / V) (1 - (l / softcap)²)

and zero for both where the target t is ignored. logits [rows, V] any float dtype, targets [rows] int64; loss, lse and
the row's upstream gradient g [rows] fp32. All maths in fp32, one rounding of dlogits: p_t - 1 would cancel in half
precision.
Moves R V elements forward, 2 R V backward, 2 R V for both in one sweep while the row's second read comes from L2.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.op import as_rows, register, runs_kernels, widen

REDUCTIONS = ("mean", "sum", "none")
LOWEST = tl.constexpr(-3.0e38)  # below any logit, and finite: exp(-inf - LOWEST) is 0 where exp(-inf - -inf) is not


def cross_entropy_reference(
    logits: Tensor, targets: Tensor, *, ignore_index: int = -100, softcap: float | None = None,
    logit_scale: float = 1.0, z_loss: float = 0.0, label_smoothing: float = 0.0, reduction: str = "mean",
) -> Tensor:  # fmt: skip
    logits = widen(logits)
    if logit_scale != 1.0:
        logits = logits * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    kept = targets != ignore_index
    log_probs = logits.log_softmax(-1)
    loss = (label_smoothing - 1) * log_probs.gather(-1, torch.where(kept, targets, 0)[..., None]).squeeze(-1)
    if label_smoothing:
        loss = loss - label_smoothing * log_probs.mean(-1)
    if z_loss:
        loss = loss + z_loss * logits.logsumexp(-1).square()
    return _reduce(torch.where(kept, loss, 0.0), targets, ignore_index, reduction)


def supervised_count(targets: Tensor, ignore_index: int) -> Tensor:
    """Number of targets not ignored, at least one, as a scalar on their device."""
    return (targets != ignore_index).sum().clamp_min(1)


def check_arguments(inputs: Tensor, targets: Tensor, reduction: str) -> None:
    if inputs.shape[:-1] != targets.shape:
        raise ValueError(
            f"cross_entropy: targets {tuple(targets.shape)} must have the shape of the rows {tuple(inputs.shape[:-1])}"
        )
    if reduction not in REDUCTIONS:
        raise ValueError(f"cross_entropy: reduction {reduction!r} must be one of {', '.join(REDUCTIONS)}")


def _reduce(losses: Tensor, targets: Tensor, ignore_index: int, reduction: str) -> Tensor:
    if reduction == "none":
        return losses
    total = losses.sum()
    return total / supervised_count(targets, ignore_index) if reduction == "mean" else total


@triton.jit
def _tanh(x, SINGLE: tl.constexpr):
    """The exponential form cancels near zero: what is left serves half precision; for SINGLE a series takes over."""
    decay = tl.exp(-2 * tl.abs(x))
    size = 1 - 2 * decay / (1 + decay)
    tanh = tl.where(x < 0, -size, size)
    if SINGLE:
        square = x * x
        series = x + x * square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835))))
        tanh = tl.where(tl.abs(x) < 0.3, series, tanh)
    return tanh


@triton.jit
def _load_logits(row_ptr, column, columns, logit_scale, softcap, SOFTCAP: tl.constexpr):
    """The scaled and capped logits at `column`, -inf outside [0, columns)."""
    inside = (column >= 0) & (column < columns)
    logits = tl.load(row_ptr + column, inside, other=0.0).to(tl.float32) * logit_scale
    if SOFTCAP:
        logits = softcap * _tanh(logits * (1 / softcap), row_ptr.dtype.element_ty == tl.float32)
    return tl.where(inside, logits, -float("inf"))


@triton.jit
def _kernel(
    logits_ptr, targets_ptr, loss_ptr, lse_ptr, scale_ptr, dlogits_ptr,
    logits_stride, dlogits_stride, scale_stride, columns,
    ignore_index, softcap, logit_scale, z_loss, label_smoothing,
    SOFTCAP: tl.constexpr, SMOOTHING: tl.constexpr, LOSS: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a row: LOSS sweeps it for loss and lse (else lse is read), GRADIENT sweeps it (again) for dlogits,
    which may lie over the logits: each element is read and written by the same thread."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * logits_stride
    dlogits_ptr += row * dlogits_stride
    block = tl.arange(0, BLOCK)
    target = tl.load(targets_ptr + row)
    if target == ignore_index:
        if LOSS:
            tl.store(loss_ptr + row, 0.0)
            tl.store(lse_ptr + row, 0.0)
        if GRADIENT:
            zeros = tl.zeros([BLOCK], dlogits_ptr.dtype.element_ty)
            for start in range(0, columns, BLOCK):
                tl.store(dlogits_ptr + start + block, zeros, start + block < columns)
        return

    if LOSS:
        # Read before the first reduction of the sweep, whose barrier keeps any thread from overwriting it earlier.
        target_logit = _load_logits(logits_ptr, target, columns, logit_scale, softcap, SOFTCAP)
        maximum = LOWEST
        total = 0.0
        logit_sum = 0.0
        for start in range(0, columns, BLOCK):
            logits = _load_logits(logits_ptr, start + block, columns, logit_scale, softcap, SOFTCAP)
            higher = tl.maximum(maximum, tl.max(logits, 0))
            total = total * tl.exp(maximum - higher) + tl.sum(tl.exp(logits - higher), 0)
            maximum = higher
            if SMOOTHING:
                logit_sum += tl.sum(tl.where(start + block < columns, logits, 0.0), 0)
        lse = maximum + tl.log(total)
        loss = lse - (1 - label_smoothing) * target_logit + z_loss * lse * lse
        if SMOOTHING:
            loss -= label_smoothing * (logit_sum / columns)
        tl.store(loss_ptr + row, loss)
        tl.store(lse_ptr + row, lse)
    else:
        lse = tl.load(lse_ptr + row)

    if GRADIENT:
        scale = tl.load(scale_ptr + row * scale_stride) * logit_scale
        for start in range(0, columns, BLOCK):
            column = start + block
            logits = _load_logits(logits_ptr, column, columns, logit_scale, softcap, SOFTCAP)
            gradient = tl.exp(logits - lse) * (1 + 2 * z_loss * lse)
            gradient -= tl.where(column == target, 1 - label_smoothing, 0.0)
            if SMOOTHING:
                gradient -= label_smoothing / columns
            if SOFTCAP:
                tanh = logits * (1 / softcap)
                gradient *= 1 - tanh * tanh
            tl.store(dlogits_ptr + column, (gradient * scale).to(dlogits_ptr.dtype.element_ty), column < columns)


def block_of(columns: int) -> tuple[int, int]:
    """(columns, warps) of one step of the sweep.

    The rows in flight should fit in L2 between the two sweeps. From V = 65536 on, 32 warps of over 32 registers leave
    room for one program on a multiprocessor: 132 rows of 2 V bytes on an H200, 34 MB at V = 128256.
    """
    block = min(triton.next_power_of_2(columns), 16384 if columns > 65536 else 8192)
    return block, min(32, max(4, block // 512))


def sweep(
    logits: Tensor, targets: Tensor, loss: Tensor | None, lse: Tensor, scale: Tensor | None, dlogits: Tensor | None,
    ignore_index: int, softcap: float | None, logit_scale: float, z_loss: float, label_smoothing: float,
) -> None:  # fmt: skip
    """One launch that fills `loss` and `lse` (where `loss` is None, `lse` is read), and `dlogits` where it is given.

    logits, dlogits [rows, V] with unit stride along V, the same tensor or disjoint; targets [rows]; loss, lse [rows]
    fp32; scale [rows] fp32 of any stride, 0 for a scalar's.
    """
    rows, columns = logits.shape
    if not rows:
        return
    block, warps = block_of(columns)
    _kernel[(rows,)](
        logits, targets, lse if loss is None else loss, lse,
        lse if scale is None else scale, logits if dlogits is None else dlogits,
        logits.stride(0), 0 if dlogits is None else dlogits.stride(0), 0 if scale is None else scale.stride(0), columns,
        ignore_index, softcap or 1.0, logit_scale, z_loss, label_smoothing,
        SOFTCAP=softcap is not None, SMOOTHING=label_smoothing != 0, LOSS=loss is not None,
        GRADIENT=dlogits is not None, BLOCK=block, num_warps=warps,
    )  # fmt: skip


def _launch_forward(logits: Tensor, targets: Tensor, *options) -> tuple[Tensor, Tensor]:
    loss = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    lse = torch.empty_like(loss)
    sweep(logits, targets, loss, lse, None, None, *options)
    return loss, lse


def _launch_backward(logits: Tensor, targets: Tensor, lse: Tensor, scale: Tensor, *options) -> Tensor:
    dlogits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    sweep(logits, targets, None, lse, scale, dlogits, *options)
    return dlogits


def _fake_forward(logits, targets, *options):
    loss = logits.new_empty(logits.shape[0], dtype=torch.float32)
    return loss, torch.empty_like(loss)


def _fake_backward(logits, targets, lse, scale, *options):
    return logits.new_empty(logits.shape)


OPTIONS = "int ignore_index, float? softcap, float logit_scale, float z_loss, float label_smoothing"
cross_entropy_forward = register(
    f"cross_entropy(Tensor logits, Tensor targets, {OPTIONS}) -> (Tensor loss, Tensor lse)",
    _launch_forward,
    _fake_forward,
)
cross_entropy_backward = register(
    f"cross_entropy_backward(Tensor logits, Tensor targets, Tensor lse, Tensor scale, {OPTIONS}) -> Tensor dlogits",
    _launch_backward,
    _fake_backward,
)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, *options):
        loss, lse = cross_entropy_forward(logits, targets, *options)
        ctx.save_for_backward(logits, targets, lse)
        ctx.options = options
        return loss

    @staticmethod
    def backward(ctx, dloss):
        logits, targets, lse = ctx.saved_tensors
        dlogits = cross_entropy_backward(logits, targets, lse, dloss, *ctx.options)
        return dlogits, None, None, None, None, None, None


def cross_entropy(
    logits: Tensor, targets: Tensor, *, ignore_index: int = -100, softcap: float | None = None,
    logit_scale: float = 1.0, z_loss: float = 0.0, label_smoothing: float = 0.0, reduction: str = "mean",
) -> Tensor:  # fmt: skip
    """Cross-entropy of logits against class indices; the file's docstring has the formula.

    logits [..., V] float, targets [...] int64 in [0, V) or ignore_index -> fp32, a scalar, or [...] for "none". "mean"
    divides by the number of targets not ignored, and is 0 where there is none. An ignored row has loss 0 and gradient
    0; a target out of range gives an infinite loss. Raises ValueError where the shapes disagree.
    """
    check_arguments(logits, targets, reduction)
    if not runs_kernels(logits):
        return cross_entropy_reference(
            logits, targets, ignore_index=ignore_index, softcap=softcap, logit_scale=logit_scale, z_loss=z_loss,
            label_smoothing=label_smoothing, reduction=reduction,
        )  # fmt: skip
    options = ignore_index, softcap, logit_scale, z_loss, label_smoothing
    losses = _CrossEntropy.apply(as_rows(logits), targets.reshape(-1).contiguous(), *options)
    return _reduce(losses.reshape(targets.shape), targets, ignore_index, reduction)
