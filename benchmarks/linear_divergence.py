"""The divergence of a student from a teacher, with both output projections, forward and backward.

Shape: [tokens, student's hidden, teacher's hidden, vocabulary]; from a top-k teacher [tokens, hidden, k, vocabulary].
The limit is the time of the matrix products alone, three of the student's head and one of the teacher's, measured in
the same run. Peak memory excludes the gradients of the student's hidden states and weight. One op for each kind.
"""

import torch

from benchmarks.cross_entropy import SPREAD
from benchmarks.ops import Op, linear_matmuls, random_input
from benchmarks.timing import MATMUL
from ligermodels.kernels.losses import linear_divergence_chunks
from ligermodels.kernels.losses.linear_divergence import linear_divergence, linear_divergence_reference
from ligermodels.losses import divergence, top_k_divergence

MAIN = [(8192, 4096, 4096, 128256), (8192, 2048, 4096, 128256)]
SMALL = (64, 1024, 1024, 1024)
TOP_K_SHAPES = [(8192, 4096, 64, 128256), (64, 1024, 8, 1024)]
TRL_BETA = {"forward_kl": 0.0, "reverse_kl": 1.0, "jsd": 0.5}


def model(tokens, hidden, vocab):
    return random_input(tokens, hidden), random_input(vocab, hidden, scale=SPREAD * hidden**-0.5)


def inputs(tokens, hidden, teacher_hidden, vocab):
    teacher = (x.detach() for x in model(tokens, teacher_hidden, vocab))
    return [*model(tokens, hidden, vocab), *teacher]


def top_k_inputs(tokens, hidden, k, vocab):
    logprobs, ids = (SPREAD * torch.randn(tokens, vocab)).log_softmax(-1).topk(k)
    return [*model(tokens, hidden, vocab), ids, logprobs]


def matmuls(tokens, hidden, teacher_hidden, vocab):
    students = linear_matmuls(tokens, hidden, vocab)
    x, weight = (x.detach() for x in model(tokens, teacher_hidden, vocab))
    logits = torch.empty(tokens, vocab, dtype=x.dtype)

    def multiply():
        return torch.mm(x, weight.T, out=logits), students()

    return multiply


def mean_of(function, **options):
    """Its loss, which is a sum, divided by the number of tokens."""
    return lambda hidden, weight, *teacher: function(hidden, weight, teacher, **options).loss / hidden.shape[0]


def with_chunks_of(size, function):
    """`function` with other chunks of logits, in bytes."""

    def call(*inputs):
        default, linear_divergence_chunks.MAX_CHUNK_BYTES = linear_divergence_chunks.MAX_CHUNK_BYTES, size
        try:
            return function(*inputs)
        finally:
            linear_divergence_chunks.MAX_CHUNK_BYTES = default

    return call


def add_op(kind):
    op = Op(
        f"linear_divergence_{kind}", [*MAIN, SMALL], inputs, mean_of(linear_divergence_reference, kind=kind),
        work=lambda tokens, hidden, teacher, vocab: {"forward+backward": 2 * tokens * vocab * (3 * hidden + teacher)},
        ceiling=MATMUL, limit_function=matmuls, exclude_gradients=True,
    )  # fmt: skip

    @op.provider("pytorch")
    def pytorch(*shape):
        return lambda hidden, weight, teacher_hidden, teacher_weight: divergence(
            (hidden @ weight.T).float(), (teacher_hidden @ teacher_weight.T).float(), kind=kind
        ).mean()

    @op.provider("ligermodels")
    def ours(*shape):
        return mean_of(linear_divergence, kind=kind)

    for gib in (1, 4):
        op.provider(f"ligermodels, chunks of {gib} GiB", MAIN)(
            lambda *shape, gib=gib: with_chunks_of(gib * 2**30, ours(*shape))
        )
    if kind in TRL_BETA:

        @op.provider("trl")
        def trl(*shape):
            from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

            return lambda hidden, weight, *teacher: ChunkedDivergenceFunction.apply(
                hidden, weight, None, *teacher, None, TRL_BETA[kind]
            )[0].mean()

    return op


ops_of_kinds = {kind: add_op(kind) for kind in ("forward_kl", "reverse_kl", "jsd", "tvd", "cosine")}


def liger_distillation(loss, tokens, vocab):
    """A loss of Liger's chunked_loss, without its cross-entropy's share. It needs labels."""
    labels = torch.randint(vocab, (tokens,))
    return lambda hidden, weight, *teacher: loss(hidden, weight, *teacher, labels)


@ops_of_kinds["jsd"].provider("liger")
def liger_jsd(tokens, hidden, teacher_hidden, vocab):
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    return liger_distillation(LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0), tokens, vocab)


@ops_of_kinds["jsd"].provider("liger, fused_linear_jsd")
def liger_fused_linear_jsd(*shape):
    from liger_kernel.transformers import LigerFusedLinearJSD

    return LigerFusedLinearJSD(jsd_beta=0.5)


@ops_of_kinds["cosine"].provider("liger")
def liger_cosine(tokens, hidden, teacher_hidden, vocab):
    from liger_kernel.chunked_loss import LigerFusedLinearCosineSimilarityLoss

    loss = LigerFusedLinearCosineSimilarityLoss(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=1.0)
    return liger_distillation(loss, tokens, vocab)


top_k = Op(
    "linear_divergence_top_k", TOP_K_SHAPES, top_k_inputs, mean_of(linear_divergence_reference),
    work=lambda tokens, hidden, k, vocab: {"forward+backward": 6 * tokens * hidden * vocab},
    ceiling=MATMUL, limit_function=lambda tokens, hidden, k, vocab: linear_matmuls(tokens, hidden, vocab),
    exclude_gradients=True,
)  # fmt: skip


@top_k.provider("pytorch")
def pytorch_top_k(*shape):
    return lambda hidden, weight, *teacher: top_k_divergence((hidden @ weight.T).float(), *teacher).mean()


@top_k.provider("ligermodels")
def ours_top_k(*shape):
    return mean_of(linear_divergence)
