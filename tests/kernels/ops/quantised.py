"""Ops whose weights are frozen and quantised: NF4, FP8, MXFP4."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.kernels.linear.linear import (
    layer_norm_linear,
    layer_norm_linear_reference,
    norm_linear,
    norm_linear_reference,
)
from ligermodels.kernels.quant.fp8 import Float8, fp8_dequantize_reference
from ligermodels.kernels.quant.fp8_products import quantize_rows, transposed
from ligermodels.kernels.quant.mxfp4 import EXPONENT_BIAS, Mxfp4Layout, mxfp4_dequantize_reference
from ligermodels.kernels.quant.nf4 import Nf4, nf4_dequantize_reference, nf4_encode, nf4_encode_reference
from ligermodels.kernels.quant.quantised_weight import QuantisedWeight, frozen_linear
from tests.conftest import DEVICE
from tests.kernels.ops.base import EPS, Case, Function, Op, draw_update, normal, with_low_rank_update
from tests.kernels.ops.decoding import few_rows_linear_case
from tests.kernels.ops.experts import experts_case
from tests.kernels.ops.linears import low_rank_gated_linear_case
from tests.kernels.ops.norms import layer_norm_linear_case, norm_linear_case


def draw_nf4(width: int, inputs: int) -> tuple[Tensor, Nf4]:
    """The bytes of a quantised weight of two parts, and their layout."""
    layout = Nf4((width, inputs), (1, width - 1), torch.float32)
    return layout.quantize(normal(width, inputs, scale=0.1)), layout


def draw_fp8(width: int, inputs: int) -> tuple[Tensor, Float8]:
    """As `draw_nf4`, with several blocks in each direction."""
    layout = Float8((width, inputs), (1, width - 1), torch.float32, (4, 48))
    return layout.quantize(normal(width, inputs, scale=0.1)), layout


def draw_mxfp4(width: int, inputs: int) -> tuple[Tensor, Mxfp4Layout]:
    layout = Mxfp4Layout((width, inputs), (1, width - 1), torch.float32)
    data = torch.randint(256, (layout.nbytes,), dtype=torch.uint8, device=DEVICE)
    layout.view(data)[0].fill_(EXPONENT_BIAS - 5)
    return data, layout


def mxfp4_reference(data: Tensor, layout: Mxfp4Layout) -> Tensor:
    exponents, codes = layout.view(data)
    return mxfp4_dequantize_reference(codes, exponents).to(layout.dtype)


def frozen_linear_case(
    batch, length, inputs, width, draw=draw_nf4, dequantize=nf4_dequantize_reference
) -> Case:  # fmt: skip
    data, layout = draw(width, inputs)

    def ours(x, bias, data):
        return frozen_linear(x, QuantisedWeight(data, layout.with_dtype(x.dtype)), bias)

    def reference(x, bias, data):
        return F.linear(x, dequantize(data, layout.with_dtype(x.dtype)), bias)

    return Case(ours, reference, [normal(batch, length, inputs), normal(width)], [data])


def of_frozen_weight(case: Case, node: Function, reference: Function, inputs: int, width: int) -> Case:
    """The case of a fused node whose weight, the second of its leaves, is frozen and quantised."""
    data, layout = draw_nf4(width, inputs)

    def compute(node, dequantize, *tensors):
        *leaves, data = tensors
        return node(*leaves[:-2], dequantize(data, layout.with_dtype(leaves[-1].dtype)), *leaves[-2:])

    leaves = [x for index, x in enumerate(case.leaves) if index != len(case.leaves) - 3]
    ours, plain = partial(compute, node, QuantisedWeight), partial(compute, reference, nf4_dequantize_reference)
    return Case(ours, plain, leaves, [data])


def frozen_norm_linear_case(batch, length, hidden, width) -> Case:
    def with_update(function):
        return lambda x, norm, weight, a, b: with_low_rank_update(function, width, eps=EPS)(x, None, norm, weight, a, b)

    x, _, norm, *_ = norm_linear_case(batch, length, hidden, width).leaves
    case = Case(norm_linear, norm_linear, [x, norm, x, *draw_update(hidden, width)], [])
    return of_frozen_weight(case, *map(with_update, (norm_linear, norm_linear_reference)), hidden, width)


def frozen_layer_norm_linear_case(batch, length, hidden, width) -> Case:
    def with_update(function):
        update = with_low_rank_update(function, width, eps=EPS)
        return lambda x, norm, norm_bias, weight, a, b: update(x, None, norm, norm_bias, weight, a, b)

    x, _, norm, norm_bias, *_ = layer_norm_linear_case(batch, length, hidden, width).leaves
    case = Case(layer_norm_linear, layer_norm_linear, [x, norm, norm_bias, x, *draw_update(hidden, width)], [])
    return of_frozen_weight(case, *map(with_update, (layer_norm_linear, layer_norm_linear_reference)), hidden, width)


def frozen_gated_linear_case(batch, length, inner, width) -> Case:
    case = low_rank_gated_linear_case(batch, length, inner, width)
    return of_frozen_weight(case, case.ours, case.reference, inner, width)


def frozen_experts_case(*size) -> Case:
    """The case of updates with both weights, the third and fourth of its leaves, in NF4 and frozen."""
    case = experts_case(*size, low_rank=True)
    layouts = [Nf4(tuple(x.shape), (x.shape[:-1].numel(),), torch.float32) for x in case.leaves[2:4]]

    def compute(function, dequantize, x, weight, *rest):
        *updates, gate_up, down, index = rest
        own = [layout.with_dtype(x.dtype) for layout in layouts]
        return function(x, weight, *map(dequantize, (gate_up, down), own), *updates, index)

    ours, reference = (
        partial(compute, case.ours, QuantisedWeight),
        partial(compute, case.reference, nf4_dequantize_reference),
    )
    quantised = [layout.quantize(x) for layout, x in zip(layouts, case.leaves[2:4], strict=True)]
    return Case(ours, reference, [*case.leaves[:2], *case.leaves[4:]], [*quantised, *case.constants])


def few_rows_frozen_linear_case(batch, length, hidden, width) -> Case:
    """The same with a weight in NF4, in the place of a leaf."""
    case, (data, layout) = few_rows_linear_case(batch, length, hidden, width), draw_nf4(width, hidden)

    def compute(function, dequantize, *tensors):
        *leaves, bias, data = tensors
        return function(*leaves, dequantize(data, layout.with_dtype(bias.dtype)), bias)

    leaves = [*case.leaves[:4], case.leaves[5]]
    ours, reference = (
        partial(compute, case.ours, QuantisedWeight),
        partial(compute, case.reference, nf4_dequantize_reference),
    )
    return Case(ours, reference, leaves, [data])


def nf4_encode_case(batch, length, columns) -> Case:
    @torch.no_grad()
    def encode(function, x):
        codes, absmax = function(x.flatten(0, 1))
        return codes.to(x.dtype), absmax.to(x.dtype)

    ours, reference = partial(encode, nf4_encode), partial(encode, nf4_encode_reference)
    return Case(ours, reference, [normal(batch, length, columns)], [])


def run_fp8_products() -> None:
    """Runs the kernels around products in FP8, which have no place in the table: their rounding is the result."""
    x, factors = normal(32, 4096).to(torch.bfloat16), normal(3, 4096).abs()
    for group in (128, 4096):
        codes, _ = quantize_rows(x, group)
    quantize_rows(x, 4096, factors)
    quantize_rows(x, 4096, factors, torch.arange(32, device=DEVICE) % 3)
    transposed(codes)


OPS = {
    "frozen_linear": Op(
        draw=frozen_linear_case, small=(64, 7), real=((4096, 64), (2880, 512)), huge=None, products=(1, 1, 0)
    ),
    "frozen_linear in FP8": Op(
        draw=partial(frozen_linear_case, draw=draw_fp8, dequantize=fp8_dequantize_reference), small=(64, 7),
        real=((4096, 64),),
    ),
    "frozen_linear in MXFP4": Op(
        draw=partial(frozen_linear_case, draw=draw_mxfp4, dequantize=mxfp4_reference), small=(64, 7),
        real=((2880, 64),),
    ),
    "norm_linear of a frozen weight": Op(draw=frozen_norm_linear_case, small=(64, 9)),
    "layer_norm_linear of a frozen weight": Op(draw=frozen_layer_norm_linear_case, small=(64, 9)),
    "gated_linear of a frozen weight": Op(draw=frozen_gated_linear_case, small=(64, 9)),
    "nf4_encode": Op(draw=nf4_encode_case, small=(192,), real=((4096,),), has_gradients=False),
    "experts of frozen weights": Op(draw=frozen_experts_case, small=(64, 64, 3, 2)),
    "few_rows_linear of a frozen weight": Op(
        draw=few_rows_frozen_linear_case, small=(64, 7), real=((14336, 4096),), has_gradients=False,
        more_variants=((1, 1), (2, 1)),
    ),
}  # fmt: skip
