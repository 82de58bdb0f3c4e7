"""What changes or filters logits before a draw: penalties, and the thresholds of top-k, top-p and min-p.

Penalties on tokens that a text already has: repetition (Hugging Face's), presence and frequency (vLLM's, OpenAI's).
    in the prompt or generated:  l = l / repetition if l > 0, else l * repetition
    generated n > 0 times:       l = l - (frequency * n + presence)
One table [B, V] int32 records what the formulas need: 2 n, plus 1 for tokens of the prompt. 4 B V bytes; a row is reset
by `start_penalty_row`, and each generated token adds 2 to one number.
logits [B, V] any float dtype -> fp32. Repetition 1, presence 0 and frequency 0 change nothing. Reads logits and table
once and writes once: bound by memory bandwidth.
Sources: Keskar et al. 2019, https://arxiv.org/abs/1909.05858, for repetition; OpenAI's API reference for the others.

Thresholds, in one program for a row of logits; `sample.py` has the definitions.
The maxima of the row's blocks bound a threshold from below: k blocks whose maximum is at least t hold at least k tokens
of at least t. The tokens above a threshold are therefore in the blocks whose maximum reaches the bound; for top-k these
are about k blocks. Only those are listed and searched, by bisection over the logits' bits in ascending order. A step
counts the tokens (or sums the masses) from the middle up, and moves the interval's end to the closest logit. A search
takes about 10 steps, at most 32. Where the block maxima do not bound the threshold (top-p of nearly equal
probabilities), nearly all blocks are searched.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.dispatch import (
    INT32,
    check_floats,
    check_one_of,
    check_shape,
    register_op,
    runs_kernels,
    shape_of,
)
from ligermodels.kernels.launch import as_rows_with_stride, cdiv, kernel
from ligermodels.kernels.losses.softmax_sweep import LOG2_E
from ligermodels.kernels.pdl import pdl_constants, wait_for_previous_kernel

MASS_OF_ONE = 2**40  # the mass of weight 1; the sum of 2^22 of them fits in 62 bits
KERNEL_MASS_OF_ONE = tl.constexpr(float(MASS_OF_ONE))
HIGHEST, LOWEST = tl.constexpr(2147483647), tl.constexpr(-2147483648)  # int32


@triton.jit
def inverse_temperature(temperature):
    """1 / temperature; 1 for greedy rows."""
    return 1.0 / tl.where(temperature == 0, 1.0, temperature)


@triton.jit
def softmax_weight(logits, best, inverse):
    """exp((logits - best) / temperature)."""
    return tl.exp2((logits - best) * (inverse * LOG2_E))


@triton.jit
def mass_of(weight):
    """The weight as an integer, whose sums do not depend on their order."""
    return (weight * KERNEL_MASS_OF_ONE).to(tl.int64)


@triton.jit
def load_blocks(row_ptr, block, inside, columns, BLOCK: tl.constexpr):
    """Logits [GROUP, BLOCK] of the blocks [GROUP], fp32, -inf outside of the row, and their columns."""
    column = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    logits = tl.load(row_ptr + column, inside[:, None] & (column < columns), other=-float("inf"))
    return logits.to(tl.float32), column


@triton.jit
def _to_ordered_bits(x):
    """fp32 as int32 that compare as the numbers do. Its own inverse, between the bits and the ordered bits."""
    return x ^ ((x >> 31) & 0x7FFFFFFF)


@triton.jit
def _bits_of(x):
    return _to_ordered_bits(x.to(tl.int32, bitcast=True)).to(tl.int64)


@triton.jit
def _list_blocks(list_ptr, maxima, bound, min_p, best, inverse, blocks, BLOCKS: tl.constexpr):
    """Writes the blocks that have a token to keep, in order, and returns their number."""
    block = tl.arange(0, BLOCKS)
    listed = (maxima >= bound) & (softmax_weight(maxima, best, inverse) >= min_p) & (block < blocks)
    place = tl.cumsum(listed.to(tl.int32), 0)
    tl.debug_barrier()  # every thread has read the previous list
    tl.store(list_ptr + place - 1, block, listed)
    tl.debug_barrier()  # every thread sees the list
    return tl.sum(listed.to(tl.int32), 0)


@triton.jit
def _load_listed(row_ptr, list_ptr, start, count, columns, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """One step over the listed blocks: their numbers, which of the GROUP exist, logits, columns."""
    place = start + tl.arange(0, GROUP)
    block = tl.load(list_ptr + place, place < count, other=0)
    logits, column = load_blocks(row_ptr, block, place < count, columns, BLOCK)
    return block, place < count, logits, column


@triton.jit
def _measure(logits, best, inverse, MASS: tl.constexpr):
    """What a search sums: the mass of a token, or 1."""
    return mass_of(softmax_weight(logits, best, inverse)) if MASS else tl.full(logits.shape, 1, tl.int64)


@triton.jit
def _search(
    row_ptr, list_ptr, count, columns, bound, best, inverse, needed,
    MASS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The highest logit t such that the tokens >= t number (or have a mass of) at least `needed`.

    bound: a number for which that holds, fp32.
    """
    low, high = _bits_of(bound), _bits_of(best) + 1  # holds at low, does not hold at high
    while high - low > 1:
        middle = low + (high - low) // 2
        reached = tl.zeros([GROUP, BLOCK], tl.int64)
        above = tl.full([GROUP, BLOCK], HIGHEST, tl.int32)
        below = tl.full([GROUP, BLOCK], LOWEST, tl.int32)
        for start in range(0, count, GROUP):
            _, inside, logits, column = _load_listed(row_ptr, list_ptr, start, count, columns, BLOCK, GROUP)
            bits = _to_ordered_bits(logits.to(tl.int32, bitcast=True))
            inside = inside[:, None] & (column < columns)
            kept = inside & (bits >= middle.to(tl.int32))
            reached += tl.where(kept, _measure(logits, best, inverse, MASS), 0)
            above = tl.where(kept, tl.minimum(above, bits), above)
            below = tl.where(inside & ~kept, tl.maximum(below, bits), below)
        total = tl.sum(tl.sum(reached, 1), 0)
        if total >= needed:
            low = tl.min(tl.min(above, 1), 0).to(tl.int64)
        else:
            high = tl.maximum(tl.max(tl.max(below, 1), 0).to(tl.int64), low) + 1
        if total == needed:
            high = low + 1
    return _to_ordered_bits(low.to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def _bound_by_count(ranked, needed, BLOCKS: tl.constexpr):
    """The `needed`-th highest block maximum, -inf if there are fewer blocks. ranked [BLOCKS], descending."""
    return tl.max(tl.where(tl.arange(0, BLOCKS) == needed - 1, ranked, -float("inf")), 0)


@triton.jit
def _bound_by_mass(ranked, best, inverse, needed):
    """The highest block maximum at which the masses of the block maxima reach `needed`; -inf if they do not."""
    reached = tl.cumsum(mass_of(softmax_weight(ranked, best, inverse)), 0)
    return tl.max(tl.where(reached >= needed, ranked, -float("inf")), 0)


@triton.jit
def _bound_by_tail(allowed, best, inverse, columns):
    """A logit below which all tokens of a row together have at most half of the mass `allowed`."""
    weight = allowed.to(tl.float32) / KERNEL_MASS_OF_ONE / (2.0 * columns)
    return best + tl.log2(weight) / (inverse * LOG2_E)


@triton.jit
def _sum_listed(
    row_ptr, list_ptr, masses_ptr, count, columns, threshold, min_p, best, inverse,
    BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The mass of the kept tokens, of each listed block in masses_ptr, and in total."""
    total = tl.zeros([GROUP], tl.int64)
    for start in range(0, count, GROUP):
        block, inside, logits, _ = _load_listed(row_ptr, list_ptr, start, count, columns, BLOCK, GROUP)
        weight = softmax_weight(logits, best, inverse)
        mass = tl.sum(tl.where(keep(logits, weight, threshold, min_p), mass_of(weight), 0), 1)
        tl.store(masses_ptr + block, mass, inside)
        total += mass
    return tl.sum(total, 0)


@triton.jit
def keep(logits, weight, threshold, min_p):
    """Whether a token passes the filters."""
    return (logits >= threshold) & (weight >= min_p)


@triton.jit
def filter_blocks(
    row_ptr, list_ptr, masses_ptr, maxima, best, inverse, top_k, top_p, min_p, columns, blocks,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Replaces the masses of a row's blocks by those of the kept tokens; returns the threshold of top-k and top-p.

    maxima [BLOCKS], -inf beyond the row's blocks. list_ptr: int32 scratch memory, one number for each block.
    """
    block = tl.arange(0, BLOCKS)
    masses = tl.load(masses_ptr + block, block < blocks, other=0)
    total = tl.sum(masses, 0)
    ranked = tl.sort(maxima, descending=True)
    threshold = float("-inf")
    if (top_k > 0) & (top_k < columns):
        needed = top_k.to(tl.int64)
        bound = _bound_by_count(ranked, top_k, BLOCKS)
        count = _list_blocks(list_ptr, maxima, bound, 0.0, best, inverse, blocks, BLOCKS)
        threshold = _search(
            row_ptr, list_ptr, count, columns, bound, best, inverse, needed, False, BLOCK, GROUP
        )  # fmt: skip
        total = _sum_listed(
            row_ptr, list_ptr, masses_ptr, count, columns, threshold, 0.0, best, inverse, BLOCK, GROUP
        )  # fmt: skip
    if top_p < 1:
        needed = tl.maximum((total.to(tl.float64) * top_p.to(tl.float64)).to(tl.int64), 1)
        bound = tl.maximum(threshold, _bound_by_mass(ranked, best, inverse, needed))
        bound = tl.maximum(bound, _bound_by_tail(total - needed, best, inverse, columns))
        count = _list_blocks(list_ptr, maxima, bound, 0.0, best, inverse, blocks, BLOCKS)
        threshold = _search(row_ptr, list_ptr, count, columns, bound, best, inverse, needed, True, BLOCK, GROUP)
    count = _list_blocks(list_ptr, maxima, threshold, min_p, best, inverse, blocks, BLOCKS)
    tl.store(masses_ptr + block, tl.zeros([BLOCKS], tl.int64), block < blocks)
    tl.debug_barrier()  # the zeros are written before the masses
    _sum_listed(row_ptr, list_ptr, masses_ptr, count, columns, threshold, min_p, best, inverse, BLOCK, GROUP)
    tl.debug_barrier()  # every thread sees the masses
    return threshold


PENALTY_TILE, PENALTY_WARPS = 2048, 4
GENERATED_ONCE = 2  # in the table


def penalize_reference(
    logits: Tensor, table: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> Tensor:
    """Arguments and result as in `penalize`."""
    logits, generated = logits.float(), table // GENERATED_ONCE
    repetition, presence, frequency = (x[:, None] for x in (repetition, presence, frequency))
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(table > 0, repeated, logits)
    return torch.where(generated > 0, logits - (frequency * generated + presence), logits)


@kernel()
def _penalize_kernel(
    logits_ptr, table_ptr, repetition_ptr, presence_ptr, frequency_ptr, out_ptr, row_stride, columns,
    TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program penalizes TILE logits of a row."""
    wait_for_previous_kernel(PDL)
    tiles = tl.cdiv(columns, TILE)
    row = (tl.program_id(0) // tiles).to(tl.int64)
    column = tl.program_id(0) % tiles * TILE + tl.arange(0, TILE)
    inside = column < columns
    logits = tl.load(logits_ptr + row * row_stride + column, inside).to(tl.float32)
    recorded = tl.load(table_ptr + row * columns + column, inside)
    generated = recorded >> 1
    repetition = tl.load(repetition_ptr + row)
    penalty = tl.load(frequency_ptr + row) * generated.to(tl.float32) + tl.load(presence_ptr + row)
    repeated = tl.where(logits > 0, tl.div_rn(logits, repetition), logits * repetition)
    logits = tl.where(recorded > 0, repeated, logits)
    tl.store(out_ptr + row * columns + column, tl.where(generated > 0, logits - penalty, logits), inside)


def _launch_penalize(logits: Tensor, table: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor) -> Tensor:
    out = _fake_penalize(logits, table, repetition, presence, frequency)
    rows, columns = logits.shape
    if rows:
        logits, row_stride = as_rows_with_stride(logits, columns)
        launch = _penalize_kernel.bind(TILE=PENALTY_TILE, num_warps=PENALTY_WARPS, **pdl_constants(logits.device))
        launch(
            rows * cdiv(columns, PENALTY_TILE), logits, table.contiguous(),
            *(x.contiguous() for x in (repetition, presence, frequency)), out, row_stride, columns,
        )  # fmt: skip
    return out


def _fake_penalize(logits, table, repetition, presence, frequency):
    return logits.new_empty(*logits.shape, dtype=torch.float32)


penalize_op = register_op("penalize", _launch_penalize, _fake_penalize)


def penalize(logits: Tensor, table: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor) -> Tensor:
    """The logits of each row with its penalties, [B, V] fp32. Differentiates nothing; does not wait for the device.

    logits [B, V] any float dtype; table [B, V] int32, of `start_penalty_row` and `count_tokens`; repetition, presence,
    frequency [B] fp32, 1, 0 and 0 for none. Raises ValueError where shapes or dtypes disagree.
    """
    shape = shape_of("penalize", "logits", logits, "B, V")
    check_shape("penalize", "table", table, *shape)
    of_rows = {"repetition": repetition, "presence": presence, "frequency": frequency}
    for name, x in of_rows.items():
        check_shape("penalize", name, x, shape[0])
    check_floats("penalize", logits=logits, **of_rows)
    check_one_of("penalize", INT32, table=table)
    function = penalize_op if runs_kernels(logits) else penalize_reference
    return function(logits.detach(), table, repetition, presence, frequency)


def start_penalty_row(table: Tensor, row: int, prompt: Tensor) -> None:
    """Records in a row of the table that its text is a new one with this prompt, token ids [T] int64."""
    table[row].zero_().index_fill_(0, prompt, 1)


def count_tokens(table: Tensor, tokens: Tensor, running: Tensor) -> None:
    """Records one generated token in each row. tokens [B] int64; running [B] bool: the rows that are to record it."""
    table.scatter_add_(1, tokens[:, None], GENERATED_ONCE * running[:, None].to(table.dtype))
