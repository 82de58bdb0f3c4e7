"""The Triton kernel of log-probabilities: log-probability, entropy and more of rows of logits, and their gradient.

For each row with target t, logits l = softcap * tanh(s * logits / softcap), without a softcap l = s * logits,
p = softmax(l), g and h the upstream gradients of logprob and entropy:

    logprob = -softplus(lse' - l_t)         lse' = log Σ_{j ≠ t} exp(l_j): a sure token keeps its small log-probability
    entropy = -Σ p log p
    dlogits_j = s (g ([j = t] - p_j) - h p_j (log p_j + entropy)) (1 - (l_j / softcap)²)      1 - p_t = -expm1(logprob)

A temperature divides both softcap and s. All are zero if t is ignore_index. If t is another number outside [0, V),
logprob is minus infinity and the rest is zero.
logits [rows, V] fp32 (or fp64), targets [rows] int64, results fp32; dlogits in any float dtype, rounded once. A dlogits
that is narrower than the logits may be in their memory, in the second half of each row (`gradient_memory`).
Reads V elements a row forward, 2 V for results and gradient together; one program a row.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.launch import Launcher, kernel
from ligermodels.kernels.losses.softmax_sweep import LOG2_E, load_logits, online_softmax, through_softcap
from ligermodels.kernels.pdl import pdl_constants, wait_for_previous_kernel

# One tile for every launch that computes results: the order of the sums decides about the last bits of a
# log-probability, which must be the same with and without a gradient.
MAX_BLOCK, ELEMENTS_PER_THREAD, VECTOR = 16384, 16, 4
# Shorter rows take half of MAX_BLOCK. Of longer ones fewer are in flight with it, so that more of a row is still in the
# L2 cache when it is read again for its gradient.
LONG_ROW = 65536
SERIES_BELOW = tl.constexpr(0.015625)  # series of four terms are exact to 1e-8 there


class RowLogProbs(NamedTuple):
    """What the kernel computes for each row, fp32."""

    logprobs: Tensor  # [rows]
    lse: Tensor  # [rows], log-sum-exp
    entropy: Tensor | None = None  # [rows]
    extras: Tensor | None = None  # [3, rows]: log Σ p², mean of the logits, whether the target is the first argmax

    def slice(self, rows: slice) -> "RowLogProbs":
        if rows.stop - rows.start == self.lse.shape[0]:  # a view costs microseconds
            return self
        return RowLogProbs._make(None if x is None else x[..., rows] for x in self)


def empty_logprobs(targets: Tensor, entropy: bool, extras: bool) -> RowLogProbs:
    """Uninitialised results for targets [rows]."""
    logprobs = torch.empty_like(targets, dtype=torch.float32, memory_format=torch.contiguous_format)
    more = logprobs.new_empty(3, *targets.shape) if extras else None
    return RowLogProbs(logprobs, torch.empty_like(logprobs), torch.empty_like(logprobs) if entropy else None, more)


@triton.jit
def _log1p(x):
    """log(1 + x) for x in [0, 1], with a small relative error."""
    return tl.where(x < SERIES_BELOW, x * (1 - x * (1 / 2 - x * (1 / 3 - x * (1 / 4)))), tl.log(1 + x))


@triton.jit
def _complement(logprob):
    """1 - exp(logprob), with a small relative error."""
    x = -logprob
    series = x * (1 - x * (1 / 2) * (1 - x * (1 / 3) * (1 - x * (1 / 4))))
    return tl.where(x < SERIES_BELOW, series, 1 - tl.exp(logprob))


@triton.jit
def _log_of_sum(a, b):
    """log(exp(a) + exp(b)); only one of them may be infinite."""
    return tl.maximum(a, b) + _log1p(tl.exp(-tl.abs(a - b)))


@kernel(do_not_specialize=["extras_stride", "dlogprob_stride", "dentropy_stride", "first_class", "ignore_index"])
def _kernel(
    logits_ptr, targets_ptr, logprob_ptr, lse_ptr, entropy_ptr, extras_ptr, dlogprob_ptr, dentropy_ptr, dlogits_ptr,
    logits_stride, dlogits_stride, extras_stride, dlogprob_stride, dentropy_stride, columns, vocab, first_class,
    ignore_index, softcap, logit_scale,
    SOFTCAP: tl.constexpr, RESULTS: tl.constexpr, ENTROPY: tl.constexpr, EXTRAS: tl.constexpr, GRADIENT: tl.constexpr,
    UPSTREAM: tl.constexpr, ENTROPY_GRADIENT: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program per row. RESULTS computes them, with ENTROPY and EXTRAS also these; otherwise they are read.

    GRADIENT writes dlogits, of the upstream gradients or, without UPSTREAM, of the log-probability alone. It walks the
    row backwards, because the columns read last are the most likely to be still in a cache.
    """
    wait_for_previous_kernel(PDL)
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCK)
    logits_ptr += row * logits_stride
    dlogits_ptr += row * dlogits_stride
    target = tl.load(targets_ptr + row)
    if (target == ignore_index) | (target < 0) | (target >= vocab):
        if RESULTS:
            tl.store(logprob_ptr + row, tl.where(target == ignore_index, 0.0, -float("inf")))
            tl.store(lse_ptr + row, 0.0)
            if ENTROPY:
                tl.store(entropy_ptr + row, 0.0)
            if EXTRAS:
                for extra in tl.static_range(3):
                    tl.store(extras_ptr + extra * extras_stride + row, 0.0)
        if GRADIENT:
            zeros = tl.zeros([BLOCK], dlogits_ptr.dtype.element_ty)
            for start in range(0, columns, BLOCK):
                tl.store(dlogits_ptr + start + block, zeros, start + block < columns)
        return

    target -= first_class
    entropy = 0.0
    if RESULTS:
        # Read before the reductions: their barriers guarantee that no thread has overwritten it with dlogits yet.
        target_logit = load_logits(logits_ptr, target, target < columns, logit_scale, softcap, SOFTCAP, "")
        maximum, log_total, logit_sum, entropy_of_others, argmax, log_squares = online_softmax(
            logits_ptr, logits_ptr, columns, target, logit_scale, softcap, SOFTCAP, EXTRAS, False, ENTROPY, EXTRAS,
            EXTRAS, True, BLOCK, VECTOR,
        )  # fmt: skip
        lse_of_others = maximum + log_total
        lse = _log_of_sum(target_logit, lse_of_others)
        gap = tl.abs(lse_of_others - target_logit)
        small = _log1p(tl.exp(-gap))  # softplus(x) = max(x, 0) + log1p(exp(-|x|))
        logprob = -(tl.maximum(lse_of_others - target_logit, 0.0) + small)
        logprob_of_others = -(tl.maximum(target_logit - lse_of_others, 0.0) + small)
        tl.store(logprob_ptr + row, logprob)
        tl.store(lse_ptr + row, lse)
        others = tl.exp(logprob_of_others)  # their probability
        if ENTROPY:
            surprise = tl.where(others > 0, others * (entropy_of_others - logprob_of_others), 0.0)
            entropy = surprise - tl.where(logprob > -float("inf"), tl.exp(logprob) * logprob, 0.0)
            tl.store(entropy_ptr + row, entropy)
        if EXTRAS:
            squares_of_others = tl.where(others > 0, 2 * logprob_of_others + log_squares, -float("inf"))
            is_greedy = (target_logit > maximum) | ((target_logit == maximum) & (target < argmax))
            tl.store(extras_ptr + row, _log_of_sum(2 * logprob, squares_of_others))
            tl.store(extras_ptr + extras_stride + row, logit_sum / vocab)
            tl.store(extras_ptr + 2 * extras_stride + row, is_greedy.to(tl.float32))
    else:
        logprob, lse = tl.load(logprob_ptr + row), tl.load(lse_ptr + row)
        if ENTROPY_GRADIENT:
            entropy = tl.load(entropy_ptr + row)

    if GRADIENT:
        dlogprob, dentropy = logit_scale, 0.0
        if UPSTREAM:
            dlogprob *= tl.load(dlogprob_ptr + row * dlogprob_stride)
        if ENTROPY_GRADIENT:
            dentropy = logit_scale * tl.load(dentropy_ptr + row * dentropy_stride)
        steps = tl.cdiv(columns, BLOCK)
        for step in range(steps):
            column = (steps - 1 - step) * BLOCK + block
            logits = load_logits(logits_ptr, column, column < columns, logit_scale, softcap, SOFTCAP, "evict_first")
            log_probs = tl.where(column == target, logprob, logits - lse)
            probabilities = tl.exp2(log_probs * LOG2_E)
            gradient = tl.where(column == target, _complement(logprob), -probabilities) * dlogprob
            if ENTROPY_GRADIENT:
                gradient -= tl.where(probabilities > 0, probabilities * (log_probs + entropy), 0.0) * dentropy
            gradient = through_softcap(gradient, logits, softcap, SOFTCAP)
            # Narrower gradients overwrite logits to the right of those that other threads have yet to read.
            tl.debug_barrier()
            gradient = gradient.to(dlogits_ptr.dtype.element_ty)
            tl.store(dlogits_ptr + column, gradient, column < columns, eviction_policy="evict_first")


@functools.cache
def _launcher(columns: int, device: torch.device, **constants: bool) -> Launcher:
    most = MAX_BLOCK if columns >= LONG_ROW else MAX_BLOCK // 2
    block = min(triton.next_power_of_2(max(columns, 16)), most)
    warps = max(1, block // (32 * ELEMENTS_PER_THREAD))
    return _kernel.bind(BLOCK=block, VECTOR=VECTOR, num_warps=warps, **constants, **pdl_constants(device))


def gradient_memory(logits: Tensor, dtype: torch.dtype) -> Tensor:
    """Where the gradient of logits [rows, V] can be written over them, in `dtype`: the second half of each row."""
    if logits.dtype == dtype:
        return logits
    halves = logits.view(dtype)
    return halves.as_strided(logits.shape, halves.stride(), halves.storage_offset() + logits.stride(0))


def launch_logprobs(
    logits: Tensor, targets: Tensor, results: RowLogProbs, dlogits: Tensor | None,
    ignore_index: int, softcap: float | None, logit_scale: float,
    *, computed: bool = False, dlogprobs: Tensor | None = None, dentropy: Tensor | None = None, first_class: int = 0,
    vocab: int | None = None,
) -> None:  # fmt: skip
    """One launch that fills `results`, unless they are computed already, and `dlogits` if it is given.

    logits, dlogits [rows, V] with unit stride along V, disjoint or `gradient_memory(logits)`; targets [rows]
    contiguous; dlogprobs and dentropy, the upstream gradients, fp32 [rows] of any stride. If the results are computed,
    logits may be a part of the vocabulary: the classes from `first_class` on, of `vocab` in all.
    """
    rows, columns = logits.shape
    if not rows:
        return
    logprobs, lse, entropy, extras = results
    vocab = vocab or columns
    launch = _launcher(
        columns, logits.device, SOFTCAP=softcap is not None, RESULTS=not computed, ENTROPY=entropy is not None,
        EXTRAS=extras is not None, GRADIENT=dlogits is not None, UPSTREAM=dlogprobs is not None,
        ENTROPY_GRADIENT=dentropy is not None,
    )  # fmt: skip
    launch(
        rows, logits, targets, logprobs, lse, lse if entropy is None else entropy, lse if extras is None else extras,
        lse if dlogprobs is None else dlogprobs, lse if dentropy is None else dentropy,
        logits if dlogits is None else dlogits,
        logits.stride(0), 0 if dlogits is None else dlogits.stride(0), 0 if extras is None else extras.stride(0),
        0 if dlogprobs is None else dlogprobs.stride(0), 0 if dentropy is None else dentropy.stride(0),
        columns, vocab, first_class, ignore_index, softcap or 1.0, logit_scale,
    )  # fmt: skip
