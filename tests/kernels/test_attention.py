import pytest
import torch

from ligermodels.kernels import attention as module
from ligermodels.kernels.attention import attention, attention_reference, dense_mask, packed_attention_name
from tests.conftest import DEVICE
from tests.kernels.error_budget import DTYPES, check

SCALE = 0.3


@pytest.fixture(autouse=True)
def compile_afresh():
    """Without a reset, all tests together would exceed the recompilation limit of FlexAttention."""
    torch._dynamo.reset()


def draw(batch=2, queries=37, keys=None, heads=6, kv_heads=2, size=16):
    """q, k, v as views of one packed projection, as in the layers."""
    packed = torch.randn(batch, keys or queries, heads + 2 * kv_heads, size, dtype=torch.float64, device=DEVICE)
    q, k, v = packed.split((heads, kv_heads, kv_heads), dim=2)
    return q[:, :queries], k, v


def compare(inputs, dtype, **options):
    """attention against its reference, outputs and gradients."""
    reference = {k: v for k, v in options.items() if k != "max_seqlen"}
    check(
        lambda q, k, v: attention(q, k, v, scale=SCALE, **options),
        lambda q, k, v: attention_reference(q, k, v, SCALE, **reference),
        inputs,
        dtype,
        factor=3.0,  # online softmax rescales running sums, which rounds more often than the reference
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
    q, k, v = draw(batch=1)
    compiled = torch.compile(attention, backend="eager", fullgraph=True)
    for offsets in ([0, 1, 12, 37], [0, 20, 37]):
        cu_seqlens = torch.tensor(offsets, dtype=torch.int32, device=DEVICE)
        expected = attention_reference(q, k, v, SCALE, cu_seqlens=cu_seqlens)
        torch.testing.assert_close(compiled(q, k, v, scale=SCALE, cu_seqlens=cu_seqlens), expected)


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


def test_packed_documents_in_several_rows_raise():
    q, k, v = draw()
    with pytest.raises(ValueError, match="one row"):
        attention(q, k, v, scale=1.0, cu_seqlens=torch.tensor([0, 37], dtype=torch.int32))


def test_the_default_scale_is_one_over_the_square_root_of_the_head_dimension():
    inputs = draw(size=16)
    expected = attention(*inputs, scale=0.25)
    torch.testing.assert_close(attention(*inputs), expected)
    torch.testing.assert_close(attention_reference(*inputs), attention_reference(*inputs, 0.25))


def test_the_attention_of_packed_documents_has_a_name_and_says_what_is_faster(monkeypatch):
    def name(size=128, dtype=torch.bfloat16, softcap=None, installed=()):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda gpu: (9, 0))
        monkeypatch.setattr(module, "head_dims", lambda gpu: installed)
        return packed_attention_name(torch.device("cuda"), dtype, size, softcap)

    faster = "; the extra `flash` is faster: pip install 'ligermodels[flash]'"
    assert name() == f"FlashAttention 2{faster}" and name(softcap=50.0) == f"FlexAttention{faster}"
    assert name(installed=(128,)) == name(softcap=50.0, installed=(128,)) == "FlashAttention 4"
    assert (name(size=80), name(dtype=torch.float32)) == ("FlashAttention 2", "SDPA with a dense mask")
