"""Losses of distillation: divergences of a student's distribution p from a teacher's q over the same V classes.

p and q are softmaxes of logits / temperature. For each row:

    forward_kl   Σ q log(q / p)                                        KL(q ‖ p)
    reverse_kl   Σ p log(p / q)                                        KL(p ‖ q)
    jsd          b KL(q ‖ m) + (1 - b) KL(p ‖ m), m = (1 - b) p + b q  0 < b < 1
    tvd          ½ Σ |p - q|
    cosine       1 - cos(student logits, teacher logits)               without a softmax

A top-k teacher has the log-probabilities of k classes. All other classes count as one, the tail, with p_T and q_T:

    forward_kl   Σ_k q log(q / p) + q_T log(q_T / p_T)                 lower bounds of the divergences over V classes
    reverse_kl   Σ_k p log(p / q) + p_T log(p_T / q_T)
    cut off      -Σ_k q log p                                          forward_kl with tail=False; biased

The unit is the token: values are per token, so that the caller leaves out what is not supervised. Nothing is multiplied
by temperature². The teacher gets no gradient. `ops.linear_divergence` computes the same from hidden states.
Sources: https://arxiv.org/abs/2306.13649 (jsd), https://arxiv.org/abs/2307.15190 (tvd).
"""

import math

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.losses.segments import check_positive, dtype_and_shape

KINDS = ("forward_kl", "reverse_kl", "jsd", "tvd", "cosine")
TOP_K_KINDS = ("forward_kl", "reverse_kl")
# The smallest probability of a tail: 1 - Σ q is not known better in fp32, and the reverse KL divides by it.
LEAST_TAIL = 2.0**-24
LEAST_NORM = 1e-8  # of the product of two norms, as in F.cosine_similarity


def divergence(
    logits: Tensor, teacher_logits: Tensor, *, kind: str = "forward_kl", b: float = 0.5, temperature: float = 1.0
) -> Tensor:
    """The divergence of each token, `kind` of the module's table: [...], fp32, or fp64 for fp64 logits.

    logits, teacher_logits: float [..., V] of one shape. b: of "jsd" alone. temperature: divides both.
    Raises InputError for other shapes and for options out of range.
    TRL: GKDTrainer.generalized_jsd_loss, whose `beta` is 0 for forward_kl, 1 for reverse_kl and b between.
    """
    check_divergence(kind, b, temperature)
    if logits.shape != teacher_logits.shape:
        raise InputError(
            f"teacher_logits is {dtype_and_shape(teacher_logits)} for logits {list(logits.shape)}; if the vocabularies "
            "differ by padding alone, cut both to the common classes: logits[..., :n]"
        )
    student, teacher = _widen(logits) / temperature, _widen(teacher_logits).detach() / temperature
    if kind == "cosine":
        norms = student.norm(dim=-1) * teacher.norm(dim=-1)
        return 1 - (student * teacher).sum(-1) / norms.clamp_min(LEAST_NORM)
    log_p, log_q = _log_softmax(student), _log_softmax(teacher)
    if kind == "forward_kl":
        return _kl(log_q, log_p)
    if kind == "reverse_kl":
        return _kl(log_p, log_q)
    if kind == "tvd":
        return (log_p.exp() - log_q.exp()).abs().sum(-1) / 2
    log_m = torch.logaddexp(log_p + math.log1p(-b), log_q + math.log(b))
    return b * _kl(log_q, log_m) + (1 - b) * _kl(log_p, log_m)


def top_k_divergence(
    logits: Tensor, ids: Tensor, logprobs: Tensor, *, kind: str = "forward_kl", tail: bool = True,
    temperature: float = 1.0,
) -> Tensor:  # fmt: skip
    """The divergence of each token from a top-k teacher: [...], fp32, or fp64 for fp64 logits.

    logits: float [..., V]. ids: int64 [..., k], distinct classes; the result is infinite where they are not. logprobs:
    [..., k], the teacher's log-probabilities of these, at the temperature at which the loss is computed: `temperature`
    divides the student's logits alone. Raises InputError for other shapes and for options out of range.
    """
    check_divergence(kind, 0.5, temperature)
    check_top_k(logits.shape, ids, logprobs, kind, tail)
    valid = valid_ids(ids, logits.shape[-1])
    ids = torch.where(valid[..., None], ids, torch.arange(ids.shape[-1], device=ids.device))
    log_q, log_q_tail = with_tail(_widen(logprobs).detach())
    student = _widen(logits) / temperature
    others = torch.ones(logits.shape, dtype=torch.bool, device=logits.device).scatter(-1, ids, False)
    log_p_tail = student.masked_fill(~others, -math.inf).logsumexp(-1) - student.logsumexp(-1)
    log_p = _log_softmax(student).gather(-1, ids)
    if not tail:
        result = -(_finite(log_q).exp() * log_p).sum(-1)
    else:
        log_p = torch.cat((log_p, log_p_tail[..., None]), -1)
        log_q = torch.cat((log_q, log_q_tail[..., None]), -1)
        result = _kl(log_q, log_p) if kind == "forward_kl" else _kl(log_p, log_q)
    return torch.where(valid, result, math.inf)


def check_divergence(kind: str, b: float, temperature: float) -> None:
    if kind not in KINDS:
        raise InputError(f"kind is {kind!r}; supported: {', '.join(KINDS)}")
    if kind == "jsd" and not 0 < b < 1:
        raise InputError(f"b is {b}; it must be above 0 and below 1: for a KL take kind='forward_kl' or 'reverse_kl'")
    check_positive("temperature", temperature)


def check_top_k(shape: tuple[int, ...], ids: Tensor, logprobs: Tensor, kind: str, tail: bool) -> None:
    """Raises InputError for a top-k teacher that does not fit the student's logits, whose shape is [..., V]."""
    if kind not in TOP_K_KINDS:
        raise InputError(f"kind is {kind!r}; for a top-k teacher it must be {' or '.join(TOP_K_KINDS)}")
    if not tail and kind != "forward_kl":
        raise InputError(f"tail is False and kind {kind!r}; without the tail only kind='forward_kl' has a formula")
    if ids.shape != logprobs.shape or ids.shape[:-1] != shape[:-1] or ids.dtype != torch.int64:
        raise InputError(
            f"ids is {dtype_and_shape(ids)} and logprobs {dtype_and_shape(logprobs)}; they must be int64 and float "
            f"{[*shape[:-1], 'k']}"
        )
    if not 0 < ids.shape[-1] < shape[-1]:
        raise InputError(f"ids has k = {ids.shape[-1]} of {shape[-1]} classes; k must be above 0 and below that")


def valid_ids(ids: Tensor, vocab: int) -> Tensor:
    """Whether the k ids of a row are distinct and in [0, vocab): bool [...]."""
    ordered = ids.sort(-1).values
    return (ordered[..., 0] >= 0) & (ordered[..., -1] < vocab) & (ordered[..., 1:] != ordered[..., :-1]).all(-1)


def with_tail(logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (log q of the k classes, log q_T). If Σ q exceeds 1, by the rounding of stored numbers, it becomes 1."""
    total = logprobs.exp().sum(-1)
    return logprobs - total.clamp_min(1).log()[..., None], (1 - total).clamp_min(LEAST_TAIL).log()


def _widen(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _finite(x: Tensor) -> Tensor:
    """So that 0 log 0 is 0, and its gradient too."""
    return x.clamp_min(torch.finfo(x.dtype).min)


def _log_softmax(logits: Tensor) -> Tensor:
    return _finite(logits.log_softmax(-1))


def _kl(log_q: Tensor, log_p: Tensor) -> Tensor:
    """Σ q log(q / p)."""
    return (log_q.exp() * (_finite(log_q) - log_p)).sum(-1)
