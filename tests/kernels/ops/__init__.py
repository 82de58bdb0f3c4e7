"""The table of all ops, for the tests that hold for every op. A new op adds a function and a line to one of the files.

A case is an op at one size, with its tensors, drawn from (batch, length, *size): odd sizes for the interpreter, sizes
of real models for compiled kernels, and one size beyond 2^31 elements. Ops that are only parts of others (grouped GEMM,
permutation of rows, rescaling) are covered by the cases of those; `test_opcheck` fails if one is not.
"""

from collections.abc import Callable

import pytest

from tests.kernels.ops import (
    activations,
    attention,
    decoding,
    experts,
    linears,
    losses,
    norms,
    optimizers,
    quantised,
    recurrent,
)
from tests.kernels.ops.base import Op

OPS = {
    **norms.OPS, **linears.OPS, **activations.OPS, **attention.OPS, **experts.OPS, **quantised.OPS, **losses.OPS,
    **optimizers.OPS, **decoding.OPS, **recurrent.OPS,
}  # fmt: skip


def parametrize_ops(condition: Callable[[Op], bool] = lambda op: True):
    """Runs a test for each op of the table that meets the condition."""
    chosen = {name: op for name, op in OPS.items() if condition(op)}
    return pytest.mark.parametrize("op", chosen.values(), ids=chosen)
