"""The Triton kernel of divergences from a top-k teacher: value and gradient of rows; `losses/divergences.py` has the
formulas of the values.

The student's p over V classes is read as k + 1 classes: those of the teacher's ids, and the tail of all others, whose
log-probability comes from a sum over them, never from 1 - Σ p. With D the value and j outside of the ids, the gradient
with respect to z = logits / temperature is

    forward_kl   p_k - q_k                        p_j (1 - q_T / p_T)
    reverse_kl   p_k (log(p_k / q_k) - D)         p_j (log(p_T / q_T) - D)
    cut off      p_k Σ q - q_k                    p_j Σ q

One program a row sweeps it twice: statistics of the others, then the gradient. Moves V logits a sweep, V of the
gradient, and 12 k bytes.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.launch import Launcher, kernel
from ligermodels.kernels.losses.divergence_rows import merge_softmax, row_tile
from ligermodels.kernels.losses.softmax_sweep import LOG2_E, LOWEST, apply_softcap, through_softcap, update_softmax
from ligermodels.kernels.pdl import pdl_constants, wait_for_previous_kernel
from ligermodels.losses.divergences import LEAST_TAIL

MIN_TAIL = tl.constexpr(LEAST_TAIL)


@triton.jit
def _load_unless_removed(row_ptr, column, inside, logit_scale, softcap, SOFTCAP: tl.constexpr):
    """The scaled and softcapped logits at `column`; -inf where they were removed, and outside the mask."""
    raw = tl.load(row_ptr + column, inside, other=-float("inf"))
    removed = raw == -float("inf")
    raw = tl.where(removed, 0.0, raw) * logit_scale
    if SOFTCAP:
        raw = apply_softcap(raw, softcap, True)
    return tl.where(removed, -float("inf"), raw)


@triton.jit
def _log_add(a, b):
    top = tl.maximum(a, b)
    return top + tl.log(tl.exp(a - top) + tl.exp(b - top))


@triton.jit
def _log_sum(z):
    top = tl.max(z, 0)
    return top + tl.log(tl.sum(tl.exp(z - top), 0))


@kernel(do_not_specialize=["k"])
def _kernel(
    student_ptr, ids_ptr, logprobs_ptr, weights_ptr, targets_ptr, divergence_ptr, cross_entropy_ptr, entropy_ptr,
    dlogits_ptr, student_stride, dlogits_stride, columns, k, inverse_temperature, softcap, logit_scale, ce_weight,
    upstream,
    KIND: tl.constexpr, TAIL: tl.constexpr, SOFTCAP: tl.constexpr, CROSS_ENTROPY: tl.constexpr, GRADIENT: tl.constexpr,
    IDS: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program a row; rows of weight 0 and dlogits as in `divergence_rows.py`. Overwrites the student's logits."""
    wait_for_previous_kernel(PDL)
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCK)
    steps = tl.cdiv(columns, BLOCK)
    student_ptr += row * student_stride
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

    lane = tl.arange(0, IDS)
    known = lane < k
    ids = tl.load(ids_ptr + row * k + lane, known, other=0)
    raw_ids = _load_unless_removed(student_ptr, ids, known, logit_scale, softcap, SOFTCAP)
    if CROSS_ENTROPY:
        target = tl.load(targets_ptr + row)
        target_logit = _load_unless_removed(student_ptr, target, target < columns, logit_scale, softcap, SOFTCAP)
    tl.debug_barrier()
    tl.store(student_ptr + ids, tl.full([IDS], -float("inf"), tl.float32), known)
    tl.debug_barrier()

    GROUPS: tl.constexpr = BLOCK // VECTOR
    zeros = tl.zeros([GROUPS], tl.float32)
    maxima, totals, moments = tl.full([GROUPS], LOWEST, tl.float32), zeros, zeros
    raw_maxima, raw_totals = maxima, zeros
    for step in range(steps):
        column = step * BLOCK + block
        raw = _load_unless_removed(student_ptr, column, column < columns, logit_scale, softcap, SOFTCAP)
        raw = tl.reshape(raw, [GROUPS, VECTOR])
        maxima, totals, moments, _, _ = update_softmax(maxima, totals, moments, raw * inverse_temperature, True)
        if CROSS_ENTROPY:
            raw_maxima, raw_totals, _, _, _ = update_softmax(raw_maxima, raw_totals, zeros, raw, False)

    maximum, log_total, entropy_of_others, _ = merge_softmax(maxima, totals, moments)
    others = maximum + log_total
    z_ids = raw_ids * inverse_temperature
    lse = _log_add(_log_sum(z_ids), others)
    log_p, log_p_tail = z_ids - lse, others - lse
    p, p_tail = tl.exp(log_p), tl.exp(log_p_tail)
    surprise = tl.where(p > 0, -p * log_p, 0.0)
    tl.store(entropy_ptr + row, tl.sum(surprise, 0) + p_tail * (entropy_of_others - log_p_tail))
    log_q = tl.load(logprobs_ptr + row * k + lane, known, other=-float("inf")).to(tl.float32)
    total_q = tl.sum(tl.exp(log_q), 0)
    log_q -= tl.log(tl.maximum(total_q, 1.0))
    q = tl.exp(log_q)
    log_q_tail = tl.log(tl.maximum(1 - total_q, MIN_TAIL))
    q_tail = tl.exp(log_q_tail)
    if not TAIL:
        divergence = -tl.sum(tl.where(q > 0, q * log_p, 0.0), 0)
        share = tl.sum(q, 0)
        gradient_ids, gradient_tail = p * share - q, p_tail * share
    elif KIND == "forward_kl":
        divergence = tl.sum(tl.where(q > 0, q * (log_q - log_p), 0.0), 0) + q_tail * (log_q_tail - log_p_tail)
        gradient_ids, gradient_tail = p - q, p_tail - q_tail
    else:
        divergence = tl.sum(tl.where(p > 0, p * (log_p - log_q), 0.0), 0) + p_tail * (log_p_tail - log_q_tail)
        gradient_ids = tl.where(p > 0, p * (log_p - log_q - divergence), 0.0)
        gradient_tail = p_tail * (log_p_tail - log_q_tail - divergence)
    tl.store(divergence_ptr + row, divergence)
    raw_lse = 0.0
    if CROSS_ENTROPY:
        raw_maximum, raw_log_total, _, _ = merge_softmax(raw_maxima, raw_totals, zeros)
        raw_lse = _log_add(_log_sum(raw_ids), raw_maximum + raw_log_total)
        tl.store(cross_entropy_ptr + row, raw_lse - target_logit)

    if GRADIENT:
        scale = weight * upstream * logit_scale
        for step in range(steps):
            column = (steps - 1 - step) * BLOCK + block
            inside = column < columns
            raw = _load_unless_removed(student_ptr, column, inside, logit_scale, softcap, SOFTCAP)
            gradient = tl.exp2((raw * inverse_temperature - others) * LOG2_E) * gradient_tail
            gradient *= scale * inverse_temperature
            if CROSS_ENTROPY:
                raw_p = tl.exp2((raw - raw_lse) * LOG2_E)
                gradient += (scale * ce_weight) * (raw_p - tl.where(column == target, 1.0, 0.0))
            raw = tl.where(raw > -float("inf"), raw, 0.0)
            gradient = through_softcap(gradient, raw, softcap, SOFTCAP)
            tl.store(dlogits_ptr + column, gradient.to(dlogits_ptr.dtype.element_ty), inside)
        tl.debug_barrier()
        gradient_ids *= scale * inverse_temperature
        if CROSS_ENTROPY:
            raw_p = tl.exp(raw_ids - raw_lse)
            gradient_ids += (scale * ce_weight) * (raw_p - tl.where(ids == target, 1.0, 0.0))
        gradient_ids = through_softcap(gradient_ids, tl.where(known, raw_ids, 0.0), softcap, SOFTCAP)
        tl.store(dlogits_ptr + ids, gradient_ids.to(dlogits_ptr.dtype.element_ty), known)


@functools.cache
def _row_launcher(columns: int, ids: int, device: torch.device, **options: bool | str) -> Launcher:
    return _kernel.bind(**options, IDS=ids, **row_tile(columns), **pdl_constants(device))


def launch_top_k_divergence(
    student: Tensor, ids: Tensor, logprobs: Tensor, weights: Tensor, targets: Tensor | None,
    results: tuple[Tensor, Tensor | None, Tensor], dlogits: Tensor | None, upstream: float,
    kind: str, tail: bool, temperature: float, softcap: float | None, logit_scale: float, ce_weight: float,
) -> None:  # fmt: skip
    """Is `launch_divergence` with contiguous ids int64 and logprobs [rows, k]. Overwrites the student's logits.

    The ids of a row of nonzero weight are distinct and in [0, V); k < V.
    """
    rows, columns = student.shape
    if not rows:
        return
    divergence, cross_entropy, entropy = results
    k = ids.shape[1]
    launch = _row_launcher(
        columns, triton.next_power_of_2(k), student.device, KIND=kind, TAIL=tail, SOFTCAP=softcap is not None,
        CROSS_ENTROPY=targets is not None, GRADIENT=dlogits is not None,
    )  # fmt: skip
    launch(
        rows, student, ids, logprobs, weights, weights if targets is None else targets, divergence,
        entropy if cross_entropy is None else cross_entropy, entropy, student if dlogits is None else dlogits,
        student.stride(0), 0 if dlogits is None else dlogits.stride(0), columns, k, 1 / temperature, softcap or 1.0,
        logit_scale, ce_weight, upstream,
    )  # fmt: skip
