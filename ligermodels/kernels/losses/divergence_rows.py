"""The Triton kernel of divergences from a teacher's logits: value and gradient of rows; `losses/divergences.py` has the
formulas of the values.

z = logits / temperature, after logit scale and softcap; p and q are the softmaxes of the student's and the teacher's z.
The gradient with respect to the student's z_j:

    forward_kl   p_j - q_j                      reverse_kl   p_j (log(p_j / q_j) - D)
    jsd          (1 - b) p_j (log(p_j / m_j) - KL(p ‖ m))
    tvd          ½ p_j (sign_j - Σ p sign)      sign = sign(p - q)
    cosine       cos z_j / ‖z‖² - t_j / (‖z‖ ‖t‖)

One program a row sweeps it two or three times: statistics (log-sum-exps, entropy, and for KLs the weighted gap); for
jsd and tvd the sums that need both normalisers; the gradient. Moves 2 V logits a sweep, and V of the gradient.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.launch import Launcher, kernel
from ligermodels.kernels.losses.softmax_sweep import LOG2_E, LOWEST, load_logits, through_softcap, update_softmax
from ligermodels.kernels.pdl import pdl_constants, wait_for_previous_kernel
from ligermodels.losses.divergences import LEAST_NORM

# Logits of each model in one step: the more, the fewer rows are in flight, and the more of a row is still in the L2
# cache when it is read again.
MAX_BLOCK = 8192
MIN_NORM_PRODUCT = tl.constexpr(LEAST_NORM)
LEAST_NORMAL = tl.constexpr(torch.finfo(torch.float32).tiny)


@triton.jit
def merge_softmax(maxima, totals, moments):
    """Merges groups' online softmaxes into one: (maximum, log Σ exp(z - maximum), entropy, share of each group)."""
    maximum = tl.max(maxima, 0)
    decay = tl.exp(maxima - maximum)
    total = tl.sum(totals * decay, 0)
    moment = tl.sum(decay * (moments + totals * (maxima - maximum)), 0)
    return maximum, tl.log(total), tl.log(total) - moment / total, decay / total


@triton.jit
def _log_mixture(p, q, b):
    """log((1 - b) p + b q), finite also where both are 0."""
    return tl.log(tl.maximum((1 - b) * p + b * q, LEAST_NORMAL))


@triton.jit
def _weighted(power, gap):
    """power * gap, 0 where a probability of 0 meets an infinite gap."""
    return tl.where(power > 0, power * gap, 0.0)


@kernel()
def _kernel(
    student_ptr, teacher_ptr, weights_ptr, targets_ptr, divergence_ptr, cross_entropy_ptr, entropy_ptr, dlogits_ptr,
    student_stride, teacher_stride, dlogits_stride, columns, b, inverse_temperature, softcap, logit_scale,
    teacher_softcap, teacher_logit_scale, ce_weight, upstream,
    KIND: tl.constexpr, SOFTCAP: tl.constexpr, TEACHER_SOFTCAP: tl.constexpr, CROSS_ENTROPY: tl.constexpr,
    GRADIENT: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program a row. A row of weight 0 is not read: its results and its gradient are 0. Each sweep begins where the
    one before ended: those logits may still be in the cache."""
    wait_for_previous_kernel(PDL)
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCK)
    steps = tl.cdiv(columns, BLOCK)
    student_ptr += row * student_stride
    teacher_ptr += row * teacher_stride
    dlogits_ptr += row * dlogits_stride
    weight = tl.load(weights_ptr + row)
    if weight == 0:
        tl.store(divergence_ptr + row, 0.0)
        tl.store(entropy_ptr + row, 0.0)
        if CROSS_ENTROPY:
            tl.store(cross_entropy_ptr + row, 0.0)
        if GRADIENT:
            for step in range(steps):
                column = step * BLOCK + block
                tl.store(dlogits_ptr + column, tl.zeros([BLOCK], dlogits_ptr.dtype.element_ty), column < columns)
        return

    GROUPS: tl.constexpr = BLOCK // VECTOR
    zeros = tl.zeros([GROUPS], tl.float32)
    maxima, totals, moments = tl.full([GROUPS], LOWEST, tl.float32), zeros, zeros
    teacher_maxima, teacher_totals, gaps = maxima, zeros, zeros
    raw_maxima, raw_totals = maxima, zeros  # of the student at temperature 1, for the cross-entropy
    squares, teacher_squares = zeros, zeros
    if CROSS_ENTROPY:
        target = tl.load(targets_ptr + row)
        target_logit = load_logits(student_ptr, target, target < columns, logit_scale, softcap, SOFTCAP, "")
    for step in range(steps):
        column = step * BLOCK + block
        inside = column < columns
        raw = load_logits(student_ptr, column, inside, logit_scale, softcap, SOFTCAP, "")
        raw = tl.reshape(tl.where(inside, raw, -float("inf")), [GROUPS, VECTOR])
        z = raw * inverse_temperature
        t = load_logits(teacher_ptr, column, inside, teacher_logit_scale, teacher_softcap, TEACHER_SOFTCAP, "")
        t = tl.reshape(tl.where(inside, t, -float("inf")), [GROUPS, VECTOR]) * inverse_temperature
        maxima, totals, moments, powers, decay = update_softmax(maxima, totals, moments, z, True)
        if CROSS_ENTROPY:
            raw_maxima, raw_totals, _, _, _ = update_softmax(raw_maxima, raw_totals, zeros, raw, False)
        if KIND == "cosine":
            z = tl.where(z > -float("inf"), z, 0.0)
            t = tl.where(t > -float("inf"), t, 0.0)
            gaps += tl.sum(z * t, 1)
            squares += tl.sum(z * z, 1)
            teacher_squares += tl.sum(t * t, 1)
        else:
            teacher_maxima, teacher_totals, _, teacher_powers, teacher_decay = update_softmax(
                teacher_maxima, teacher_totals, zeros, t, False
            )
            if KIND == "forward_kl":
                gaps = gaps * teacher_decay + tl.sum(_weighted(teacher_powers, t - z), 1)
            if KIND == "reverse_kl":
                gaps = gaps * decay + tl.sum(_weighted(powers, z - t), 1)

    maximum, log_total, entropy, share = merge_softmax(maxima, totals, moments)
    raw_maximum, raw_log_total = 0.0, 0.0
    tl.store(entropy_ptr + row, entropy)
    if CROSS_ENTROPY:
        raw_maximum, raw_log_total, _, _ = merge_softmax(raw_maxima, raw_totals, zeros)
        tl.store(cross_entropy_ptr + row, raw_log_total - (target_logit - raw_maximum))

    # What the gradient needs of the row: `pivot`, a mean over p, and for the cosine the factors of z and t. Of z the
    # maximum and the log-sum are subtracted one after the other: their sum would be rounded.
    pivot, factor, teacher_factor, teacher_maximum, teacher_log_total = 0.0, 0.0, 0.0, 0.0, 0.0
    if KIND == "cosine":
        square = tl.sum(squares, 0)
        norms = tl.maximum(tl.sqrt(square) * tl.sqrt(tl.sum(teacher_squares, 0)), MIN_NORM_PRODUCT)
        cosine = tl.sum(gaps, 0) / norms
        divergence = 1 - cosine
        factor, teacher_factor = cosine / square, 1 / norms
    else:
        teacher_maximum, teacher_log_total, _, teacher_share = merge_softmax(teacher_maxima, teacher_totals, zeros)
    if KIND == "forward_kl":
        divergence = tl.sum(gaps * teacher_share, 0) - (teacher_maximum - maximum) - (teacher_log_total - log_total)
    if KIND == "reverse_kl":
        divergence = tl.sum(gaps * share, 0) - (maximum - teacher_maximum) - (log_total - teacher_log_total)
        pivot = divergence
    if KIND == "jsd" or KIND == "tvd":
        values, means = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
        for step in range(steps):
            column = (steps - 1 - step) * BLOCK + block
            inside = column < columns
            raw = load_logits(student_ptr, column, inside, logit_scale, softcap, SOFTCAP, "")
            t = load_logits(teacher_ptr, column, inside, teacher_logit_scale, teacher_softcap, TEACHER_SOFTCAP, "")
            log_p = (raw * inverse_temperature - maximum) - log_total
            log_q = (t * inverse_temperature - teacher_maximum) - teacher_log_total
            p, q = tl.where(inside, tl.exp(log_p), 0.0), tl.where(inside, tl.exp(log_q), 0.0)
            if KIND == "jsd":
                log_m = _log_mixture(p, q, b)
                mean = _weighted(p, log_p - log_m)
                values += b * _weighted(q, log_q - log_m) + (1 - b) * mean
            else:
                mean = tl.where(p > q, p, tl.where(p < q, -p, 0.0))
                values += 0.5 * tl.abs(p - q)
            means += mean
        divergence = tl.sum(values, 0)
        pivot = tl.sum(means, 0)
    tl.store(divergence_ptr + row, divergence)

    if GRADIENT:
        scale = weight * upstream * logit_scale
        for step in range(steps):
            column = (step if KIND == "jsd" or KIND == "tvd" else steps - 1 - step) * BLOCK + block
            inside = column < columns
            raw = load_logits(student_ptr, column, inside, logit_scale, softcap, SOFTCAP, "evict_first")
            t = load_logits(
                teacher_ptr, column, inside, teacher_logit_scale, teacher_softcap, TEACHER_SOFTCAP, "evict_first"
            )
            z, t = raw * inverse_temperature, t * inverse_temperature
            log_p, log_q = (z - maximum) - log_total, (t - teacher_maximum) - teacher_log_total
            p, q = tl.exp2(log_p * LOG2_E), tl.exp2(log_q * LOG2_E)
            if KIND == "forward_kl":
                gradient = p - q
            if KIND == "reverse_kl":
                gradient = _weighted(p, log_p - log_q - pivot)
            if KIND == "jsd":
                gradient = (1 - b) * _weighted(p, log_p - _log_mixture(p, q, b) - pivot)
            if KIND == "tvd":
                gradient = 0.5 * p * (tl.where(p > q, 1.0, tl.where(p < q, -1.0, 0.0)) - pivot)
            if KIND == "cosine":
                gradient = factor * z - teacher_factor * t
            gradient *= scale * inverse_temperature
            if CROSS_ENTROPY:
                raw_p = tl.exp2(((raw - raw_maximum) - raw_log_total) * LOG2_E)
                gradient += (scale * ce_weight) * (raw_p - tl.where(column == target, 1.0, 0.0))
            gradient = through_softcap(gradient, raw, softcap, SOFTCAP)
            tl.store(dlogits_ptr + column, gradient.to(dlogits_ptr.dtype.element_ty), inside)


def row_tile(columns: int) -> dict[str, int]:
    """BLOCK, VECTOR and num_warps of a program for rows of fp32 logits: 8 elements a thread, 16 bytes a load."""
    block = min(triton.next_power_of_2(columns), MAX_BLOCK)
    return {"BLOCK": block, "VECTOR": min(4, block), "num_warps": max(4, block // 256)}


@functools.cache
def _row_launcher(columns: int, device: torch.device, **options: bool | str) -> Launcher:
    return _kernel.bind(**options, **row_tile(columns), **pdl_constants(device))


def launch_divergence(
    student: Tensor, teacher: Tensor, weights: Tensor, targets: Tensor | None,
    results: tuple[Tensor, Tensor | None, Tensor], dlogits: Tensor | None, upstream: float,
    kind: str, b: float, temperature: float, softcap: float | None, logit_scale: float,
    teacher_softcap: float | None, teacher_logit_scale: float, ce_weight: float,
) -> None:  # fmt: skip
    """One launch that fills results (divergence, cross-entropy, entropy; fp32 [rows]) and dlogits.

    student fp32 and teacher float [rows, V] with unit stride along V; weights fp32 [rows], of the gradient; targets
    int64 [rows] in [0, V), with results[1]; dlogits [rows, V], times `upstream`, in memory of its own.
    """
    rows, columns = student.shape
    if not rows:
        return
    divergence, cross_entropy, entropy = results
    launch = _row_launcher(
        columns, student.device, KIND=kind, SOFTCAP=softcap is not None, TEACHER_SOFTCAP=teacher_softcap is not None,
        CROSS_ENTROPY=targets is not None, GRADIENT=dlogits is not None,
    )  # fmt: skip
    launch(
        rows, student, teacher, weights, weights if targets is None else targets, divergence,
        entropy if cross_entropy is None else cross_entropy, entropy, student if dlogits is None else dlogits,
        student.stride(0), teacher.stride(0), 0 if dlogits is None else dlogits.stride(0), columns, b, 1 / temperature,
        softcap or 1.0, logit_scale, teacher_softcap or 1.0, teacher_logit_scale, ce_weight, upstream,
    )  # fmt: skip
