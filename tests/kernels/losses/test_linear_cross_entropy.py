import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from ligermodels.kernels import launch
from ligermodels.kernels.losses import cross_entropy as cross_entropy_module
from ligermodels.kernels.losses import linear_cross_entropy as module
from ligermodels.kernels.losses import logits_chunks
from ligermodels.kernels.losses.cross_entropy import cross_entropy
from ligermodels.kernels.losses.linear_cross_entropy import (
    linear_cross_entropy,
    linear_cross_entropy_reference,
    linear_cross_entropy_with_metrics,
    linear_cross_entropy_with_metrics_reference,
)
from ligermodels.kernels.losses.logits_chunks import chunk_rows, keeps_logits
from ligermodels.kernels.losses.rescale import rescale, rescale_pair, scale_gradient_
from tests.conftest import DEVICE, TENS_OF_GIB
from tests.kernels.allocations import allocations
from tests.kernels.error_budget import DTYPES, relative_error
from tests.kernels.losses.test_cross_entropy import NEW_OPTIONS, OPTIONS, TOGETHER, check_loss, path, weights_of  # noqa: F401

# [..., H, V]; enough rows that the errors average out
SHAPES = [(40, 17, 33), (3, 13, 31, 257), (32, 9, 1000)]
pytestmark = [
    pytest.mark.usefixtures("kernels", "poisoned"),
    # The interpreter computes masked lanes with NumPy, which warns about their values.
    pytest.mark.filterwarnings("ignore:invalid value encountered in multiply:RuntimeWarning"),
]


def draw(*shape, dtype=torch.float64):
    """Hidden states, weight and targets; one target is ignored."""
    *rows, columns, vocab = shape
    hidden = torch.randn(*rows, columns, dtype=torch.float64, device=DEVICE)
    weight = torch.randn(vocab, columns, dtype=torch.float64, device=DEVICE) / 4
    targets = torch.randint(vocab, rows, device=DEVICE)
    targets.view(-1)[1] = -100
    return hidden.to(dtype), weight.to(dtype), targets


def leaves(*shape, dtype=torch.float32):
    hidden, weight, targets = draw(*shape, dtype=dtype)
    return hidden.requires_grad_(), weight.requires_grad_(), targets


@pytest.fixture
def chunks_of_16(monkeypatch):
    monkeypatch.setattr(logits_chunks, "chunk_rows", lambda *a: 16)


@pytest.fixture
def short_of_memory(monkeypatch):
    """The smallest buffers, of one row or 16 columns of logits: several chunks of rows and of the vocabulary."""
    monkeypatch.setattr(logits_chunks, "LOW_MEMORY_BYTES", 1)
    monkeypatch.setattr(logits_chunks, "LOGITS_ALIGNMENT", 8)


def count_calls(monkeypatch, name):
    """A list to which every call of `module.name` appends an entry."""
    calls, function = [], getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args, **kwargs: (calls.append(name), function(*args, **kwargs))[1])
    return calls


def check_options(inputs, dtype, **options):
    check_loss(linear_cross_entropy, linear_cross_entropy_reference, inputs, dtype, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("options", OPTIONS[:-1])  # the next test has all of them together
def test_options_are_within_the_error_budget(options, reduction, dtype):
    check_options(draw(40, 17, 33), dtype, reduction=reduction, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "reduction"), [(SHAPES[0], "sum"), *((shape, kind) for shape in SHAPES for kind in ("mean", "none"))]
)
def test_shapes_are_within_the_error_budget(shape, reduction, dtype):
    check_options(draw(*shape), dtype, reduction=reduction, **TOGETHER)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_several_chunks_are_within_the_error_budget(chunks_of_16, reduction, dtype):
    check_options(draw(45, 17, 33), dtype, reduction=reduction, **TOGETHER)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("reduction", "options"), [("mean", {}), ("sum", TOGETHER), ("none", {}), ("none", TOGETHER)])
def test_low_memory_is_within_the_error_budget(short_of_memory, options, reduction, dtype):
    """In bf16 gradients are rounded twice: before and after the multiplication by the upstream gradient."""
    low_memory = partial(linear_cross_entropy, low_memory=True)
    check_loss(low_memory, linear_cross_entropy_reference, draw(100, 17, 33), dtype, reduction=reduction, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_low_memory_with_a_buffer_for_all_logits_is_within_the_error_budget(reduction, dtype):
    low_memory = partial(linear_cross_entropy, low_memory=True)
    check_loss(low_memory, linear_cross_entropy_reference, draw(40, 64, 640), dtype, reduction=reduction, **TOGETHER)


def with_bias(function, **settings):
    """`function` of (hidden, weight, bias, targets); with metrics, the loss minus a share of the entropies."""

    def call(hidden, weight, bias, targets, **options):
        output = function(hidden, weight, targets, bias=bias, **settings, **options)
        if isinstance(output, torch.Tensor):
            return output
        return output.loss - 0.3 * (output.entropy if output.loss.ndim else output.entropy.mean())

    return call


def check_with_bias(shape, dtype, low_memory=False, **options):
    *inputs, targets = draw(*shape)
    bias = torch.randn(shape[-1], dtype=torch.float64, device=DEVICE)
    ours = with_bias(linear_cross_entropy_with_metrics, low_memory=low_memory)
    reference = with_bias(linear_cross_entropy_with_metrics_reference)
    check_loss(ours, reference, (*inputs, bias, targets), dtype, class_weight=weights_of(shape[-1]), **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_bias_is_within_the_error_budget(chunks_of_16, reduction, dtype):
    *inputs, targets = draw(45, 17, 33)
    inputs.append(torch.randn(33, dtype=torch.float64, device=DEVICE))
    functions = map(with_bias, (linear_cross_entropy, linear_cross_entropy_reference))
    check_loss(*functions, (*inputs, targets), dtype, reduction=reduction)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_new_options_are_within_the_error_budget(chunks_of_16, reduction, dtype):
    check_with_bias((45, 17, 33), dtype, reduction=reduction, **NEW_OPTIONS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_new_options_with_low_memory_are_within_the_error_budget(short_of_memory, reduction, dtype):
    check_with_bias((100, 17, 33), dtype, low_memory=True, reduction=reduction, **NEW_OPTIONS)


def test_new_options_with_few_rows_are_within_the_error_budget():
    check_with_bias((40, 64, 48), torch.float32, **NEW_OPTIONS)
    check_with_bias((40, 64, 640), torch.float32, low_memory=True, **NEW_OPTIONS)


@pytest.mark.parametrize("low_memory", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_bias_alone_can_be_trained(short_of_memory, chunks_of_16, reduction, low_memory):
    hidden, weight, targets = draw(40, 17, 33, dtype=torch.float32)
    bias = torch.randn(33, device=DEVICE, requires_grad=True)
    got = linear_cross_entropy(hidden, weight, targets, bias=bias, reduction=reduction, low_memory=low_memory)
    expected = F.cross_entropy(F.linear(hidden, weight, bias), targets, reduction=reduction)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(*(torch.autograd.grad(loss.sum(), bias) for loss in (got, expected)))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_all_paths_agree_on_metrics(path, chunks_of_16, short_of_memory, reduction):  # noqa: F811
    hidden, weight, targets = leaves(3, 7, 17, 48)
    options = {"class_weight": weights_of(48), "reduction": reduction, **NEW_OPTIONS}
    logits = F.linear(hidden, weight)
    _, *expected = linear_cross_entropy_with_metrics_reference(hidden, weight, targets, **options)
    assert torch.equal(expected[2], logits.argmax(-1).where(targets != -100, -1))
    for low_memory in (False, True):
        _, *metrics = linear_cross_entropy_with_metrics(hidden, weight, targets, low_memory=low_memory, **options)
        torch.testing.assert_close(metrics, expected)


@pytest.mark.parametrize("low_memory", [False, True])
def test_targets_outside_the_vocabulary_change_no_other_row(path, chunks_of_16, short_of_memory, low_memory):  # noqa: F811
    hidden, weight, targets = leaves(20, 17, 33)
    outside, ignored = targets.clone(), targets.clone()
    outside[[3, 5, 17]], ignored[[3, 5, 17]] = torch.tensor([33, -1, 2**40], device=DEVICE), -100
    wrong, right = (
        linear_cross_entropy(hidden, weight, t, reduction="none", low_memory=low_memory) for t in (outside, ignored)
    )
    assert wrong[[3, 5, 17]].isposinf().all() and wrong.isinf().sum() == 3
    assert torch.equal(wrong.where(wrong.isfinite(), 0), right)
    gradients = (torch.autograd.grad(loss.sum(), (hidden, weight)) for loss in (wrong, right))
    assert all(map(torch.equal, *gradients))
    assert linear_cross_entropy(hidden, weight, outside, low_memory=low_memory).isposinf()


def test_a_bias_of_another_size_raises():
    with pytest.raises(ValueError, match=r"bias has shape \[32\]; needed \[33\]"):
        linear_cross_entropy(*draw(4, 17, 33), bias=torch.zeros(32, device=DEVICE))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("reduction", "options"), [("mean", {}), ("sum", {}), ("mean", TOGETHER)])
def test_few_rows_save_their_logits_and_are_within_the_error_budget(monkeypatch, options, reduction, dtype):
    losses = count_calls(monkeypatch, "cross_entropy_of_temporary")
    check_options(draw(40, 64, 48), dtype, reduction=reduction, **options)
    assert bool(losses) == (dtype != torch.float16)


@pytest.mark.parametrize("retained", [False, True])
def test_few_rows_overwrite_logits_with_their_gradient_unless_the_graph_is_retained(monkeypatch, retained):
    launches, launch_kernel = [], cross_entropy_module.launch_cross_entropy

    def record(*args, **options):
        launches.append(args)
        launch_kernel(*args, **options)

    monkeypatch.setattr(cross_entropy_module, "launch_cross_entropy", record)
    *inputs, targets = leaves(5, 17, 48)
    linear_cross_entropy(*inputs, targets).backward(retain_graph=retained)
    (logits, *_), (saved, _, _, _, _, dlogits, *_) = launches
    assert saved.data_ptr() == logits.data_ptr()
    assert (dlogits.data_ptr() == logits.data_ptr()) == (not retained)


@pytest.mark.parametrize(
    ("rows", "dtype", "needed", "expected"),
    [
        (8448, torch.bfloat16, (True, True), True),  # 2 T V bytes of logits against 4 H (T + V) of sums
        (8832, torch.bfloat16, (True, True), False),
        (4096, torch.float32, (True, True), True),
        (4608, torch.float32, (True, True), False),
        (4096, torch.float16, (True, True), False),
        (64, torch.bfloat16, (True, False), False),
        (64, torch.bfloat16, (False, False), False),
    ],
)
def test_logits_are_saved_if_they_take_no_more_memory_than_fp32_sums(rows, dtype, needed, expected):
    assert keeps_logits(rows, 4096, 128256, dtype, *needed) == expected


def test_logits_with_unaligned_rows_are_not_saved():
    assert not keeps_logits(64, 768, 50257, torch.bfloat16, True, True)


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_low_memory_buffer_size_changes_only_the_order_of_fp32_sums(monkeypatch, reduction):
    *inputs, targets = leaves(20, 40, 200)
    results, chunks = [], []
    for size in (1, 2**20):
        launches = count_calls(monkeypatch, "launch_cross_entropy")
        monkeypatch.setattr(logits_chunks, "LOW_MEMORY_BYTES", size)
        loss = linear_cross_entropy(*inputs, targets, reduction=reduction, low_memory=True, **TOGETHER)
        results.append([loss.detach(), *torch.autograd.grad(loss.sum(), inputs)])
        chunks.append(len(launches))
    assert chunks[0] > chunks[1] + 5
    for little, much in zip(*results, strict=True):
        assert relative_error(little, much.double()) <= 1e-6


@pytest.mark.parametrize("frozen", [0, 1])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_low_memory_gives_a_frozen_input_no_gradient_and_does_not_change_the_other(short_of_memory, frozen, reduction):
    *inputs, targets = leaves(40, 17, 33)
    loss = linear_cross_entropy(*inputs, targets, reduction=reduction, low_memory=True).sum()
    expected = torch.autograd.grad(loss, inputs)
    inputs[frozen].requires_grad_(False)
    linear_cross_entropy(*inputs, targets, reduction=reduction, low_memory=True).sum().backward()
    assert inputs[frozen].grad is None
    torch.testing.assert_close(inputs[1 - frozen].grad, expected[1 - frozen])


def test_low_memory_allocates_both_gradients_and_one_buffer(short_of_memory):
    """Beyond the loss and the gradients there is only one row of logits, rounded up to whole tiles."""
    *inputs, targets = leaves(5, 17, 129)
    with allocations("empty") as allocated:
        linear_cross_entropy(*inputs, targets, low_memory=True).backward()
    assert [tuple(x.shape) for x in allocated] == [(5, 17), (129, 17), (136,)]


def test_low_memory_raises_on_a_second_backward():
    *inputs, targets = leaves(5, 17, 33)
    loss = linear_cross_entropy(*inputs, targets, low_memory=True)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_chunk_size_changes_only_the_order_of_fp32_sums(monkeypatch, reduction, dtype):
    *inputs, targets = leaves(50, 17, 33, dtype=dtype)
    results = []
    for rows in (16, 64):
        monkeypatch.setattr(logits_chunks, "chunk_rows", lambda *a, rows=rows: rows)
        loss = linear_cross_entropy(*inputs, targets, reduction=reduction, **TOGETHER)
        results.append([loss.detach(), *torch.autograd.grad(loss.sum(), inputs)])
    for few, all_rows in zip(*results, strict=True):
        bound = 1e-6 if few.dtype == torch.float32 else torch.finfo(few.dtype).eps / 8
        assert relative_error(few, all_rows.double()) <= bound


def test_without_gradients_the_loss_is_the_same_and_costs_one_product(chunks_of_16):
    *inputs, targets = leaves(40, 17, 33)
    expected = linear_cross_entropy(*inputs, targets)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        torch.testing.assert_close(linear_cross_entropy(*inputs, targets), expected.detach())
    assert counter.get_total_flops() == 2 * 40 * 17 * 33


@pytest.mark.parametrize("low_memory", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("rows", [0, 5])
def test_without_supervised_targets_loss_and_gradients_are_zero(rows, reduction, low_memory):
    hidden = torch.randn(rows, 17, device=DEVICE, requires_grad=True)
    weight = torch.randn(33, 17, device=DEVICE, requires_grad=True)
    targets = torch.full((rows,), -100, device=DEVICE)
    loss = linear_cross_entropy(hidden, weight, targets, reduction=reduction, low_memory=low_memory).sum()
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(hidden.grad, torch.zeros_like(hidden))
    assert torch.equal(weight.grad, torch.zeros_like(weight))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_backward_can_run_twice(reduction):
    *inputs, targets = leaves(5, 17, 33)
    loss = linear_cross_entropy(*inputs, targets, reduction=reduction).sum()
    first, second = (torch.autograd.grad(3 * loss, inputs, retain_graph=True) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


def test_weight_gradient_is_bit_identical_from_run_to_run(chunks_of_16):
    hidden, weight, targets = leaves(70, 17, 33)
    first, second = (torch.autograd.grad(linear_cross_entropy(hidden, weight, targets), weight)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_weight_gradient_is_summed_in_fp32(chunks_of_16):
    """320 equal rows in 20 chunks: a half-precision sum would be rounded twenty times, this one once."""
    hidden = torch.ones(320, 8, device=DEVICE, dtype=torch.float16)
    weight = torch.zeros(33, 8, device=DEVICE, dtype=torch.float16, requires_grad=True)
    targets = torch.zeros(320, dtype=torch.int64, device=DEVICE)
    (dweight,) = torch.autograd.grad(linear_cross_entropy(hidden, weight, targets, reduction="sum"), weight)
    probability = torch.tensor(1 / 33).half().double().item()
    expected = torch.full((32, 8), 320 * probability, device=DEVICE, dtype=torch.float64).half()
    assert torch.equal(dweight[1:], expected)


def test_upstream_gradient_is_not_rounded_to_half_precision():
    """1/3 in fp16 has a relative error of 2e-4, which every gradient would inherit."""
    hidden, weight, targets = leaves(40, 17, 33, dtype=torch.float16)
    loss = linear_cross_entropy(hidden, weight, targets, reduction="sum")
    full, third = (torch.autograd.grad(loss * s, (hidden, weight), retain_graph=True) for s in (1.0, 1 / 3))
    for part, whole in zip(third, full, strict=True):  # both rounded once, so without bias
        bias = (3 * part.double() - whole.double()) * whole.sign()
        assert bias.sum().abs() < 5e-5 * whole.double().abs().sum()


@pytest.mark.parametrize("rows", [0, 1, 200])
def test_scaling_a_pair_is_bit_identical_to_scaling_each_alone(rows):
    """Both tensors are larger than the span of one program and end inside a span."""
    pair = torch.randn(rows, 17, device=DEVICE), torch.randn(300, 17, device=DEVICE)
    scale = torch.tensor(0.375, device=DEVICE), torch.tensor(7.0, device=DEVICE), 2.0, torch.float16
    for got, x in zip(rescale_pair(*pair, *scale), pair, strict=True):
        assert torch.equal(got, rescale(x, *scale))
        assert torch.equal(got, (5.25 * x).half())


@TENS_OF_GIB
@pytest.mark.gpu
@pytest.mark.parametrize("columns", [2**14, 2**14 + 1])  # scaled as one long row, and row by row
def test_scaling_beyond_two_to_the_31_elements(columns):
    x = torch.zeros(2**17 + 1, columns, device=DEVICE, dtype=torch.bfloat16)
    x[-1] = torch.randn(columns, device=DEVICE)
    two, one = torch.tensor([2.0, 1.0], device=DEVICE)
    for scale in (
        lambda: rescale(x, two, None, 1.0, x.dtype),
        lambda: rescale_pair(x, x[:1], two, one, 1.0, x.dtype)[0],
        lambda: rescale_pair(x[:1], x, two, one, 1.0, x.dtype)[1],
        lambda: scale_gradient_(x.clone(), two),
    ):
        result = scale()
        assert torch.equal(result[-1], 2 * x[-1]) and not result[:-1].any()


def test_only_one_chunk_of_logits_is_allocated(chunks_of_16):
    *inputs, targets = leaves(40, 17, 200)
    with allocations("empty") as allocated:
        linear_cross_entropy(*inputs, targets).backward()
    sizes = [tuple(x.shape) for x in allocated]
    assert (16, 256) in sizes  # the vocabulary rounded up to a multiple of 128
    assert not [s for s in sizes if s[0] == 40 and len(s) > 1 and s[1] >= 200]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cpu_tensors_run_the_reference(monkeypatch, reduction):
    monkeypatch.setattr(launch, "interpreting", False)
    inputs = [x.cpu() for x in draw(6, 17, 33, dtype=torch.float32)]
    expected = linear_cross_entropy_reference(*inputs, reduction=reduction, **TOGETHER)
    assert torch.equal(linear_cross_entropy(*inputs, reduction=reduction, **TOGETHER), expected)
    logits = inputs[0] @ inputs[1].T
    assert torch.equal(cross_entropy(logits, inputs[2], reduction=reduction, **TOGETHER), expected)


@pytest.mark.parametrize(
    ("rows", "hidden", "vocab", "dtype", "expected"),
    [
        (16384, 4096, 128256, torch.bfloat16, 4096),
        (16384, 2304, 256000, torch.bfloat16, 2048),
        (16384, 4096, 32000, torch.bfloat16, 8192),
        (16384, 0, 151936, torch.bfloat16, 3328),  # five equal chunks of at most 3456 rows
        (16384, 896, 151936, torch.bfloat16, 2816),  # six: with the fp32 sums 1.2 GiB beyond both gradients
        (16384, 2048, 262144, torch.float32, 1024),
        (16384, 3584, 152064, torch.float32, 1664),
        (16384, 4096, 128256, torch.float32, 2048),
        (5, 4096, 128256, torch.bfloat16, 128),
    ],
)
def test_chunks_hold_at_most_a_gibibyte_of_logits(rows, hidden, vocab, dtype, expected):
    assert chunk_rows(rows, vocab, (rows + vocab) * hidden, dtype) == expected


@pytest.mark.parametrize("shape", [(6, 17, 33), (6, 64, 128)])
@pytest.mark.parametrize(
    ("reduction", "low_memory", "products"),
    [("mean", False, 3), ("none", False, 4), ("mean", True, 4), ("none", True, 5)],
)
def test_flops_are_counted(reduction, low_memory, products, shape):
    """low_memory does not recompute logits if its buffer holds all of them."""
    *inputs, targets = leaves(*shape)
    with FlopCounterMode(display=False) as counter:
        linear_cross_entropy(*inputs, targets, reduction=reduction, low_memory=low_memory).sum().backward()
    products -= low_memory and shape[-1] == 128
    assert counter.get_total_flops() == products * 2 * math.prod(shape)
