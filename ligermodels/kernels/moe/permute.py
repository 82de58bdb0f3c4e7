"""Tokens to their experts and back: permutation into expert order for top-k routing, and exchange between ranks.

The router gives each token k slots: slot t k + j is the j-th expert of token t. The slots, sorted stably by expert, are
the rows of the grouped GEMMs.
    sort_by_expert   index [T, k] int64 or int32 -> row of each slot [T, k], end row of each expert [E], both int32
    permute          x [T, H], row -> rows [T k, H], rows[row_tj] = x_t
    unpermute        rows [T k, H], row -> y [T, H], y_t = Σ_j rows[row_tj] in fp32; the gradient of `permute`
permute and unpermute move (k + 1) T H elements: a program handles one token, not one row, and so reads x or writes y
once. No atomics: results are bit-identical from run to run. No host synchronisation: no size depends on the indices.

Experts on several ranks: of R ranks each has E / R experts, in order, and tokens of its own:
    dispatch   each token goes once to every rank that has some of its k experts, with their numbers and routing
               weights; there it is copied for each of them
    compute    each rank's experts on these copies, one expert each
    combine    the copies' results are summed, the sums sent back, and those of all ranks summed again, both in fp32
Copying and summing are each other's gradient. The numbers of rows depend on the routing: the host reads them once a
forward pass, which needs one small all-to-all before; backward has them. For each other rank that it needs, at most
min(k, R - 1), a token moves H elements each way, in backward again.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.activations.gated_activation import split_row
from ligermodels.kernels.collectives import all_to_all, send_parts
from ligermodels.kernels.dispatch import Node, register_op, runs_kernels, widen
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
permute = register_op("permute", _launch_permute, _fake_permute)
unpermute = register_op("unpermute", _launch_unpermute, _fake_unpermute)


ComputeExperts = Callable[[Tensor, Tensor, Tensor], Tensor]


class Copies(NamedTuple):
    """Copies of T tokens, at most one for each of G, those for the first of G first.

    entry: int64 [copies], g T + t of each. token: int64 [copies], t. place: int32 [T, G], where the copies of each
    token are; the number of all copies where there is none.
    """

    entry: Tensor
    token: Tensor
    place: Tensor


def experts_on_ranks(
    compute: ComputeExperts, x: Tensor, expert_index: Tensor, expert_weight: Tensor, own_experts: int,
    group: dist.ProcessGroup,
) -> Tensor:  # fmt: skip
    """x [T, H], expert_index and expert_weight [T, k] -> the weighted sum of each token's k experts, [T, H].

    own_experts: how many each rank has. compute: that sum on a rank, of its own experts, counted from 0. Every rank of
    the group must call it, also in backward; T may differ.
    """
    ranks = torch.arange(dist.get_world_size(group), device=x.device)
    here = expert_index // own_experts == ranks[:, None, None]  # [R, T, k], whose expert each slot is
    needed = here.any(-1)  # [R, T]
    sent = torch.stack([needed.sum(1), here.sum((1, 2))], 1)  # [R, 2]: tokens, and (token, expert) pairs
    received = send_parts(sent, group, None, None)
    (rows_sent, _), (rows_received, pairs) = torch.stack([sent, received]).mT.tolist()

    to_ranks = find_copies(needed, sum(rows_sent))
    local = torch.where(here, expert_index % own_experts, -1).flatten(0, 1)[to_ranks.entry]
    local = send_parts(local, group, rows_sent, rows_received)  # [received, k], -1 for experts of other ranks
    weight = all_to_all(expert_weight.index_select(0, to_ranks.token), group, rows_sent, rows_received)  # [received, k]
    tokens = all_to_all(_Copy.apply(x, to_ranks), group, rows_sent, rows_received)  # [received, H]

    to_experts = find_copies(local.mT >= 0, sum(pairs))
    index, weight = (slots.mT.flatten().gather(0, to_experts.entry)[:, None] for slots in (local, weight))
    out = compute(_Copy.apply(tokens, to_experts), index, weight)
    sums = _SumCopies.apply(out, to_experts)
    return _SumCopies.apply(all_to_all(sums, group, rows_received, rows_sent), to_ranks)


def find_copies(needed: Tensor, count: int) -> Copies:
    """needed: bool [G, T], whether each token has a copy for each of G; `count` are true, which the host knows."""
    flat = needed.flatten()
    entry = flat.byte().argsort(descending=True, stable=True)[:count]
    place = torch.where(flat, flat.cumsum(0) - 1, count).view_as(needed)
    return Copies(entry, entry % max(1, needed.shape[1]), place.mT.int().contiguous())


class _Copy(Node):
    @staticmethod
    def forward(ctx: Any, x: Tensor, copies: Copies) -> Tensor:
        ctx.copies = copies
        return x.index_select(0, copies.token)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return sum_of_copies(dy, ctx.copies), None


class _SumCopies(Node):
    @staticmethod
    def forward(ctx: Any, x: Tensor, copies: Copies) -> Tensor:
        ctx.copies = copies
        return sum_of_copies(x, copies)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy.index_select(0, ctx.copies.token), None


def sum_of_copies(x: Tensor, copies: Copies) -> Tensor:
    """[copies, H] -> their sums in fp32, [T, H]; zero for a token without copies."""
    rows = torch.cat([x, x.new_zeros(1, x.shape[1])])
    if runs_kernels(x):
        return unpermute(rows, copies.place)
    return widen(rows)[copies.place.long()].sum(1).to(x.dtype)
