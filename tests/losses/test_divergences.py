"""Divergences beside their formulas, written out in float64, the gradients that they should have, and TRL's."""

import math

import pytest
import torch

from ligermodels.errors import InputError
from ligermodels.losses import divergence, top_k_divergence
from ligermodels.losses.divergences import KINDS

B = 0.3


def draw(tokens=5, vocab=7, scale=3.0):
    generator = torch.Generator().manual_seed(0)
    student, teacher = scale * torch.randn(2, tokens, vocab, generator=generator, dtype=torch.float64)
    return student.requires_grad_(), teacher


def formula(kind, z, t):
    """(value, gradient with respect to z) of the student's and the teacher's logits / temperature."""
    p, q = z.softmax(-1), t.softmax(-1)
    m = (1 - B) * p + B * q
    if kind == "forward_kl":
        return (q * (q / p).log()).sum(-1), p - q
    if kind == "reverse_kl":
        value = (p * (p / q).log()).sum(-1)
        return value, p * ((p / q).log() - value[:, None])
    if kind == "jsd":
        from_m = (p * (p / m).log()).sum(-1)
        value = B * (q * (q / m).log()).sum(-1) + (1 - B) * from_m
        return value, (1 - B) * p * ((p / m).log() - from_m[:, None])
    if kind == "tvd":
        sign = (p - q).sign()
        return (p - q).abs().sum(-1) / 2, p * (sign - (p * sign).sum(-1, keepdim=True)) / 2
    z_norm, t_norm = z.norm(dim=-1, keepdim=True), t.norm(dim=-1, keepdim=True)
    cosine = (z * t).sum(-1, keepdim=True) / (z_norm * t_norm)
    return 1 - cosine[:, 0], cosine * z / z_norm**2 - t / (z_norm * t_norm)


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_are_those_of_the_formulas(kind, temperature):
    student, teacher = draw()
    teacher.requires_grad_()
    values = divergence(student, teacher, kind=kind, b=B, temperature=temperature)
    gradient, of_teacher = torch.autograd.grad(values.sum(), (student, teacher), allow_unused=True)
    expected, expected_gradient = formula(kind, *(x.detach() / temperature for x in (student, teacher)))
    torch.testing.assert_close(values, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, expected_gradient / temperature, rtol=1e-11, atol=1e-12)
    assert of_teacher is None


def top_k_formula(form, z, ids, q):
    """(value, gradient with respect to z), with the tail as one class or cut off."""
    p = z.softmax(-1)
    p_ids = p.gather(-1, ids)
    p_tail, q_tail = 1 - p_ids.sum(-1, keepdim=True), 1 - q.sum(-1, keepdim=True)
    if form == "cut off":
        value, of_ids, of_tail = -(q * p_ids.log()).sum(-1), p_ids * q.sum(-1, keepdim=True) - q, q.sum(-1)[:, None]
    elif form == "forward_kl":
        value = (q * (q / p_ids).log()).sum(-1) + (q_tail * (q_tail / p_tail).log())[:, 0]
        of_ids, of_tail = p_ids - q, 1 - q_tail / p_tail
    else:
        value = (p_ids * (p_ids / q).log()).sum(-1) + (p_tail * (p_tail / q_tail).log())[:, 0]
        of_ids = p_ids * ((p_ids / q).log() - value[:, None])
        of_tail = (p_tail / q_tail).log() - value[:, None]
    return value, (p * of_tail).scatter(-1, ids, of_ids)


FORMS = {"forward_kl": {}, "reverse_kl": {"kind": "reverse_kl"}, "cut off": {"tail": False}}


@pytest.mark.parametrize("form", FORMS)
def test_top_k_values_and_gradients_are_those_of_the_formulas(form):
    student, teacher = draw()
    logprobs, ids = (teacher / 2).log_softmax(-1).topk(3)
    values = top_k_divergence(student, ids, logprobs, temperature=2.0, **FORMS[form])
    (gradient,) = torch.autograd.grad(values.sum(), student)
    expected, expected_gradient = top_k_formula(form, student.detach() / 2, ids, logprobs.exp())
    torch.testing.assert_close(values, expected, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(gradient, expected_gradient / 2, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl"])
def test_a_top_k_teacher_with_one_class_in_its_tail_is_the_whole_teacher_and_with_more_a_lower_bound(kind):
    student, teacher = draw()
    logprobs, ids = teacher.log_softmax(-1).topk(6)
    whole = divergence(student, teacher, kind=kind)
    torch.testing.assert_close(top_k_divergence(student, ids, logprobs, kind=kind), whole)
    assert (top_k_divergence(student, ids[:, :2], logprobs[:, :2], kind=kind) < whole).all()


def test_probabilities_of_zero_add_nothing():
    """A padded class has the logit -inf in both models; and log-probabilities of -inf fill a list of fewer than k."""
    student, teacher = draw()
    padding = torch.full((5, 1), -math.inf, dtype=torch.float64)
    padded = [torch.cat((x.detach(), padding), -1).requires_grad_() for x in (student, teacher)]
    for kind in ("forward_kl", "reverse_kl", "jsd", "tvd"):
        values = divergence(*padded, kind=kind)
        torch.testing.assert_close(values, divergence(student, teacher, kind=kind))
        (gradient,) = torch.autograd.grad(values.sum(), padded[0])
        torch.testing.assert_close(gradient[:, :7], torch.autograd.grad(values_of(kind, student, teacher), student)[0])
    ids = torch.tensor([[1, 4, 2]]).expand(5, 3)
    logprobs = torch.tensor([[0.5, 0.25, 0.0]], dtype=torch.float64).log().expand(5, 3)
    p = student.detach().softmax(-1)
    rest = 1 - p[:, 1] - p[:, 4] - p[:, 2]
    expected = 0.5 * (0.5 / p[:, 1]).log() + 0.25 * (0.25 / p[:, 4]).log() + 0.25 * (0.25 / rest).log()
    torch.testing.assert_close(top_k_divergence(student, ids, logprobs), expected)


def values_of(kind, student, teacher):
    return divergence(student, teacher, kind=kind).sum()


def test_stored_probabilities_that_exceed_one_by_rounding_are_normalised():
    student, _ = draw()
    ids, probabilities = torch.tensor([[0, 3]]).expand(5, 2), torch.tensor([0.75, 0.2578125]).expand(5, 2)
    values = top_k_divergence(student, ids, probabilities.log(), kind="reverse_kl")
    least = 2.0**-24
    _, gradient = top_k_formula("reverse_kl", student.detach(), ids, probabilities.double() / 1.0078125 * (1 - least))
    assert values.isfinite().all()
    torch.testing.assert_close(torch.autograd.grad(values.sum(), student)[0], gradient, rtol=1e-5, atol=1e-6)


def test_ids_that_are_not_distinct_classes_give_an_infinite_loss_and_no_gradient():
    student, teacher = draw()
    logprobs, ids = teacher.log_softmax(-1).topk(2)
    ids[0, 1], ids[1, 0], ids[2, 1] = ids[0, 0], -1, 7
    values = top_k_divergence(student, ids, logprobs)
    assert values.isinf().tolist() == [True, True, True, False, False]
    gradient = torch.autograd.grad(values[values.isfinite()].sum(), student)[0]
    assert not gradient[:3].any() and gradient[3:].all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "kl"}, "kind is 'kl'; supported: forward_kl, reverse_kl, jsd, tvd, cosine"),
        ({"kind": "jsd", "b": 1.0}, "b is 1.0; it must be above 0 and below 1: for a KL take kind='forward_kl' or"),
        ({"temperature": 0.0}, "temperature is 0.0; it must be above 0"),
    ],
)
def test_options_that_are_refused(options, message):
    with pytest.raises(InputError, match=f"^{message}"):
        divergence(*draw(), **options)


def test_teachers_that_are_refused():
    student, teacher = draw()
    logprobs, ids = teacher.log_softmax(-1).topk(3)
    with pytest.raises(InputError, match=r"teacher_logits is float64 \[5, 6\] for logits \[5, 7\]; .* cut both to the"):
        divergence(student, teacher[:, :6])
    with pytest.raises(InputError, match="kind is 'tvd'; for a top-k teacher it must be forward_kl or reverse_kl"):
        top_k_divergence(student, ids, logprobs, kind="tvd")
    with pytest.raises(
        InputError, match="tail is False and kind 'reverse_kl'; without the tail only kind='forward_kl'"
    ):
        top_k_divergence(student, ids, logprobs, kind="reverse_kl", tail=False)
    with pytest.raises(
        InputError, match=r"ids is int64 \[4, 3\] and logprobs float64 \[5, 3\]; they must be int64 and f"
    ):
        top_k_divergence(student, ids[:4], logprobs)
    with pytest.raises(InputError, match="ids has k = 7 of 7 classes; k must be above 0 and below that"):
        top_k_divergence(student, *reversed(teacher.log_softmax(-1).topk(7)))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("beta", "kind"), [(0.0, "forward_kl"), (1.0, "reverse_kl"), (B, "jsd")])
def test_trl(beta, kind, temperature):
    """TRL's GKD with the labels that make it divide by tokens."""
    trainer = pytest.importorskip("trl.experimental.gkd").GKDTrainer
    student, teacher = (x.detach().float() for x in draw())
    student.requires_grad_()
    labels = torch.tensor([[3, -100, 1, -100, 2]])
    theirs = trainer.generalized_jsd_loss(student[None], teacher[None], labels, beta, temperature)
    values = divergence(student, teacher, kind=kind, b=B, temperature=temperature)
    mine = values[labels[0] != -100].mean()
    torch.testing.assert_close(mine, theirs, rtol=2e-6, atol=1e-6)
    gradients = [torch.autograd.grad(loss, student)[0] for loss in (mine, theirs)]
    torch.testing.assert_close(*gradients, rtol=2e-5, atol=1e-6)


def test_cosine_of_liger():
    module = pytest.importorskip("liger_kernel.chunked_loss.cosine_similarity_loss")
    student, teacher = draw()
    theirs = module.LigerFusedLinearCosineSimilarityFunction.distillation_loss_fn(student, teacher, beta=1.0)
    torch.testing.assert_close(divergence(student, teacher, kind="cosine").sum(), theirs)
