"""Linears with low-rank updates, and those fused with the activation before them."""

from functools import partial

from ligermodels.kernels.linear.fp32_linear import fp32_linear, fp32_linear_reference
from ligermodels.kernels.linear.linear import (
    activated_linear,
    activated_linear_reference,
    gated_linear,
    gated_linear_reference,
    low_rank_linear,
    low_rank_linear_reference,
)
from tests.kernels.ops.activations import MULTIPLIERS
from tests.kernels.ops.base import Case, Op, draw_update, normal, with_low_rank_update


def low_rank_linear_case(batch, length, inputs, width) -> Case:
    ours, reference = (with_low_rank_update(f, width) for f in (low_rank_linear, low_rank_linear_reference))
    weights = normal(width, inputs, scale=0.1), normal(width)
    return Case(ours, reference, [normal(batch, length, inputs), *weights, *draw_update(inputs, width)], [])


def fp32_linear_case(batch, length, inputs, width) -> Case:
    def of_rows(function, x, weight):
        return function(x.flatten(0, 1), weight)

    leaves = [normal(batch, length, inputs), normal(width, inputs, scale=0.1)]
    return Case(partial(of_rows, fp32_linear), partial(of_rows, fp32_linear_reference), leaves, [])


def activated_linear_case(batch, length, inner, width) -> Case:
    ours, reference = (partial(f, activation="gelu_tanh") for f in (activated_linear, activated_linear_reference))
    weights = normal(width, inner, scale=0.1), normal(width)
    return Case(ours, reference, [normal(batch, length, inner), *weights], [])


def low_rank_activated_linear_case(batch, length, inner, width) -> Case:
    functions = activated_linear, activated_linear_reference
    return low_rank_without_bias(activated_linear_case(batch, length, inner, width), functions, "gelu")


def low_rank_without_bias(case, functions, activation) -> Case:
    """The fused linear of a case, with a low-rank update and without its bias."""
    x, weight, _ = case.leaves
    width, inner = weight.shape

    def without_bias(function):
        updated = with_low_rank_update(function, width, activation=activation)
        return lambda x, weight, *update: updated(x, weight, None, *update)

    ours, reference = map(without_bias, functions)
    return Case(ours, reference, [x, weight, *draw_update(inner, width)], [])


def gated_linear_case(batch, length, inner, width, **multipliers) -> Case:
    functions = gated_linear, gated_linear_reference
    ours, reference = (partial(f, activation="silu", **multipliers) for f in functions)
    weights = normal(width, inner, scale=0.1), normal(width)
    return Case(ours, reference, [normal(batch, length, 2 * inner), *weights], [])


def low_rank_gated_linear_case(batch, length, inner, width) -> Case:
    functions = gated_linear, gated_linear_reference
    return low_rank_without_bias(gated_linear_case(batch, length, inner, width), functions, "silu")


OPS = {
    "low_rank_linear": Op(draw=low_rank_linear_case, small=(33, 9)),
    "fp32_linear": Op(draw=fp32_linear_case, small=(33, 9), real=((4096, 128), (7168, 256))),
    "gated_linear with multipliers": Op(
        draw=partial(gated_linear_case, **MULTIPLIERS), small=(33, 7), real=((14336, 64),), products=(2, 1, 1, 0)
    ),
    "gated_linear": Op(
        draw=gated_linear_case, small=(33, 7), real=((14336, 64),), huge=(2**16 + 1, 2**14, 16), products=(2, 1, 1, 0)
    ),
    "gated_linear with a low-rank update": Op(draw=low_rank_gated_linear_case, small=(33, 9)),
    "activated_linear": Op(draw=activated_linear_case, small=(33, 7), real=((5120, 64),), products=(2, 1, 1, 0)),
    "activated_linear with a low-rank update": Op(draw=low_rank_activated_linear_case, small=(33, 9)),
}  # fmt: skip
