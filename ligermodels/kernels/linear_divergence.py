"""Fused linear divergence: Σ w D(student's logits, teacher's logits) of hidden states and heads, in chunks of rows.

The student has hidden [N, H] and weight [V, H] of one float dtype. The teacher is one of

    (hidden_t [N, H_t], weight_t [V, H_t])    a model, or its stored last hidden states: 2 H_t bytes a token
    logits [N, V]
    (ids [N, k] int64, logprobs [N, k])       the k most probable classes; 12 k bytes a token

Rows are separable and their weights w known, so that forward computes both gradients, in fp32, and backward only
multiplies them by the upstream gradient and rounds. For each chunk it computes the logits of both models in fp32; by
one kernel (`divergence_rows.py`, `top_k_divergence_rows.py`) the values and dlogits, rounded once, in the memory of the
student's logits; and

    dhidden = dlogits @ weight        dweight = Σ_chunks dlogitsᵀ @ hidden, summed in fp32

6 N H V + 2 N H_t V FLOP: three products of the student's head and one of the teacher's. The teacher is frozen and
nothing of it is kept. Memory beyond the gradients: a chunk of logits, and 2 H (N + V) bytes in half precision.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.kernels.dispatch import Node, autocast, runs_kernels, widen
from ligermodels.kernels.launch import as_matrix, as_rows
from ligermodels.kernels.linear_cross_entropy import GRADIENT_SCALE
from ligermodels.kernels.linear_divergence_chunks import linear_divergence_forward, linear_top_k_divergence_forward
from ligermodels.kernels.rescale import rescale, rescale_pair
from ligermodels.losses.divergences import (
    check_divergence,
    check_top_k,
    divergence,
    top_k_divergence,
    valid_ids,
)

Teacher = Tensor | tuple[Tensor, Tensor]


class DivergenceOutput(NamedTuple):
    """A loss with what it is made of. Only the loss has a gradient. Ignored rows have values 0."""

    loss: Tensor  # Σ w (divergence + ce_weight * cross_entropy)
    divergence: Tensor  # [...] fp32, of each row, without its weight
    cross_entropy: Tensor | None  # [...] fp32, of each row at temperature 1, without weights; None if ce_weight is 0
    entropy: Tensor  # [...] fp32, of the student at the temperature, in nats


class _Options(NamedTuple):
    kind: str = "forward_kl"
    b: float = 0.5
    tail: bool = True
    temperature: float = 1.0
    softcap: float | None = None
    logit_scale: float = 1.0
    teacher_softcap: float | None = None
    teacher_logit_scale: float = 1.0
    vocab: int | None = None
    row_weight: Tensor | None = None
    targets: Tensor | None = None
    ignore_index: int = -100
    ce_weight: float = 0.0

    def of_op(self, top_k: bool) -> tuple[Any, ...]:
        """As the registered op takes them, without ce_weight."""
        student = self.temperature, self.softcap, self.logit_scale
        if top_k:
            return self.kind, self.tail, *student
        return self.kind, self.b, *student, self.teacher_softcap, self.teacher_logit_scale


class _Rows(NamedTuple):
    """What is known of each row before the forward."""

    weights: Tensor  # [...] fp32 or fp64; 0 if the row is left out
    targets: Tensor | None  # [...] in [0, V) where the weight is not 0; None without cross-entropy
    unusable: Tensor  # [...] bool: rows whose loss is infinite, without a gradient


class _SummedLoss(Node):
    """(loss, divergence, entropy), and the cross-entropy if there are targets. Only the loss has a gradient. Forward
    computes the gradients in fp32; backward scales and rounds them."""

    @staticmethod
    def forward(
        ctx, hidden, weight, first, second, weights, targets, top_k, hidden_grad, weight_grad, ce_weight, *options
    ):
        op = linear_top_k_divergence_forward if top_k else linear_divergence_forward
        arguments = hidden, weight, first, second, weights, targets, hidden_grad, weight_grad, *options, ce_weight
        divergences, cross_entropies, entropies, *gradients = op(*arguments)
        values = divergences if targets is None else divergences + ce_weight * cross_entropies
        ctx.save_for_backward(*gradients, weights.new_ones(()))
        ctx.dtype, ctx.needed = weight.dtype, (hidden_grad, weight_grad)
        ctx.set_materialize_grads(False)
        results = (values * weights).sum(), divergences, entropies
        return results if targets is None else (*results, cross_entropies)

    @staticmethod
    def backward(ctx, dloss, *_):
        (dhidden, dweight, one), (hidden_grad, weight_grad) = ctx.saved_tensors, ctx.needed
        scale = dloss, one, 1 / GRADIENT_SCALE, ctx.dtype
        if hidden_grad and weight_grad:
            dhidden, dweight = rescale_pair(dhidden, dweight, *scale)
        else:
            dhidden = rescale(dhidden, *scale) if hidden_grad else None
            dweight = rescale(dweight, *scale) if weight_grad else None
        return dhidden, dweight, *[None] * 16


def linear_divergence(
    hidden: Tensor, weight: Tensor, teacher: Teacher, *, kind: str = "forward_kl", b: float = 0.5, tail: bool = True,
    temperature: float = 1.0, softcap: float | None = None, logit_scale: float = 1.0,
    teacher_softcap: float | None = None, teacher_logit_scale: float = 1.0, vocab: int | None = None,
    row_weight: Tensor | None = None, targets: Tensor | None = None, ignore_index: int = -100, ce_weight: float = 0.0,
) -> DivergenceOutput:  # fmt: skip
    """Sum over rows of w (divergence of the student from the teacher + ce_weight * cross-entropy).

    hidden [..., H], weight [V, H] of one float dtype. teacher: (hidden_t [..., H_t], weight_t [V, H_t]), or logits
    [..., V], or (ids [..., k] int64, logprobs [..., k]) of the k most probable classes, whose logprobs are those at
    `temperature`. It gets no gradient.
    kind: "forward_kl", "reverse_kl", "jsd" (with b), "tvd", "cosine"; the first two for a top-k teacher, whose other
    classes count as one, or with tail=False not at all (forward_kl only). `losses.divergence` and
    `losses.top_k_divergence` have the formulas.
    temperature divides both models' logits, after logit scale and softcap, which each has of its own.
    vocab: only the first `vocab` classes of each model exist; needed where their numbers differ by padding.
    row_weight [...]: w, 1 by default; 0 leaves a row out. Of order 1: divide the loss by the number of tokens instead.
    targets [...] int64: a row whose target is ignore_index is left out. With ce_weight, the class of the cross-entropy,
    at temperature 1. One outside [0, V) gives an infinite loss and no gradient; ids that are not distinct classes too.
    Raises ValueError if shapes disagree, and for options that are unknown, out of range or without effect.
    """
    options = _Options(
        kind, b, tail, temperature, softcap, logit_scale, teacher_softcap, teacher_logit_scale, vocab, row_weight,
        targets, ignore_index, ce_weight,
    )  # fmt: skip
    return _summed(_apply_node if runs_kernels(hidden) else _reference, hidden, weight, teacher, options)


def linear_divergence_reference(hidden: Tensor, weight: Tensor, teacher: Teacher, **options: Any) -> DivergenceOutput:
    """Options as in `linear_divergence`."""
    return _summed(_reference, hidden, weight, teacher, _Options(**options))


def _summed(
    compute: Callable[..., tuple[Tensor | None, ...]], hidden: Tensor, weight: Tensor, teacher: Teacher,
    options: _Options,
) -> DivergenceOutput:  # fmt: skip
    """compute: the node or its reference; both return the loss, then three values of each row."""
    weight, teacher = _cut_to_common_classes(weight, teacher, options.vocab)
    _check(hidden, weight, teacher, options)
    rows = _prepare_rows(hidden, weight, teacher, options)
    hidden, weight = autocast(hidden, weight)
    if not isinstance(teacher, Tensor):
        teacher = autocast(teacher[0], teacher[1]) if _is_model(teacher) else teacher
    loss, *values = compute(hidden, weight, teacher, rows, options)
    divergences, entropies, cross_entropies = (
        None if x is None else x.detach().view(rows.weights.shape) for x in values
    )
    infinite = torch.where(rows.unusable, torch.inf, 0.0)
    return DivergenceOutput(loss + infinite.sum(), divergences + infinite, cross_entropies, entropies)


def _is_model(teacher: tuple[Tensor, Tensor]) -> bool:
    """Whether a pair is (hidden states, weight); otherwise it is (ids, log-probabilities)."""
    return teacher[0].is_floating_point()


def _is_top_k(teacher: Teacher) -> bool:
    return not isinstance(teacher, Tensor) and not _is_model(teacher)


def _cut_to_common_classes(weight: Tensor, teacher: Teacher, vocab: int | None) -> tuple[Tensor, Teacher]:
    """The heads, or logits, of the first `vocab` classes, which are renormalised by what reads them."""
    if _is_top_k(teacher):
        sizes = {weight.shape[0]}
    else:
        sizes = {weight.shape[0], teacher.shape[-1] if isinstance(teacher, Tensor) else teacher[1].shape[0]}
    if vocab is None and len(sizes) == 1:
        return weight, teacher
    if vocab is None:
        raise ValueError(
            f"linear_divergence: the student has {weight.shape[0]} classes, the teacher"
            f" {max(sizes - {weight.shape[0]})}; if they differ by padding alone, pass vocab=<size of the tokenizer>;"
            " other vocabularies cannot be compared"
        )
    if not 0 < vocab <= min(sizes):
        raise ValueError(f"linear_divergence: vocab is {vocab}; the smaller model has {min(sizes)} classes")
    if isinstance(teacher, Tensor):
        return weight[:vocab], teacher[..., :vocab]
    return weight[:vocab], (teacher[0], teacher[1][:vocab]) if _is_model(teacher) else teacher


def _check(hidden: Tensor, weight: Tensor, teacher: Teacher, options: _Options) -> None:
    rows, vocab = hidden.shape[:-1], weight.shape[0]
    check_divergence(options.kind, options.b, options.temperature)
    if hidden.shape[-1] != weight.shape[1]:
        raise ValueError(f"linear_divergence: hidden {list(hidden.shape)} and weight {list(weight.shape)} do not match")
    if _is_top_k(teacher):
        check_top_k((*rows, vocab), *teacher, options.kind, options.tail)
        if options.teacher_softcap is not None or options.teacher_logit_scale != 1:
            raise ValueError("linear_divergence: teacher_softcap and teacher_logit_scale have no effect on logprobs")
    elif not options.tail:
        raise ValueError("linear_divergence: tail=False has no effect without a top-k teacher")
    shapes = [list(x.shape) for x in ((teacher,) if isinstance(teacher, Tensor) else teacher)]
    needed = [[*rows, vocab]] if len(shapes) == 1 else [[*rows, shapes[1][-1]], [vocab, shapes[1][-1]]]
    if not _is_top_k(teacher) and shapes != needed:
        raise ValueError(f"linear_divergence: the teacher has shapes {shapes}; needed {needed}")
    for name in ("row_weight", "targets"):
        given = getattr(options, name)
        if given is not None and given.shape != rows:
            raise ValueError(f"linear_divergence: {name} {list(given.shape)}; needed {list(rows)}, one for each row")
    if options.ce_weight and options.targets is None:
        raise ValueError(f"linear_divergence: ce_weight is {options.ce_weight}; the cross-entropy needs targets")


def _prepare_rows(hidden: Tensor, weight: Tensor, teacher: Teacher, options: _Options) -> _Rows:
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    if options.row_weight is None:
        weights = hidden.new_ones(hidden.shape[:-1], dtype=dtype)
    else:
        weights = options.row_weight.detach().to(dtype)
    targets = options.targets
    if targets is not None:
        weights = torch.where(targets == options.ignore_index, 0.0, weights)
    usable = weights != 0
    if options.ce_weight:
        usable = usable & (targets >= 0) & (targets < weight.shape[0])
    if _is_top_k(teacher):
        usable = usable & valid_ids(teacher[0], weight.shape[0])
    unusable = ~usable & (weights != 0)
    return _Rows(torch.where(unusable, 0.0, weights), targets if options.ce_weight else None, unusable)


def _apply_node(hidden: Tensor, weight: Tensor, teacher: Teacher, rows: _Rows, options: _Options) -> tuple[Tensor, ...]:
    """(loss, divergence, entropy, cross-entropy or None)."""
    needed = (torch.is_grad_enabled() and x.requires_grad for x in (hidden, weight))
    first, second = (teacher, None) if isinstance(teacher, Tensor) else teacher
    top_k = _is_top_k(teacher)
    first = as_rows(first.detach())
    if top_k:
        first, second = first.contiguous(), as_rows(second).contiguous()
    results = _SummedLoss.apply(
        as_matrix(hidden), weight, first, None if second is None else second.detach(),
        rows.weights.reshape(-1).contiguous(), None if rows.targets is None else rows.targets.reshape(-1).contiguous(),
        top_k, *needed, options.ce_weight, *options.of_op(top_k),
    )  # fmt: skip
    return results if len(results) == 4 else (*results, None)


def _reference(hidden: Tensor, weight: Tensor, teacher: Teacher, rows: _Rows, options: _Options) -> tuple[Tensor, ...]:
    logits = _softcapped(F.linear(hidden, weight), options.softcap, options.logit_scale)
    settings = {"kind": options.kind, "temperature": options.temperature}
    counted = rows.weights != 0
    if _is_top_k(teacher):
        divergences = top_k_divergence(logits, *teacher, tail=options.tail, **settings)
    else:
        teacher_logits = teacher if isinstance(teacher, Tensor) else F.linear(*(x.detach() for x in teacher))
        teacher_logits = _softcapped(teacher_logits, options.teacher_softcap, options.teacher_logit_scale)
        divergences = divergence(logits, teacher_logits, b=options.b, **settings)
    log_p = (logits.detach() / options.temperature).log_softmax(-1)
    entropies = torch.special.entr(log_p.exp()).sum(-1)
    divergences, entropies = (torch.where(counted, x, 0.0) for x in (divergences, entropies))
    if rows.targets is None:
        return (divergences * rows.weights).sum(), divergences, entropies, None
    targets = torch.where(counted, rows.targets, 0)
    cross_entropies = -logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    cross_entropies = torch.where(counted, cross_entropies, 0.0)
    loss = ((divergences + options.ce_weight * cross_entropies) * rows.weights).sum()
    return loss, divergences, entropies, cross_entropies


def _softcapped(logits: Tensor, softcap: float | None, logit_scale: float) -> Tensor:
    logits = widen(logits) * logit_scale
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)
