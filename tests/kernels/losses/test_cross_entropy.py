import math

import pytest
import torch
import torch.nn.functional as F

from ligermodels.kernels import launch
from ligermodels.kernels.losses import cross_entropy as module
from ligermodels.kernels.losses import cross_entropy_rows as rows_module
from ligermodels.kernels.losses.cross_entropy import (
    cross_entropy,
    cross_entropy_reference,
    cross_entropy_with_metrics,
    cross_entropy_with_metrics_reference,
)
from ligermodels.kernels.losses.cross_entropy_rows import LogitsTile, empty_results, launch_cross_entropy
from ligermodels.kernels.losses.loss_reduction import mean_factor, reduce_losses
from ligermodels.kernels.losses.rescale import rescale_
from tests.conftest import DEVICE, TENS_OF_GIB
from tests.kernels.error_budget import DTYPES, FACTOR, check, relative_error, run

SHAPES = [(20, 33), (3, 5, 257), (12, 1000)]
OPTIONS = [
    {},
    {"softcap": 3.0},
    {"logit_scale": 0.25},
    {"z_loss": 0.01},
    {"label_smoothing": 0.1},
    {"softcap": 2.0, "logit_scale": 1.5, "z_loss": 0.02, "label_smoothing": 0.2},
]
TOGETHER = OPTIONS[-1]
NEW_OPTIONS = {"token_scaling": True, **TOGETHER}
FP32_BOUND = 16 * torch.finfo(torch.float32).eps
pytestmark = [
    pytest.mark.usefixtures("kernels", "poisoned"),
    # The interpreter computes masked lanes with NumPy, which warns about their values.
    pytest.mark.filterwarnings("ignore:invalid value encountered in multiply:RuntimeWarning"),
]


def draw(*shape, ignore_index=-100):
    """Logits and targets; one target is ignored, one is the last class."""
    logits = 3 * torch.randn(shape, dtype=torch.float64, device=DEVICE)
    targets = torch.randint(shape[-1], shape[:-1], device=DEVICE)
    targets.view(-1)[1], targets.view(-1)[2] = ignore_index, shape[-1] - 1
    return logits, targets


def weights_of(classes):
    """Class weights; that of class 0 is zero."""
    weights = 0.5 + torch.rand(classes, device=DEVICE)
    weights[0] = 0
    return weights


@pytest.fixture(params=["kernels", "reference"])
def path(request, kernels, monkeypatch):
    """Runs a test on the Triton kernels and, on a CPU, on the reference implementation too."""
    if request.param == "reference":
        if DEVICE != "cpu":
            pytest.skip("references run on CPU tensors")
        monkeypatch.setattr(launch, "interpreting", False)


@pytest.fixture
def short_blocks(monkeypatch):
    """Rows of several blocks, the last one only partly filled."""
    monkeypatch.setattr(rows_module, "logits_tile", lambda *kind: LogitsTile(64, 4, 4))
    monkeypatch.setattr(rows_module, "_row_launcher", rows_module._row_launcher.__wrapped__)  # without its cache


def check_loss(ours, reference, inputs, dtype, factor=FACTOR, **options):
    """In half precision the error budget, for the loss rounded to that precision. In fp32 a fixed bound, because the
    error of plain PyTorch is only one or two roundings, or zero by chance."""

    def rounded(function):
        return lambda *inputs: function(*inputs, **options).to(inputs[0].dtype)

    if dtype != torch.float32:
        return check(rounded(ours), rounded(reference), inputs, dtype, factor)
    inputs = [x.float() if x.is_floating_point() else x for x in inputs]
    got, expected = (
        run(rounded(f), inputs, precision, torch.Generator())
        for f, precision in [(ours, torch.float32), (reference, torch.float64)]
    )
    for index, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert a.shape == b.shape
        assert relative_error(a, b) <= FP32_BOUND, f"tensor {index} of {len(got)}: error {relative_error(a, b):.3e}"


def check_options(inputs, dtype, **options):
    check_loss(cross_entropy, cross_entropy_reference, inputs, dtype, **options)


@pytest.mark.parametrize("options", OPTIONS)
def test_the_loss_of_half_precision_logits_is_fp32(options):
    logits, targets = draw(20, 257)
    logits = logits.half()
    loss = cross_entropy(logits, targets, reduction="none", **options)
    expected = cross_entropy_reference(logits.double(), targets, reduction="none", **options)
    assert loss.dtype == torch.float32
    assert relative_error(loss, expected) <= FP32_BOUND


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "options"), [*((SHAPES[0], options) for options in OPTIONS), *((shape, TOGETHER) for shape in SHAPES[1:])]
)
def test_within_the_error_budget_under_non_uniform_upstream_gradients(shape, options, dtype):
    check_options(draw(*shape), dtype, reduction="none", **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_rows_of_several_blocks_are_within_the_error_budget(short_blocks, reduction, dtype):
    check_options(draw(2, 3, 257), dtype, reduction=reduction, **TOGETHER)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, NEW_OPTIONS])
def test_class_weights_are_within_the_error_budget(options, reduction, dtype):
    check_options(draw(20, 33), dtype, reduction=reduction, class_weight=weights_of(33), **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_token_scaling_is_within_the_error_budget(reduction, dtype):
    check_options(draw(20, 33), dtype, reduction=reduction, token_scaling=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, NEW_OPTIONS])
def test_loss_and_entropy_are_within_the_error_budget_with_their_gradients(short_blocks, options, dtype):
    """As in policy gradients with an entropy bonus: rows of several blocks, the last one only partly filled."""

    def with_bonus(function):
        def call(logits, targets, **options):
            output = function(logits, targets, reduction="none", **options)
            return output.loss - 0.3 * output.entropy

        return call

    functions = map(with_bonus, (cross_entropy_with_metrics, cross_entropy_with_metrics_reference))
    check_loss(*functions, draw(2, 3, 257), dtype, class_weight=weights_of(257), **options)


def test_another_ignore_index_is_within_the_error_budget():
    check_options(draw(4, 33, ignore_index=7), torch.float32, ignore_index=7)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_reference_agrees_with_pytorch_cross_entropy(reduction, label_smoothing):
    logits, targets = draw(7, 33)
    expected = F.cross_entropy(logits, targets, reduction=reduction, label_smoothing=label_smoothing)
    got = cross_entropy_reference(logits, targets, reduction=reduction, label_smoothing=label_smoothing)
    torch.testing.assert_close(got, expected, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_reference_agrees_with_pytorch_cross_entropy_with_class_weights(reduction, label_smoothing):
    logits, targets = draw(7, 33)
    targets[3] = 0  # of weight 0
    weights = weights_of(33).double()
    options = {"reduction": reduction, "label_smoothing": label_smoothing}
    results = []
    for loss in (
        lambda x: F.cross_entropy(x, targets, weights, **options),
        lambda x: cross_entropy_reference(x, targets, class_weight=weights, **options),
    ):
        leaf = logits.clone().requires_grad_()
        results.append([loss(leaf), *torch.autograd.grad(loss(leaf).sum(), leaf)])
    torch.testing.assert_close(*results, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_reference_scales_each_token_by_the_probability_of_its_target(reduction):
    logits, targets = draw(7, 33)
    leaf, twin = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    losses = F.cross_entropy(twin, targets, reduction="none")
    expected = losses * (-losses).detach().exp()
    expected = {"mean": expected.sum() / 6, "sum": expected.sum(), "none": expected}[reduction]
    got = cross_entropy_reference(leaf, targets, token_scaling=True, reduction=reduction)
    torch.testing.assert_close(got, expected)
    gradients = torch.autograd.grad(got.sum(), leaf), torch.autograd.grad(expected.sum(), twin)
    torch.testing.assert_close(*gradients, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("inplace", [False, True])
def test_metrics_follow_their_formulas(path, short_blocks, inplace, reduction):
    logits, targets = draw(2, 4, 100)
    logits, weights = logits.float(), weights_of(100)
    targets[0, 3] = logits[0, 3].argmax()  # at least one token is predicted
    supervised, log_probs = targets != -100, logits.double().log_softmax(-1)
    z_losses = 0.02 * logits.double().logsumexp(-1).square() * weights[targets * supervised].double() * supervised
    correct = (logits.argmax(-1) == targets).double()
    count = weights[targets[supervised]].double().sum()
    z_loss = {"mean": z_losses.sum() / count, "sum": z_losses.sum(), "none": z_losses}[reduction]
    accuracy = {"mean": correct.sum() / 7, "sum": correct.sum(), "none": correct}[reduction]

    options = {"class_weight": weights, "z_loss": 0.02, "reduction": reduction}
    expected_loss = cross_entropy(logits, targets, **options)
    leaf = logits.clone().requires_grad_()
    output = cross_entropy_with_metrics(leaf * 1, targets, inplace=inplace, **options)
    torch.testing.assert_close(output.loss.detach(), expected_loss)
    torch.testing.assert_close(output.z_loss, z_loss.float())
    torch.testing.assert_close(output.token_accuracy, accuracy.float())
    assert torch.equal(output.predicted_tokens, logits.argmax(-1).where(supervised, -1))
    entropy = -(log_probs.exp() * log_probs).sum(-1) * supervised
    torch.testing.assert_close(output.entropy.detach(), entropy.float())
    assert output.loss.requires_grad and not output.z_loss.requires_grad
    assert output.entropy.requires_grad == (reduction == "none" and not inplace)
    (gradient,) = torch.autograd.grad(output.loss.sum(), leaf)
    (expected,) = torch.autograd.grad(cross_entropy(leaf, targets, **options).sum(), leaf)
    torch.testing.assert_close(gradient, expected)


def test_the_entropy_alone_can_be_differentiated(path):
    logits, targets = draw(4, 33)
    leaf = logits.float().requires_grad_()
    entropy = cross_entropy_with_metrics(leaf, targets, reduction="none").entropy
    (got,) = torch.autograd.grad(entropy.sum(), leaf)
    p = logits.softmax(-1)
    expected = -p * (p.log() - (p * p.log()).sum(-1, keepdim=True)) * (targets != -100)[:, None]
    torch.testing.assert_close(got, expected.float())


def test_metrics_of_equal_peaked_and_masked_logits(path, short_blocks):
    """The first of equal logits is predicted; a peak has an entropy of zero; masked classes add none."""
    logits = torch.zeros(4, 130, device=DEVICE)
    logits[1, 70] = 100
    logits[2, :128] = -float("inf")
    logits[3, [5, 77, 129]] = 1
    leaf, targets = logits.clone().requires_grad_(), torch.tensor([0, 70, 129, 77], device=DEVICE)
    output = cross_entropy_with_metrics(leaf, targets, reduction="none")
    assert output.predicted_tokens.tolist() == [0, 70, 128, 5]
    assert output.token_accuracy.tolist() == [1, 1, 0, 0]
    entropy = torch.distributions.Categorical(logits=logits[3]).entropy().item()
    torch.testing.assert_close(output.entropy.cpu(), torch.tensor([130, 1, 2, math.exp(entropy)]).log())
    (gradient,) = torch.autograd.grad(output.entropy.sum(), leaf)
    assert gradient.isfinite().all() and not gradient[:3].abs().gt(1e-6).any()


def test_reference_options_follow_the_formula():
    logits, targets = draw(7, 33)
    lse = (2 * torch.tanh(1.5 * logits / 2)).logsumexp(-1)
    expected = F.cross_entropy(2 * torch.tanh(1.5 * logits / 2), targets, reduction="none") + 0.02 * lse**2
    got = cross_entropy_reference(logits, targets, softcap=2.0, logit_scale=1.5, z_loss=0.02, reduction="none")
    torch.testing.assert_close(got, expected.where(targets != -100, 0.0), rtol=1e-14, atol=1e-14)


def test_logits_far_below_the_softcap_keep_full_accuracy():
    """A tanh that cancels near zero has an error of 1e-7 times the softcap."""
    check_options(draw(20, 33), torch.float32, softcap=1000.0, reduction="none")


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("rows", [0, 5])
def test_without_supervised_targets_loss_and_gradient_are_zero(rows, reduction):
    logits = torch.randn(rows, 33, device=DEVICE, requires_grad=True)
    targets = torch.full((rows,), -100, device=DEVICE)
    loss = cross_entropy(logits, targets, reduction=reduction)
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(logits.grad, torch.zeros_like(logits))


@pytest.mark.parametrize("mean", [True, False])
def test_a_reduction_of_several_steps_skips_ignored_targets_and_returns_its_factor(mean):
    losses, targets = torch.randn(2500, device=DEVICE), torch.randint(2, (2500,), device=DEVICE)
    total, factor = reduce_losses(losses, targets, None, 0, mean)
    count = targets.sum().item() if mean else 1
    assert factor.item() == pytest.approx(1 / count)
    assert total.item() == pytest.approx(losses.double().sum().item() / count, rel=1e-5)
    assert torch.equal(mean_factor(targets, None, 1), 1 / (targets == 0).sum().float())


def test_masked_logits_get_no_probability(short_blocks):
    """Logits of minus infinity fill whole blocks, including the first."""
    logits = torch.randn(3, 257, device=DEVICE)
    logits[:, :130] = -float("inf")
    logits.requires_grad_()
    targets = torch.tensor([130, 200, 256], device=DEVICE)
    loss = cross_entropy(logits, targets)
    (gradient,) = torch.autograd.grad(loss, logits)
    short = logits.detach()[:, 130:].requires_grad_()
    expected = F.cross_entropy(short, targets - 130)
    torch.testing.assert_close(loss, expected)
    assert torch.equal(gradient[:, :130], torch.zeros_like(gradient[:, :130]))
    torch.testing.assert_close(gradient[:, 130:], torch.autograd.grad(expected, short)[0])


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize(("target", "options"), [(-1, {}), (33, {"label_smoothing": 1.0}), (2**40, NEW_OPTIONS)])
def test_a_target_outside_the_vocabulary_has_an_infinite_loss_and_no_gradient(path, target, options, inplace):
    logits = torch.randn(3, 33, device=DEVICE)
    targets, ignored = (torch.tensor([4, t, 5], device=DEVICE) for t in (target, -100))
    options = {"class_weight": weights_of(33), "inplace": inplace, **options}
    leaf = logits.clone().requires_grad_()
    output = cross_entropy_with_metrics(leaf * 1, targets, reduction="none", **options)
    others = cross_entropy(leaf * 1, ignored, reduction="none", **options)
    assert torch.equal(output.loss.isinf(), torch.tensor([False, True, False], device=DEVICE))
    assert torch.equal(output.loss[[0, 2]], others[[0, 2]])
    assert output.predicted_tokens[1] == -1 and output.entropy[1] == 0 and output.token_accuracy[1] == 0
    gradients = [torch.autograd.grad(loss.sum(), leaf)[0] for loss in (output.loss, others)]
    assert torch.equal(*gradients) and not gradients[0][1].any()
    assert cross_entropy(logits, targets, **options).isinf()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_mean_weighs_targets_outside_the_vocabulary_by_one(path, dtype):
    """Their loss is infinite; the gradients of the others are divided by the same number on every device."""
    leaf = torch.randn(3, 33, device=DEVICE, dtype=dtype, requires_grad=True)
    targets = torch.tensor([4, 33, 5], device=DEVICE)
    (got,) = torch.autograd.grad(cross_entropy(leaf, targets), leaf)
    expected = torch.autograd.grad(F.cross_entropy(leaf.double()[[0, 2]], targets[[0, 2]], reduction="sum") / 3, leaf)
    torch.testing.assert_close(got, expected[0])


def test_weights_that_are_all_zero_have_the_mean_zero(path):
    logits, targets = draw(4, 33)
    assert cross_entropy(logits.float(), targets, class_weight=torch.zeros(33, device=DEVICE)) == 0


def test_the_gradient_computed_in_place_is_the_same(short_blocks):
    logits, targets = draw(6, 257)
    logits = logits.half()
    options = (-100, 2.0, 1.5, 0.02, 0.2)
    scale = torch.rand(6, device=DEVICE)
    loss, lse, *_ = module.cross_entropy_forward(logits, targets, None, False, False, *options)
    expected = module.cross_entropy_backward(logits, targets, None, lse, scale, None, None, None, *options)
    results, got = empty_results(targets, False, False), logits.clone()
    launch_cross_entropy(got, targets, None, results, scale, got, *options)
    for a, b in [(results.loss, loss), (results.lse, lse), (got, expected)]:
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("reduction", "options"), [("mean", {}), ("sum", TOGETHER), ("none", {}), ("none", TOGETHER)])
def test_in_place_is_within_the_error_budget(short_blocks, reduction, options, dtype):
    """The upstream gradients are random, so each row of the gradient is multiplied by its own and rounded twice."""

    def in_place(logits, targets, **options):
        return cross_entropy(logits.clone(), targets, inplace=True, **options)

    inputs = draw(4, 20, 257)  # enough rows to average the errors of their few large elements
    check_loss(in_place, cross_entropy_reference, inputs, dtype, factor=2, reduction=reduction, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_in_place_with_class_weights_is_within_the_error_budget(short_blocks, reduction, dtype):
    def in_place(logits, targets, **options):
        return cross_entropy(logits.clone(), targets, inplace=True, **options)

    options = {"reduction": reduction, "class_weight": weights_of(257), **NEW_OPTIONS}
    check_loss(in_place, cross_entropy_reference, draw(4, 20, 257), dtype, factor=2, **options)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_in_place_gradient_takes_the_memory_of_the_logits(short_blocks, reduction):
    logits, targets = draw(6, 257)
    logits = logits.float()
    leaf, before = logits.clone().requires_grad_(), logits.clone()
    (expected,) = torch.autograd.grad(cross_entropy(leaf, targets, reduction=reduction), leaf)
    (got,) = torch.autograd.grad(
        cross_entropy(logits.requires_grad_(), targets, reduction=reduction, inplace=True), logits
    )
    assert got.data_ptr() == logits.data_ptr()
    assert not torch.equal(logits, before)
    torch.testing.assert_close(got, expected)


def test_in_place_an_upstream_gradient_of_one_writes_nothing():
    """The kernel leaves rows with upstream gradient 1 untouched and scales the others."""
    gradient = torch.ones(2, 33, device=DEVICE)
    rescale_(gradient, torch.tensor([1.0, 3.0], device=DEVICE))
    assert torch.equal(gradient, torch.tensor([[1.0], [3.0]], device=DEVICE).expand(2, 33))
    poison = torch.full((4, 33), float("nan"), device=DEVICE)
    rescale_(poison, torch.ones((), device=DEVICE))
    assert poison.isnan().all()


def test_in_place_raises_on_a_second_backward():
    logits, targets = draw(4, 33)
    loss = cross_entropy(logits.float().requires_grad_(), targets, inplace=True)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_in_place_raises_if_another_op_saved_the_logits():
    logits, targets = draw(4, 33)
    leaf = logits.float().requires_grad_()
    loss = cross_entropy(torch.exp(leaf), targets, inplace=True)  # exp saves its output for backward
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_in_place_does_not_write_logits_that_need_no_gradient():
    logits, targets = draw(4, 33)
    logits = logits.float()
    before = logits.clone()
    cross_entropy(logits, targets, inplace=True)
    with torch.no_grad():
        cross_entropy(logits.requires_grad_(), targets, inplace=True)
    assert torch.equal(logits, before)


def test_in_place_copies_expanded_rows():
    logits, targets = draw(4, 33)
    row = logits[:1].float().requires_grad_()
    expected, got = (
        torch.autograd.grad(cross_entropy(row.expand(4, 33), targets, inplace=inplace), row)[0]
        for inplace in (False, True)
    )
    torch.testing.assert_close(got, expected)


def test_logits_are_not_written_to_by_default():
    logits, targets = draw(4, 33)
    logits = logits.float().requires_grad_()
    before = logits.detach().clone()
    cross_entropy(logits, targets).backward()
    assert torch.equal(logits, before)


def test_mismatched_arguments_raise():
    logits, targets = draw(4, 33)
    with pytest.raises(ValueError, match=r"targets has shape \[3\]; needed \[4\]"):
        cross_entropy(logits, targets[:3])
    with pytest.raises(ValueError, match=r"'median'; supported: mean, sum, none"):
        cross_entropy(logits, targets, reduction="median")
    with pytest.raises(
        ValueError, match=r"class_weight has shape \(32,\) on .*; expected \(33,\), one weight for each"
    ):
        cross_entropy(logits, targets, class_weight=weights_of(32))


@pytest.mark.gpu
@TENS_OF_GIB
@pytest.mark.parametrize("vocab", [128256, 50257])
@pytest.mark.parametrize("options", [(-100, None, 1.0, 0.0, 0.0), (-100, 20.0, 1.5, 0.01, 0.1)])
def test_one_launch_agrees_with_two_and_is_bit_identical_when_repeated(vocab, options):
    """More rows than programs run at a time, of many blocks."""
    logits, targets = draw(3000, vocab)
    logits = logits.bfloat16()
    scale = torch.rand(3000, device=DEVICE)
    loss, lse, *_ = module.cross_entropy_forward(logits, targets, None, False, False, *options)
    expected = module.cross_entropy_backward(logits, targets, None, lse, scale, None, None, None, *options)
    (got, got_loss), (again, again_loss) = (
        (copy, module.cross_entropy_in_place(copy, targets, None, False, False, scale, *options).loss)
        for copy in (logits.clone(), logits.clone())
    )
    assert torch.equal(got, again) and torch.equal(got_loss, again_loss)
    assert relative_error(got_loss, loss.double()) <= FP32_BOUND
    assert relative_error(got, expected.double()) <= torch.finfo(torch.bfloat16).eps / 8


@pytest.mark.gpu
def test_in_place_can_be_captured_in_a_cuda_graph():
    logits, targets = draw(64, 128256)
    logits = logits.bfloat16()
    options, scale = (-100, None, 1.0, 0.0, 0.0), torch.ones((), device=DEVICE).expand(64)
    expected = logits.clone()
    arguments = targets, None, False, False, scale, *options
    expected_loss = module.cross_entropy_in_place(expected, *arguments).loss  # compiles the kernel
    buffer, graph = torch.empty_like(logits), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = module.cross_entropy_in_place(buffer, *arguments).loss
    for _ in range(2):
        buffer.copy_(logits)
        graph.replay()
        assert torch.equal(buffer, expected) and torch.equal(loss, expected_loss)
