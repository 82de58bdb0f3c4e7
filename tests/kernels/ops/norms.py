"""RMSNorm and LayerNorm, alone and fused with the linear behind them."""

from functools import partial

import torch

from ligermodels.kernels.linear.linear import (
    layer_norm_linear,
    layer_norm_linear_reference,
    norm_linear,
    norm_linear_reference,
)
from ligermodels.kernels.norms.gated_rms_norm import gated_rms_norm, gated_rms_norm_reference
from ligermodels.kernels.norms.layer_norm import layer_norm, layer_norm_reference
from ligermodels.kernels.norms.rms_norm import (
    CHUNKED_WIDTHS,
    add_rms_norm,
    add_rms_norm_reference,
    rms_norm,
    rms_norm_reference,
)
from tests.kernels.ops.base import EPS, Case, Op, draw_update, normal, with_low_rank_update

HIDDEN = 576, 1024, 1152, 2048, 2880, 3584, 4096, 5120, 8192, 16384


def norm_case(batch, length, hidden) -> Case:
    ours, reference = (partial(f, eps=EPS, offset=1.0) for f in (rms_norm, rms_norm_reference))
    return Case(ours, reference, [normal(batch, length, hidden), normal(hidden)], [])


def add_norm_case(batch, length, hidden) -> Case:
    ours, reference = (partial(f, eps=EPS) for f in (add_rms_norm, add_rms_norm_reference))
    return Case(ours, reference, [normal(batch, length, hidden), normal(batch, length, hidden), normal(hidden)], [])


def norm_without_weight_case(batch, length, hidden, add=False) -> Case:
    functions = (add_rms_norm, add_rms_norm_reference) if add else (rms_norm, rms_norm_reference)
    ours, reference = (partial(f, eps=EPS) for f in functions)
    return Case(ours, reference, [normal(batch, length, hidden) for _ in range(1 + add)], [])


def layer_norm_case(batch, length, hidden) -> Case:
    ours, reference = (partial(f, eps=EPS) for f in (layer_norm, layer_norm_reference))
    return Case(ours, reference, [normal(batch, length, hidden), normal(hidden), normal(hidden)], [])


def layer_norm_without_bias_case(batch, length, hidden) -> Case:
    ours, reference = (partial(f, bias=None, eps=EPS) for f in (layer_norm, layer_norm_reference))
    return Case(ours, reference, [normal(batch, length, hidden), normal(hidden)], [])


def norm_linear_case(batch, length, hidden, width) -> Case:
    ours, reference = (partial(f, eps=EPS) for f in (norm_linear, norm_linear_reference))
    stream = normal(batch, length, hidden), normal(batch, length, hidden)
    return Case(ours, reference, [*stream, normal(hidden), normal(width, hidden, scale=0.1), normal(width)], [])


def layer_norm_linear_case(batch, length, hidden, width) -> Case:
    ours, reference = (partial(f, eps=EPS) for f in (layer_norm_linear, layer_norm_linear_reference))
    stream = normal(batch, length, hidden), normal(batch, length, hidden)
    weights = normal(hidden), normal(hidden), normal(width, hidden, scale=0.1), normal(width)
    return Case(ours, reference, [*stream, *weights], [])


def low_rank_norm_linear_case(batch, length, hidden, width) -> Case:
    def without_residual(function):
        return lambda x, *weights: with_low_rank_update(function, width, eps=EPS)(x, None, *weights)

    ours, reference = map(without_residual, (norm_linear, norm_linear_reference))
    x, _, *weights = norm_linear_case(batch, length, hidden, width).leaves
    return Case(ours, reference, [x, *weights, *draw_update(hidden, width)], [])


def low_rank_layer_norm_linear_case(batch, length, hidden, width) -> Case:
    """Without a residual, and with a norm without a bias."""

    def without_residual(function):
        update = with_low_rank_update(function, width, eps=EPS)
        return lambda x, norm, *weights: update(x, None, norm, None, *weights)

    ours, reference = map(without_residual, (layer_norm_linear, layer_norm_linear_reference))
    x, _, norm, _, *weights = layer_norm_linear_case(batch, length, hidden, width).leaves
    return Case(ours, reference, [x, norm, *weights, *draw_update(hidden, width)], [])


def gated_rms_norm_case(batch, length, heads, size, gate_first=False) -> Case:
    leaves = [normal(batch, length, heads, size), normal(batch, length, heads, size), normal(size)]
    ours, reference = (partial(f, gate_first=gate_first) for f in (gated_rms_norm, gated_rms_norm_reference))
    return Case(ours, reference, leaves, [])


def run_chunked_norm() -> None:
    """Runs the kernel for rows of certain widths, which are too long to be in the table."""
    for columns in CHUNKED_WIDTHS:
        case = norm_case(1, 32, columns).to(torch.bfloat16)
        case.forward(case.ours)


OPS = {
    "rms_norm": Op(
        draw=norm_case, small=(33,), real=tuple((h,) for h in (128, *HIDDEN)), huge=(2**17 + 1, 2**14)
    ),
    "add_rms_norm": Op(
        draw=add_norm_case, small=(33,), real=tuple((h,) for h in HIDDEN), huge=(2**17 + 1, 2**14)
    ),
    "rms_norm without weight": Op(draw=norm_without_weight_case, small=(33,), real=((4096,), (8192,))),
    "add_rms_norm without weight": Op(
        draw=partial(norm_without_weight_case, add=True), small=(33,), real=((4096,), (16384,))
    ),
    # At most 1024 columns: where x has more than 2^31 elements, cuBLAS 13.0 loses rows of dyᵀ x for a dy of 16 columns.
    "layer_norm": Op(
        draw=layer_norm_case, small=(33,), real=tuple((h,) for h in HIDDEN), huge=(2**17 + 1, 2**14)
    ),
    "layer_norm without bias": Op(draw=layer_norm_without_bias_case, small=(33,), real=((8192,),)),
    "norm_linear": Op(
        draw=norm_linear_case, small=(33, 7), real=tuple((h, 64) for h in HIDDEN), huge=(2**17 + 1, 2**14, 1024),
        products=(2, 1, 1, 1, 1, 0),
    ),
    "norm_linear with a low-rank update": Op(draw=low_rank_norm_linear_case, small=(33, 9)),
    # Not 16384 columns: sums of both gradients, the normed values and their bias need more registers than a thread has.
    "layer_norm_linear": Op(
        draw=layer_norm_linear_case, small=(33, 7), real=tuple((h, 64) for h in HIDDEN[:-1]),
        huge=(2**17 + 1, 2**14, 1024), products=(2, 1, 1, 1, 1, 1, 0),
    ),
    "layer_norm_linear with a low-rank update": Op(draw=low_rank_layer_norm_linear_case, small=(33, 9)),
    "gated_rms_norm": Op(draw=gated_rms_norm_case, small=(3, 20), real=((32, 128), (48, 128))),
    "gated_rms_norm, the gate first": Op(
        draw=partial(gated_rms_norm_case, gate_first=True), small=(3, 20), real=((1, 3072), (1, 8192))
    ),
}  # fmt: skip
