"""The two fused autograd nodes of a block, forward and backward. Shape: [tokens, hidden, intermediate].

norm_linear is residual add, RMSNorm and the gate and up projection. gated_linear is SwiGLU and the down projection.
The limit is the time of the node's three matrix products alone, measured in the same run. Peak memory includes the
tensors saved for backward and excludes the gradients.
"""

import torch.nn.functional as F

from benchmarks.ops import Op, linear_matmuls, random_input
from benchmarks.rms_norm import EPS
from benchmarks.timing import MATMUL
from ligermodels.kernels.linear.linear import gated_linear_reference, norm_linear_reference

SHAPES = [(16384, 4096, 14336), (64, 1024, 1024)]  # the time of the last is bound by the host


def norm_linear_inputs(tokens, hidden, inner):
    stream = random_input(tokens, hidden), random_input(tokens, hidden)
    return [*stream, random_input(hidden), random_input(2 * inner, hidden, scale=hidden**-0.5)]


def gated_linear_inputs(tokens, hidden, inner):
    return [random_input(tokens, 2 * inner), random_input(hidden, inner, scale=inner**-0.5)]


def fused_op(name, inputs, reference, sides, restore_inputs=False):
    """sides(hidden, inner) -> the input and output features of the linear layer."""

    def work(tokens, hidden, inner):
        columns, rows = sides(hidden, inner)
        return {"forward+backward": 6 * tokens * columns * rows}

    return Op(
        name, SHAPES, inputs, reference, work, ceiling=MATMUL, exclude_gradients=True, restore_inputs=restore_inputs,
        limit_function=lambda tokens, hidden, inner: linear_matmuls(tokens, *sides(hidden, inner)),
    )  # fmt: skip


norm_linear = fused_op(
    "norm_linear", norm_linear_inputs,
    lambda x, residual, norm_weight, weight: norm_linear_reference(x, residual, norm_weight, weight, None, EPS),
    lambda hidden, inner: (hidden, 2 * inner),
)  # fmt: skip
# restore_inputs: Liger overwrites gate and up with their gradients. They would become zero within a few calls, and a
# matrix product of zeros is faster.
gated_linear = fused_op(
    "gated_linear", gated_linear_inputs,
    lambda gate_up, weight: gated_linear_reference(gate_up, weight, None, "silu"),
    lambda hidden, inner: (inner, hidden), restore_inputs=True,
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
    from ligermodels.kernels.linear.linear import norm_linear

    return lambda *inputs: norm_linear(*inputs, None, EPS)


@gated_linear.provider("pytorch")
def pytorch_gated_linear(*shape):
    def activate_and_multiply(gate_up, weight):
        gate, up = gate_up.chunk(2, -1)
        return F.linear(F.silu(gate) * up, weight)

    return activate_and_multiply


def unpacked(gate_up, weight):
    """Separate contiguous gate and up, the outputs of unpacked projections."""
    return *(x.contiguous() for x in gate_up.chunk(2, -1)), weight


@gated_linear.provider("liger", layout=unpacked)
def liger_gated_linear(*shape):
    from liger_kernel.transformers.functional import liger_swiglu

    return lambda gate, up, weight: F.linear(liger_swiglu(gate, up), weight)


@gated_linear.provider("ligermodels")
def our_gated_linear(*shape):
    from ligermodels.kernels.linear.linear import gated_linear

    return lambda *inputs: gated_linear(*inputs, None, "silu")


@gated_linear.provider("ligermodels, in place")  # the variant that the models use
def our_gated_linear_in_place(*shape):
    from ligermodels.kernels.linear.linear import gated_linear

    return lambda *inputs: gated_linear(*inputs, None, "silu", inplace=True)


for op in (norm_linear, gated_linear):
    op.add_compiled(SHAPES)
