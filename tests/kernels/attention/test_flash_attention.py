"""FlashAttention 4, where it is installed: the numbers of attention over packed documents, windows, softcaps, sinks."""

import itertools

import pytest
import torch

from ligermodels.kernels.attention import attention as door
from ligermodels.kernels.attention import flash_attention as module
from ligermodels.kernels.attention.attention import attention, attention_reference
from tests.conftest import DEVICE, TENS_OF_GIB
from tests.kernels.error_budget import check

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def small_work(monkeypatch):
    if DEVICE == "cpu" or not module.head_dims(torch.cuda.current_device()):
        pytest.skip("needs flash-attn-4 and a Hopper GPU")
    monkeypatch.setattr(module, "FEWEST_ELEMENTS", 0)


def draw(batch, length, size, heads=4, kv_heads=2, queries=None):
    """q, k, v as views of one packed projection, as in the layers. queries: how many of them, if not `length`."""
    packed = torch.randn(batch, length, heads + 2 * kv_heads, size, dtype=torch.float64, device=DEVICE)
    q, k, v = packed.split((heads, kv_heads, kv_heads), dim=2)
    return q[:, :queries], k, v


def draw_sinks(heads=4):
    return torch.randn(heads, dtype=torch.float64, device=DEVICE)


@pytest.fixture
def calls(monkeypatch):
    """Grows with every call of FlashAttention 4."""
    made = []

    def record(*arguments):
        made.append(arguments)
        return module.flash_attention(*arguments)

    monkeypatch.setattr(door, "flash_attention", record)
    return made


def offsets(*numbers):
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("options", [{}, {"window": 100}, {"softcap": 30.0}, {"window": 100, "softcap": 30.0}])
@pytest.mark.parametrize("size", module.HEAD_DIMS[9])
def test_packed_documents_windows_and_softcaps_are_within_the_error_budget(size, options):
    cu_seqlens = offsets(0, 1, 130, 130, 517, 700)  # one of them empty
    check(
        lambda q, k, v: attention(q, k, v, cu_seqlens=cu_seqlens, max_seqlen=387, **options),
        lambda q, k, v: attention_reference(q, k, v, cu_seqlens=cu_seqlens, **options),
        draw(1, 700, size),
        torch.bfloat16,
        factor=3.0,
    )


@pytest.mark.parametrize("options", [{"window": 100}, {"softcap": 30.0}])
def test_plain_rows_are_within_the_error_budget(options):
    check(
        lambda q, k, v: attention(q, k, v, **options),
        lambda q, k, v: attention_reference(q, k, v, **options),
        draw(2, 300, 128),
        torch.float16,
        factor=3.0,
    )


# (heads, key-value heads, head size, options, whether there are sinks, whether FlashAttention 4 computes it)
MODELS = {
    "Llama": (32, 8, 128, {}, False, True),
    "Gemma": (8, 4, 256, {"softcap": 50.0}, False, True),
    "gpt-oss, windowed layers": (64, 8, 64, {"window": 128}, True, True),
    "gpt-oss, full layers": (64, 8, 64, {}, True, True),
    "both directions": (16, 16, 128, {"causal": False}, False, True),
    "a window in both directions": (16, 16, 64, {"causal": False, "window": 100}, False, True),
    "a vision tower": (16, 16, 80, {"causal": False}, False, False),  # its backward pass is wrong for heads of 80
}
DOCUMENTS = {
    "as many keys": ((0, 1, 130, 130, 517, 700), None),
    "more keys": ((0, 1, 130, 130, 400, 500), (0, 90, 219, 230, 600, 700)),
    "fewer keys": ((0, 1, 290, 300, 600, 700), (0, 1, 130, 130, 400, 500)),
}


@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("model", MODELS)
def test_shapes_of_models_are_within_the_error_budget(model, documents, calls):
    heads, kv_heads, size, options, with_sinks, by_flash_attention = MODELS[model]
    ends, ends_k = DOCUMENTS[documents]
    lengths = ends[-1], ends[-1] if ends_k is None else ends_k[-1]
    q, k, v = draw(1, max(lengths), size, heads, kv_heads)
    inputs = [q[:, : lengths[0]], k[:, : lengths[1]], v[:, : lengths[1]], *([draw_sinks(heads)] if with_sinks else [])]
    options = options | {"cu_seqlens": offsets(*ends), "cu_seqlens_k": None if ends_k is None else offsets(*ends_k)}
    check(
        lambda q, k, v, sinks=None: attention(q, k, v, sinks=sinks, max_seqlen=400, max_seqlen_k=400, **options),
        lambda q, k, v, sinks=None: attention_reference(q, k, v, sinks=sinks, **options),
        inputs,
        torch.bfloat16,
        factor=3.0,
    )
    assert bool(calls) == by_flash_attention


# (heads, key-value heads, head size, ends of documents, options): what docs/performance.md has whole steps of.
STEPS = {
    "Llama-3-8B, 8 x 2048": (32, 8, 128, (0, 1500, 4096, 6144, 8000, 10240, 12288, 14000, 16384), {}),
    "Llama-3-8B, 1 x 32768": (32, 8, 128, (0, 20000, 32768), {}),
    "Mistral-7B, 4 x 8192": (32, 8, 128, (0, 8192, 15000, 24576, 32768), {"window": 1024}),
    "Gemma-2-2B, 4 x 2048": (8, 4, 256, (0, 2048, 3500, 6144, 8192), {"softcap": 50.0}),
    "Gemma-2-2B, 1 x 32768": (8, 4, 256, (0, 20000, 32768), {"softcap": 50.0}),
    "Gemma-2-2B, 1 x 32768, windowed layers": (8, 4, 256, (0, 20000, 32768), {"softcap": 50.0, "window": 4096}),
}


def one_head_after_the_other(q, k, v, ends, options):
    """`attention_reference` of documents, one and one query head at a time: of 20,000 tokens in fp64 it takes 20 GB."""
    attend = checkpointed(lambda *inputs: attention_reference(*inputs, **options))
    parts = list(itertools.pairwise(ends))
    heads = [torch.cat([attend(head[:, a:b], k[:, a:b], v[:, a:b]) for a, b in parts], 1) for head in q.split(1, dim=2)]
    return torch.cat(heads, 2)


@TENS_OF_GIB
@pytest.mark.parametrize("step", STEPS)
def test_steps_that_are_measured_are_within_the_error_budget(step, calls):
    """The kernel computes all heads, in groups that are equal; the upstream gradient is that of the first group."""
    heads, kv_heads, size, ends, options = STEPS[step]
    group, longest = heads // kv_heads, max(b - a for a, b in itertools.pairwise(ends))

    def ours(q, k, v):
        wide = (x.repeat(1, 1, kv_heads, 1) for x in (q, k, v))
        return attention(*wide, cu_seqlens=offsets(*ends), max_seqlen=longest, **options)[:, :, :group]

    inputs = draw(1, ends[-1], size, group, 1)
    check(ours, lambda *inputs: one_head_after_the_other(*inputs, ends, options), inputs, torch.bfloat16, factor=3.0)
    assert calls


@pytest.mark.parametrize("options", [{}, {"window": 50}, {"causal": False, "softcap": 30.0}])
def test_rows_with_more_keys_than_queries_are_within_the_error_budget(options):
    check(
        lambda q, k, v, sinks: attention(q, k, v, sinks=sinks, **options),
        lambda q, k, v, sinks: attention_reference(q, k, v, sinks=sinks, **options),
        [*draw(2, 300, 128, queries=170), draw_sinks()],
        torch.bfloat16,
        factor=3.0,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sinks_in_either_dtype_have_a_gradient_in_theirs(dtype):
    q, k, v = (x.bfloat16() for x in draw(1, 300, 64))
    sinks = draw_sinks().to(dtype).requires_grad_()
    attention(q, k, v, sinks=sinks).square().sum().backward()
    exact = sinks.detach().double().requires_grad_()
    attention_reference(q.double(), k.double(), v.double(), sinks=exact).square().sum().backward()
    assert sinks.grad.dtype == dtype
    torch.testing.assert_close(sinks.grad.double(), exact.grad, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("with_sinks", [True, False])
def test_opcheck(packed, with_sinks):
    tensors = [x.bfloat16() for x in draw(1, 300, 64)]
    q, k, v = (x[0] if packed else x for x in tensors)
    sinks = draw_sinks().float() if with_sinks else None
    documents = (offsets(0, 100, 300), offsets(0, 100, 300)) if packed else (None, None)
    options = (*documents, 200, 200, 0.125, 50, 0, 20.0)
    ops = torch.ops.ligermodels
    torch.library.opcheck(ops.flash_attention_forward.default, (q, k, v, sinks, *options))
    out, lse = ops.flash_attention_forward(q, k, v, sinks, *options)
    gradient = torch.randn_like(out)
    # Its sums are in no fixed order, which opcheck's comparison of two calls would see.
    torch.use_deterministic_algorithms(True)
    try:
        torch.library.opcheck(ops.flash_attention_backward.default, (gradient, q, k, v, sinks, out, lse, *options))
    finally:
        torch.use_deterministic_algorithms(False)


def test_one_compiled_graph_and_activation_checkpointing_give_the_same_numbers():
    inputs = [x.bfloat16().requires_grad_() for x in (*draw(1, 700, 64), draw_sinks())]

    def attend(q, k, v, sinks, cu_seqlens):
        return attention(q, k, v, sinks=sinks, cu_seqlens=cu_seqlens, max_seqlen=700)

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    for cu_seqlens in (offsets(0, 100, 700), offsets(0, 1, 2, 600, 700)):
        expected = attend(*inputs, cu_seqlens)
        upstream = torch.randn_like(expected)
        gradients = torch.autograd.grad(expected, inputs, upstream)
        for function in (compiled, checkpointed(attend)):
            out = function(*inputs, cu_seqlens)
            assert torch.equal(out, expected)
            for got, want in zip(torch.autograd.grad(out, inputs, upstream), gradients, strict=True):
                torch.testing.assert_close(got, want, rtol=2e-2, atol=1e-3)  # its sums are in no fixed order


def checkpointed(function):
    return lambda *inputs: torch.utils.checkpoint.checkpoint(function, *inputs, use_reentrant=False)


# FlashAttention 4 with a softcap and with sinks; SDPA; FlashAttention 2 and FlexAttention, which take other heads.
@pytest.mark.parametrize("size, options, with_sinks", [
    (128, {"softcap": 20.0}, False), (64, {"window": 128}, True), (128, {}, False), (80, {"window": 128}, True),
    (32, {"softcap": 20.0}, False), (256, {"softcap": 50.0}, False),
])  # fmt: skip
def test_deterministic_algorithms_give_the_same_bits(size, options, with_sinks):
    inputs = [x.bfloat16().requires_grad_() for x in (*draw(1, 2000, size), *([draw_sinks()] if with_sinks else []))]
    torch.use_deterministic_algorithms(True)
    try:
        outputs = [attention(*inputs[:3], sinks=inputs[3] if with_sinks else None, **options) for _ in range(3)]
        runs = [torch.autograd.grad(out.sum(), inputs) for out in outputs]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))


def test_head_dimensions_with_wrong_gradients_are_left_to_torch():
    for size in (16, 40, 80):
        assert not module.runs_flash_attention(torch.empty(1, 700, 4, size, dtype=torch.bfloat16, device=DEVICE))
