"""Experts on several ranks: tokens go to the ranks that have their experts (dispatch), and the results back (combine).

Of R ranks each has E / R experts, in order, and tokens of its own: dispatch   each token goes once to every rank that
has some of its k experts, with their numbers and routing weights; there it is copied for each of them compute    each
rank's experts on these copies, one expert each combine    the copies' results are summed, the sums sent back, and those
of all ranks summed again, both in fp32 Copying and summing are each other's gradient. The numbers of rows depend on the
routing: the host reads them once a forward pass, which needs one small all-to-all before; backward has them. For each
other rank that it needs, at most min(k, R - 1), a token moves H elements each way, in backward again.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ligermodels.kernels.collectives import all_to_all, send_parts
from ligermodels.kernels.dispatch import Node, runs_kernels, widen
from ligermodels.kernels.moe.permute import unpermute

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
