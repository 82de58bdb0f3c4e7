"""The output projection fused with cross-entropy, forward and backward. Shape: [tokens, hidden, vocabulary].

The limit is the time of the three matrix products alone, measured in the same run. Peak memory excludes the gradients
of hidden and weight.
"""

import torch
import torch.nn.functional as F

from benchmarks.cross_entropy import SPREAD
from benchmarks.ops import Op, linear_matmuls, random_input
from benchmarks.timing import MATMUL
from ligermodels.kernels.losses.linear_cross_entropy import linear_cross_entropy_reference

SHAPES = [
    (16384, 4096, 128256), (16384, 2304, 256000), (16384, 896, 151936), (4096, 4096, 128256), (64, 1024, 1024),
]  # fmt: skip


def inputs(tokens, hidden, vocab):
    return [
        random_input(tokens, hidden),
        random_input(vocab, hidden, scale=SPREAD * hidden**-0.5),
        torch.randint(vocab, (tokens,)),
    ]


linear_cross_entropy = Op(
    "linear_cross_entropy", SHAPES, inputs, linear_cross_entropy_reference,
    work=lambda tokens, hidden, vocab: {"forward+backward": 6 * tokens * hidden * vocab},
    ceiling=MATMUL, limit_function=linear_matmuls, exclude_gradients=True,
)  # fmt: skip


@linear_cross_entropy.provider("pytorch")
def pytorch(*shape):
    return lambda hidden, weight, targets: F.cross_entropy((hidden @ weight.T).float(), targets)


@linear_cross_entropy.provider("liger")
def liger(*shape):
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return liger_fused_linear_cross_entropy


@linear_cross_entropy.provider("liger, fp32 sums")
def liger_fp32_accumulation(*shape):
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return lambda *inputs: liger_fused_linear_cross_entropy(*inputs, accum_dtype=torch.float32)


@linear_cross_entropy.provider("cut-cross-entropy")
def cut_cross_entropy(*shape):
    from cut_cross_entropy import linear_cross_entropy

    return lambda *inputs: linear_cross_entropy(*inputs, impl="cce")


@linear_cross_entropy.provider("quack")
def quack(*shape):
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    return chunked_linear_cross_entropy


@linear_cross_entropy.provider("ligermodels")
def ours(*shape):
    from ligermodels.kernels.losses.linear_cross_entropy import linear_cross_entropy

    return linear_cross_entropy


@linear_cross_entropy.provider("ligermodels, low memory")
def ours_low_memory(*shape):
    from ligermodels.kernels.losses.linear_cross_entropy import linear_cross_entropy

    return lambda *inputs: linear_cross_entropy(*inputs, low_memory=True)


linear_cross_entropy.add_compiled(SHAPES)
