"""Fused linear divergence: Σ w D(student's logits, teacher's logits) of hidden states and heads, in chunks of rows.

The student has hidden [N, H] and weight [V, H] of one float dtype. The teacher is one of

    (hidden_t [N, H_t], weight_t [V, H_t])    a model, or its stored last hidden states: 2 H_t bytes a token
    logits [N, V]
    (ids [N, k] int64, logprobs [N, k])       the k most probable classes; 12 k bytes a token

Rows are separable and their weights w known, so that forward computes both gradients, in fp32, and backward only
multiplies them by the upstream gradient and rounds. For each piece of a chunk it computes the logits of both models in
fp32, and by one kernel (`divergence_rows.py`, `top_k_divergence_rows.py`) the values and dlogits, rounded once; for the
chunk

    dhidden = dlogits @ weight        dweight = Σ_chunks dlogitsᵀ @ hidden, summed in fp32

6 N H V + 2 N H_t V FLOP: three products of the student's head and one of the teacher's. The teacher is frozen and
nothing of it is kept. Memory beyond the gradients: the logits of a piece, dlogits of a chunk, and 2 H (N + V) bytes in
half precision.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.kernels.dispatch import (
    INT64,
    Node,
    autocast,
    check_dtypes,
    check_floats,
    check_linear,
    check_one_of,
    check_shape,
    runs_kernels,
    shape_of,
    widen,
)
from ligermodels.kernels.launch import as_matrix, as_rows
from ligermodels.kernels.losses.linear_divergence_chunks import (
    linear_divergence_forward,
    linear_top_k_divergence_forward,
)
from ligermodels.kernels.losses.logits_chunks import GRADIENT_SCALE
from ligermodels.kernels.losses.rescale import rescale, rescale_pair
from ligermodels.losses.divergences import check_divergence, check_top_k, divergence, top_k_divergence, valid_ids

TeacherInputs = Tensor | tuple[Tensor, Tensor]


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
        """Returns the arguments as the registered op takes them, without ce_weight."""
        student = self.temperature, self.softcap, self.logit_scale
        if top_k:
            return self.kind, self.tail, *student
        return self.kind, self.b, *student, self.teacher_softcap, self.teacher_logit_scale


class _Teacher(NamedTuple):
    """A teacher without gradients, as one of three kinds."""

    states: Tensor  # hidden states [..., H_t], logits [..., V] or ids [..., k]
    weight: Tensor | None = None  # [V, H_t], of hidden states
    logprobs: Tensor | None = None  # [..., k], of ids

    @classmethod
    def of(cls, given: TeacherInputs) -> "_Teacher":
        """Raises ValueError for a teacher whose tensors are no rows."""
        for x in (given,) if isinstance(given, Tensor) else given:
            shape_of("linear_divergence", "teacher", x)
        if isinstance(given, Tensor):
            return cls(given.detach())
        first, second = (x.detach() for x in given)
        return cls(first, second) if first.is_floating_point() else cls(first, None, second)

    @property
    def classes(self) -> int | None:
        """V; None if it is not known."""
        if self.logprobs is not None:
            return None
        return self.states.shape[-1] if self.weight is None else self.weight.shape[0]

    def cut(self, vocab: int) -> "_Teacher":
        """The first `vocab` classes."""
        if self.weight is not None:
            return self._replace(weight=self.weight[:vocab])
        return self if self.logprobs is not None else self._replace(states=self.states[..., :vocab])

    def under_autocast(self) -> "_Teacher":
        """Puts the operands of the matrix product in the dtype of `torch.autocast`."""
        return self if self.weight is None else _Teacher(*autocast(self.states, self.weight))


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
    hidden: Tensor, weight: Tensor, teacher: TeacherInputs, *,
    kind: str = "forward_kl", b: float = 0.5, tail: bool = True, temperature: float = 1.0,
    softcap: float | None = None, logit_scale: float = 1.0, teacher_softcap: float | None = None,
    teacher_logit_scale: float = 1.0, vocab: int | None = None, row_weight: Tensor | None = None,
    targets: Tensor | None = None, ignore_index: int = -100, ce_weight: float = 0.0,
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


def linear_divergence_reference(
    hidden: Tensor, weight: Tensor, teacher: TeacherInputs, **options: Any
) -> DivergenceOutput:
    """Options as in `linear_divergence`."""
    return _summed(_reference, hidden, weight, teacher, _Options(**options))


def _summed(
    compute: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor | None]], hidden: Tensor, weight: Tensor,
    given: TeacherInputs, options: _Options,
) -> DivergenceOutput:  # fmt: skip
    """compute: the node or its reference; both return the loss, then divergence, entropy and cross-entropy of rows."""
    shape_of("linear_divergence", "hidden", hidden)
    shape_of("linear_divergence", "weight", weight, "V, H")
    teacher = _Teacher.of(given)
    if options.vocab is not None or teacher.classes not in (None, weight.shape[0]):
        weight, teacher = _cut_to_common_classes(weight, teacher, options.vocab)
    _check_teacher(teacher, (*hidden.shape[:-1], weight.shape[0]), options)
    _check_rows(hidden, weight, options)
    hidden, weight = autocast(hidden, weight)
    teacher = teacher.under_autocast()
    check_dtypes("linear_divergence", hidden=hidden, weight=weight)
    if teacher.logprobs is None:
        check_dtypes("linear_divergence", **{"teacher[0]": teacher.states, "teacher[1]": teacher.weight})
    rows = _prepare_rows(hidden, weight, teacher, options)
    loss, divergences, entropies, cross_entropies = compute(hidden, weight, teacher, rows, options)
    shape, infinite = rows.weights.shape, torch.where(rows.unusable, torch.inf, 0.0)
    return DivergenceOutput(
        loss + infinite.sum(),
        divergences.detach().view(shape) + infinite,
        None if cross_entropies is None else cross_entropies.detach().view(shape),
        entropies.detach().view(shape),
    )


def _cut_to_common_classes(weight: Tensor, teacher: _Teacher, vocab: int | None) -> tuple[Tensor, _Teacher]:
    """The heads, or logits, of the first `vocab` classes, which are renormalised by what reads them."""
    if vocab is None:
        raise ValueError(
            f"linear_divergence: the student has {weight.shape[0]} classes, the teacher {teacher.classes}; if they"
            " differ by padding alone, pass vocab=<size of the tokenizer>; other vocabularies cannot be compared"
        )
    smallest = min(weight.shape[0], teacher.classes or weight.shape[0])
    if not 0 < vocab <= smallest:
        raise ValueError(f"linear_divergence: vocab is {vocab}; the smaller model has {smallest} classes")
    return weight[:vocab], teacher.cut(vocab)


def _check_teacher(teacher: _Teacher, shape: tuple[int, ...], options: _Options) -> None:
    """shape: [..., V], of the student's logits."""
    check_divergence(options.kind, options.b, options.temperature)
    if teacher.logprobs is not None:
        check_shape("linear_divergence", "teacher[1]", teacher.logprobs, *teacher.states.shape)
        check_one_of("linear_divergence", INT64, **{"teacher[0]": teacher.states})
        check_top_k(shape, teacher.states, teacher.logprobs, options.kind, options.tail)
        if options.teacher_softcap is not None or options.teacher_logit_scale != 1:
            raise ValueError("linear_divergence: teacher_softcap and teacher_logit_scale have no effect on logprobs")
        return
    if not options.tail:
        raise ValueError("linear_divergence: tail=False has no effect without a top-k teacher")
    shapes, needed = [list(teacher.states.shape)], [list(shape)]
    if teacher.weight is not None:
        columns = teacher.weight.shape[-1]
        shapes, needed = [*shapes, list(teacher.weight.shape)], [[*shape[:-1], columns], [shape[-1], columns]]
    if shapes != needed:
        raise ValueError(f"linear_divergence: the teacher has shapes {shapes}; needed {needed}")


def _check_rows(hidden: Tensor, weight: Tensor, options: _Options) -> None:
    op = "linear_divergence"
    *rows, columns = hidden.shape
    check_linear(op, columns, weight, None)
    check_shape(op, "row_weight", options.row_weight, *rows)
    check_shape(op, "targets", options.targets, *rows)
    check_floats(op, row_weight=options.row_weight)
    check_one_of(op, INT64, targets=options.targets)
    if options.ce_weight and options.targets is None:
        raise ValueError(f"linear_divergence: ce_weight is {options.ce_weight}; the cross-entropy needs targets")


def _prepare_rows(hidden: Tensor, weight: Tensor, teacher: _Teacher, options: _Options) -> _Rows:
    targets, dtype = options.targets, torch.promote_types(hidden.dtype, torch.float32)
    if options.row_weight is None:
        weights = hidden.new_ones(hidden.shape[:-1], dtype=dtype)
    else:
        weights = options.row_weight.detach().to(dtype)
    if targets is not None:
        weights = torch.where(targets == options.ignore_index, 0.0, weights)
    usable = weights != 0
    if targets is not None and options.ce_weight:
        usable = usable & (targets >= 0) & (targets < weight.shape[0])
    if teacher.logprobs is not None:
        usable = usable & valid_ids(teacher.states, weight.shape[0])
    unusable = ~usable & (weights != 0)
    return _Rows(torch.where(unusable, 0.0, weights), targets if options.ce_weight else None, unusable)


def _apply_node(
    hidden: Tensor, weight: Tensor, teacher: _Teacher, rows: _Rows, options: _Options
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    needed = (torch.is_grad_enabled() and x.requires_grad for x in (hidden, weight))
    states, second, top_k = as_rows(teacher.states), teacher.weight, teacher.logprobs is not None
    if teacher.logprobs is not None:
        states, second = states.contiguous(), as_rows(teacher.logprobs).contiguous()
    loss, divergences, entropies, *cross_entropies = _SummedLoss.apply(
        as_matrix(hidden), weight, states, second, rows.weights.reshape(-1).contiguous(),
        None if rows.targets is None else rows.targets.reshape(-1).contiguous(), top_k, *needed, options.ce_weight,
        *options.of_op(top_k),
    )  # fmt: skip
    return loss, divergences, entropies, cross_entropies[0] if cross_entropies else None


def _reference(
    hidden: Tensor, weight: Tensor, teacher: _Teacher, rows: _Rows, options: _Options
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    logits = _softcapped(F.linear(hidden, weight), options.softcap, options.logit_scale)
    kind, temperature, counted = options.kind, options.temperature, rows.weights != 0
    if teacher.logprobs is not None:
        divergences = top_k_divergence(
            logits, teacher.states, teacher.logprobs, kind=kind, tail=options.tail, temperature=temperature
        )
    else:
        of_teacher = teacher.states if teacher.weight is None else F.linear(teacher.states, teacher.weight)
        of_teacher = _softcapped(of_teacher, options.teacher_softcap, options.teacher_logit_scale)
        divergences = divergence(logits, of_teacher, kind=kind, b=options.b, temperature=temperature)
    entropies = torch.special.entr((logits.detach() / temperature).softmax(-1)).sum(-1)
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
