"""Rows of tokens sorted by expert, and back to tokens.

A token has k slots, one for each expert that it chose: slot t k + j is token t's j-th. Sorted by expert, those of one
expert in their own order, the slots are rows.
    sort_by_expert   index [T, k] -> the row of each slot [T, k], the end of each expert's rows [E], both int32
    spread           x [T, H], row -> rows [T k, H], rows[row_tj] = x_t
    gather_sum       rows [T k, H], row -> y [T, H], y_t = Σ_j rows[row_tj] in fp32: the gradient of the former
The last two move (k + 1) T H elements: a program that went by rows would read a token k times. Without atomics: equal
bits from run to run. Nothing here waits for the device, and no size depends on the indices.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.dispatch import register
from ligermodels.kernels.gated_activation import tiles_of
from ligermodels.kernels.launch import kernel

SORT_TILE = 8192  # slots that a program of eight warps looks at in a step


@kernel(do_not_specialize=["slots"])
def _sort_kernel(index_ptr, row_ptr, offsets_ptr, slots, TILE: tl.constexpr):
    """One program counts the slots of the experts before its own, then numbers its own expert's slots in order."""
    expert = tl.program_id(0)
    before = tl.zeros([TILE], tl.int32)
    for step in range(tl.cdiv(slots, TILE)):
        slot = tl.arange(0, TILE) + step * TILE
        before += (tl.load(index_ptr + slot, slot < slots, other=2147483647) < expert).to(tl.int32)
    end = tl.sum(before, 0)
    for step in range(tl.cdiv(slots, TILE)):
        slot = tl.arange(0, TILE) + step * TILE
        chosen = tl.load(index_ptr + slot, slot < slots, other=-1) == expert
        row = end + tl.cumsum(chosen.to(tl.int32), 0) - 1
        tl.store(row_ptr + slot, row, chosen)
        end += tl.sum(chosen.to(tl.int32), 0)
    tl.store(offsets_ptr + expert, end)


@triton.jit
def _place(columns, TILE: tl.constexpr):
    """This program's token and columns. Neighbours share a token: memory likes them close."""
    tiles = tl.cdiv(columns, TILE)
    return (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles * TILE + tl.arange(0, TILE)


@kernel()
def _spread_kernel(x_ptr, row_ptr, rows_ptr, columns, SLOTS: tl.constexpr, TILE: tl.constexpr):
    """One program copies TILE columns of one token to its SLOTS rows."""
    token, column = _place(columns, TILE)
    mask = column < columns
    x = tl.load(x_ptr + token * columns + column, mask)
    for slot in tl.static_range(SLOTS):
        row = tl.load(row_ptr + token * SLOTS + slot).to(tl.int64)
        tl.store(rows_ptr + row * columns + column, x, mask)


@kernel()
def _gather_sum_kernel(rows_ptr, row_ptr, y_ptr, columns, SLOTS: tl.constexpr, TILE: tl.constexpr):
    """One program sums TILE columns of one token's SLOTS rows."""
    token, column = _place(columns, TILE)
    mask = column < columns
    total = tl.zeros([TILE], tl.float32)
    for slot in tl.static_range(SLOTS):
        row = tl.load(row_ptr + token * SLOTS + slot).to(tl.int64)
        total += tl.load(rows_ptr + row * columns + column, mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + token * columns + column, total.to(y_ptr.dtype.element_ty), mask)


def _launch_sort(expert_index: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    row, offsets = _fake_sort(expert_index, num_experts)
    index = expert_index.contiguous()
    _sort_kernel.bind(TILE=SORT_TILE, num_warps=8)(num_experts, index, row, offsets, index.numel())
    return row, offsets


def _launch_spread(x: Tensor, row: Tensor) -> Tensor:
    rows = _fake_spread(x, row)
    tokens, columns = x.shape
    if rows.numel():
        tiles, tile = tiles_of(columns)
        _spread_kernel.bind(SLOTS=row.shape[1], TILE=tile)(tokens * tiles, x.contiguous(), row, rows, columns)
    return rows


def _launch_gather_sum(rows: Tensor, row: Tensor) -> Tensor:
    y = _fake_gather_sum(rows, row)
    tokens, columns = y.shape
    if y.numel():
        tiles, tile = tiles_of(columns)
        _gather_sum_kernel.bind(SLOTS=row.shape[1], TILE=tile)(tokens * tiles, rows.contiguous(), row, y, columns)
    return y


def _fake_sort(expert_index, num_experts):
    row = expert_index.new_empty(*expert_index.shape, dtype=torch.int32)
    return row, expert_index.new_empty(num_experts, dtype=torch.int32)


def _fake_spread(x, row):
    return x.new_empty(row.numel(), x.shape[1])


def _fake_gather_sum(rows, row):
    return rows.new_empty(row.shape[0], rows.shape[1])


sort_by_expert = register(
    "sort_by_expert(Tensor expert_index, SymInt num_experts) -> (Tensor row, Tensor offsets)", _launch_sort, _fake_sort
)
spread = register("spread(Tensor x, Tensor row) -> Tensor", _launch_spread, _fake_spread)
gather_sum = register("gather_sum(Tensor rows, Tensor row) -> Tensor", _launch_gather_sum, _fake_gather_sum)
