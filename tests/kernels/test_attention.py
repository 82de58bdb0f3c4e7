import pytest
import torch

from ligermodels.kernels import attention as door
from ligermodels.kernels.attention import attention, attention_reference, visible
from tests.conftest import DEVICE
from tests.kernels.error_budget import DTYPES, check

SCALE = 0.3


@pytest.fixture(autouse=True)
def compile_afresh():
    """Each test compiles FlexAttention anew; together they would reach the limit of versions of one function."""
    torch._dynamo.reset()


def draw(batch=2, queries=37, keys=None, heads=6, kv_heads=2, size=16):
    """q, k, v as views of one packed projection, as the layers have them."""
    packed = torch.randn(batch, keys or queries, heads + 2 * kv_heads, size, dtype=torch.float64, device=DEVICE)
    q, k, v = packed.split((heads, kv_heads, kv_heads), dim=2)
    return q[:, :queries], k, v


def compare(inputs, dtype, **options):
    """The door against the reference, both through autograd."""
    reference = {k: v for k, v in options.items() if k != "max_seqlen"}
    check(
        lambda q, k, v: attention(q, k, v, scale=SCALE, **options),
        lambda q, k, v: attention_reference(q, k, v, SCALE, **reference),
        inputs,
        dtype,
        factor=3.0,  # online softmax rescales its running sums: roundings that the plain one does not make
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_causal(kv_heads, dtype):
    compare(draw(kv_heads=kv_heads), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [4, 5, 36, 37, 100])
def test_window(window, dtype):
    compare(draw(), dtype, window=window)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 4])
def test_packed_documents(window, dtype):
    cu_seqlens = torch.tensor([0, 1, 12, 12, 37], dtype=torch.int32, device=DEVICE)  # one of them empty
    compare(draw(batch=1), dtype, cu_seqlens=cu_seqlens, max_seqlen=25, window=window)


@pytest.mark.parametrize("softcap", [None, 4.0])
def test_packed_documents_on_a_cpu_make_no_mask_longer_than_a_document(softcap, monkeypatch):
    lengths = []

    def noted(queries, *others):
        lengths.append(queries)
        return visible(queries, *others)

    monkeypatch.setattr(door, "visible", noted)
    cu_seqlens = torch.tensor([0, 1, 12, 37], dtype=torch.int32)
    q, k, v = (x.cpu() for x in draw(batch=1))
    attention(q, k, v, scale=SCALE, window=4, softcap=softcap, cu_seqlens=cu_seqlens)
    assert sorted(lengths)[-2:] == [11, 25]


def test_packed_documents_are_one_graph_whatever_they_are():
    q, k, v = draw(batch=1)
    compiled = torch.compile(attention, backend="eager", fullgraph=True)
    for offsets in ([0, 1, 12, 37], [0, 20, 37]):
        cu_seqlens = torch.tensor(offsets, dtype=torch.int32, device=DEVICE)
        expected = attention_reference(q, k, v, SCALE, cu_seqlens=cu_seqlens)
        torch.testing.assert_close(compiled(q, k, v, scale=SCALE, cu_seqlens=cu_seqlens), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 7])
def test_softcap(window, dtype):
    q, k, v = draw(queries=128)
    compare((5 * q, 5 * k, v), dtype, softcap=4.0, window=window)


@pytest.mark.parametrize("dtype", DTYPES)
def test_softcap_over_packed_documents(dtype):
    cu_seqlens = torch.tensor([0, 40, 128], dtype=torch.int32, device=DEVICE)
    compare(draw(batch=1, queries=128), dtype, softcap=2.0, cu_seqlens=cu_seqlens)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 6])
def test_queries_over_a_cache_of_longer_keys(window, dtype):
    """Each row's queries stand at positions of their own; keys after a query are garbage it must not see."""
    position_ids = torch.tensor([[3, 4, 5], [17, 18, 19]], device=DEVICE)
    compare(draw(queries=3, keys=24), dtype, position_ids=position_ids, window=window)


def test_the_reference_by_hand():
    """Two positions, one head: the second query weighs both values by the softmax of its two scores."""
    q = torch.tensor([1.0, 2.0], device=DEVICE).view(1, 2, 1, 1)
    k = torch.tensor([3.0, 0.5], device=DEVICE).view(1, 2, 1, 1)
    v = torch.tensor([10.0, 20.0], device=DEVICE).view(1, 2, 1, 1)
    out = attention_reference(q, k, v, 0.5).flatten()
    weight = torch.softmax(torch.tensor([3.0, 0.5]), 0)[0].item()  # 0.5 * 2 * k
    torch.testing.assert_close(out.cpu(), torch.tensor([10.0, 10 * weight + 20 * (1 - weight)]))


def test_documents_in_more_than_one_row_are_refused():
    q, k, v = draw()
    with pytest.raises(ValueError, match="one row"):
        attention(q, k, v, scale=1.0, cu_seqlens=torch.tensor([0, 37], dtype=torch.int32))
