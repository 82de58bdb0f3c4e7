import itertools

import pytest
import torch

from ligermodels.kernels.attention import attention as module
from ligermodels.kernels.attention import flash_attention, flex_attention
from ligermodels.kernels.attention.attention import attention, attention_reference, dense_mask, packed_attention_name
from ligermodels.kernels.attention.attention_mask import Mask
from tests.conftest import DEVICE
from tests.kernels.error_budget import DTYPES, check

SCALE = 0.3


@pytest.fixture(autouse=True)
def compile_afresh():
    """Without a reset, all tests together would exceed the recompilation limit of FlexAttention."""
    torch._dynamo.reset()


def draw(batch=2, queries=37, keys=None, heads=6, kv_heads=2, size=16):
    """q, k, v as views of one packed projection, as in the layers."""
    longest = max(queries, keys or queries)
    packed = torch.randn(batch, longest, heads + 2 * kv_heads, size, dtype=torch.float64, device=DEVICE)
    q, k, v = packed.split((heads, kv_heads, kv_heads), dim=2)
    return q[:, :queries], k[:, : keys or queries], v[:, : keys or queries]


def offsets(*numbers):
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


def compare(inputs, dtype, **options):
    """attention against its reference, outputs and gradients. inputs: q, k, v and, if there are any, sinks."""
    reference = {k: v for k, v in options.items() if not k.startswith("max_seqlen")}
    # Of fp32 sinks on a GPU: FlexAttention's exponentials and logarithms are approximate, to 2e-6 of a gradient's sum.
    approximate = len(inputs) == 4 and dtype == torch.float32 and DEVICE == "cuda"
    check(
        lambda q, k, v, sinks=None: attention(q, k, v, scale=SCALE, sinks=sinks, **options),
        lambda q, k, v, sinks=None: attention_reference(q, k, v, SCALE, sinks=sinks, **reference),
        inputs,
        dtype,
        # Online softmax rescales running sums, which rounds more often than the reference.
        factor=30.0 if approximate else 3.0,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_causal_attention_is_within_the_error_budget(kv_heads, dtype):
    compare(draw(kv_heads=kv_heads), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [4, 5, 36, 37, 100])
def test_windows_are_within_the_error_budget(window, dtype):
    compare(draw(), dtype, window=window)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 4])
def test_packed_documents_are_within_the_error_budget(window, dtype):
    cu_seqlens = torch.tensor([0, 1, 12, 12, 37], dtype=torch.int32, device=DEVICE)  # one of them empty
    compare(draw(batch=1), dtype, cu_seqlens=cu_seqlens, max_seqlen=25, window=window)


@pytest.mark.parametrize("documents", [None, (0, 1, 12, 37)])
@pytest.mark.parametrize("size", [264, 512])
def test_heads_wider_than_256_are_within_the_error_budget(size, documents):
    """Of a GPU: of Gemma 4, which no FlashAttention takes."""
    packed = {} if documents is None else {"cu_seqlens": offsets(*documents), "max_seqlen": 25}
    compare(draw(batch=2 if documents is None else 1, size=size), torch.bfloat16, **packed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 4])
def test_documents_of_equal_length_are_rows(window, causal, dtype, monkeypatch):
    shapes = []

    def record(q, k, v, **options):
        shapes.append(q.shape[:2])
        return attention(q, k, v, **options)

    monkeypatch.setattr(module, "attention", record)
    q, k, v = draw(batch=1, queries=36)
    compare((q, k, v), dtype, cu_seqlens=offsets(0, 12, 24, 36), max_seqlen=12, window=window, causal=causal)
    assert {*shapes} == {(3, 12)}


@pytest.mark.parametrize("softcap", [None, 4.0])
def test_packed_documents_on_the_cpu_need_no_mask_longer_than_a_document(softcap, monkeypatch):
    lengths = []

    def record(queries, *others):
        lengths.append(queries)
        return dense_mask(queries, *others)

    monkeypatch.setattr(module, "dense_mask", record)
    cu_seqlens = torch.tensor([0, 1, 12, 37], dtype=torch.int32)
    q, k, v = (x.cpu() for x in draw(batch=1))
    attention(q, k, v, scale=SCALE, window=4, softcap=softcap, cu_seqlens=cu_seqlens)
    assert sorted(lengths)[-2:] == [11, 25]


def test_one_compiled_graph_serves_all_packings():
    """On the CPU: on a GPU, FlexAttention's mask of each batch is made outside of the graph."""
    q, k, v = (x.cpu() for x in draw(1, 37, 50))
    sinks = torch.randn(6, dtype=torch.float64)
    compiled = torch.compile(attention, backend="eager", fullgraph=True)
    for ends, ends_k in (((0, 1, 12, 37), (0, 3, 20, 50)), ((0, 20, 37), (0, 40, 50))):
        documents = {"cu_seqlens": offsets(*ends).cpu(), "cu_seqlens_k": offsets(*ends_k).cpu()}
        expected = attention_reference(q, k, v, SCALE, sinks=sinks, **documents)
        torch.testing.assert_close(compiled(q, k, v, scale=SCALE, sinks=sinks, **documents), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 7])
def test_softcaps_are_within_the_error_budget(window, dtype):
    q, k, v = draw(queries=128)
    compare((5 * q, 5 * k, v), dtype, softcap=4.0, window=window)


@pytest.mark.parametrize("dtype", DTYPES)
def test_softcap_over_packed_documents_is_within_the_error_budget(dtype):
    cu_seqlens = torch.tensor([0, 40, 128], dtype=torch.int32, device=DEVICE)
    compare(draw(batch=1, queries=128), dtype, softcap=2.0, cu_seqlens=cu_seqlens)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 6])
def test_queries_that_see_keys_ahead_of_them_are_within_the_error_budget(window, dtype):
    """Alone, in packed documents, and over longer keys; 40 queries, of which 9 to 20 see up to the 20th."""
    ahead = torch.zeros(1, 40, dtype=torch.int64, device=DEVICE)
    ahead[0, 9:21] = torch.arange(11, -1, -1)
    compare(draw(batch=1, queries=40), dtype, window=window, ahead=ahead)
    compare(draw(batch=1, queries=40), dtype, window=window, ahead=ahead, cu_seqlens=offsets(0, 5, 30, 40))
    compare(draw(batch=1, queries=40, keys=64), dtype, window=window, ahead=ahead)


@pytest.mark.parametrize("window", [None, 6])
def test_ahead_and_window_say_which_keys_a_query_sees(window):
    ahead = torch.tensor([[0, 0, 3, 2, 1, 0, 0, 0, 1, 0], [9, 0, 0, 0, 0, 0, 0, 0, 0, 0]])
    seen = dense_mask(10, 10, torch.device("cpu"), Mask(None if window is None else window - 1, ahead=ahead))
    for row, query, key in itertools.product(range(2), range(10), range(10)):
        expected = key <= query + ahead[row, query] and query - key < (window or 10)
        assert seen[row, query, key] == expected


def test_ahead_without_causal_is_refused():
    with pytest.raises(ValueError, match="ahead adds keys to those of causal attention"):
        attention(*draw(), causal=False, ahead=torch.zeros(2, 37, dtype=torch.int64))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 6])
def test_queries_over_a_longer_cache_are_within_the_error_budget(window, dtype):
    """Every row has its own query positions. Cache entries after a query are garbage that it must not see."""
    position_ids = torch.tensor([[3, 4, 5], [17, 18, 19]], device=DEVICE)
    compare(draw(queries=3, keys=24), dtype, position_ids=position_ids, window=window)


def test_the_reference_agrees_with_a_computation_by_hand():
    """Two positions, one head: the second output is the mean of both values, weighted by the softmax of two scores."""
    q = torch.tensor([1.0, 2.0], device=DEVICE).view(1, 2, 1, 1)
    k = torch.tensor([3.0, 0.5], device=DEVICE).view(1, 2, 1, 1)
    v = torch.tensor([10.0, 20.0], device=DEVICE).view(1, 2, 1, 1)
    out = attention_reference(q, k, v, 0.5).flatten()
    weight = torch.softmax(torch.tensor([3.0, 0.5]), 0)[0].item()  # 0.5 * 2 * k
    torch.testing.assert_close(out.cpu(), torch.tensor([10.0, 10 * weight + 20 * (1 - weight)]))


# Offsets of queries and keys, each a document without queries and one without keys, or (queries, keys) of a row.
LAYOUTS = {"a row": (9, 9), "fewer queries": (5, 9), "more queries": (9, 5),
           "documents": ((0, 1, 5, 5, 9), (0, 3, 5, 7, 11)), "no keys": ((0, 4, 4, 9), (0, 0, 2, 5))}  # fmt: skip


def by_hand(q, k, v, pairs, softcap=None, sinks=None):
    """Attention of one row in float64. pairs: bool [T, S], which keys a query sees."""
    group = q.shape[2] // k.shape[2]
    out = torch.zeros_like(q)
    for head in range(q.shape[2]):
        for query in pairs.any(1).nonzero().flatten().tolist():
            scores = SCALE * (k[0, pairs[query], head // group] @ q[0, query, head])
            scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
            weights = torch.exp(scores)
            total = weights.sum() + (0.0 if sinks is None else torch.exp(sinks[head]))
            out[0, query, head] = (weights / total) @ v[0, pairs[query], head // group]
    return out


def pairs_by_hand(layout, causal, window):
    ends, ends_k = layout if isinstance(layout[0], tuple) else ((0, layout[0]), (0, layout[1]))
    pairs = torch.zeros(ends[-1], ends_k[-1], dtype=torch.bool)
    for begin, end, begin_k, end_k in zip(ends, ends[1:], ends_k, ends_k[1:], strict=False):
        for query in range(begin, end):
            for key in range(begin_k, end_k):
                ahead = (key - end_k) - (query - end)  # the last query is at the last key
                pairs[query, key] = (not causal or ahead <= 0) and (window is None or abs(ahead) < window)
    return pairs


@pytest.mark.parametrize("extras", [(), ("softcap", "sinks")])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_the_reference_and_the_cpu_agree_with_loops_over_queries(layout, causal, window, extras):
    pairs = pairs_by_hand(layout, causal, window)
    q, k, v = (x.cpu() for x in draw(1, *pairs.shape, heads=4, size=8))
    sinks = torch.randn(4, dtype=torch.float64) if "sinks" in extras else None
    inputs = [x.requires_grad_() for x in (q, k, v, sinks) if x is not None]
    options = {"softcap": 2.0 if "softcap" in extras else None, "sinks": sinks}
    expected = by_hand(q, k, v, pairs, **options)
    upstream = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, inputs, upstream)
    if isinstance(layout[0], tuple):
        options |= {"cu_seqlens": offsets(*layout[0]).cpu(), "cu_seqlens_k": offsets(*layout[1]).cpu()}
    for function in (attention, attention_reference):
        out = function(q, k, v, scale=SCALE, causal=causal, window=window, **options)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(torch.autograd.grad(out, inputs, upstream), gradients)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"window": 5}, {"softcap": 3.0}, {"causal": False}], ids=str)
def test_sinks_are_within_the_error_budget(options, dtype):
    sinks = torch.randn(6, dtype=torch.float64, device=DEVICE)
    compare((*draw(), sinks), dtype, **options)
    packed = options | {"cu_seqlens": offsets(0, 1, 12, 12, 37), "max_seqlen": 25}
    compare((*draw(batch=1), sinks), dtype, **packed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "options", [{}, {"window": 5}, {"softcap": 3.0}, {"causal": False}, {"causal": False, "window": 5}], ids=str
)
def test_documents_with_more_keys_than_queries_are_within_the_error_budget(options, dtype):
    documents = {"cu_seqlens": offsets(0, 1, 12, 12, 37), "cu_seqlens_k": offsets(0, 9, 20, 21, 50)}
    compare(draw(1, 37, 50), dtype, **documents, max_seqlen=25, max_seqlen_k=29, **options)


def test_the_cpu_and_the_gpu_take_sinks_over_a_cache():
    sinks = torch.randn(6, dtype=torch.float64, device=DEVICE)
    compare((*draw(queries=3, keys=24), sinks), torch.float32, position_ids=torch.tensor([[3, 4, 5]], device=DEVICE))


def test_sinks_of_flash_attention_2_have_the_gradients_of_one_more_column(monkeypatch):
    """Its kernels, which compute without sinks, are replaced by their formulas in float64."""

    def scores_of(q, k):
        return SCALE * torch.einsum("thd,shd->hts", q, k).masked_fill(~pairs, -torch.inf)

    def flash_2_forward(q, k, v, *options):
        scores = scores_of(q, k)
        return torch.einsum("hts,shd->thd", scores.softmax(-1), v), scores.logsumexp(-1), None, None

    def flash_2_backward(dout, q, k, v, out, lse, *options):
        weights = torch.exp(scores_of(q, k) - lse[..., None])
        dots = torch.einsum("thd,shd->hts", dout, v) - (dout * out).sum(-1).T[..., None]
        dscores = SCALE * weights * dots
        dk, dv = (torch.einsum("hts,thd->shd", *pair) for pair in ((dscores, q), (weights, dout)))
        return torch.einsum("hts,shd->thd", dscores, k), dk, dv

    monkeypatch.setattr(flash_attention, "flash_2_forward", flash_2_forward)
    monkeypatch.setattr(flash_attention, "flash_2_backward", flash_2_backward)
    pairs = pairs_by_hand(((0, 4, 9), (0, 4, 9)), True, None)
    inputs = [x.cpu().requires_grad_() for x in (*draw(1, 9, heads=4, kv_heads=4, size=8), torch.randn(4).double())]
    expected = by_hand(*inputs[:3], pairs, sinks=inputs[3])
    out = flash_attention.flash_attention_2(*inputs, SCALE, Mask(cu_seqlens=offsets(0, 4, 9).cpu()), 0.0)
    torch.testing.assert_close(out, expected)
    upstream = torch.randn_like(out)
    gradients = [torch.autograd.grad(x, inputs, upstream, retain_graph=True) for x in (out, expected)]
    torch.testing.assert_close(*gradients)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("causal", [True, False])
def test_flex_attention_takes_sinks_windows_and_other_numbers_of_keys(causal, monkeypatch):
    monkeypatch.setattr(flex_attention, "compiled_flex_attention", lambda: flex_attention.flex_attention_with_sinks)
    monkeypatch.setattr(flex_attention, "shared_memory", lambda device: 0)
    q, k, v = (x.float().cpu() for x in draw(1, 37, 50))
    sinks, cu_seqlens, cu_seqlens_k = torch.randn(6), offsets(0, 1, 12, 12, 37).cpu(), offsets(0, 9, 20, 21, 50).cpu()
    mask = Mask(4, 0 if causal else 4, cu_seqlens, cu_seqlens_k)
    out = flex_attention.flex_attention(q, k, v, sinks, SCALE, 3.0, mask)
    expected = attention_reference(
        q, k, v, SCALE, 5, 3.0, cu_seqlens, causal=causal, sinks=sinks, cu_seqlens_k=cu_seqlens_k
    )
    torch.testing.assert_close(out, expected)
    cu_seqlens_k[2] = 15  # the next batch, in the same tensor
    expected = attention_reference(
        q, k, v, SCALE, 5, 3.0, cu_seqlens, causal=causal, sinks=sinks, cu_seqlens_k=cu_seqlens_k
    )
    torch.testing.assert_close(flex_attention.flex_attention(q, k, v, sinks, SCALE, 3.0, mask), expected)


REFUSED = {
    "needs a batch of one row, but the batch has 2 rows": {"cu_seqlens": offsets(0, 37)},
    "cu_seqlens_k needs cu_seqlens": {"cu_seqlens_k": offsets(0, 37)},
    "they need causal=True": {"causal": False, "position_ids": torch.zeros(2, 37)},
    "dropout cannot be combined with a softcap or with sinks": {"dropout": 0.1, "sinks": torch.zeros(6)},
}


@pytest.mark.parametrize("message", REFUSED)
def test_arguments_that_contradict_each_other_raise(message):
    with pytest.raises(ValueError, match=message):
        attention(*draw(2 if "one row" in message or "position" in REFUSED[message] else 1), **REFUSED[message])


def test_flash_attention_2_is_left_out_where_it_would_ignore_a_window():
    def runs(right, longest, longest_k, size=64, dtype=torch.bfloat16):
        mask = Mask(right, right, longest=longest, longest_k=longest_k)
        return flash_attention.runs_flash_attention_2(torch.empty(size, dtype=dtype), mask)

    assert not runs(6, 9, 5)
    assert runs(4, 9, 5) and runs(6, 5, 5) and runs(0, 9, 5) and runs(None, 9, 5)
    assert not runs(0, 9, 9, size=264) and not runs(0, 9, 9, dtype=torch.float32)


def test_documents_with_other_numbers_of_keys_need_their_offsets():
    with pytest.raises(ValueError, match="37 queries over 50 keys in documents need cu_seqlens_k"):
        attention(*draw(1, 37, 50), cu_seqlens=offsets(0, 12, 37))


def test_a_mask_of_quadratic_memory_is_told_once(recwarn):
    module.warn_of_quadratic_memory.cache_clear()
    for _ in range(2):
        module.warn_of_quadratic_memory(torch.float32, 8)
    assert [str(x.message) for x in recwarn] == [
        "attention over packed documents in float32 with heads of 8 stores a mask of tokens x tokens;"
        " bfloat16 with heads of at most 256 does not"
    ]


def test_the_default_scale_is_one_over_the_square_root_of_the_head_dimension():
    inputs = draw(size=16)
    expected = attention(*inputs, scale=0.25)
    torch.testing.assert_close(attention(*inputs), expected)
    torch.testing.assert_close(attention_reference(*inputs), attention_reference(*inputs, 0.25))


def test_the_attention_of_packed_documents_has_a_name_and_says_what_is_faster(monkeypatch):
    def name(size=128, dtype=torch.bfloat16, softcap=None, installed=(), memory=227 * 1024):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda gpu: (9, 0))
        monkeypatch.setattr(module, "head_dims", lambda gpu: installed)
        monkeypatch.setattr(flex_attention, "shared_memory", lambda device: memory)
        return packed_attention_name(torch.device("cuda"), dtype, size, softcap)

    faster = "; the extra `flash` is faster: pip install 'ligermodels[flash]'"
    assert name() == f"FlashAttention 2{faster}" and name(softcap=50.0) == f"FlexAttention{faster}"
    assert name(installed=(128,)) == name(softcap=50.0, installed=(128,)) == "FlashAttention 4"
    assert (name(size=80), name(dtype=torch.float32)) == ("FlashAttention 2", "SDPA with a dense mask")
    assert (name(size=512), name(size=264)) == ("FlexAttention", "FlexAttention")
    assert name(size=512, memory=163 * 1024) == name(size=520) == "SDPA with a dense mask"
    assert name(size=512, dtype=torch.float32) == "SDPA with a dense mask"


@pytest.mark.parametrize("value_size", [8, 24])
@pytest.mark.parametrize("options", [{}, {"cu_seqlens": True}, {"window": 5}, {"softcap": 3.0}], ids=str)
def test_values_may_have_another_size_than_keys(options, value_size):
    q, k = (torch.randn(1, 20, heads, 16, dtype=torch.float64, device=DEVICE) for heads in (4, 2))
    v = torch.randn(1, 20, 2, value_size, dtype=torch.float64, device=DEVICE)
    if "cu_seqlens" in options:
        options = {"cu_seqlens": torch.tensor([0, 7, 20], dtype=torch.int32, device=DEVICE)}
    expected = attention_reference(q, k, v, **options)
    assert expected.shape == (1, 20, 4, value_size)
    torch.testing.assert_close(attention(q, k, v, **options), expected)


@pytest.mark.parametrize("value_size", [8, 24])
def test_on_a_gpu_the_smaller_of_keys_and_values_is_padded(value_size, monkeypatch):
    def equal_sizes_only(q, k, v, sinks, scale, mask, dropout):
        assert q.shape[-1] == k.shape[-1] == v.shape[-1] == max(16, value_size)
        return attention_reference(q, k, v, scale, cu_seqlens=mask.cu_seqlens)

    monkeypatch.setattr(module, "flash_attention_2", equal_sizes_only)
    monkeypatch.setattr(module, "runs_flash_attention_2", lambda q, mask: True)
    monkeypatch.setattr(module, "runs_flash_attention", lambda q: False)
    q, k, v = (torch.randn(1, 20, 2, size, dtype=torch.float64) for size in (16, 16, value_size))
    offsets = torch.tensor([0, 7, 20], dtype=torch.int32)
    out = module.attention_on_gpu(q, k, v, None, 0.3, None, Mask(cu_seqlens=offsets, longest=13, longest_k=13), 0.0)
    torch.testing.assert_close(out, attention_reference(q, k, v, 0.3, cu_seqlens=offsets))
