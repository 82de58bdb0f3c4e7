"""Log-probabilities of targets from hidden states, as preference and reinforcement learning need them.

Shape: [tokens, hidden, vocabulary]. Five ops: both gradients, with the entropy's as well, of hidden alone (a frozen
head, as under LoRA), no gradient (a reference model), and a loss whose gradients the forward computes. The limit is the
time of the fewest matrix products, measured in the same run: 4, 4, 2, 1 and 3. Peak memory excludes the gradients.
"""

import torch

from benchmarks.cross_entropy import SPREAD
from benchmarks.ops import Op, linear_matmuls, random_input
from benchmarks.timing import MATMUL
from ligermodels.kernels.losses.linear_logprobs import linear_logprobs_reference

HEADS = (4096, 128256), (3584, 152064), (2304, 256000), (896, 151936)
SHAPES = [*((tokens, *head) for head in HEADS for tokens in (16384, 8192, 2048)), (64, 1024, 1024)]
FEWER = [(8192, 4096, 128256), (2048, 4096, 128256), (64, 1024, 1024)]  # plain entropy keeps six copies of the logits


def inputs(tokens, hidden, vocab):
    return [
        random_input(tokens, hidden),
        random_input(vocab, hidden, scale=SPREAD * hidden**-0.5),
        torch.randint(vocab, (tokens,)),
    ]


def frozen_inputs(*shape):
    hidden, weight, targets = inputs(*shape)
    return [hidden, weight.detach(), targets]


def inference_inputs(*shape):
    return [x.detach() for x in inputs(*shape)]


def products(count):
    """A function of the shape that returns a callable which computes the first `count` products of a step."""

    def make(tokens, hidden, vocab):
        x, weight = random_input(tokens, hidden).detach(), random_input(vocab, hidden).detach()
        logits, dx = torch.empty(tokens, vocab, dtype=x.dtype), torch.empty_like(x)
        if count >= 3:
            three = linear_matmuls(tokens, hidden, vocab)

        def multiply():
            if count != 3:
                torch.mm(x, weight.T, out=logits)
            return three() if count >= 3 else torch.mm(logits, weight, out=dx) if count == 2 else None

        return multiply

    return make


def logprobs_op(name, make_inputs, reference, count, shapes=SHAPES):
    label = "forward" if count == 1 else "forward+backward"
    return Op(
        name, shapes, make_inputs, reference,
        work=lambda tokens, hidden, vocab: {label: 2 * count * tokens * hidden * vocab},
        ceiling=MATMUL, limit_function=products(count), exclude_gradients=True,
    )  # fmt: skip


def token_loss(logprobs, entropies, rows):
    """The loss of a row depends on its own log-probability alone, as in GRPO with one update a batch."""
    advantage = torch.sin(torch.arange(rows.start, rows.stop, device=logprobs.device, dtype=torch.float32))
    return -((logprobs - logprobs.detach()).exp() * advantage).sum() / 1024


def reference_loss(*inputs):
    logprobs = linear_logprobs_reference(*inputs).logprobs
    return token_loss(logprobs, None, slice(0, logprobs.numel()))


linear_logprobs = logprobs_op("linear_logprobs", inputs, lambda *x: linear_logprobs_reference(*x).logprobs, 4)
linear_logprobs_entropy = logprobs_op(
    "linear_logprobs_entropy", inputs, lambda *x: linear_logprobs_reference(*x, entropy=True)[:2], 4, FEWER
)
linear_logprobs_frozen = logprobs_op(
    "linear_logprobs_frozen", frozen_inputs, lambda *x: linear_logprobs_reference(*x).logprobs, 2
)
linear_logprobs_inference = logprobs_op(
    "linear_logprobs_inference", inference_inputs, lambda *x: linear_logprobs_reference(*x).logprobs, 1
)
linear_logprobs_loss = logprobs_op("linear_logprobs_loss", inputs, reference_loss, 3)
LOGPROBS = linear_logprobs, linear_logprobs_frozen, linear_logprobs_inference


def plain(hidden, weight, targets):
    return (hidden @ weight.T).float().log_softmax(-1).gather(-1, targets[:, None])[:, 0]


def plain_with_entropy(hidden, weight, targets):
    log_probs = (hidden @ weight.T).float().log_softmax(-1)
    return log_probs.gather(-1, targets[:, None])[:, 0], -(log_probs.exp() * log_probs).sum(-1)


def ours(**options):
    from ligermodels.kernels.losses.linear_logprobs import linear_logprobs

    return lambda *inputs: linear_logprobs(*inputs, **options)


def trl(*outputs):
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE as SIZE

    def logprobs(hidden, weight, targets):
        return ChunkedLogProbFunction.apply(hidden, weight, None, targets, 1.0, SIZE, None, 1.0, outputs)

    return logprobs


def liger():
    from liger_kernel.chunked_loss.fused_linear_ppo import _SELECTIVE_LOGPROB_VOCAB_CHUNK_SIZE as SIZE
    from liger_kernel.chunked_loss.fused_linear_ppo import _ChunkedSelectiveLogProbFunction

    return lambda *inputs: _ChunkedSelectiveLogProbFunction.apply(*inputs, None, 1.0, SIZE)


def first(function):
    return lambda *inputs: function(*inputs)[0]


for op in LOGPROBS:
    op.provider("pytorch")(lambda *shape: plain)
    op.provider("trl")(lambda *shape: first(trl()))
    op.provider("liger")(lambda *shape: liger())
    op.provider("ligermodels")(lambda *shape: first(ours()))
    op.provider("ligermodels, low memory")(lambda *shape: first(ours(low_memory=True)))
    op.add_compiled(op.shapes)

linear_logprobs_entropy.provider("pytorch")(lambda *shape: plain_with_entropy)
linear_logprobs_entropy.provider("trl")(lambda *shape: lambda *inputs: trl("entropy")(*inputs)[:2])
linear_logprobs_entropy.provider("ligermodels")(lambda *shape: lambda *inputs: ours(entropy=True)(*inputs)[:2])
linear_logprobs_entropy.add_compiled(FEWER)


def loss_of(logprobs):
    return lambda *inputs: token_loss(logprobs(*inputs), None, slice(0, len(inputs[0])))


def with_logits(kept, *inputs):
    """Ours, with all logits kept for backward, or with none."""
    from ligermodels.kernels.losses import linear_logprobs as module

    keeps, module.keeps_logits = module.keeps_logits, lambda *size: kept
    try:
        return module.linear_logprobs(*inputs).logprobs
    finally:
        module.keeps_logits = keeps


@linear_logprobs.provider("ligermodels, recompute", SHAPES)
def ours_recompute(*shape):
    """Without keeping the logits of few rows."""
    return lambda *inputs: with_logits(False, *inputs)


@linear_logprobs.provider("ligermodels, half kept", [shape for shape in SHAPES if shape[0] == 16384])
def ours_half_kept(tokens, *_):
    """Keeps the logits of half of the rows and computes the others again: 3.5 products, 2 N V bytes."""
    half = tokens // 2

    def logprobs(hidden, weight, targets):
        parts = (True, slice(0, half)), (False, slice(half, tokens))
        return torch.cat([with_logits(kept, hidden[rows], weight, targets[rows]) for kept, rows in parts])

    return logprobs


@linear_logprobs_loss.provider("ligermodels")
def ours_loss(*shape):
    from ligermodels.kernels.losses.linear_logprobs_loss import linear_logprobs_loss

    return lambda *inputs: linear_logprobs_loss(*inputs, token_loss).loss


linear_logprobs_loss.provider("pytorch")(lambda *shape: loss_of(plain))
linear_logprobs_loss.provider("trl")(lambda *shape: loss_of(first(trl())))
linear_logprobs_loss.provider("liger")(lambda *shape: loss_of(liger()))
linear_logprobs_loss.provider("ligermodels, recompute")(lambda *shape: loss_of(first(ours())))
linear_logprobs_loss.add_compiled(SHAPES)
