"""Cross-entropy of logits [rows, vocabulary], forward and backward.

The minimum traffic reads the logits once and writes their gradient once. Liger overwrites its input with the gradient.
"""

import torch
import torch.nn.functional as F

from benchmarks.ops import Op, random_input
from ligermodels.kernels.losses.cross_entropy import cross_entropy_reference

SPREAD = 3.0  # standard deviation of the logits: the gradient is not concentrated on the target alone
SHAPES = [(8192, 128256), (8192, 262144), (64, 1024)]


def inputs(rows, vocab):
    return [random_input(rows, vocab, scale=SPREAD), torch.randint(vocab, (rows,))]


cross_entropy = Op(
    "cross_entropy", SHAPES, inputs, cross_entropy_reference,
    work=lambda rows, vocab: {"forward+backward": 2 * 2 * rows * vocab},
)  # fmt: skip


@cross_entropy.provider("pytorch")
def pytorch(*shape):
    return lambda logits, targets: F.cross_entropy(logits.float(), targets)


@cross_entropy.provider("liger")
def liger(*shape):
    from liger_kernel.transformers.functional import liger_cross_entropy

    return liger_cross_entropy


@cross_entropy.provider("quack")
def quack(*shape):
    from quack import cross_entropy

    return lambda logits, targets: cross_entropy(logits, targets).mean()


@cross_entropy.provider("ligermodels")
def ours(*shape):
    from ligermodels.kernels.losses.cross_entropy import cross_entropy

    return cross_entropy


@cross_entropy.provider("ligermodels, in place")
def ours_in_place(*shape):
    from ligermodels.kernels.losses.cross_entropy import cross_entropy

    return lambda logits, targets: cross_entropy(logits, targets, inplace=True)


cross_entropy.add_compiled(SHAPES)
