"""Sampling: one token per row of logits, by temperature, top-k, top-p and min-p, with its log-probability.

    weight_i = exp((l_i - max l) / T)                          T = 1 for greedy rows (temperature 0)
    kept     = {i: l_i >= threshold, weight_i >= min_p}
    token    = the first token at which Σ mass of kept tokens, in vocabulary order, exceeds u Σ mass of all kept tokens
    logprob  = log(weight_token / Σ weight of kept tokens)     of the distribution that the token is drawn from
A greedy row takes its first highest logit; the log-probability is that of the whole softmax at T = 1.

Filters apply in the order of Hugging Face and vLLM. threshold is the k-th highest logit, and then the highest one at
which the kept probability, of what top-k kept, reaches top_p. Tokens with a logit equal to a threshold are all kept:
the result does not depend on the order of a sort. min-p compares with the most likely token.

mass_i = floor(2^40 weight_i) is an integer: sums do not depend on their order, and a row gives the same token in any
batch. The error, at most 2^-40 of the most likely token, is below the rounding of fp32 weights. u is one random number
of 62 bits (philox.py), determined by the row's seed and counters.

logits [B, V] any float dtype, read as fp32, V < 2^22 -> tokens [B] int64, logprobs [B] fp32. Logits are finite or -inf;
a row with NaN, infinity or only -inf gives some token of the vocabulary and a logprob that is not finite.
Three launches. Two read the logits, in blocks of 256 that all programs share: bound by memory bandwidth. In the third,
one program for each row reads the block of its token; with filters it first searches for the thresholds
(sample_filters.py).
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.decoding.sample_filters import (
    KERNEL_MASS_OF_ONE,
    MASS_OF_ONE,
    filter_blocks,
    inverse_temperature,
    keep,
    load_blocks,
    mass_of,
    softmax_weight,
)
from ligermodels.kernels.dispatch import (
    INDICES,
    INT64,
    check_floats,
    check_one_of,
    check_shape,
    register_op,
    runs_kernels,
    shape_of,
)
from ligermodels.kernels.launch import Launcher, as_rows_with_stride, cdiv, kernel
from ligermodels.kernels.pdl import pdl_constants, wait_for_previous_kernel
from ligermodels.kernels.philox import draw_bits, draw_bits_reference, multiply_high, multiply_high_reference

BLOCK = 256  # tokens
GROUP = 16  # blocks of one step of a program
BLOCKS_WARPS = 4
DRAW_WARPS = {False: 4, True: 16}  # without and with filters: searches keep their sums in registers

FEW = 1024  # tokens: on a CPU, sorting the highest ones alone takes a tenth of the time of sorting all


def sample_reference(
    logits: Tensor, temperature: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None,
    seeds: Tensor, counters: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Arguments and results as in `sample`; top_k, top_p and min_p are given together, or none of them."""
    logits = logits.float()
    greedy = temperature == 0
    best, first_best = logits.max(-1, keepdim=True)
    if bool(greedy.all()):  # a CPU knows it without waiting
        return first_best[:, 0], logits.log_softmax(-1).amax(-1)
    inverse = temperature.masked_fill(greedy, 1.0).reciprocal()[:, None]
    weights = ((logits - best) * inverse).exp_()
    masses = (weights * MASS_OF_ONE).long()
    if top_k is not None and top_p is not None and min_p is not None:
        threshold = threshold_reference(logits, masses, top_k, top_p)
        kept = (logits >= threshold) & (weights >= min_p[:, None])
        masses.masked_fill_(~(kept | greedy[:, None]), 0)
    cumulative = masses.cumsum(-1)
    total = cumulative[:, -1]
    target = multiply_high_reference(draw_bits_reference(seeds, counters), total)
    drawn = torch.searchsorted(cumulative, target[:, None], right=True).clamp_(max=logits.shape[-1] - 1)
    token = torch.where(greedy[:, None], first_best, drawn)
    logprob = ((logits.gather(-1, token) - best) * inverse)[:, 0] - (total.float() / MASS_OF_ONE).log()
    return token[:, 0], torch.where(greedy, logits.log_softmax(-1).amax(-1), logprob)


def threshold_reference(logits: Tensor, masses: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The lowest logit of each row that top-k and top-p keep, [B, 1]; -inf if they are off."""
    rows, columns = logits.shape
    threshold = logits.new_full((rows, 1), -torch.inf)
    limited = (top_k > 0) & (top_k < columns)
    if bool(limited.any()):
        highest = logits.topk(int(top_k[limited].max())).values
        kth = highest.gather(-1, (top_k.long() - 1).clamp(0, highest.shape[-1] - 1)[:, None])
        threshold = torch.where(limited[:, None], kth, threshold)
    if not bool((top_p < 1).any()):
        return threshold
    total = masses.masked_fill(logits < threshold, 0).sum(-1)
    needed = (total.double() * top_p).long()[:, None]
    ranked, order = logits.topk(min(FEW, columns))
    reached = masses.gather(-1, order).cumsum(-1)
    if not bool((reached[:, -1:] >= needed).all()):
        ranked, order = logits.sort(-1, descending=True)
        reached = masses.gather(-1, order).cumsum(-1)
    last = torch.searchsorted(reached, needed).clamp_(max=ranked.shape[-1] - 1)
    return torch.where((top_p < 1)[:, None], ranked.gather(-1, last), threshold)


@kernel()
def _maxima_kernel(
    logits_ptr, maxima_ptr, row_stride, columns, blocks,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program writes the highest logit of each of GROUP blocks of a row."""
    wait_for_previous_kernel(PDL)
    row, block = _locate_blocks(blocks, GROUP)
    logits, _ = load_blocks(logits_ptr + row * row_stride, block, block < blocks, columns, BLOCK)
    logits = tl.where(logits != logits, float("inf"), logits)  # max would leave NaN out
    tl.store(maxima_ptr + row * blocks + block, tl.max(logits, 1), block < blocks)


@triton.jit
def _locate_blocks(blocks, GROUP: tl.constexpr):
    """The row and the blocks of this program."""
    programs_per_row = tl.cdiv(blocks, GROUP)
    row = (tl.program_id(0) // programs_per_row).to(tl.int64)
    return row, tl.program_id(0) % programs_per_row * GROUP + tl.arange(0, GROUP)


@triton.jit
def _load_maxima(maxima_ptr, row, blocks, BLOCKS: tl.constexpr):
    """The maxima of a row's blocks, [BLOCKS], -inf beyond them."""
    block = tl.arange(0, BLOCKS)
    return tl.load(maxima_ptr + row * blocks + block, block < blocks, other=-float("inf"))


@kernel()
def _masses_kernel(
    logits_ptr, maxima_ptr, masses_ptr, temperature_ptr, row_stride, columns, blocks,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program writes the mass of each of GROUP blocks of a row."""
    wait_for_previous_kernel(PDL)
    row, block = _locate_blocks(blocks, GROUP)
    best = tl.max(_load_maxima(maxima_ptr, row, blocks, BLOCKS), 0)
    inverse = inverse_temperature(tl.load(temperature_ptr + row))
    logits, _ = load_blocks(logits_ptr + row * row_stride, block, block < blocks, columns, BLOCK)
    mass = tl.sum(mass_of(softmax_weight(logits, best, inverse)), 1)
    tl.store(masses_ptr + row * blocks + block, mass, block < blocks)


@kernel()
def _draw_kernel(
    logits_ptr, maxima_ptr, masses_ptr, list_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seeds_ptr,
    counters_ptr, tokens_ptr, logprobs_ptr, row_stride, columns, blocks,
    FILTERS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program draws the token of a row: its block by the masses of the blocks, then the token in the block."""
    wait_for_previous_kernel(PDL)
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    maxima = _load_maxima(maxima_ptr, row, blocks, BLOCKS)
    best = tl.max(maxima, 0)
    temperature = tl.load(temperature_ptr + row)
    inverse = inverse_temperature(temperature)
    threshold = tl.full((), -float("inf"), tl.float32)
    min_p = tl.zeros((), tl.float32)
    if FILTERS:
        top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
        min_p = tl.load(min_p_ptr + row)
        if (temperature > 0) & ((top_k > 0) | (top_p < 1) | (min_p > 0)):
            threshold = filter_blocks(
                row_ptr, list_ptr + row * blocks, masses_ptr + row * blocks, maxima, best, inverse, top_k, top_p,
                min_p, columns, blocks, BLOCKS, BLOCK, GROUP,
            )  # fmt: skip
    block = tl.arange(0, BLOCKS)
    masses = tl.load(masses_ptr + row * blocks + block, block < blocks, other=0)
    total = tl.sum(masses, 0)
    bits = draw_bits(tl.load(seeds_ptr + row), tl.load(counters_ptr + 2 * row), tl.load(counters_ptr + 2 * row + 1))
    target = multiply_high(bits, total)
    greedy = temperature == 0  # the first token that reaches the maximum
    masses = tl.where(greedy, (maxima == best).to(tl.int64), masses)
    target = tl.where(greedy, 0, target)
    threshold = tl.where(greedy, best, threshold)
    cumulative = tl.cumsum(masses, 0)
    drawn = tl.minimum(tl.sum((cumulative <= target).to(tl.int32), 0), blocks - 1)
    preceding = tl.sum(tl.where(block < drawn, masses, 0), 0)

    column = drawn * BLOCK + tl.arange(0, BLOCK)
    logits = tl.load(row_ptr + column, column < columns, other=-float("inf")).to(tl.float32)
    weight = softmax_weight(logits, best, inverse)
    masses = tl.where(keep(logits, weight, threshold, min_p), mass_of(weight), 0)
    place = tl.sum((tl.cumsum(masses, 0) + preceding <= target).to(tl.int32), 0)
    token = tl.minimum(drawn * BLOCK + place, columns - 1)
    logit = tl.load(row_ptr + token).to(tl.float32)
    tl.store(tokens_ptr + row, token.to(tl.int64))
    tl.store(logprobs_ptr + row, (logit - best) * inverse - tl.log(total.to(tl.float32) / KERNEL_MASS_OF_ONE))


@functools.cache
def _launchers(blocks: int, filters: bool, device: torch.device) -> tuple[Launcher, Launcher, Launcher]:
    shared = {"BLOCK": BLOCK, "GROUP": GROUP, **pdl_constants(device)}
    padded = triton.next_power_of_2(blocks)
    return (
        _maxima_kernel.bind(**shared, num_warps=BLOCKS_WARPS),
        _masses_kernel.bind(BLOCKS=padded, **shared, num_warps=BLOCKS_WARPS),
        _draw_kernel.bind(FILTERS=filters, BLOCKS=padded, **shared, num_warps=DRAW_WARPS[filters]),
    )


def _launch(
    logits: Tensor, temperature: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None,
    seeds: Tensor, counters: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    tokens, logprobs = _fake(logits, temperature, top_k, top_p, min_p, seeds, counters)
    rows, columns = logits.shape
    if not rows:
        return tokens, logprobs
    logits, row_stride = as_rows_with_stride(logits, columns)
    temperature, seeds, counters = temperature.contiguous(), seeds.contiguous(), counters.contiguous()
    filters = [x.contiguous() for x in (top_k, top_p, min_p) if x is not None] or [temperature] * 3
    blocks = cdiv(columns, BLOCK)
    maxima, masses = logprobs.new_empty(rows, blocks), seeds.new_empty(rows, blocks)
    listed = maxima if top_k is None else top_k.new_empty(rows, blocks)
    find_maxima, sum_masses, draw = _launchers(blocks, top_k is not None, logits.device)
    programs = rows * cdiv(blocks, GROUP)
    find_maxima(programs, logits, maxima, row_stride, columns, blocks)
    sum_masses(programs, logits, maxima, masses, temperature, row_stride, columns, blocks)
    draw(
        rows, logits, maxima, masses, listed, temperature, *filters, seeds, counters, tokens, logprobs,
        row_stride, columns, blocks,
    )  # fmt: skip
    return tokens, logprobs


def _fake(logits, temperature, top_k, top_p, min_p, seeds, counters):
    return seeds.new_empty(*seeds.shape), temperature.new_empty(*temperature.shape)


sample_op = register_op("sample", _launch, _fake)


def sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None,
    seeds: Tensor, counters: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Draws one token from each row of logits: (tokens [B] int64, logprobs [B] fp32). Differentiates nothing.

    logits [B, V] any float dtype, V < 2^22; of NaN and infinity see above. temperature [B] fp32, 0 for greedy.
    top_k [B] int32, 0 for all tokens. top_p [B] fp32, 1 for all tokens; min_p [B] fp32, 0 for all tokens; each None if
    no row has it. seeds [B] int64. counters [B, 2] int64: what makes a row's random number its own, such as the number
    of the sample and the position. Equal seeds and counters give equal random numbers, in any batch.
    logprobs: of the tokens under the distribution that they are drawn from, after temperature and filters; of a greedy
    row under the softmax of its logits.
    Does not wait for the device. Filters cost time only in rows that have them; without any of the three tensors, their
    code is left out. Raises ValueError where shapes or dtypes disagree.
    """
    rows, _ = shape_of("sample", "logits", logits, "B, V")
    of_rows = {"temperature": temperature, "top_p": top_p, "min_p": min_p}
    for name, x in {**of_rows, "top_k": top_k, "seeds": seeds}.items():
        check_shape("sample", name, x, rows)
    check_shape("sample", "counters", counters, rows, 2)
    check_floats("sample", logits=logits, **of_rows)
    check_one_of("sample", INDICES, top_k=top_k)
    check_one_of("sample", INT64, seeds=seeds, counters=counters)
    logits = logits.detach()
    if any(x is not None for x in (top_k, top_p, min_p)):
        top_k = torch.zeros_like(temperature, dtype=torch.int32) if top_k is None else top_k
        top_p = torch.ones_like(temperature) if top_p is None else top_p
        min_p = torch.zeros_like(temperature) if min_p is None else min_p
    function = sample_op if runs_kernels(logits) else sample_reference
    return function(logits, temperature, top_k, top_p, min_p, seeds, counters)
