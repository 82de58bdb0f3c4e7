"""Head and loss of ORPO, SimPO, KTO, GRPO and JSD, forward and backward, in the shapes of Liger's tables.

Shape: [sequences, tokens of each, hidden, vocabulary]; of JSD [tokens, student's hidden, teacher's hidden, vocabulary].
Rows of pairs are the chosen completions, then the rejected ones; of KTO every other one is good. KTO and GRPO have a
reference. The limit is the time of the matrix products alone. Peak memory includes the heads and the gradients, as in
Liger's benchmarks. One command for all: python -m benchmarks orpo_loss simpo_loss kto_loss grpo_loss jsd_loss
"""

import math
from functools import partial

import torch
from torch.nn.functional import pad

from benchmarks import linear_divergence as divergences
from benchmarks.dpo_loss import by_pair, five_products, in_one_pass, in_pairs, offsets, pairs_in_one_pass
from benchmarks.dpo_loss import inputs as pairs_with_reference
from benchmarks.linear_logprobs import plain, products
from benchmarks.ops import Op
from benchmarks.timing import MATMUL
from ligermodels import losses
from ligermodels.kernels.losses.linear_logprobs import linear_logprobs, linear_logprobs_reference
from ligermodels.kernels.losses.linear_logprobs_loss import linear_logprobs_loss

PAIRS_SHAPES = [(16, 1024, 4096, 128256), (16, 4096, 4096, 128256), (4, 64, 256, 4096)]
KTO_SHAPES = [(32, 512, 1024, 128256), (4, 64, 256, 4096)]
GRPO_SHAPES = [(16, 1024, 4096, 128256), (4, 64, 256, 4096)]
JSD_SHAPES = [(8192, 4096, 4096, 128256), (64, 1024, 1024, 1024)]
ONE_PASS = "ligermodels, gradients in the forward"
BETA, GAMMA, KL_WEIGHT = 0.1, 0.5, 0.04


def with_reference(sequences, *shape):
    return pairs_with_reference(sequences // 2, *shape)


def without_reference(*shape):
    return with_reference(*shape)[:3]


def judged(targets):
    """Which sequences are good, for KTO."""
    return torch.arange(len(targets), device=targets.device) % 2 == 0


def advantages(targets):
    """Their mean is not 0: the loss would be nothing but rounding, as all ratios are 1."""
    return torch.linspace(-0.5, 1, len(targets), device=targets.device)


def of_logprobs(loss, logprobs):
    """A loss on the inputs of an op, from a function that returns log-probabilities."""

    def call(hidden, weight, targets, *reference):
        with torch.no_grad():
            old = logprobs(*reference, targets.flatten()) if reference else None
        return loss(logprobs(hidden, weight, targets.flatten()), old, targets)

    return call


def of_pairs(loss, policy, targets):
    """The negative log-likelihood is over the tokens of the chosen sides."""
    found = loss(by_pair(policy, len(targets)), offsets(targets))
    return (found.loss + found.nll / targets.shape[1]) * 2 / len(targets)


PAIR_LOSSES = {
    "orpo": partial(losses.orpo, beta=BETA),
    "simpo": partial(losses.simpo, beta=BETA, gamma=GAMMA, nll_weight=1.0),
}


def orpo(policy, _, targets):
    return of_pairs(PAIR_LOSSES["orpo"], policy, targets)


def simpo(policy, _, targets):
    return of_pairs(PAIR_LOSSES["simpo"], policy, targets)


def kto(policy, reference, targets):
    return kto_share(policy, targets, slice(0, len(targets)), losses.segment_sums(reference, offsets(targets)))


def kto_share(policy, targets, part, sums):
    good = judged(targets)[part]
    return losses.kto(policy, offsets(targets[part]), sums, good, 0.0, beta=BETA).loss / len(targets)


def grpo(policy, reference, targets, only=None):
    cu_seqlens = offsets(targets)
    penalty = KL_WEIGHT * losses.kl_penalty(policy, reference, None, cu_seqlens, use_bias_correction_kl=False)
    added = {"token_weights": only, "token_penalty": penalty if only is None else penalty * only}
    return losses.grpo(policy, None, advantages(targets), cu_seqlens, **added) / len(targets)


def grpo_in_chunks(hidden, weight, targets, ref_hidden, ref_weight):
    """The gradients of the head are formed in the forward pass, as in a run."""
    flat = targets.flatten()
    with torch.no_grad():
        reference = linear_logprobs(ref_hidden, ref_weight, flat).logprobs

    def row_loss(logprobs, _, rows):
        around = rows.start, len(flat) - rows.stop
        return grpo(pad(logprobs, around), reference, targets, pad(torch.ones_like(logprobs), around))

    return linear_logprobs_loss(hidden, weight, flat, row_loss).loss


def add_op(name, shapes, inputs, loss, multiplied, limit):
    """multiplied: how many products with a head there are. limit: of a number of rows, as `products(4)`."""

    def ours(function, **options):
        return of_logprobs(loss, lambda *tensors: function(*tensors, **options).logprobs)

    op = Op(
        f"{name}_loss", shapes, inputs, ours(linear_logprobs_reference),
        work=lambda *shape: {"forward+backward": 2 * multiplied * math.prod(shape)},
        ceiling=MATMUL, limit_function=lambda sequences, length, *head: limit(sequences * length, *head),
        max_error_ratio=16.0,  # peers round logits to bf16, and a loss is the small difference of long sums of them
    )  # fmt: skip
    op.provider("ligermodels")(lambda *shape: ours(linear_logprobs))
    op.provider("ligermodels, low memory")(lambda *shape: ours(linear_logprobs, low_memory=True))
    op.provider("pytorch")(lambda *shape: of_logprobs(loss, plain))
    return op


def four_products(*shape):
    three, one = products(3)(*shape), products(1)(*shape)
    return lambda: (three(), one())


orpo_loss = add_op("orpo", PAIRS_SHAPES, without_reference, orpo, 4, products(4))
simpo_loss = add_op("simpo", PAIRS_SHAPES, without_reference, simpo, 4, products(4))
kto_loss = add_op("kto", KTO_SHAPES, with_reference, kto, 5, five_products)
grpo_loss = add_op("grpo", GRPO_SHAPES, with_reference, grpo, 4, four_products)
grpo_loss.provider(ONE_PASS)(lambda *shape: grpo_in_chunks)
kto_loss.provider(ONE_PASS)(lambda *shape: in_one_pass(kto_share, 1))
orpo_loss.provider(ONE_PASS, layout=in_pairs)(lambda *shape: pairs_in_one_pass(PAIR_LOSSES["orpo"]))
simpo_loss.provider(ONE_PASS, layout=in_pairs)(lambda *shape: pairs_in_one_pass(PAIR_LOSSES["simpo"]))


def compiled():
    return torch.cuda.is_available()


def by_sequence(rows, targets):
    return rows.view(*targets.shape, -1)


@orpo_loss.provider("liger")
def liger_orpo(*shape):
    from liger_kernel.chunked_loss import LigerFusedLinearORPOLoss

    made = LigerFusedLinearORPOLoss(beta=BETA, compiled=compiled())
    return lambda hidden, weight, targets: made(weight, by_sequence(hidden, targets), targets)[0]


@simpo_loss.provider("liger")
def liger_simpo(*shape):
    from liger_kernel.chunked_loss import LigerFusedLinearSimPOLoss

    made = LigerFusedLinearSimPOLoss(beta=BETA, gamma=GAMMA, compiled=compiled())
    return lambda hidden, weight, targets: made(weight, by_sequence(hidden, targets), targets)[0]


@kto_loss.provider("liger")
def liger_kto(*shape):
    from liger_kernel.chunked_loss import LigerFusedLinearKTOLoss

    made = LigerFusedLinearKTOLoss(beta=BETA, compiled=compiled(), use_ref_model=True)

    def loss(hidden, weight, targets, ref_hidden, ref_weight):
        rows, references = by_sequence(hidden, targets), by_sequence(ref_hidden, targets)
        labels = judged(targets)
        return made(rows, weight, targets, preference_labels=labels, ref_input=references, ref_weight=ref_weight)[0]

    return loss


@grpo_loss.provider("liger")
def liger_grpo(*shape):
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    made = LigerFusedLinearGRPOLoss(beta=KL_WEIGHT, loss_type="grpo", compiled=compiled(), use_ref_model=True)

    def loss(hidden, weight, targets, ref_hidden, ref_weight):
        rows, references = by_sequence(hidden, targets), by_sequence(ref_hidden, targets)
        more = {"ref_input": references, "ref_weight": ref_weight}
        return made(rows, weight, targets, torch.ones_like(targets), advantages(targets), **more)[0]

    return loss


jsd_loss = Op(
    "jsd_loss", JSD_SHAPES, divergences.inputs, divergences.ops_of_kinds["jsd"].reference,
    work=divergences.ops_of_kinds["jsd"].work, ceiling=MATMUL, limit_function=divergences.matmuls, max_error_ratio=16.0,
)  # fmt: skip
for name in ("pytorch", "ligermodels", "liger", "liger, fused_linear_jsd"):
    jsd_loss.provider(name)(divergences.ops_of_kinds["jsd"].providers[name].make)
