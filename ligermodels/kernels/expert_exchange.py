"""Experts on several ranks: tokens go to the ranks that have their experts (dispatch), and the results back (combine).

Of R ranks each has E / R experts, in order, and tokens of its own. A (token, expert) pair is a row:
    dispatch   rows sorted by rank of their expert, exchanged by all-to-all; likewise experts and routing weights
    compute    each rank's experts on the rows that it received, whose order is by rank of the token
    combine    results exchanged back; y_t = Σ over the token's rows, in fp32
Each is the other's gradient. The numbers of rows depend on the routing: the host reads them once a forward pass, which
needs one small all-to-all before; backward has them. A row moves H elements each way: 2 k T H (R - 1) / R elements in
forward where tokens are spread evenly, as many in backward. Must not know what an expert computes.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ligermodels.kernels.collectives import all_to_all, send_parts
from ligermodels.kernels.dispatch import Node, runs_kernels, widen
from ligermodels.kernels.permute import permute, unpermute

ComputeExperts = Callable[[Tensor, Tensor, Tensor], Tensor]


class TokenRoute(NamedTuple):
    """Where the rows of T tokens with k experts each go. row: int [T, k], the place of each slot in what is sent.
    sent, received: the number of rows to and from each rank."""

    row: Tensor
    group: dist.ProcessGroup
    sent: list[int]
    received: list[int]


def experts_on_ranks(
    compute: ComputeExperts, x: Tensor, expert_index: Tensor, expert_weight: Tensor, own_experts: int,
    group: dist.ProcessGroup,
) -> Tensor:  # fmt: skip
    """x [T, H], expert_index and expert_weight [T, k] -> the weighted sum of each token's k experts, [T, H].

    own_experts: how many each rank has. compute: the sum on a rank, of its own experts, counted from 0. Every rank of
    the group must call it, also in backward; T may differ.
    """
    with torch.no_grad():
        route = find_route(expert_index // own_experts, group)
        slots = torch.empty_like(route.row).scatter_(0, route.row, torch.arange(len(route.row), device=x.device))
        index = send_parts((expert_index % own_experts).flatten()[slots], group, route.sent, route.received)
    weight = all_to_all(expert_weight.flatten().gather(0, slots), group, route.sent, route.received)
    route = route._replace(row=route.row.view_as(expert_index))
    rows = compute(_Dispatch.apply(x, route), index[:, None], weight[:, None])
    return _Combine.apply(rows, route)


def find_route(rank: Tensor, group: dist.ProcessGroup) -> TokenRoute:
    """rank: int [T, k], of each slot's expert -> the route, with row [T k]."""
    order = rank.flatten().argsort(stable=True)
    row = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    sent = torch.bincount(rank.flatten(), minlength=dist.get_world_size(group))
    received = send_parts(sent, group, None, None)
    sent_rows, received_rows = torch.stack([sent, received]).tolist()
    return TokenRoute(row, group, sent_rows, received_rows)


class _Dispatch(Node):
    @staticmethod
    def forward(ctx: Any, x: Tensor, route: TokenRoute) -> Tensor:
        ctx.route = route
        return dispatch_rows(x, route)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return combine_rows(dy, ctx.route), None


class _Combine(Node):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, route: TokenRoute) -> Tensor:
        ctx.route = route
        return combine_rows(rows, route)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dispatch_rows(dy, ctx.route), None


def dispatch_rows(x: Tensor, route: TokenRoute) -> Tensor:
    """x [T, H] -> the rows that this rank's experts compute, [Σ received, H]."""
    if runs_kernels(x):
        rows = permute(x.contiguous(), route.row.int())
    else:
        slots = x.repeat_interleave(route.row.shape[1], 0)
        rows = torch.empty_like(slots).index_copy_(0, route.row.flatten(), slots)
    return send_parts(rows, route.group, route.sent, route.received)


def combine_rows(rows: Tensor, route: TokenRoute) -> Tensor:
    """[Σ received, H] -> the sums of the tokens' rows, [T, H]."""
    back = send_parts(rows, route.group, route.received, route.sent)
    if runs_kernels(rows):
        return unpermute(back, route.row.int())
    return widen(back)[route.row].sum(1).to(rows.dtype)
