"""One sweep of a program along a row of logits: its log-sum-exp and what else one reading of the row gives.

Functions of Triton, shared by the kernels of cross-entropy, of log-probabilities and of divergences.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
# Below any logit, and finite also after the conversion to base 2: exp(-inf - LOWEST) is 0, but exp(-inf - -inf) is NaN.
LOWEST = tl.constexpr(-1.0e38)


@triton.jit
def apply_softcap(x, softcap, FP32: tl.constexpr):
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
def through_softcap(gradient, logits, softcap, SOFTCAP: tl.constexpr):
    """The gradient of softcapped `logits` as that of the logits before the softcap."""
    if SOFTCAP:
        tanh = logits * (1 / softcap)
        gradient *= 1 - tanh * tanh
    return gradient


@triton.jit
def load_logits(row_ptr, column, inside, logit_scale, softcap, SOFTCAP: tl.constexpr, POLICY: tl.constexpr):
    """The scaled and softcapped logits at `column`; outside the mask the values are meaningless."""
    logits = tl.load(row_ptr + column, inside, other=0.0, eviction_policy=POLICY).to(tl.float32) * logit_scale
    return apply_softcap(logits, softcap, row_ptr.dtype.element_ty == tl.float32) if SOFTCAP else logits


@triton.jit
def update_softmax(maxima, totals, moments, z, MOMENTS: tl.constexpr):
    """One step of online softmaxes, one for each row of z [groups, vector]: (maxima, totals, moments, powers, decay).

    powers = exp(z - maxima); sums weighted by it must be multiplied by decay first. moments = Σ powers (z - maxima).
    """
    higher = tl.maximum(maxima, tl.max(z, 1))
    powers = tl.exp2(z * LOG2_E - (higher * LOG2_E)[:, None])
    decay = tl.exp2((maxima - higher) * LOG2_E)
    if MOMENTS:
        products = tl.where(powers > 0, powers * (z - higher[:, None]), 0.0)
        moments = decay * (moments + totals * (maxima - higher)) + tl.sum(products, 1)
    return higher, totals * decay + tl.sum(powers, 1), moments, powers, decay


@triton.jit
def online_softmax(
    row_ptr, class_weights_ptr, columns, excluded, logit_scale, softcap,
    SOFTCAP: tl.constexpr, SUM: tl.constexpr, WEIGHTED: tl.constexpr, ENTROPY: tl.constexpr, ARGMAX: tl.constexpr,
    SQUARES: tl.constexpr, EXCLUDE: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """(m, log Σ exp(l - m), Σ w l, entropy, argmax, log Σ p²) of a row, m = max l, p = softmax(l); what is not required
    is zero. EXCLUDE leaves the column `excluded` out of everything but Σ w l.

    Online softmax. Each thread keeps its own running maxima and sums, one pair per vector load of VECTOR logits, so
    that no step waits for another warp. `moments` are Σ exp(l - maximum) (l - maximum): its terms
    have one sign, so that none cancels another.
    """
    GROUPS: tl.constexpr = BLOCK // VECTOR
    maxima = tl.full([GROUPS], LOWEST, tl.float32)
    totals = tl.zeros([GROUPS], tl.float32)
    sums = tl.zeros([GROUPS], tl.float32)
    moments = tl.zeros([GROUPS], tl.float32)
    squares = tl.zeros([GROUPS], tl.float32)
    best = tl.zeros([GROUPS], tl.int32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        logits = load_logits(row_ptr, column, column < columns, logit_scale, softcap, SOFTCAP, "")
        if SUM:
            terms = tl.where(column < columns, logits, 0.0)
            if WEIGHTED:
                terms *= tl.load(class_weights_ptr + column, column < columns, other=0.0)
            sums += tl.sum(tl.reshape(terms, [GROUPS, VECTOR]), 1)
        included = column < columns
        if EXCLUDE:
            included &= column != excluded
        logits = tl.reshape(tl.where(included, logits, -float("inf")), [GROUPS, VECTOR])
        higher, totals, moments, powers, decay = update_softmax(maxima, totals, moments, logits, ENTROPY)
        if SQUARES:
            squares = squares * decay * decay + tl.sum(powers * powers, 1)
        if ARGMAX:
            columns_of_group = tl.reshape(column, [GROUPS, VECTOR])
            first = tl.min(tl.where(logits == higher[:, None], columns_of_group, 2147483647), 1)
            best = tl.where(higher > maxima, first, best)
        maxima = higher
    maximum = tl.max(maxima, 0)
    decay = tl.exp(maxima - maximum)
    log_total = tl.log(tl.sum(totals * decay, 0))
    entropy, argmax, log_squares = 0.0, 0, 0.0
    if ENTROPY:
        moment = tl.sum(decay * (moments + totals * (maxima - maximum)), 0)
        entropy = log_total - moment * tl.exp(-log_total)
    if SQUARES:
        log_squares = tl.log(tl.sum(squares * decay * decay, 0)) - 2 * log_total
    if ARGMAX:
        argmax = tl.min(tl.where(maxima == maximum, best, 2147483647), 0)
    return maximum, log_total, tl.sum(sums, 0), entropy, argmax, log_squares
