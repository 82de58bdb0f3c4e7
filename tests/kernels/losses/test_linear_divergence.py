from functools import partial

import pytest
import torch

from ligermodels.kernels.losses import divergence_rows, top_k_divergence_rows
from ligermodels.kernels.losses import linear_divergence_chunks as chunks
from ligermodels.kernels.losses.linear_divergence import linear_divergence, linear_divergence_reference
from ligermodels.losses.divergences import KINDS
from tests.conftest import DEVICE
from tests.kernels.error_budget import DTYPES, check, relative_error

VOCAB = 133
STUDENT = {"temperature": 1.5, "softcap": 5.0, "logit_scale": 1.5}
TEACHER = {"teacher_softcap": 4.0, "teacher_logit_scale": 0.8}
pytestmark = [
    pytest.mark.usefixtures("kernels", "poisoned"),
    # The interpreter computes masked lanes with NumPy, which warns about their values.
    pytest.mark.filterwarnings(r"ignore:invalid value encountered in (multiply|subtract):RuntimeWarning"),
]


def draw(rows=45, columns=17, vocab=VOCAB, dtype=torch.float64):
    hidden = torch.randn(rows, columns, dtype=torch.float64, device=DEVICE)
    weight = torch.randn(vocab, columns, dtype=torch.float64, device=DEVICE) / 2
    return hidden.to(dtype), weight.to(dtype)


def leaves(dtype=torch.float32, **sizes):
    return [x.requires_grad_() for x in draw(dtype=dtype, **sizes)]


def draw_rows(rows=45):
    """Weights, one of them 0, and targets, one of them ignored."""
    weights, targets = torch.rand(rows, device=DEVICE), torch.randint(VOCAB, (rows,), device=DEVICE)
    weights[3], targets[1] = 0.0, -100
    return {"row_weight": weights, "targets": targets}


def top_k_of(hidden, weight, k):
    """At a temperature of 4, so that the tail 1 - Σ q has more than the rounding of fp32 in it."""
    logprobs, ids = (hidden @ weight.T / 4).log_softmax(-1).topk(k)
    return ids, logprobs


@pytest.fixture
def chunks_of_16(monkeypatch):
    """In two pieces."""
    monkeypatch.setattr(chunks, "rows_of_chunk", lambda *sizes: (9, 16))


@pytest.fixture
def blocks_of_32(monkeypatch):
    """Rows are swept in five steps."""
    monkeypatch.setattr(divergence_rows, "MAX_BLOCK", 32)
    caches = divergence_rows._row_launcher, top_k_divergence_rows._row_launcher
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def loss_from_model(function, hidden, weight, *teacher, **options):
    """The teacher is a leaf as well: it gets no gradient."""
    loss = function(hidden, weight, teacher, **options).loss
    return loss + 0 * sum(x.sum() for x in teacher)  # for the error budget, which differentiates all inputs


def check_from_model(dtype, **options):
    functions = (partial(loss_from_model, f, **options) for f in (linear_divergence, linear_divergence_reference))
    check(*functions, [*draw(), *draw(columns=9)], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_are_within_the_error_budget(chunks_of_16, kind, dtype):
    """Three chunks, the last of them short; models of two widths; 133 classes, which no tile divides."""
    check_from_model(dtype, kind=kind, b=0.3, **draw_rows())


@pytest.mark.parametrize("kind", KINDS)
def test_options_of_both_sides_are_within_the_error_budget(chunks_of_16, kind):
    check_from_model(DTYPES[-1], kind=kind, ce_weight=0.3, **STUDENT, **TEACHER, **draw_rows())


FORMS = {"forward_kl": {}, "reverse_kl": {"kind": "reverse_kl"}, "cut off": {"tail": False}}


@pytest.mark.parametrize("options", [{}, {"ce_weight": 0.3, **STUDENT}], ids=["", "options"])
@pytest.mark.parametrize("form", FORMS)
def test_top_k_teachers_are_within_the_error_budget(chunks_of_16, form, options):
    teacher, rows = top_k_of(*draw(columns=9, dtype=torch.float32), 7), draw_rows()

    def loss_of(function, hidden, weight):
        return function(hidden, weight, teacher, **FORMS[form], **options, **rows).loss

    functions = [partial(loss_of, f) for f in (linear_divergence, linear_divergence_reference)]
    for dtype in DTYPES:
        check(*functions, draw(), dtype)


def outputs_and_gradients(function, inputs, teacher, **options):
    output = function(*inputs, teacher, **options)
    gradients = torch.autograd.grad(output.loss, inputs)
    return [*(x.detach() for x in output if x is not None), *gradients]


@pytest.mark.parametrize("kind", ["reverse_kl", "jsd", "top-k"])
def test_rows_may_be_swept_in_several_steps(blocks_of_32, kind):
    test_values_of_half_precision_are_those_of_fp32_logits(kind)


@pytest.mark.parametrize("kind", [*KINDS, "top-k"])
def test_values_of_half_precision_are_those_of_fp32_logits(kind):
    """Rounded logits would cost 1e-4."""
    inputs, teacher = leaves(DTYPES[-1]), draw(columns=9, dtype=DTYPES[-1])
    exact = [x.detach().double().requires_grad_() for x in inputs]
    exact_teacher = [x.double() for x in teacher]
    if kind == "top-k":
        teacher = exact_teacher = top_k_of(*(x.float() for x in teacher), 7)
    options = {"kind": "forward_kl" if kind == "top-k" else kind, "ce_weight": 0.5, **draw_rows()}
    got = outputs_and_gradients(linear_divergence, inputs, teacher, **options)
    expected = outputs_and_gradients(linear_divergence_reference, exact, tuple(exact_teacher), **options)
    assert [x.dtype for x in got] == [torch.float32] * 4 + [DTYPES[-1]] * 2
    errors = [relative_error(x, y) for x, y in zip(got, expected, strict=True)]
    assert max(errors[:4]) < 3e-6, errors
    assert max(errors[4:]) < torch.finfo(DTYPES[-1]).eps, errors


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_the_reference_are_finite_differences(kind):
    inputs, teacher = leaves(torch.float64), draw(columns=9)
    loss = partial(linear_divergence_reference, teacher=teacher, kind=kind, ce_weight=0.4, **STUDENT, **TEACHER)
    rows, step, directions = draw_rows(), 1e-6, [torch.randn_like(x) for x in inputs]
    gradients = torch.autograd.grad(loss(*inputs, **rows).loss, inputs)
    up, down = ([x.detach() + s * d for x, d in zip(inputs, directions, strict=True)] for s in (step, -step))
    slope = sum((g * d).sum() for g, d in zip(gradients, directions, strict=True)).item()
    difference = loss(*up, **rows).loss - loss(*down, **rows).loss
    assert difference.item() / (2 * step) == pytest.approx(slope, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_and_a_model_are_the_same_teacher(chunks_of_16, dtype):
    inputs, (hidden, weight) = leaves(), draw(columns=9, dtype=torch.float32)
    options = {"kind": "jsd", **STUDENT, **TEACHER, **draw_rows()}
    logits = (hidden @ weight.T).to(dtype)
    got = outputs_and_gradients(linear_divergence, inputs, logits, **options)
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.1, "atol": 0.05}
    torch.testing.assert_close(
        got, outputs_and_gradients(linear_divergence, inputs, (hidden, weight), **options), **tolerance
    )


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl"])
def test_a_top_k_teacher_with_one_class_in_its_tail_is_the_whole_teacher(kind):
    inputs, teacher = leaves(), draw(columns=9, dtype=torch.float32)
    got = outputs_and_gradients(linear_divergence, inputs, top_k_of(*teacher, VOCAB - 1), kind=kind)
    expected = outputs_and_gradients(linear_divergence, inputs, teacher, kind=kind, teacher_logit_scale=0.25)
    torch.testing.assert_close(got, expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("top_k", [False, True])
def test_rows_that_are_left_out_are_not_read(chunks_of_16, top_k):
    """Row 1 by its target, row 3 by its weight: nothing of them reaches a result."""
    hidden, weight = leaves()
    teacher = draw(columns=9, dtype=torch.float32)
    teacher, rows = (top_k_of(*teacher, 7) if top_k else teacher), draw_rows()
    got = outputs_and_gradients(linear_divergence, [hidden, weight], teacher, ce_weight=0.2, **rows)
    with torch.no_grad():
        hidden[[1, 3]] = 1e30
        teacher[0][[1, 3]] = -1 if top_k else torch.nan
    again = outputs_and_gradients(linear_divergence, [hidden, weight], teacher, ce_weight=0.2, **rows)
    torch.testing.assert_close(got, again, rtol=0, atol=0)
    assert all(not x[[1, 3]].any() for x in again[1:5])


@pytest.mark.parametrize("top_k", [False, True])
def test_if_all_rows_are_ignored_the_loss_and_the_gradients_are_zero(top_k):
    inputs, teacher = leaves(), draw(columns=9, dtype=torch.float32)
    teacher, targets = (top_k_of(*teacher, 7) if top_k else teacher), torch.full((45,), -100, device=DEVICE)
    results = outputs_and_gradients(linear_divergence, inputs, teacher, targets=targets, ce_weight=1.0)
    assert len(results) == 6
    assert not any(x.any() for x in results)


def test_rows_without_a_usable_target_or_ids_have_an_infinite_loss_and_no_gradient():
    inputs, teacher, rows = leaves(), draw(columns=9, dtype=torch.float32), draw_rows()
    ids, logprobs = top_k_of(*teacher, 7)
    rows["targets"][5], ids[7, 0], ids[9, 0], ids[11, 3] = VOCAB, -1, ids[9, 1], VOCAB
    for function in (linear_divergence, linear_divergence_reference):
        outputs = function(*inputs, (ids, logprobs), ce_weight=0.3, **rows)
        assert outputs.loss.isinf()
        assert outputs.divergence.isinf().nonzero()[:, 0].tolist() == [5, 7, 9, 11]
        dhidden, dweight = torch.autograd.grad(outputs.loss, inputs)
        assert (dhidden == 0).all(1).nonzero()[:, 0].tolist() == [1, 3, 5, 7, 9, 11]
        assert dweight.isfinite().all()


@pytest.mark.parametrize("teacher_vocab", [VOCAB, 150, 120])
def test_padded_vocabularies_are_compared_over_their_common_classes(teacher_vocab):
    inputs, (hidden, weight) = leaves(), draw(columns=9, vocab=teacher_vocab, dtype=torch.float32)
    with pytest.raises(
        ValueError, match=f"has {VOCAB} classes, the teacher 150; if they differ by padding alone, pass"
    ):
        linear_divergence(*inputs, draw(columns=9, vocab=150, dtype=torch.float32))
    with pytest.raises(ValueError, match=f"vocab is 151; the smaller model has {min(VOCAB, teacher_vocab)} classes"):
        linear_divergence(*inputs, (hidden, weight), vocab=151)
    got = outputs_and_gradients(linear_divergence, inputs, (hidden, weight), vocab=100, kind="reverse_kl")
    cut = [inputs[0], inputs[1][:100].detach().requires_grad_()]
    *expected, dhidden, dweight = outputs_and_gradients(
        linear_divergence, cut, (hidden @ weight[:100].T).contiguous(), kind="reverse_kl"
    )
    dweight = torch.cat((dweight, torch.zeros_like(inputs[1][100:])))
    torch.testing.assert_close(got, [*expected, dhidden, dweight], rtol=1e-4, atol=1e-5)


REFUSED = {
    "weight": ({"columns": 5}, {}, "weight has shape [133, 5]; needed [133, 17]"),
    "rows": ({}, {"row_weight": torch.ones(3)}, "row_weight has shape [3]; needed [45]"),
    "targets": ({}, {"ce_weight": 0.5}, "ce_weight is 0.5; the cross-entropy needs targets"),
    "tail": ({}, {"tail": False}, "tail=False has no effect without a top-k teacher"),
    "jsd": ({}, {"kind": "jsd", "b": 0.0}, "b is 0.0; it must be above 0 and below 1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_arguments_that_are_refused(case):
    sizes, options, message = REFUSED[case]
    hidden, weight = draw()[0], draw(**sizes)[1]
    with pytest.raises(ValueError) as error:
        linear_divergence(hidden, weight, draw(columns=9), **options)
    assert message in str(error.value)


def test_teachers_that_are_refused():
    student, teacher = draw(), draw(columns=9)
    with pytest.raises(
        ValueError, match=r"the teacher has shapes \[\[44, 9\], \[133, 9\]\]; needed \[\[45, 9\], \[133"
    ):
        linear_divergence(*student, (teacher[0][1:], teacher[1]))
    with pytest.raises(ValueError, match=r"the teacher has shapes \[\[45, 133, 1\]\]|classes, the teacher 1"):
        linear_divergence(*student, (teacher[0] @ teacher[1].T)[..., None])
    with pytest.raises(ValueError, match="teacher_softcap and teacher_logit_scale have no effect on logprobs"):
        linear_divergence(*student, top_k_of(*teacher, 7), teacher_softcap=3.0)


def test_chunks_and_their_pieces_are_of_equal_size_and_fit_the_memory():
    """1 GiB of both models' fp32 logits, and 1 GiB of dlogits; pieces of 512 rows at least."""
    assert chunks.rows_of_chunk(16384, 128256, 2, torch.bfloat16) == (1024, 4096)
    assert chunks.rows_of_chunk(16384, 128256, 1, torch.bfloat16) == (2048, 4096)
    assert chunks.rows_of_chunk(16384, 128256, 2, torch.float32) == (1024, 2048)
    assert chunks.rows_of_chunk(5000, 262144, 2, torch.bfloat16) == (512, 1792)
    assert chunks.rows_of_chunk(100_000, 1024, 2, torch.bfloat16) == (7808, 7808)
    assert chunks.rows_of_chunk(5, 128256, 2, torch.bfloat16) == (128, 128)


def test_backward_twice_and_without_a_graph():
    inputs, teacher = leaves(), draw(columns=9, dtype=torch.float32)
    output = linear_divergence(*inputs, teacher)
    first, second = (torch.autograd.grad(3 * output.loss, inputs, retain_graph=True) for _ in range(2))
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    assert not any(x.requires_grad for x in (output.divergence, output.entropy))
    with torch.no_grad():
        torch.testing.assert_close(linear_divergence(*inputs, teacher).loss, output.loss.detach())
