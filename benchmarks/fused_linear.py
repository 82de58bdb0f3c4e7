"""The two fused nodes of a block: [tokens, hidden, inner], forward and backward.

norm_linear is residual add, RMSNorm and the projection to gate and up; gated_linear is SwiGLU and the projection back.
The limit is the time of the node's three matrix products alone, in the same run. The peak of memory holds what is kept
from forward to backward; it leaves out the gradients.
"""

import torch.nn.functional as F

from benchmarks.ops import Op, draw, three_products
from benchmarks.rms_norm import EPS
from benchmarks.timing import MATMUL
from ligermodels.kernels.gated_linear import gated_linear_reference
from ligermodels.kernels.norm_linear import norm_linear_reference

SHAPES = [(16384, 4096, 14336), (64, 1024, 1024)]  # the last is bound by the host


def norm_linear_inputs(tokens, hidden, inner):
    stream = draw(tokens, hidden), draw(tokens, hidden)
    return [*stream, draw(hidden), draw(2 * inner, hidden, scale=hidden**-0.5)]


def gated_linear_inputs(tokens, hidden, inner):
    return [draw(tokens, 2 * inner), draw(hidden, inner, scale=inner**-0.5)]


def fused_op(name, inputs, reference, sides, overwritten=False):
    """sides: from hidden and inner, the linear's inputs and outputs."""

    def work(tokens, hidden, inner):
        columns, rows = sides(hidden, inner)
        return {"forward+backward": 6 * tokens * columns * rows}

    return Op(
        name, SHAPES, inputs, reference, work, ceiling=MATMUL, beyond_gradients=True, overwritten=overwritten,
        alone=lambda tokens, hidden, inner: three_products(tokens, *sides(hidden, inner)),
    )  # fmt: skip


norm_linear = fused_op(
    "norm_linear", norm_linear_inputs,
    lambda x, residual, norm_weight, weight: norm_linear_reference(x, residual, norm_weight, weight, None, EPS),
    lambda hidden, inner: (hidden, 2 * inner),
)  # fmt: skip
# Overwritten: Liger's gradients would make gate and up zeros within a few calls, of which a product is faster.
gated_linear = fused_op(
    "gated_linear", gated_linear_inputs,
    lambda gate_up, weight: gated_linear_reference(gate_up, weight, None, "silu"),
    lambda hidden, inner: (inner, hidden), overwritten=True,
)  # fmt: skip


@norm_linear.provider("pytorch")
def pytorch_norm_linear(tokens, hidden, inner):
    def norm_and_multiply(x, residual, norm_weight, weight):
        total = x + residual
        return F.linear(F.rms_norm(total, (hidden,), norm_weight, EPS), weight), total

    return norm_and_multiply


@norm_linear.provider("liger")
def liger_norm_linear(*shape):
    from liger_kernel.transformers.functional import liger_fused_add_rms_norm

    def norm_and_multiply(x, residual, norm_weight, weight):
        normed, total = liger_fused_add_rms_norm(x, residual, norm_weight, EPS)
        return F.linear(normed, weight), total

    return norm_and_multiply


@norm_linear.provider("ligermodels")
def our_norm_linear(*shape):
    from ligermodels.kernels.norm_linear import norm_linear

    return lambda *inputs: norm_linear(*inputs, None, EPS)


@gated_linear.provider("pytorch")
def pytorch_gated_linear(*shape):
    def activate_and_multiply(gate_up, weight):
        gate, up = gate_up.chunk(2, -1)
        return F.linear(F.silu(gate) * up, weight)

    return activate_and_multiply


def apart(gate_up, weight):
    """Gate and up as unpacked projections leave them."""
    return *(x.contiguous() for x in gate_up.chunk(2, -1)), weight


@gated_linear.provider("liger", layout=apart)
def liger_gated_linear(*shape):
    from liger_kernel.transformers.functional import liger_swiglu

    return lambda gate, up, weight: F.linear(liger_swiglu(gate, up), weight)


@gated_linear.provider("ligermodels")
def our_gated_linear(*shape):
    from ligermodels.kernels.gated_linear import gated_linear

    return lambda *inputs: gated_linear(*inputs, None, "silu")


@gated_linear.provider("ligermodels, in place")  # as in the models
def our_gated_linear_in_place(*shape):
    from ligermodels.kernels.gated_linear import gated_linear

    return lambda *inputs: gated_linear(*inputs, None, "silu", inplace=True)


for op in (norm_linear, gated_linear):
    op.compiled(SHAPES)
