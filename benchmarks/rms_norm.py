"""RMSNorm, and residual add + RMSNorm. Shape: [rows, columns]. The time of the last shape is bound by the host."""

import torch.nn.functional as F

from benchmarks.ops import Op, random_input, work_per_pass
from ligermodels.kernels.norms.rms_norm import add_rms_norm_reference, rms_norm_reference

EPS = 1e-6
MAIN = [(16384, 4096), (16384, 8192), (64, 1024)]
SHAPES = [(16384, width) for width in (2048, 2880, 3584, 4096, 5120, 8192, 16384)] + [(64, 1024)]


def norm_inputs(rows, columns):
    return [random_input(rows, columns), random_input(columns)]


def add_norm_inputs(rows, columns):
    return [random_input(rows, columns), random_input(rows, columns), random_input(columns)]


rms_norm = Op(
    "rms_norm", SHAPES, norm_inputs, lambda x, weight: rms_norm_reference(x, weight, EPS),
    work=lambda rows, columns: work_per_pass(2 * 2 * rows * columns, 3 * 2 * rows * columns),
)  # fmt: skip
add_rms_norm = Op(
    "add_rms_norm", SHAPES, add_norm_inputs, lambda x, y, weight: add_rms_norm_reference(x, y, weight, EPS),
    work=lambda rows, columns: work_per_pass(4 * 2 * rows * columns, 4 * 2 * rows * columns),
)  # fmt: skip


@rms_norm.provider("pytorch")
def pytorch(rows, columns):
    return lambda x, weight: F.rms_norm(x, (columns,), weight, EPS)


@rms_norm.provider("liger")
def liger(rows, columns):
    from liger_kernel.transformers.functional import liger_rms_norm

    return lambda x, weight: liger_rms_norm(x, weight, EPS)


@rms_norm.provider("quack", MAIN)
def quack(rows, columns):
    from quack import rmsnorm

    return lambda x, weight: rmsnorm(x, weight, eps=EPS)


@rms_norm.provider("ligermodels")
def ours(rows, columns):
    from ligermodels.kernels.norms.rms_norm import rms_norm

    return lambda x, weight: rms_norm(x, weight, EPS)


@add_rms_norm.provider("pytorch")
def pytorch_add(rows, columns):
    def add_norm(x, residual, weight):
        hidden = x + residual
        return F.rms_norm(hidden, (columns,), weight, EPS), hidden

    return add_norm


@add_rms_norm.provider("liger")
def liger_add(rows, columns):
    from liger_kernel.transformers.functional import liger_fused_add_rms_norm

    return lambda x, residual, weight: liger_fused_add_rms_norm(x, residual, weight, EPS)


@add_rms_norm.provider("quack", MAIN)
def quack_add(rows, columns):
    from quack import rmsnorm

    return lambda x, residual, weight: rmsnorm(x, weight, residual=residual, eps=EPS, prenorm=True)


@add_rms_norm.provider("ligermodels")
def ours_add(rows, columns):
    from ligermodels.kernels.norms.rms_norm import add_rms_norm

    return lambda x, residual, weight: add_rms_norm(x, residual, weight, EPS)


rms_norm.add_compiled(MAIN)
add_rms_norm.add_compiled(MAIN)
