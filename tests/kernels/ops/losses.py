"""Cross-entropy, log-probabilities and divergences, from logits and from hidden states."""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ligermodels.kernels.losses.cross_entropy import (
    cross_entropy,
    cross_entropy_reference,
    cross_entropy_with_metrics,
    cross_entropy_with_metrics_reference,
)
from ligermodels.kernels.losses.linear_cross_entropy import (
    linear_cross_entropy,
    linear_cross_entropy_reference,
    linear_cross_entropy_with_metrics,
    linear_cross_entropy_with_metrics_reference,
)
from ligermodels.kernels.losses.linear_divergence import linear_divergence, linear_divergence_reference
from ligermodels.kernels.losses.linear_logprobs import linear_logprobs, linear_logprobs_reference
from ligermodels.losses.divergences import KINDS
from tests.conftest import DEVICE
from tests.kernels.ops.base import VOCABULARIES, Case, Function, Op, normal

ALL_OPTIONS = {"softcap": 5.0, "logit_scale": 1.5, "z_loss": 0.02, "label_smoothing": 0.1}
STUDENT = {"temperature": 1.5, "softcap": 5.0, "logit_scale": 1.5, "ce_weight": 0.3}
DISTILLED = {**STUDENT, "teacher_softcap": 4.0, "teacher_logit_scale": 0.8}
TOP_K_FORMS = {"kind": "forward_kl", **STUDENT}, {"kind": "reverse_kl", **STUDENT}, {"tail": False, **STUDENT}
SCALED = {**ALL_OPTIONS, "token_scaling": True}
LOGPROB_OPTIONS = {"softcap": 5.0, "logit_scale": 1.5, "temperature": 0.7, "entropy": True, "extras": ("greedy",)}


def draw_targets(batch: int, length: int, vocabulary: int) -> Tensor:
    targets = torch.randint(vocabulary, (batch, length), device=DEVICE)
    return torch.where(torch.rand(batch, length, device=DEVICE) < 0.2, -100, targets)


def cross_entropy_case(batch, length, vocabulary, **options) -> Case:
    ours, reference = (partial(f, **options) for f in (cross_entropy, cross_entropy_reference))
    return Case(ours, reference, [normal(batch, length, vocabulary)], [draw_targets(batch, length, vocabulary)])


def cross_entropy_in_place_case(batch, length, vocabulary, **options) -> Case:
    def ours(logits, targets):
        return cross_entropy(logits.clone(memory_format=torch.contiguous_format), targets, inplace=True, **options)

    return replace(cross_entropy_case(batch, length, vocabulary, **options), ours=ours)


def linear_cross_entropy_case(batch, length, hidden, vocabulary, **options) -> Case:
    ours, reference = (partial(f, **options) for f in (linear_cross_entropy, linear_cross_entropy_reference))
    leaves = [normal(batch, length, hidden), normal(vocabulary, hidden, scale=hidden**-0.5)]
    return Case(ours, reference, leaves, [draw_targets(batch, length, vocabulary)])


def low_memory_case(batch, length, hidden, vocabulary, **options) -> Case:
    case = linear_cross_entropy_case(batch, length, hidden, vocabulary, **options)
    return replace(case, ours=partial(linear_cross_entropy, low_memory=True, **options))


def linear_logprobs_case(batch, length, hidden, vocabulary, low_memory=False, **options) -> Case:
    """Log-probabilities and, with entropy=True, entropies."""

    def differentiable(function, **options):
        return lambda *inputs: tuple(x for x in function(*inputs, **options)[:2] if x is not None)

    ours = differentiable(linear_logprobs, low_memory=low_memory, **options)
    case = linear_cross_entropy_case(batch, length, hidden, vocabulary)
    return replace(case, ours=ours, reference=differentiable(linear_logprobs_reference, **options))


def sum_of_metrics(function: Function, **options) -> Function:
    """`function` of (..., targets, class weights), its loss and its metrics added up to one output."""

    def call(*inputs):
        output = function(*inputs[:-1], class_weight=inputs[-1], **options)
        return output.loss + output.z_loss + (output.entropy if output.loss.ndim else output.entropy.sum())

    return call


def weighted_cross_entropy_case(batch, length, vocabulary, inplace=False, **options) -> Case:
    def ours(logits, *constants):
        logits = logits.clone(memory_format=torch.contiguous_format) if inplace else logits
        return sum_of_metrics(cross_entropy_with_metrics, inplace=inplace, **options)(logits, *constants)

    reference = sum_of_metrics(cross_entropy_with_metrics_reference, **options)
    case = cross_entropy_case(batch, length, vocabulary)
    return Case(ours, reference, case.leaves, [*case.constants, 0.5 + torch.rand(vocabulary, device=DEVICE)])


def weighted_linear_cross_entropy_case(batch, length, hidden, vocabulary, low_memory=False, **options) -> Case:
    def with_bias(function, **options):
        return sum_of_metrics(
            lambda x, weight, bias, *rest, **kw: function(x, weight, *rest, bias=bias, **kw), **options
        )

    ours = with_bias(linear_cross_entropy_with_metrics, low_memory=low_memory, **options)
    reference = with_bias(linear_cross_entropy_with_metrics_reference, **options)
    case = linear_cross_entropy_case(batch, length, hidden, vocabulary)
    constants = [*case.constants, 0.5 + torch.rand(vocabulary, device=DEVICE)]
    return Case(ours, reference, [*case.leaves, normal(vocabulary)], constants)


def draw_student(batch, length, hidden, vocabulary) -> list[Tensor]:
    """Hidden states and a weight that half precision holds: autocast rounds it in every path, and a loss is one number,
    in which two errors may differ by chance."""
    weight = normal(vocabulary, hidden, scale=hidden**-0.5).bfloat16().float()
    return [normal(batch, length, hidden).bfloat16().float(), weight]


def linear_divergence_case(batch, length, hidden, vocabulary) -> Case:
    def from_model(function, student, weight, targets, *teacher):
        return function(student, weight, teacher, targets=targets).loss

    ours, reference = (partial(from_model, f) for f in (linear_divergence, linear_divergence_reference))
    size = batch, length, hidden, vocabulary
    return Case(ours, reference, draw_student(*size), [draw_targets(batch, length, vocabulary), *draw_student(*size)])


def divergences_case(batch, length, hidden, vocabulary) -> Case:
    """The sum of all kinds, from logits."""

    def from_logits(function, student, weight, targets, logits):
        return sum(function(student, weight, logits, kind=kind, targets=targets, **DISTILLED).loss for kind in KINDS)

    ours, reference = (partial(from_logits, f) for f in (linear_divergence, linear_divergence_reference))
    constants = draw_targets(batch, length, vocabulary), normal(batch, length, vocabulary).float()
    return Case(ours, reference, draw_student(batch, length, hidden, vocabulary), [*constants])


def top_k_divergence_case(batch, length, hidden, vocabulary, k, forms=({},)) -> Case:
    """The sum of several forms."""

    def from_top_k(function, student, weight, targets, *teacher):
        return sum(function(student, weight, teacher, targets=targets, **form).loss for form in forms)

    ours, reference = (partial(from_top_k, f) for f in (linear_divergence, linear_divergence_reference))
    ids = torch.rand(batch, length, vocabulary, device=DEVICE).topk(k).indices
    logprobs = normal(batch, length, k + 3).float().log_softmax(-1)[..., :k]
    constants = draw_targets(batch, length, vocabulary), ids, logprobs
    return Case(ours, reference, draw_student(batch, length, hidden, vocabulary), [*constants])


OPS = {
    "cross_entropy": Op(
        draw=partial(cross_entropy_case, reduction="none"), small=(257,), real=tuple((v,) for v in VOCABULARIES),
        huge=(2**13 + 1, 2**18),
    ),
    "cross_entropy, all options": Op(
        draw=partial(cross_entropy_case, **ALL_OPTIONS), small=(257,), real=tuple((v,) for v in VOCABULARIES)
    ),
    "cross_entropy in place": Op(
        draw=cross_entropy_in_place_case, small=(257,), real=tuple((v,) for v in VOCABULARIES)
    ),
    "cross_entropy in place, all options": Op(  # also with rows that are not aligned to vectors
        draw=partial(cross_entropy_in_place_case, **ALL_OPTIONS), small=(257,), real=((50257,),)
    ),
    "linear_cross_entropy": Op(
        draw=linear_cross_entropy_case, small=(17, 33), real=((64, 128256), (64, 262144)), products=(2, 1, 1)
    ),
    "linear_cross_entropy, all options": Op(
        draw=partial(linear_cross_entropy_case, **ALL_OPTIONS), small=(17, 33), real=((64, 128256), (64, 262144)),
        products=(2, 1, 1),
    ),
    "linear_cross_entropy of few rows": Op(draw=linear_cross_entropy_case, small=(17, 48), products=(2, 1, 1)),
    "linear_cross_entropy by rows": Op(
        draw=partial(linear_cross_entropy_case, reduction="none"), small=(17, 33), real=((16, 128256), (16, 262144)),
        huge=(2**18 + 1, 2**13, 64), products=(3, 2, 2),
    ),
    "linear_cross_entropy, low memory": Op(
        draw=low_memory_case, small=(17, 33), real=((16, 128256), (16, 262144)), products=(3, 1, 2)
    ),
    "linear_cross_entropy of few rows, low memory": Op(draw=low_memory_case, small=(64, 128), products=(2, 1, 1)),
    "linear_cross_entropy by rows, low memory": Op(
        draw=partial(low_memory_case, reduction="none"), small=(17, 33), real=((16, 128256), (16, 262144)),
        products=(4, 2, 2),
    ),
    # With class weights, a bias of the projection, token scaling and all metrics.
    "cross_entropy, weighted": Op(
        draw=partial(weighted_cross_entropy_case, reduction="none", **SCALED), small=(257,), real=((262144,),)
    ),
    "cross_entropy in place, weighted": Op(
        draw=partial(weighted_cross_entropy_case, inplace=True, **SCALED), small=(257,), real=((50257,), (262144,))
    ),
    "linear_cross_entropy, weighted": Op(
        draw=partial(weighted_linear_cross_entropy_case, **SCALED), small=(33, 129), real=((64, 262144),),
        products=(2, 1, 1, 0),
    ),
    "linear_cross_entropy by rows, weighted": Op(
        draw=partial(weighted_linear_cross_entropy_case, reduction="none", **SCALED), small=(17, 33),
        real=((16, 262144),), products=(3, 2, 2, 1),
    ),
    "linear_cross_entropy, low memory, weighted": Op(
        draw=partial(weighted_linear_cross_entropy_case, low_memory=True, **SCALED), small=(17, 33),
        real=((16, 262144),), products=(3, 1, 2, 0),
    ),
    "linear_cross_entropy by rows, low memory, weighted": Op(
        draw=partial(weighted_linear_cross_entropy_case, low_memory=True, reduction="none", **SCALED), small=(17, 33),
        real=((16, 262144),), products=(4, 2, 2, 1),
    ),
    "linear_logprobs": Op(
        draw=linear_logprobs_case, small=(17, 33), real=((16, 128256), (16, 262144)), huge=(2**18 + 1, 2**13, 64),
        products=(3, 1, 2),
    ),
    "linear_logprobs, all options": Op(
        draw=partial(linear_logprobs_case, **LOGPROB_OPTIONS), small=(17, 33), real=((16, 262144),), products=(3, 2, 2),
        more_variants=((3, 1000),),  # parts of the vocabulary below LONG_ROW
    ),
    "linear_logprobs of few rows": Op(draw=linear_logprobs_case, small=(17, 48), products=(3, 1, 2)),
    "linear_logprobs, low memory": Op(
        draw=partial(linear_logprobs_case, low_memory=True, **LOGPROB_OPTIONS), small=(17, 33), real=((16, 262144),),
        products=(4, 2, 2), more_variants=((3, 16), (3, 1000), (1, 4096)),  # a block for each power of 2 of a part
    ),
    "linear_divergence": Op(
        draw=linear_divergence_case, small=(17, 33), real=((64, 128256), (64, 262144)),
        products=(1, 0.5, 0.5),
    ),
    "linear_divergence, all kinds, all options": Op(draw=divergences_case, small=(17, 33), real=((64, 262144),)),
    "linear_divergence from top-k": Op(
        draw=top_k_divergence_case, small=(17, 33, 5), real=((64, 262144, 64),),
        products=(2, 1, 1),
    ),
    "linear_divergence from top-k, all forms, all options": Op(
        draw=partial(top_k_divergence_case, forms=TOP_K_FORMS), small=(17, 33, 5), real=((64, 262144, 64),)
    ),
}  # fmt: skip
