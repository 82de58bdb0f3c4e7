"""LayerNorm. Shape: [rows, columns]. The time of the last shape is bound by the host."""

import torch.nn.functional as F

from benchmarks.ops import Op, random_input, work_per_pass
from benchmarks.rms_norm import MAIN, SHAPES
from ligermodels.kernels.norms.layer_norm import layer_norm_reference

EPS = 1e-5


def inputs(rows, columns):
    return [random_input(rows, columns), random_input(columns), random_input(columns)]


layer_norm = Op(
    "layer_norm", SHAPES, inputs, lambda x, weight, bias: layer_norm_reference(x, weight, bias, EPS),
    work=lambda rows, columns: work_per_pass(2 * 2 * rows * columns, 3 * 2 * rows * columns),
)  # fmt: skip


@layer_norm.provider("pytorch")
def pytorch(rows, columns):
    return lambda x, weight, bias: F.layer_norm(x, (columns,), weight, bias, EPS)


@layer_norm.provider("liger")
def liger(rows, columns):
    from liger_kernel.transformers.functional import liger_layer_norm

    return lambda x, weight, bias: liger_layer_norm(x, weight, bias, EPS)


@layer_norm.provider("ligermodels")
def ours(rows, columns):
    from ligermodels.kernels.norms.layer_norm import layer_norm

    return lambda x, weight, bias: layer_norm(x, weight, bias, EPS)


layer_norm.add_compiled(MAIN)
