"""The contracts of every op: each test runs over the table of ops/."""

from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from ligermodels.kernels import launch
from tests.conftest import DEVICE, TENS_OF_GIB
from tests.kernels.compiled_kernels import import_all
from tests.kernels.error_budget import DTYPES, check, relative_error
from tests.kernels.ops import OPS, parametrize_ops
from tests.kernels.ops.attention import attention_case
from tests.kernels.ops.base import as_list
from tests.kernels.ops.quantised import run_fp8_products
from tests.suites import quick, slow

HALF = DTYPES[-1]
# (batch, length): no other dimension has one of the first sizes, and no two have the same number of rows.
SIZES = [(2, 4), (3, 2), (4, 14)][: 3 if DEVICE == "cuda" else 2]
import_all()
ALL_OPS = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("ligermodels::")}
# The kernels of flash-attn-4 need a GPU: tests/kernels/attention/test_flash_attention.py.
REGISTERED = sorted(name for name in ALL_OPS if "flash_attention" not in name)
pytestmark = [
    pytest.mark.usefixtures("kernels"),
    # NumPy warns about what the interpreter computes in masked lanes.
    pytest.mark.filterwarnings(r"ignore:invalid value encountered in (multiply|subtract):RuntimeWarning"),
]


def has_gradients(op):
    return op.has_gradients


def has_our_kernels(op):
    return op.draw is not attention_case


def equal(results, expected):
    return all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


class Recorder(TorchDispatchMode):
    """Records every call of a registered op, with its arguments."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace != "ligermodels":
            return function(*args, **(kwargs or {}))
        self.calls.append((function, tree_map_only(Tensor, lambda x: x.detach().clone(), args)))
        return function(*args)


class UnreadResults(TorchDispatchMode):
    """Collects {memory: (op, result)} of the results that no later op has read, except statistics: one number a row, or
    two."""

    def __init__(self, rows):
        super().__init__()
        self.statistics, self.results = 2 * rows, {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        outputs = function(*args, **(kwargs or {}))
        if function._schema.is_mutable:  # writes to its first argument
            self.read(args[1:])
        elif not function.is_view:
            self.read(args)
            self.results |= {x: (str(function), y) for x, y in memories(outputs).items() if y.numel() > self.statistics}
        return outputs

    def read(self, tensors):
        for memory in memories(tensors):
            self.results.pop(memory, None)


def memories(tree):
    return {x.untyped_storage().data_ptr(): x for x in tree_leaves(tree) if isinstance(x, Tensor)}


def record(case):
    upstream = case.upstream()
    with Recorder() as recorder:
        case.step(case.ours, upstream)
    return recorder


def kind_of(argument):
    """What may change the tensors that an op returns: not the value of a float, nor the name of a function."""
    if isinstance(argument, Tensor):
        return argument.dtype
    return type(argument) if isinstance(argument, float | str) else argument


@cache
def calls_of_all_ops():
    """{op: {kinds of arguments: (function, arguments)}}, with all leaves trained and with one."""
    calls = {name: {} for name in REGISTERED}
    for op in OPS.values():
        case = op.case(3, 1)
        for trained in (case, case.train_only(0), case.train_only(1)) if op.has_gradients else (case,):
            for function, args in record(trained).calls:
                calls[function._schema.name][tuple(map(kind_of, args))] = function, args
    with Recorder() as recorder:
        run_fp8_products()
    for function, args in recorder.calls:
        calls[function._schema.name][tuple(map(kind_of, args))] = function, args
    return calls


# Tracing takes most of the time, and the test behind this one traces every entry of the table.
UNTRACED = ("test_schema", "test_autograd_registration", "test_faketensor")


@pytest.mark.parametrize("name", REGISTERED)
def test_opcheck(name):
    recorded = list(calls_of_all_ops()[name].values())
    assert recorded, f"no entry of the table calls {name}"
    function, args = recorded[0]
    torch.library.opcheck(function, args)
    for function, args in recorded[1:]:
        torch.library.opcheck(function, args, test_utils=UNTRACED)


def mark_dynamic(case, sizes):
    for x in [*case.leaves, *case.constants]:
        for dim in [dim for dim, size in enumerate(x.shape) if size in sizes]:
            torch._dynamo.mark_dynamic(x, dim)


# Another entry traces the same code, and all that it branches on.
TRACED_BY_OTHERS = [
    OPS[name]
    for name in (
        *("rope", "qk_norm_rope", "swiglu", "geglu", "plain_activation", "experts", "sample without filters"),
        *("activated_linear with a low-rank update", "layer_norm_linear with a low-rank update"),
        *("layer_norm_linear of a frozen weight", "frozen_linear", "adamw, stochastic", "adamw8bit, stochastic"),
        *("cross_entropy, all options", "cross_entropy in place, all options", "linear_cross_entropy, all options"),
        *("linear_cross_entropy by rows", "linear_cross_entropy, low memory"),
        *("linear_cross_entropy by rows, low memory", "linear_divergence from top-k, all forms, all options"),
        *("gated_delta_rule of one head", "mamba2_scan of one head"),
    )
]


@slow
@parametrize_ops(lambda op: op not in TRACED_BY_OTHERS)
def test_one_compiled_graph_serves_all_batches_and_lengths_with_equal_gradients(op):
    torch._dynamo.reset()
    ours = op.case().ours
    counter = CompileCounterWithBackend("inductor" if DEVICE == "cuda" else "aot_eager")
    compiled = torch.compile(lambda *inputs: ours(*inputs), fullgraph=True, backend=counter)
    for sizes in SIZES:
        case = op.case(*sizes)
        if sizes == SIZES[0]:
            mark_dynamic(case, sizes)
        upstream = case.upstream()
        torch.testing.assert_close(case.step(compiled, upstream), case.step(ours, upstream), rtol=1e-4, atol=1e-5)
    assert counter.frame_count == 1


def recompute_others(context, function, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if function.namespace == "ligermodels" else CheckpointPolicy.PREFER_RECOMPUTE


def recompute_ours(context, function, *args, **kwargs):
    return CheckpointPolicy.PREFER_RECOMPUTE if function.namespace == "ligermodels" else CheckpointPolicy.MUST_SAVE


@parametrize_ops(has_gradients)
@pytest.mark.parametrize("policy", quick([None, recompute_ours, recompute_others], [None]))
def test_activation_checkpointing_changes_no_output_and_no_gradient(op, policy):
    """Of the whole region, and selective by each policy."""
    options = {} if policy is None else {"context_fn": partial(create_selective_checkpoint_contexts, policy)}
    case = op.case(1, 2)

    def region(*inputs):
        return tuple(y.sin() for y in as_list(case.ours(*inputs)))  # sin saves its input, so backward recomputes it

    upstream = case.upstream()
    recomputed = partial(checkpoint, region, use_reentrant=False, **options)
    torch.testing.assert_close(case.step(recomputed, upstream), case.step(region, upstream))


@pytest.mark.gpu  # the interpreter runs one program after another
@parametrize_ops(has_our_kernels)
def test_two_runs_are_bit_identical(op, poisoned):
    case = op.case(3, 670, HALF)
    upstream = case.upstream()
    assert equal(case.step(case.ours, upstream), case.step(case.ours, upstream))


@parametrize_ops(lambda op: has_our_kernels(op) and has_gradients(op))
def test_torch_func_differentiates_the_reference(op):
    case = op.case(1, 3)
    upstream = case.upstream()
    outputs, pullback = torch.func.vjp(lambda *leaves: as_list(case.ours(*leaves, *case.constants)), *case.leaves)
    gradients = [x for x, leaf in zip(pullback(upstream), case.leaves, strict=True) if leaf.requires_grad]
    torch.testing.assert_close([*outputs, *gradients], case.step(case.reference, upstream))


@parametrize_ops(lambda op: has_our_kernels(op) and has_gradients(op))
def test_double_backward_raises(op):
    """Without the error, autograd would differentiate the matrix products and silently leave out the kernels."""
    case = op.case(1, 3)
    outputs = as_list(case.ours(*case.leaves, *case.constants))
    leaves = [x for x in case.leaves if x.requires_grad]
    with pytest.raises(RuntimeError, match="do not support double backward; call backward without create_graph"):
        torch.autograd.grad(outputs, leaves, [torch.randn_like(x).requires_grad_() for x in outputs], create_graph=True)


def misaligned(x):
    return x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)


def transposed_with_padded_rows(x):
    """Batch and length transposed in memory, unit stride along the last dimension only, and misaligned."""
    x = x.transpose(0, 1) if x.ndim > 2 else x
    x = x.new_empty(*x.shape[:-1], x.shape[-1] + 3)[..., 1:-2].copy_(x) if x.ndim else x
    return x.transpose(0, 1) if x.ndim > 2 else x


def strided_columns(x):
    return x.new_empty(*x.shape, 2)[..., 1].copy_(x)


# Interpreted kernels read from any address.
LAYOUTS = pytest.param(misaligned, marks=pytest.mark.gpu), transposed_with_padded_rows, strided_columns


@parametrize_ops(has_our_kernels)
@pytest.mark.parametrize("change_layout", LAYOUTS)
def test_any_layout_is_within_the_error_budget_under_random_upstream_gradients(op, change_layout, poisoned):
    case = op.draw(2, 12 if DEVICE == "cuda" else 7, *op.small)
    constants = [x if x.is_floating_point() else change_layout(x) for x in case.constants]  # angles stay contiguous

    def rounded(function, constants):
        """Outputs in the dtype of the leaves, losses too."""
        return lambda *leaves: tuple(x.to(leaves[0].dtype) for x in as_list(function(*leaves, *constants)))

    leaves = [x.double() for x in case.leaves]
    ours, reference = rounded(case.ours, constants), rounded(case.reference, case.constants)
    check(ours, reference, leaves, HALF, change_layout=change_layout)


WINDOWED = OPS["attention with a window"]  # the window has one key, so the gradient of the queries is zero
# Before and after multiplying by the upstream gradient; the logits' gradient too, which the fp32 reference keeps.
ROUNDED_TWICE = (
    OPS["cross_entropy in place, all options"], OPS["cross_entropy in place, weighted"],
    OPS["linear_logprobs"], OPS["linear_logprobs of few rows"],
)  # fmt: skip

# The teacher has no gradient and stays fp32: under autocast plain PyTorch rounds its logits in the exact run as well.
MODEL_AS_TEACHER = OPS["linear_divergence"]

ONE_HEAD = OPS["gated_delta_rule of one head"]  # has so few gates that errors of their gradients do not average out


@parametrize_ops(lambda op: has_gradients(op) and op not in (WINDOWED, ONE_HEAD, *ROUNDED_TWICE, MODEL_AS_TEACHER))
def test_autocast_is_within_the_error_budget_of_plain_pytorch_under_autocast(op, poisoned):
    """The first input is in half precision, as from a linear; all else is fp32. Output dtypes equal plain PyTorch's."""
    case = op.draw(2, 5, *op.small)

    def under_autocast(function):
        def call(x, *others):
            x = x if x.dtype == torch.float64 else x.to(HALF)
            with torch.autocast(DEVICE, HALF):
                return function(x, *others, *case.constants)

        return call

    leaves = [x.double() for x in (case.leaves[0].to(HALF), *case.leaves[1:])]
    check(under_autocast(case.ours), under_autocast(case.reference), leaves, torch.float32)


@parametrize_ops()
def test_zero_rows_give_what_the_reference_gives(op, poisoned):
    case = op.case(batch=0)
    upstream = case.upstream()
    assert equal(case.step(case.ours, upstream), case.step(case.reference, upstream))


@parametrize_ops(lambda op: has_our_kernels(op) and has_gradients(op) and len(op.case().leaves) > 1)
def test_freezing_a_leaf_removes_its_gradient_and_changes_no_other(op, poisoned):
    case = op.case(1, 2)
    upstream = case.upstream()
    full = case.step(case.ours, upstream)
    outputs, gradients = full[: len(upstream)], full[len(upstream) :]
    for index, gradient in enumerate(gradients):
        others = [i for i in range(len(gradients)) if i != index]
        expected = [*outputs, *(gradients[i] for i in others)]
        torch.testing.assert_close(case.freeze(index).step(case.ours, upstream), expected)
        torch.testing.assert_close(case.train_only(index).step(case.ours, upstream), [*outputs, gradient])


def flops(function, *args):
    with FlopCounterMode(display=False) as counter:
        function(*args)
    return counter.get_total_flops()


@parametrize_ops(lambda op: op.products)
def test_no_matrix_product_is_computed_twice_or_only_for_frozen_leaves(op):
    case = op.case()
    upstream, forward = case.upstream(), flops(case.forward, case.ours)
    everything, *alone = op.products
    assert flops(case.step, case.ours, upstream) == (1 + everything) * forward
    for index, products in enumerate(alone):
        step = case.train_only(index).step
        assert flops(step, case.ours, upstream) == round((1 + products) * forward), f"leaf {index} alone"


def unread_results_of_backward(case, upstream):
    unread = UnreadResults(rows=upstream[0].shape[:2].numel())

    def forward(*inputs):
        outputs = case.ours(*inputs)
        unread.results.clear()
        return outputs

    with unread:
        results = case.step(forward, upstream)
    unread.read(results)
    return [(op, tuple(x.shape)) for op, x in unread.results.values()]


@parametrize_ops(lambda op: has_our_kernels(op) and has_gradients(op))
def test_backward_computes_nothing_that_is_not_read(op):
    case = op.case(1, 2)
    upstream = case.upstream()
    assert not unread_results_of_backward(case.freeze_inputs(), upstream), "weights alone"
    for index in range(len(case.leaves)):
        assert not unread_results_of_backward(case.train_only(index), upstream), f"leaf {index} alone"


@pytest.mark.gpu
@parametrize_ops()
def test_nothing_synchronizes_with_the_device(op):
    case = op.case(dtype=torch.bfloat16)
    upstream = case.upstream()
    case.step(case.ours, upstream)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        case.step(case.ours, upstream)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@parametrize_ops()
def test_a_captured_cuda_graph_replays_on_new_inputs(op):
    case, new = op.case(dtype=torch.bfloat16), op.case(dtype=torch.bfloat16)
    upstream = case.upstream()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        case.step(case.ours, upstream)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = case.step(case.ours, upstream)
    with torch.no_grad():
        for static, x in zip((*case.leaves, *case.constants), (*new.leaves, *new.constants), strict=True):
            static.copy_(x)
    graph.replay()
    torch.testing.assert_close(results, new.step(new.ours, upstream))


@TENS_OF_GIB
@pytest.mark.gpu
@parametrize_ops(lambda op: op.huge)
def test_offsets_beyond_two_to_the_31_are_right(op):
    """The last rows give the same results as those rows computed alone; the others get zero gradients.

    The upstream gradients of the other rows are zero.
    """
    length, rows = op.huge[0], 3

    def last(x):
        return x.narrow(x.shape.index(length), length - rows, rows) if length in x.shape else x

    case = op.draw(1, *op.huge).to(torch.bfloat16)
    leaves = [last(x).detach().clone().requires_grad_() for x in case.leaves]
    last_rows = replace(case, leaves=leaves, constants=[last(x).clone() for x in case.constants])
    upstream_last = last_rows.upstream(last_rows.ours)
    upstream = [torch.zeros_like(x) for x in case.forward(case.ours)]
    for whole, part in zip(upstream, upstream_last, strict=True):
        last(whole).copy_(part)
    results = case.step(case.ours, upstream)
    for index, (got, expected) in enumerate(zip(results, last_rows.step(last_rows.ours, upstream_last), strict=True)):
        assert relative_error(last(got), expected.double()) < 2**-7, f"tensor {index} of {len(results)}"
    for gradient in results[len(upstream) :]:
        if length in gradient.shape:
            assert not gradient.narrow(gradient.shape.index(length), 0, length - rows).any()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@parametrize_ops()
def test_kernels_run_on_the_device_of_the_tensors(op):
    drawn = op.draw(2, 4, *op.small)
    here, there = drawn.to(torch.bfloat16, "cuda:0"), drawn.to(torch.bfloat16, "cuda:1")
    upstream = here.upstream()
    assert torch.cuda.current_device() == 0
    results = there.step(there.ours, [x.to("cuda:1") for x in upstream])
    assert {x.device for x in results} == {torch.device("cuda:1")}
    torch.testing.assert_close([x.to("cuda:0") for x in results], here.step(here.ours, upstream))


def checks_its_inputs(op):
    """Not the part of `nf4_weight` behind its checks, nor ops with an input whose values are places in another one,
    which cannot be checked without reading them, nor recurrent layers."""
    unchecked = (
        "nf4_encode",
        "gather_keys",
        "cache writes",
        "decode_attention",
        "gated_delta",
        "mamba2",
        "causal_conv",
    )
    return not next(name for name, one in OPS.items() if one is op).startswith(unchecked)


def unfit(x):
    """Variants of an input that its op was not drawn for: a shorter one along each dimension, an empty one, another
    dtype. Interpreted kernels cannot compute some constants in bf16."""
    dtypes = [torch.bfloat16] if x.ndim > 2 or DEVICE == "cuda" else []
    yield from (x.narrow(dim, 0, x.shape[dim] - 1).contiguous() for dim in range(x.ndim))
    yield x[:0]
    yield from (x.to(dtype) for dtype in (*dtypes, torch.int32))


def outcome(function, inputs):
    """Shapes and dtypes of the results, or the class of the error."""
    try:
        with torch.no_grad():
            return [(x.shape, x.dtype) for x in as_list(function(*inputs)) if x is not None]
    except (ArithmeticError, AssertionError, LookupError, RuntimeError, ValueError) as error:
        return type(error)


@pytest.mark.slow
@parametrize_ops(checks_its_inputs)
def test_a_cpu_and_the_kernels_refuse_the_same_inputs(op, monkeypatch):
    """What a kernel refuses by ValueError is refused by it on a CPU too, and what one of them takes the other does."""
    case = op.case()
    inputs = [x.detach() for x in case.leaves] + case.constants
    for place, x in enumerate(inputs):
        if not x.is_floating_point() or not x.ndim:
            continue
        for variant in unfit(x):
            given = [*inputs[:place], variant, *inputs[place + 1 :]]
            found = []
            for interpreting in (DEVICE == "cpu", False):
                monkeypatch.setattr(launch, "interpreting", interpreting)
                copies = [y.clone().to(DEVICE if interpreting or not found else "cpu") for y in given]
                found.append(outcome(case.ours, copies))
            by_kernel, on_cpu = found
            both_refuse = isinstance(by_kernel, type) and isinstance(on_cpu, type) and by_kernel is not ValueError
            said = f"input {place} {list(x.shape)} as {variant.dtype} {list(variant.shape)}: {by_kernel}, {on_cpu}"
            assert both_refuse or by_kernel == on_cpu, said
