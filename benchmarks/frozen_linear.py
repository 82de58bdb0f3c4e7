"""A linear with a frozen weight in NF4: dequantised alone, under many rows, under one. Shape: [rows, inputs, outputs].
Weights in FP8 and MXFP4, dequantised alone.

nf4_dequantize has no rows; its limit is the time to read the bytes and write the weight in bf16, as that of
fp8_dequantize and mxfp4_dequantize. frozen_linear is
forward and backward; its limit is the time of its two matrix products on a dense weight. nf4_few_rows is a step of
generation; its limit is the time to read the bytes.
Predicted for an H200, and measured: nf4_dequantize at 70 % of its limit or more, as other kernels that read little and
write much (78 %); frozen_linear at 16,384 rows within 5 % of the dense products, because dequantising 59 million
elements twice moves 0.3 GB beside 3.8 TFLOP (6 %); nf4_few_rows at 50 % of its limit, bound by the look-up of values,
and twice as fast as the same linear in bf16 (2 % with tiles that were rearranged; about 19 % with those of
few_rows_linear.py, 1.4 times as slow as in bf16).
"""

import torch
import torch.nn.functional as F

from benchmarks.ops import Op, random_input
from benchmarks.timing import COPY, MATMUL
from ligermodels.kernels.quant.fp8 import Float8, fp8_dequantize_reference
from ligermodels.kernels.quant.mxfp4 import EXPONENT_BIAS, Mxfp4Layout, mxfp4_dequantize_reference
from ligermodels.kernels.quant.nf4 import Nf4, nf4_dequantize_reference
from ligermodels.kernels.quant.quantised_weight import QuantisedWeight

MANY, ONE, SMALL = (16384, 4096, 14336), (1, 4096, 14336), (64, 1024, 1024)
BF16_BYTES = 2


def layout_of(inputs, outputs):
    return Nf4((outputs, inputs), (outputs,), torch.bfloat16)


def draw(rows, inputs, outputs, trained=True):
    weight = random_input(outputs, inputs, scale=inputs**-0.5).detach()
    return [random_input(rows, inputs).requires_grad_(trained), layout_of(inputs, outputs).quantize(weight)]


def dense_weight(x, data, outputs):
    return nf4_dequantize_reference(data, layout_of(x.shape[1], outputs))


def dense_products(rows, inputs, outputs):
    x, weight = (y.detach() for y in (random_input(rows, inputs), random_input(outputs, inputs)))
    return lambda: (x @ weight.T) @ weight


def bytes_of(rows, inputs, outputs):
    return {"forward": layout_of(inputs, outputs).nbytes}


dequantize = Op(
    "nf4_dequantize", [MANY, SMALL], lambda rows, inputs, outputs: draw(1, inputs, outputs, trained=False),
    lambda x, data: nf4_dequantize_reference(data, layout_of(x.shape[1], outputs_of(data, x.shape[1]))),
    lambda rows, inputs, outputs: {"forward": layout_of(inputs, outputs).nbytes + BF16_BYTES * inputs * outputs},
    ceiling=COPY,
)  # fmt: skip
frozen = Op(
    "frozen_linear", [MANY, SMALL], draw,
    lambda x, data: F.linear(x, dense_weight(x, data, outputs_of(data, x.shape[1])).to(x.dtype)),
    lambda rows, inputs, outputs: {"forward+backward": 4 * rows * inputs * outputs}, ceiling=MATMUL,
    exclude_gradients=True, limit_function=dense_products,
)  # fmt: skip
few_rows = Op(
    "nf4_few_rows", [ONE, (1, 64, 64)], lambda rows, inputs, outputs: draw(rows, inputs, outputs, trained=False),
    lambda x, data: F.linear(x, dense_weight(x, data, outputs_of(data, x.shape[1])).to(x.dtype)), bytes_of,
    ceiling=COPY,
)  # fmt: skip


def outputs_of(data, inputs):
    """The rows of a weight with so many bytes."""
    return next(rows for rows in range(1, data.numel()) if layout_of(inputs, rows).nbytes == data.numel())


def in_fp8(inputs, outputs):
    return Float8((outputs, inputs), (outputs,), torch.bfloat16)


def in_mxfp4(inputs, outputs):
    return Mxfp4Layout((outputs, inputs), (outputs,), torch.bfloat16)


def fp8_bytes(rows, inputs, outputs):
    weight = random_input(outputs, inputs, scale=inputs**-0.5).detach()
    return [in_fp8(inputs, outputs).quantize(weight), torch.empty(outputs, inputs, device="meta")]


def mxfp4_bytes(rows, inputs, outputs):
    layout = in_mxfp4(inputs, outputs)
    data = random_input(layout.nbytes).detach().mul(64).to(torch.int8).view(torch.uint8)
    layout.view(data)[0].fill_(EXPONENT_BIAS - 5)
    return [data, torch.empty(outputs, inputs, device="meta")]


def dequantize_mxfp4(data, like):
    exponents, codes = in_mxfp4(*like.shape[::-1]).view(data)
    return mxfp4_dequantize_reference(codes, exponents)


def dequantize_fp8(data, like):
    return fp8_dequantize_reference(data, in_fp8(*like.shape[::-1]))


def written_and_read(layout):
    return lambda rows, inputs, outputs: {
        "forward": layout(inputs, outputs).nbytes + BF16_BYTES * inputs * outputs
    }  # fmt: skip


fp8 = Op("fp8_dequantize", [MANY, SMALL], fp8_bytes, dequantize_fp8, written_and_read(in_fp8), ceiling=COPY)
mxfp4 = Op("mxfp4_dequantize", [MANY, SMALL], mxfp4_bytes, dequantize_mxfp4, written_and_read(in_mxfp4), ceiling=COPY)


def add_providers(op, reference, layout):
    op.provider("pytorch")(lambda rows, inputs, outputs: reference)
    op.provider("ligermodels")(lambda rows, *sizes: lambda data, like: layout(*sizes).dequantize(data))


add_providers(fp8, dequantize_fp8, in_fp8)
add_providers(mxfp4, dequantize_mxfp4, in_mxfp4)


@dequantize.provider("pytorch")
def plain_dequantize(rows, inputs, outputs):
    return lambda x, data: nf4_dequantize_reference(data, layout_of(inputs, outputs))


@dequantize.provider("ligermodels")
def our_dequantize(rows, inputs, outputs):
    return lambda x, data: layout_of(inputs, outputs).dequantize(data)


@frozen.provider("pytorch", layout=lambda x, data: (x, dense_weight(x, data, outputs_of(data, x.shape[1]))))
def dense_linear(rows, inputs, outputs):
    """The dense weight: what a base in bf16 would take."""
    return F.linear


@frozen.provider("ligermodels")
def our_frozen_linear(rows, inputs, outputs):
    from ligermodels.kernels.quant.quantised_weight import frozen_linear

    return lambda x, data: frozen_linear(x, QuantisedWeight(data, layout_of(inputs, outputs)))


@few_rows.provider("pytorch", layout=lambda x, data: (x, dense_weight(x, data, outputs_of(data, x.shape[1]))))
def dense_few_rows(rows, inputs, outputs):
    return F.linear


@few_rows.provider("ligermodels")
def our_few_rows(rows, inputs, outputs):
    from ligermodels.kernels.decoding.few_rows_linear import few_rows_linear

    return lambda x, data: few_rows_linear(x, QuantisedWeight(data, layout_of(inputs, outputs)))
