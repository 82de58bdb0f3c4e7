import math
import weakref

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ligermodels import losses
from ligermodels.kernels import launch
from ligermodels.kernels.losses import linear_logprobs as module
from ligermodels.kernels.losses import logits_chunks, logprob_chunks
from ligermodels.kernels.losses import logprob_rows as rows_module
from ligermodels.kernels.losses.linear_logprobs import EXTRAS, linear_logprobs, linear_logprobs_reference
from tests.conftest import DEVICE
from tests.kernels.allocations import allocations
from tests.kernels.error_budget import DTYPES, check, relative_error

OPTIONS = {"softcap": 5.0, "logit_scale": 1.5, "temperature": 0.7}
RECOMPUTED, FEW_ROWS = (45, 17, 33), (40, 64, 48)  # rows, H, V; of few rows the logits are kept
# The gradient of the logits is rounded, and the frozen head's once more with its upstream gradient; plain PyTorch in
# fp32 rounds the result alone.
FACTOR = 2.0
pytestmark = [
    pytest.mark.usefixtures("kernels", "poisoned"),
    # The interpreter computes masked lanes with NumPy, which warns about their values.
    pytest.mark.filterwarnings("ignore:invalid value encountered in multiply:RuntimeWarning"),
]


def draw(rows, columns, vocab, dtype=torch.float64):
    """Hidden states, weight and targets; one target is ignored."""
    hidden = torch.randn(rows, columns, dtype=torch.float64, device=DEVICE)
    weight = torch.randn(vocab, columns, dtype=torch.float64, device=DEVICE) / 4
    targets = torch.randint(vocab, (rows,), device=DEVICE)
    targets[1] = -100
    return hidden.to(dtype), weight.to(dtype), targets


def leaves(*shape, dtype=torch.float32):
    hidden, weight, targets = draw(*shape, dtype=dtype)
    return hidden.requires_grad_(), weight.requires_grad_(), targets


@pytest.fixture
def small_chunks(monkeypatch):
    """Pieces of 16 rows, two in a chunk that is multiplied; in backward 16 classes of 32 rows at a time."""
    monkeypatch.setattr(logits_chunks, "piece_rows", lambda *a: 16)
    monkeypatch.setattr(logits_chunks, "rows_of_pieces", lambda *a: 32)
    monkeypatch.setattr(logits_chunks, "VOCABULARY_CHUNK_BYTES", 1)
    monkeypatch.setattr(logits_chunks, "MIN_CHUNK_CLASSES", 16)
    monkeypatch.setattr(logits_chunks, "LOGITS_ALIGNMENT", 16)
    monkeypatch.setattr(logprob_chunks, "MAX_BACKWARD_ROWS", 32)


@pytest.fixture
def short_blocks(monkeypatch):
    """Rows of several steps of a program, so that a gradient overwrites logits of later steps."""
    monkeypatch.setattr(rows_module, "MAX_BLOCK", 32)
    monkeypatch.setattr(rows_module, "_launcher", rows_module._launcher.__wrapped__)  # without its cache


def results(function, **options):
    """`function`, returning those results that have a gradient."""
    return lambda *inputs: tuple(x for x in function(*inputs, **options)[:2] if x is not None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "low_memory"), [(RECOMPUTED, False), (RECOMPUTED, True), (FEW_ROWS, False)])
@pytest.mark.parametrize("options", [{}, {"entropy": True, "extras": EXTRAS, **OPTIONS}])
def test_within_the_error_budget(monkeypatch, small_chunks, short_blocks, options, shape, low_memory, dtype):
    monkeypatch.setattr(logits_chunks, "LOW_MEMORY_BYTES", 1)
    ours = results(linear_logprobs, low_memory=low_memory, **options)
    check(ours, results(linear_logprobs_reference, **options), draw(*shape), dtype, FACTOR)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("low_memory", [False, True])
def test_a_frozen_head_is_within_the_error_budget(small_chunks, short_blocks, low_memory, dtype):
    hidden, weight, targets = draw(*RECOMPUTED)

    def frozen(function, **options):
        return lambda hidden: function(hidden, weight.to(hidden.dtype), targets, **OPTIONS, **options).logprobs

    weight = weight.to(dtype).double()
    # Rounded once more than with a trained head: it is kept in hidden's dtype until its upstream gradient comes.
    allowed = 1.5 * FACTOR
    check(frozen(linear_logprobs, low_memory=low_memory), frozen(linear_logprobs_reference), [hidden], dtype, allowed)


def test_half_precision_inputs_have_fp32_logits():
    """Logits in half precision would give log-probabilities that are wrong by 1e-3 and more."""
    hidden, weight, targets = draw(64, 17, 33, dtype=DTYPES[-1])
    exact = linear_logprobs_reference(hidden.double(), weight.double(), targets).logprobs
    assert relative_error(linear_logprobs(hidden, weight, targets).logprobs, exact) < 3e-7


@pytest.mark.parametrize("shape", [RECOMPUTED, FEW_ROWS])
def test_all_routes_compute_the_same_bits_with_and_without_gradients(small_chunks, shape):
    hidden, weight, targets = leaves(*shape, dtype=DTYPES[-1])
    with torch.no_grad():
        expected = linear_logprobs(hidden, weight, targets).logprobs
    routes = {}
    for entropy in (False, True):
        for frozen in (False, True):
            head = weight.detach() if frozen else weight
            got = linear_logprobs(hidden, head, targets, entropy=entropy, extras=EXTRAS).logprobs
            routes[got.grad_fn.name()] = torch.equal(got, expected)
    kept = "_KeptLogitsBackward" if shape == FEW_ROWS else "_RecomputedBackward"
    assert routes == dict.fromkeys({kept, "_RowGradientsBackward", *routes}, True)


@pytest.mark.parametrize("frozen", [False, True])
def test_the_first_step_of_dpo_has_a_loss_of_exactly_log_2(small_chunks, frozen):
    hidden, weight, targets = leaves(40, 17, 33)
    offsets = torch.tensor([0, 11, 20, 33, 40], dtype=torch.int32, device=DEVICE)
    with torch.no_grad():
        reference = losses.pair_sums(linear_logprobs(hidden, weight, targets).logprobs, offsets)
    policy = linear_logprobs(hidden, weight.detach() if frozen else weight, targets).logprobs
    result = losses.dpo(policy, offsets, reference, beta=0.1)
    assert (result.loss / result.pairs).item() == torch.tensor(math.log(2)).item()


@pytest.mark.parametrize("frozen", [False, True])
def test_a_sure_token_keeps_its_log_probability_and_its_gradient(frozen):
    """z_t - lse would be 0 in fp32, and p_t - 1 too."""
    hidden = torch.tensor([[20.0], [40.0]], device=DEVICE, requires_grad=True)
    weight = torch.tensor([[1.0], [0.0], [0.0]], device=DEVICE, requires_grad=not frozen)
    logprobs = linear_logprobs(hidden, weight, torch.zeros(2, dtype=torch.int64, device=DEVICE)).logprobs
    others = 2 * torch.tensor([math.exp(-20), math.exp(-40)], device=DEVICE)
    torch.testing.assert_close(logprobs.detach(), -others, rtol=1e-5, atol=0)
    (gradient,) = torch.autograd.grad(logprobs.sum(), hidden)
    torch.testing.assert_close(gradient[:, 0], others, rtol=1e-5, atol=0)


def test_extras_are_those_of_the_distribution_and_have_no_gradient(small_chunks, short_blocks):
    hidden, weight, targets = leaves(*RECOMPUTED)
    logits = 5 * torch.tanh(1.5 * hidden.double() @ weight.double().T / 5) / 0.7
    p, supervised = logits.softmax(-1).detach(), targets != -100
    targets[::3] = torch.where(supervised, logits.argmax(-1), -100)[::3]
    out = linear_logprobs(hidden, weight, targets, extras=EXTRAS, **OPTIONS)
    expected = -(p * p.log()).sum(-1), p.square().sum(-1).log(), logits.mean(-1)
    for got, value in zip(out[1:4], expected, strict=True):
        assert not got.requires_grad
        torch.testing.assert_close(got.double(), value.detach().where(supervised, 0), rtol=1e-5, atol=1e-6)
    assert torch.equal(out.greedy, supervised & (logits.argmax(-1) == targets)) and 15 <= out.greedy.sum() < 25
    assert linear_logprobs(hidden, weight, targets)[1:] == (None, None, None, None)


def test_of_equal_logits_the_first_is_greedy():
    weight = torch.tensor([0.0, 2.0, 1.0, 2.0], device=DEVICE)[:, None]
    hidden, targets = torch.ones(4, 1, device=DEVICE), torch.arange(4, device=DEVICE)
    assert linear_logprobs(hidden, weight, targets, extras=("greedy",)).greedy.tolist() == [False, True, False, False]


@pytest.mark.parametrize("low_memory", [False, True])
def test_the_entropy_alone_can_be_trained(low_memory):
    inputs = leaves(*RECOMPUTED)
    entropies = (f(*inputs, entropy=True).entropy for f in (linear_logprobs, linear_logprobs_reference))
    gradients = [torch.autograd.grad(x.square().sum(), inputs[:2]) for x in entropies]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


def flops(function):
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops() / (2 * math.prod(RECOMPUTED))


def test_a_frozen_head_costs_two_products_and_allocates_no_gradient_of_it():
    hidden, weight, targets = leaves(*RECOMPUTED)
    weight.requires_grad_(False)
    assert flops(lambda: linear_logprobs(hidden, weight, targets).logprobs.sum().backward()) == 2
    assert flops(lambda: linear_logprobs(hidden, weight, targets, extras=EXTRAS).entropy) == 2
    assert flops(lambda: linear_logprobs(hidden, weight, targets, entropy=True).entropy.sum().backward()) == 3
    with allocations("empty", "empty_like", "zeros_like") as made:
        linear_logprobs(hidden, weight, targets).logprobs.sum().backward()
    shapes = {x.shape for x in made}
    assert (45, 17) in shapes and (33, 17) not in shapes


@pytest.mark.parametrize("retained", [False, True])
def test_kept_logits_are_overwritten_with_their_gradient_unless_the_graph_is_retained(retained):
    inputs = leaves(*FEW_ROWS)
    logprobs = linear_logprobs(*inputs).logprobs
    node = logprobs.grad_fn
    logits = node.saved_tensors[3]
    before = logits.clone()
    first = torch.autograd.grad(logprobs.sum(), inputs[:2], retain_graph=retained)
    assert torch.equal(logits, before) == retained
    if retained:
        second = torch.autograd.grad(logprobs.sum(), inputs[:2])
        assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("low_memory", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_targets_that_are_ignored_or_outside_the_vocabulary_have_no_gradient(small_chunks, frozen, low_memory):
    hidden, weight, targets = leaves(*RECOMPUTED)
    weight.requires_grad_(not frozen)
    outside, ignored = targets.clone(), targets.clone()
    outside[[3, 5, 17]], ignored[[3, 5, 17]] = torch.tensor([33, -1, 2**40], device=DEVICE), -100
    wrong, right = (linear_logprobs(hidden, weight, t, low_memory=low_memory).logprobs for t in (outside, ignored))
    assert wrong[[3, 5, 17]].isneginf().all() and wrong.isinf().sum() == 3
    assert torch.equal(wrong.where(wrong.isfinite(), 0), right) and right[[1, 3, 5, 17]].tolist() == [0, 0, 0, 0]
    trained = [hidden] if frozen else [hidden, weight]
    gradients = [torch.autograd.grad(x.sum(), trained) for x in (wrong, right)]
    assert all(map(torch.equal, *gradients)) and not gradients[0][0][[1, 3, 5, 17]].any()


@pytest.mark.parametrize("low_memory", [False, True])
@pytest.mark.parametrize("rows", [0, 5])
def test_without_supervised_targets_results_and_gradients_are_zero(rows, low_memory):
    hidden = torch.randn(rows, 17, device=DEVICE, requires_grad=True)
    weight = torch.randn(33, 17, device=DEVICE, requires_grad=True)
    targets = torch.full((rows,), -100, device=DEVICE)
    out = linear_logprobs(hidden, weight, targets, entropy=True, extras=EXTRAS, low_memory=low_memory)
    (out.logprobs.sum() + out.entropy.sum()).backward()
    assert not any(x.any() for x in (*out, hidden.grad, weight.grad))


def test_a_frozen_head_without_rows_has_an_empty_gradient():
    hidden = torch.randn(0, 17, device=DEVICE, requires_grad=True)
    targets = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    linear_logprobs(hidden, torch.randn(33, 17, device=DEVICE), targets).logprobs.sum().backward()
    assert hidden.grad.shape == (0, 17)


@pytest.mark.parametrize("head", ["trained", "frozen"])
def test_chunk_size_changes_only_the_order_of_fp32_sums(request, head):
    hidden, weight, targets = leaves(50, 17, 33)
    inputs = [hidden, weight] if head == "trained" else [hidden]
    found = []
    for _ in range(2):  # whole, then in chunks
        out = linear_logprobs(hidden, weight.requires_grad_(head == "trained"), targets, entropy=head == "trained")
        loss = (out.logprobs * (out.logprobs.detach().cos() if out.entropy is None else out.entropy)).sum()
        found.append([out.logprobs.detach(), *torch.autograd.grad(loss, inputs)])
        request.getfixturevalue("small_chunks")
    assert all(relative_error(few, whole.double()) <= 1e-6 for few, whole in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("rows", "hidden", "vocab", "expected"),
    [
        (16384, 4096, 128256, (1024, 2048, 6144)),  # 128 tiles for 132 multiprocessors
        (16384, 3584, 152064, (1152, 1152, 6144)),  # 126 tiles; 1280 rows fit
        (16384, 896, 151936, (1280, 1280, 6144)),  # 40 tiles
        (16384, 2304, 256000, (1024, 1024, 6144)),
        (16384, 4096, 32000, (4096, 8192, 5376)),  # six equal parts of at most 6,144 classes
        (2048, 3584, 152064, (1024, 1024, 38016)),
        (65536, 4096, 128256, (1024, 2048, 4096)),
        (5, 4096, 128256, (128, 2048, 128256)),
    ],
)
def test_sizes_of_chunks(rows, hidden, vocab, expected):
    """Of a piece, of a chunk that is multiplied, and the classes of a chunk in backward."""
    piece = logits_chunks.piece_rows(rows, hidden, vocab, torch.float32)
    kept = min(rows, logprob_chunks.MAX_BACKWARD_ROWS)
    classes = logits_chunks.vocabulary_buffer(kept, vocab, torch.float32) / kept
    assert (piece, logits_chunks.rows_of_pieces(piece, vocab, torch.float32), classes) == expected


def test_backward_allocates_the_gradients_one_buffer_and_fp32_sums_of_the_rows(small_chunks):
    """And fp32 sums of the weight's gradient only where the rows are more than MAX_BACKWARD_ROWS."""
    for rows, summed in ((32, DTYPES[-1]), (33, torch.float32)):
        *inputs, targets = leaves(rows, 17, 50, dtype=DTYPES[-1])
        logprobs = linear_logprobs(*inputs, targets).logprobs.sum()
        with allocations("empty", "empty_like") as made:
            torch.autograd.grad(logprobs, inputs)
        sizes = {(x.numel(), x.dtype) for x in made if x.numel() > rows}
        fp32 = torch.float32
        assert sizes == {(32 * 16, fp32), (32 * 17, fp32), (rows * 17, DTYPES[-1]), (50 * 17, summed)}


def test_backward_holds_no_logits_while_the_gradient_of_the_weight_is_rounded(monkeypatch, small_chunks):
    """That is where it needs most: there are the weight's gradient and its fp32 sums."""
    *inputs, targets = leaves(33, 17, 50, dtype=DTYPES[-1])
    logprobs, views, held = linear_logprobs(*inputs, targets).logprobs.sum(), [], []
    memory, to = logprob_chunks.gradient_memory, torch.Tensor.to

    def watched(logits, dtype):
        dlogits = memory(logits, dtype)
        views.extend(map(weakref.ref, (logits, dlogits)))
        return dlogits

    def rounded(x, dtype):
        if x.shape == (50, 17) and dtype == DTYPES[-1]:
            held.append([view() is not None for view in views])
        return to(x, dtype)

    monkeypatch.setattr(logprob_chunks, "gradient_memory", watched)
    monkeypatch.setattr(torch.Tensor, "to", rounded)
    torch.autograd.grad(logprobs, inputs)
    assert held == [[False] * 2 * (4 + 1)]  # four parts of the vocabulary for 32 rows, one for the last row


def test_low_memory_allocates_the_gradients_and_one_buffer(monkeypatch):
    monkeypatch.setattr(logits_chunks, "LOW_MEMORY_BYTES", 1)
    *inputs, targets = leaves(5, 17, 129)
    with allocations("empty", "empty_like") as made:
        linear_logprobs(*inputs, targets, low_memory=True).logprobs.sum().backward()
    sizes = [x.numel() for x in made]
    assert sorted(x for x in sizes if x > 5) == [5 * 17, 256, 256, 129 * 17]  # the buffer in forward and in backward


@pytest.mark.parametrize("entropy", [False, True])
def test_cpu_tensors_run_the_reference(monkeypatch, entropy):
    monkeypatch.setattr(launch, "interpreting", False)
    monkeypatch.setattr(module, "launch_logprobs", None)
    inputs = [x.cpu() for x in draw(6, 17, 33, dtype=torch.bfloat16)]
    options = {"entropy": entropy, "extras": EXTRAS, **OPTIONS}
    expected = linear_logprobs_reference(*inputs, **options)
    assert all(map(torch.equal, linear_logprobs(*inputs, **options), expected))
    exact = linear_logprobs_reference(*(x.double() if x.is_floating_point() else x for x in inputs), **options)
    torch.testing.assert_close(expected, exact, check_dtype=False, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.0}, "temperature is 0.0; a positive number is needed"),
        ({"extras": ("perplexity",)}, "unknown extra 'perplexity'; supported: entropy, log_sum_squares, mean_logit"),
        ({"targets": torch.zeros(3, dtype=torch.int64)}, r"targets has shape \[3\]; needed \[4\]"),
    ],
)
def test_wrong_arguments_raise(change, message):
    hidden, weight, targets = draw(4, 17, 33, dtype=torch.float32)
    with pytest.raises(ValueError, match=f"linear_logprobs: {message}"):
        linear_logprobs(**{"hidden": hidden, "weight": weight, "targets": targets} | change)
