"""Head and loss of DPO from hidden states, with a reference, forward and backward, in the shape of Liger's table.

Shape: [pairs, tokens of a completion, hidden, vocabulary]. Rows are the chosen completions, then the rejected ones, as
Liger takes them. The limit is five matrix products: four of the policy, one of the reference. Peak memory includes both
heads and the gradients, as in Liger's benchmarks.
"""

from functools import partial

import torch

from benchmarks.cross_entropy import SPREAD
from benchmarks.linear_logprobs import plain, products
from benchmarks.ops import Op, random_input
from benchmarks.timing import MATMUL
from ligermodels import losses
from ligermodels.kernels.losses.linear_logprobs import linear_logprobs, linear_logprobs_reference
from ligermodels.kernels.losses.linear_logprobs_loss import linear_logprobs_loss

BETA = 0.1
SHAPES = [(8, 1024, 4096, 128256), (16, 1024, 4096, 128256), (16, 512, 1024, 128256), (4, 64, 256, 4096)]


def inputs(pairs, length, hidden, vocab):
    rows = random_input(2 * pairs * length, hidden)
    weight = random_input(vocab, hidden, scale=SPREAD * hidden**-0.5)
    reference = (rows.detach() + random_input(2 * pairs * length, hidden, scale=0.01).detach()).to(rows.dtype)
    return [rows, weight, torch.randint(vocab, (2 * pairs, length)), reference, weight.detach().clone()]


def dpo(logprobs):
    """The loss, from a function of (hidden, weight, targets) that returns log-probabilities."""

    def loss(hidden, weight, targets, ref_hidden, ref_weight):
        sequences = len(targets)
        with torch.no_grad():
            reference = by_pair(logprobs(ref_hidden, ref_weight, targets.flatten()), sequences)
        policy = by_pair(logprobs(hidden, weight, targets.flatten()), sequences)
        cu_seqlens = offsets(targets)
        return losses.dpo(policy, cu_seqlens, losses.pair_sums(reference, cu_seqlens), beta=BETA).loss * 2 / sequences

    return loss


def by_pair(logprobs, sequences):
    """Chosen and rejected alternating, as the losses take them."""
    return logprobs.view(2, sequences // 2, -1).transpose(0, 1).reshape(-1)


def offsets(targets):
    sequences, length = targets.shape
    return torch.arange(sequences + 1, dtype=torch.int32, device=targets.device) * length


def in_pairs(hidden, weight, targets, *reference):
    """The completions of a pair one after the other, as in a run."""

    def alternating(x):
        return x.view(2, len(targets) // 2, -1).transpose(0, 1).reshape(x.shape)

    reference = (alternating(reference[0]), reference[1]) if reference else ()
    return [alternating(hidden), weight, alternating(targets), *reference]


def in_one_pass(share, size):
    """The gradients of the head are formed in the forward pass, as in a run.

    share(log-probabilities, targets, part, sums of the reference): the loss of the sequences `part`, groups of `size`.
    """

    def loss(hidden, weight, targets, *reference):
        length, flat, sums = targets.shape[1], targets.flatten(), None
        if reference:
            with torch.no_grad():
                sums = losses.segment_sums(linear_logprobs(*reference, flat).logprobs, offsets(targets))

        def row_loss(logprobs, _, rows):
            part = slice(rows.start // length, rows.stop // length)
            return share(logprobs, targets, part, None if sums is None else sums[part])

        borders = range(0, len(flat) + 1, size * length)
        return linear_logprobs_loss(hidden, weight, flat, row_loss, borders=borders).loss

    return loss


def pairs_in_one_pass(loss):
    """A negative log-likelihood is over the tokens of the chosen sides."""

    def share(logprobs, targets, part, sums):
        found = loss(logprobs, offsets(targets[part]), *([] if sums is None else [sums]))
        return (found.loss + found.nll / targets.shape[1]) * 2 / len(targets)

    return in_one_pass(share, 2)


def ours(function, **options):
    return dpo(lambda *inputs: function(*inputs, **options).logprobs)


dpo_loss = Op(
    "dpo_loss", SHAPES, inputs, ours(linear_logprobs_reference),
    work=lambda pairs, length, hidden, vocab: {"forward+backward": 20 * pairs * length * hidden * vocab},
    ceiling=MATMUL, limit_function=lambda pairs, length, *head: five_products(2 * pairs * length, *head),
    max_error_ratio=16.0,  # peers round logits to bf16, and a loss is the small difference of long sums of them
)  # fmt: skip


def five_products(*shape):
    four, one = products(4)(*shape), products(1)(*shape)
    return lambda: (four(), one())


def liger(pairs, length, *_):
    from liger_kernel.chunked_loss import LigerFusedLinearDPOLoss

    made = LigerFusedLinearDPOLoss(beta=BETA, compiled=torch.cuda.is_available())

    def loss(hidden, weight, targets, ref_hidden, ref_weight):
        rows, references = (x.view(2 * pairs, length, -1) for x in (hidden, ref_hidden))
        found = made(weight, rows, targets, ref_input=references, ref_weight=ref_weight)
        return found[0]

    return loss


dpo_loss.provider("ligermodels")(lambda *shape: ours(linear_logprobs))
dpo_loss.provider("ligermodels, low memory")(lambda *shape: ours(linear_logprobs, low_memory=True))
dpo_loss.provider("ligermodels, gradients in the forward", layout=in_pairs)(
    lambda *shape: pairs_in_one_pass(partial(losses.dpo, beta=BETA))
)
dpo_loss.provider("liger")(liger)
dpo_loss.provider("pytorch")(lambda *shape: dpo(plain))
dpo_loss.add_compiled(SHAPES)
