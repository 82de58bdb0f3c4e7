"""Permutation of tokens into expert order for top-k routing, and back (permute and unpermute).

The router gives each token k slots: slot t k + j is the j-th expert of token t. The slots, sorted stably by expert, are
the rows of the grouped GEMMs.
    sort_by_expert   index [T, k] int64 or int32 -> row of each slot [T, k], end row of each expert [E], both int32
    permute          x [T, H], row -> rows [T k, H], rows[row_tj] = x_t
    unpermute        rows [T k, H], row -> y [T, H], y_t = Σ_j rows[row_tj] in fp32; the gradient of `permute`
permute and unpermute move (k + 1) T H elements: a program handles one token, not one row, and so reads x or writes y
once. No atomics: results are bit-identical from run to run. No host synchronisation: no size depends on the indices.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.activations.gated_activation import split_row
from ligermodels.kernels.dispatch import register_op
from ligermodels.kernels.launch import kernel

SORT_TILE = 8192  # slots per step of one program, which has eight warps


@kernel(do_not_specialize=["slots"])
def _sort_kernel(index_ptr, row_ptr, offsets_ptr, slots, TILE: tl.constexpr):
    """One program per expert: counts the slots of all lower experts, then numbers its own slots in order."""
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
def _locate_tile(columns, TILE: tl.constexpr):
    """Token and columns of this program. Consecutive programs share a token, for locality in memory."""
    tiles = tl.cdiv(columns, TILE)
    return (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles * TILE + tl.arange(0, TILE)


@kernel()
def _permute_kernel(x_ptr, row_ptr, rows_ptr, columns, SLOTS: tl.constexpr, TILE: tl.constexpr):
    """One program copies TILE columns of one token to its SLOTS rows."""
    token, column = _locate_tile(columns, TILE)
    mask = column < columns
    x = tl.load(x_ptr + token * columns + column, mask)
    for slot in tl.static_range(SLOTS):
        row = tl.load(row_ptr + token * SLOTS + slot).to(tl.int64)
        tl.store(rows_ptr + row * columns + column, x, mask)


@kernel()
def _unpermute_kernel(rows_ptr, row_ptr, y_ptr, columns, SLOTS: tl.constexpr, TILE: tl.constexpr):
    """One program sums TILE columns of one token's SLOTS rows."""
    token, column = _locate_tile(columns, TILE)
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


def _launch_permute(x: Tensor, row: Tensor) -> Tensor:
    rows = _fake_permute(x, row)
    tokens, columns = x.shape
    if rows.numel():
        tiles, tile = split_row(columns)
        _permute_kernel.bind(SLOTS=row.shape[1], TILE=tile)(tokens * tiles, x.contiguous(), row, rows, columns)
    return rows


def _launch_unpermute(rows: Tensor, row: Tensor) -> Tensor:
    y = _fake_unpermute(rows, row)
    tokens, columns = y.shape
    if y.numel():
        tiles, tile = split_row(columns)
        _unpermute_kernel.bind(SLOTS=row.shape[1], TILE=tile)(tokens * tiles, rows.contiguous(), row, y, columns)
    return y


def _fake_sort(expert_index, num_experts):
    row = expert_index.new_empty(*expert_index.shape, dtype=torch.int32)
    return row, expert_index.new_empty(num_experts, dtype=torch.int32)


def _fake_permute(x, row):
    return x.new_empty(row.numel(), x.shape[1])


def _fake_unpermute(rows, row):
    return rows.new_empty(row.shape[0], rows.shape[1])


sort_by_expert = register_op(
    "sort_by_expert(Tensor expert_index, SymInt num_experts) -> (Tensor row, Tensor offsets)", _launch_sort, _fake_sort
)
permute = register_op("permute(Tensor x, Tensor row) -> Tensor", _launch_permute, _fake_permute)
unpermute = register_op("unpermute(Tensor rows, Tensor row) -> Tensor", _launch_unpermute, _fake_unpermute)
