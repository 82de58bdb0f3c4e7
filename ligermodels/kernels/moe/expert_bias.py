"""Biases of stacked experts' down projections, and gradients of experts' biases; parts of experts.py.

Slot s = t k + j is the j-th choice of token t, with the row row[s], the routing weight w[s], the expert e = index[s].
    unpermute_with_bias   y_t = Σ_j rows[row_s] + w_s b_e       rows [T k, H], b [E, H] -> y [T, H]
    bias_dots             dw_s = dy_t · b_e                     dy [T, H] -> [T, k] fp32: the bias's share of dw
    sort_weights          v[row[s]] = w_s                       [T, k] -> [T k], in the order of the rows
    grouped_row_sums      sum_e = Σ_r v_r x_r over e's rows     x [R, N] sorted by expert -> [E, N]: a bias's gradient
offsets [E] int32 holds the end row of each expert, v [R] fp32 weights or None. Sums in fp32 in a fixed order, without
atomics. They move (k + 1) T H, T H and R N elements; biases and dy are read again from the L2 cache.
"""

import torch
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.activations.gated_activation import split_row
from ligermodels.kernels.dispatch import register_op
from ligermodels.kernels.launch import cdiv, kernel

WEIGHTS_TILE = 1024  # of one program
SUM_ROWS, SUM_COLUMNS = 32, 128  # of one step of a program


@kernel()
def _unpermute_kernel(
    rows_ptr, row_ptr, index_ptr, weight_ptr, bias_ptr, y_ptr, columns, SLOTS: tl.constexpr, TILE: tl.constexpr
):
    """One program sums TILE columns of one token's SLOTS rows and weighted biases."""
    tiles = tl.cdiv(columns, TILE)
    token, column = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles * TILE + tl.arange(0, TILE)
    mask = column < columns
    total = tl.zeros([TILE], tl.float32)
    for choice in tl.static_range(SLOTS):
        slot = token * SLOTS + choice
        row, expert = tl.load(row_ptr + slot).to(tl.int64), tl.load(index_ptr + slot).to(tl.int64)
        total += tl.load(rows_ptr + row * columns + column, mask, other=0.0).to(tl.float32)
        bias = tl.load(bias_ptr + expert * columns + column, mask, other=0.0).to(tl.float32)
        total += tl.load(weight_ptr + slot) * bias
    tl.store(y_ptr + token * columns + column, total.to(y_ptr.dtype.element_ty), mask)


@kernel()
def _dots_kernel(dy_ptr, index_ptr, bias_ptr, dots_ptr, columns, SLOTS: tl.constexpr, TILE: tl.constexpr):
    """One program handles one slot."""
    slot = tl.program_id(0)
    dy_ptr += (slot // SLOTS).to(tl.int64) * columns
    bias_ptr += tl.load(index_ptr + slot).to(tl.int64) * columns
    total = tl.zeros([TILE], tl.float32)
    for step in range(tl.cdiv(columns, TILE)):
        column = tl.arange(0, TILE) + step * TILE
        dy = tl.load(dy_ptr + column, column < columns, other=0.0).to(tl.float32)
        total += dy * tl.load(bias_ptr + column, column < columns, other=0.0).to(tl.float32)
    tl.store(dots_ptr + slot, tl.sum(total, 0))


@kernel()
def _row_sums_kernel(
    x_ptr, offsets_ptr, weight_ptr, sums_ptr, columns, WEIGHTED: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr
):
    """One program sums TILE columns of one group's rows."""
    tiles = tl.cdiv(columns, TILE)
    group, column = tl.program_id(0) // tiles, tl.program_id(0) % tiles * TILE + tl.arange(0, TILE)
    start = tl.load(offsets_ptr + group - 1, group > 0, other=0)
    end = tl.load(offsets_ptr + group)
    total = tl.zeros([ROWS, TILE], tl.float32)
    for step in range(tl.cdiv(end - start, ROWS)):
        row = start + step * ROWS + tl.arange(0, ROWS)
        mask = (row < end)[:, None] & (column < columns)[None, :]
        x = tl.load(x_ptr + row.to(tl.int64)[:, None] * columns + column[None, :], mask, other=0.0).to(tl.float32)
        total += x * tl.load(weight_ptr + row, row < end, other=0.0)[:, None] if WEIGHTED else x
    sums = tl.sum(total, 0)
    tl.store(sums_ptr + group.to(tl.int64) * columns + column, sums.to(sums_ptr.dtype.element_ty), column < columns)


@kernel(do_not_specialize=["slots"])
def _sort_weights_kernel(weight_ptr, row_ptr, sorted_ptr, slots, TILE: tl.constexpr):
    """One program moves TILE weights."""
    slot = tl.program_id(0) * TILE + tl.arange(0, TILE)
    row = tl.load(row_ptr + slot, slot < slots, other=0)
    tl.store(sorted_ptr + row, tl.load(weight_ptr + slot, slot < slots, other=0.0), slot < slots)


def _launch_unpermute(rows: Tensor, row: Tensor, index: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    y = _fake_unpermute(rows, row, index, weight, bias)
    tokens, columns = y.shape
    if y.numel():
        tiles, tile = split_row(columns)
        launch = _unpermute_kernel.bind(SLOTS=row.shape[1], TILE=tile)
        inputs = (x.contiguous() for x in (rows, row, index, weight, bias))
        launch(tokens * tiles, *inputs, y, columns)
    return y


def _launch_dots(dy: Tensor, index: Tensor, bias: Tensor) -> Tensor:
    dots = _fake_dots(dy, index, bias)
    if dots.numel():
        columns, slots = dy.shape[1], index.shape[1]
        launch = _dots_kernel.bind(SLOTS=slots, TILE=split_row(columns).tile_columns)
        launch(dots.numel(), dy.contiguous(), index.contiguous(), bias.contiguous(), dots, columns)
    return dots


def _launch_row_sums(x: Tensor, offsets: Tensor, weight: Tensor | None) -> Tensor:
    sums = _fake_row_sums(x, offsets, weight)
    groups, columns = sums.shape
    x = x.contiguous()
    launch = _row_sums_kernel.bind(WEIGHTED=weight is not None, ROWS=SUM_ROWS, TILE=SUM_COLUMNS)
    launch(groups * cdiv(columns, SUM_COLUMNS), x, offsets, x if weight is None else weight.contiguous(), sums, columns)
    return sums


def _launch_sort_weights(weight: Tensor, row: Tensor) -> Tensor:
    ordered = _fake_sort_weights(weight, row)
    if slots := ordered.numel():
        launch = _sort_weights_kernel.bind(TILE=WEIGHTS_TILE)
        launch(cdiv(slots, WEIGHTS_TILE), weight.contiguous(), row.contiguous(), ordered, slots)
    return ordered


def _fake_unpermute(rows, row, index, weight, bias):
    return rows.new_empty(row.shape[0], rows.shape[1])


def _fake_dots(dy, index, bias):
    return dy.new_empty(*index.shape, dtype=torch.float32)


def _fake_row_sums(x, offsets, weight):
    return x.new_empty(offsets.shape[0], x.shape[1])


def _fake_sort_weights(weight, row):
    return weight.new_empty(row.numel())


sort_weights = register_op("sort_weights", _launch_sort_weights, _fake_sort_weights)
unpermute_with_bias = register_op("unpermute_with_bias", _launch_unpermute, _fake_unpermute)
bias_dots = register_op("bias_dots", _launch_dots, _fake_dots)
grouped_row_sums = register_op("grouped_row_sums", _launch_row_sums, _fake_row_sums)
