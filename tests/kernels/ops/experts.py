"""Mixtures of experts."""

from dataclasses import replace
from functools import partial

import torch

from ligermodels.kernels.decoding.few_rows_experts import few_rows_experts
from ligermodels.kernels.dispatch import widen
from ligermodels.kernels.moe.experts import experts, experts_reference
from ligermodels.kernels.moe.grouped_gemm import GroupedLowRank
from tests.conftest import DEVICE
from tests.kernels.ops.base import RANK, Case, Op, normal


def experts_case(
    batch, length, hidden, inner, num_experts, k, low_rank=False, biased=False, ours=experts
) -> Case:  # fmt: skip
    def route(function, x, weight, gate_up, down, *rest):
        *factors, index = rest
        options = dict(zip(("gate_up_bias", "down_bias"), factors, strict=True)) if biased else {}
        pairs = [] if biased else zip(factors[::2], factors[1::2], strict=True)
        updates = [GroupedLowRank(*pair, 0.5) for pair in pairs]
        activation = "clamped_silu" if biased else "silu"
        routing = index.flatten(0, 1), widen(weight).flatten(0, 1)
        return function(x.flatten(0, 1), *routing, gate_up, down, activation, *updates, **options).view(x.shape)

    index = torch.rand(batch, length, num_experts, device=DEVICE).topk(k).indices
    gate_up, down = normal(num_experts, 2 * inner, hidden, scale=0.2), normal(num_experts, hidden, inner, scale=0.2)
    leaves = [normal(batch, length, hidden), normal(batch, length, k), gate_up, down]
    if low_rank:
        sides = (RANK, hidden), (2 * inner, RANK), (RANK, inner), (hidden, RANK)
        leaves += [normal(num_experts, *side, scale=0.2) for side in sides]
    if biased:
        leaves += [normal(num_experts, 2 * inner, scale=4.0), normal(num_experts, hidden)]
    return Case(partial(route, ours), partial(route, experts_reference), leaves, [index])


def few_rows_experts_case(*size, **options) -> Case:
    case = experts_case(*size, ours=few_rows_experts, **options)
    return replace(case, ours=torch.no_grad()(case.ours), reference=torch.no_grad()(case.reference))


OPS = {
    "experts": Op(
        draw=experts_case, small=(20, 11, 5, 3), real=((2048, 768, 128, 8), (4096, 14336, 8, 2)),
        huge=(2**18 + 1, 4096, 16, 4, 2), products=(2, 1, 1 / 3, 1, 1 / 3),
    ),
    "experts with biases and a clamped activation": Op(
        draw=partial(experts_case, biased=True), small=(20, 11, 5, 3), real=((2880, 2880, 32, 4),),
        products=(2, 1, 1 / 3, 1, 1 / 3, 1 / 3, 0),
    ),
    "experts with low-rank updates": Op(draw=partial(experts_case, low_rank=True), small=(20, 11, 3, 1)),
    "experts of few rows": Op(
        draw=few_rows_experts_case, small=(20, 11, 5, 3), real=((2048, 768, 128, 8), (4096, 14336, 8, 2)),
        has_gradients=False,
    ),
    "biased experts of few rows": Op(
        draw=partial(few_rows_experts_case, biased=True), small=(20, 11, 5, 3), real=((2880, 2880, 32, 4),),
        has_gradients=False,
    ),
}  # fmt: skip
