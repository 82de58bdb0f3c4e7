"""SwiGLU and GeGLU (tanh), and their backward that also recomputes the product. Shape: [rows, columns].

ligermodels reads one packed gate_up tensor. The other providers get separate gate and up tensors, the outputs of
unpacked projections.
"""

import torch
import torch.nn.functional as F

from benchmarks.ops import Op, random_input, work_per_pass
from ligermodels.kernels.activations.gated_activation import gated_activation_reference

MAIN = [(16384, 14336), (64, 1024)]  # the time of the last is bound by the host
SHAPES = [(2048, 14336), *MAIN]


def inputs(rows, columns):
    return [random_input(rows, columns), random_input(rows, columns)]


def packed(gate, up):
    return (torch.cat((gate, up), -1),)


def work(rows, columns):
    return work_per_pass(3 * 2 * rows * columns, 5 * 2 * rows * columns)


def gated_op(name, activation):
    return Op(name, SHAPES, inputs, lambda *pair: gated_activation_reference(*packed(*pair), activation), work)


swiglu = gated_op("swiglu", "silu")
geglu = gated_op("geglu", "gelu_tanh")


@swiglu.provider("pytorch")
def pytorch_swiglu(*shape):
    return lambda gate, up: F.silu(gate) * up


@swiglu.provider("liger")
def liger_swiglu(*shape):
    from liger_kernel.transformers.functional import liger_swiglu

    return liger_swiglu


@swiglu.provider("ligermodels", layout=packed)
def our_swiglu(*shape):
    from ligermodels.kernels.activations.gated_activation import swiglu

    return swiglu


@geglu.provider("pytorch")
def pytorch_geglu(*shape):
    return lambda gate, up: F.gelu(gate, approximate="tanh") * up


@geglu.provider("liger")
def liger_geglu(*shape):
    from liger_kernel.transformers.functional import liger_geglu

    return liger_geglu


@geglu.provider("ligermodels", layout=packed)
def our_geglu(*shape):
    from ligermodels.kernels.activations.gated_activation import gated_activation

    return lambda gate_up: gated_activation(gate_up, "gelu_tanh")


def backward_inputs(rows, columns):
    return [random_input(rows, columns).detach() for _ in range(3)]


def backward_op(name, activation):
    """An op from the upstream gradient, gate and up to the gradients of gate and up and the recomputed product."""

    def reference(dy, gate, up):
        pair = [x.detach().requires_grad_() for x in (gate, up)]
        product = gated_activation_reference(*packed(*pair), activation)
        return [*torch.autograd.grad(product, pair, dy), product.detach()]

    def ours(*shape):
        from ligermodels.kernels.activations.gated_activation import gated_activation_backward

        def backward(dy, gate_up):
            dgate_up, product, _ = gated_activation_backward(dy, gate_up, activation, True)
            return *dgate_up.chunk(2, -1), product

        return backward

    op = Op(name, SHAPES, backward_inputs, reference, work=lambda rows, columns: {"forward": 6 * 2 * rows * columns})
    op.provider("ligermodels", layout=lambda dy, *pair: (dy, *packed(*pair)))(ours)
    return op


swiglu_backward = backward_op("swiglu_backward", "silu")
geglu_backward = backward_op("geglu_backward", "gelu_tanh")


@swiglu_backward.provider("pytorch")
def pytorch_swiglu_backward(*shape):
    def backward(dy, gate, up):
        activated = F.silu(gate)
        return torch.ops.aten.silu_backward(dy * up, gate), dy * activated, activated * up

    return backward


@geglu_backward.provider("pytorch")
def pytorch_geglu_backward(*shape):
    def backward(dy, gate, up):
        activated = F.gelu(gate, approximate="tanh")
        return torch.ops.aten.gelu_backward(dy * up, gate, approximate="tanh"), dy * activated, activated * up

    return backward


for op in (swiglu, geglu, swiglu_backward, geglu_backward):
    op.add_compiled(MAIN)
