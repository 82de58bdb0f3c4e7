import pytest
import torch

from ligermodels.kernels.decoding import decode_attention as module
from ligermodels.kernels.decoding.decode_attention import decode_attention, decode_attention_reference
from tests.conftest import DEVICE, TENS_OF_GIB
from tests.kernels.error_budget import DTYPES, check, relative_error

pytestmark = pytest.mark.usefixtures("kernels", "poisoned")
PAGE = 64
LENGTHS = 1, 200, 0, 64, 129


def contiguous_cache(lengths, kv_heads, size, dtype=torch.float64):
    """Keys and values [B, S, Hkv, D] of each row, in order of position."""
    return torch.randn(2, len(lengths), max(lengths), kv_heads, size, dtype=dtype, device=DEVICE)


def paged(keys, values, lengths, max_blocks, page_size=PAGE, window=None):
    """The pools and the block table of these keys and values. NaN is wherever a query must not read."""
    rows = len(lengths)
    table = torch.randperm(rows * max_blocks, device=DEVICE).view(rows, max_blocks).int()
    pools = keys.new_full((2, rows * max_blocks * page_size, *keys.shape[2:]), torch.nan)
    for row, length in enumerate(lengths):
        for position in range(max(0, length - (window or length)), length):
            slot = table[row, position // page_size % max_blocks] * page_size + position % page_size
            pools[:, slot] = torch.stack((keys[row, position], values[row, position]))
    return *pools, table, torch.tensor(lengths, device=DEVICE)


def exact(q, keys, values, lengths, scale, window=None, softcap=None, sinks=None):
    """By the formula, one head at a time."""
    out = torch.zeros_like(q)
    for row, length in enumerate(lengths):
        seen = slice(max(0, length - (window or length)), length)
        for head in range(q.shape[1] if length else 0):
            kv_head = head // (q.shape[1] // keys.shape[2])
            scores = keys[row, seen, kv_head] @ q[row, head] * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            exponentials = scores.exp()
            total = exponentials.sum() + (0 if sinks is None else sinks[head].exp())
            out[row, head] = (exponentials / total) @ values[row, seen, kv_head]
    return out


def draw(lengths, heads, kv_heads, size, max_blocks, **options):
    keys, values = contiguous_cache(lengths, kv_heads, size)
    q = torch.randn(len(lengths), heads, size, dtype=torch.float64, device=DEVICE)
    return q, keys, values, paged(keys, values, lengths, max_blocks, **options)


OPTIONS = {
    "plain": {},
    "softcap and sinks": {"softcap": 2.0, "sinks": True},
    "window": {"window": 70},
    "window of one": {"window": 1, "sinks": True},
}


@pytest.mark.parametrize("splits", [1, 3], ids=["one program a row", "split"])
@pytest.mark.parametrize(("heads", "kv_heads", "size", "value_size"), [(20, 1, 44, 36), (40, 2, 20, 16), (3, 1, 48, 1)])
def test_values_may_be_the_first_columns_of_the_keys(heads, kv_heads, size, value_size, splits, monkeypatch):
    """As of latent attention; 20 query heads of one key are two tiles."""
    monkeypatch.setattr(module, "num_splits", lambda *sizes: splits)
    module._launchers.cache_clear()
    q, keys, _, (pool, _, table, lengths) = draw(LENGTHS, heads, kv_heads, size, 4)
    expected = exact(q, keys, keys, LENGTHS, 0.4)[..., :value_size]
    inputs = q.float(), pool.float(), None, table, lengths
    options = {"scale": 0.4, "page_size": PAGE, "value_size": value_size}
    plain = relative_error(decode_attention_reference(*inputs, **options), expected)
    assert plain <= 1e-6
    assert relative_error(decode_attention(*inputs, **options), expected) <= 3 * plain


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_over_latents_is_within_the_error_budget(dtype):
    q, _, _, (pool, _, table, lengths) = draw((150, 7), 20, 1, 80, 3)

    def call(function):
        return torch.no_grad()(
            lambda q, pool: function(q, pool, None, table, lengths, scale=0.1, page_size=PAGE, value_size=64)
        )

    check(call(decode_attention), call(decode_attention_reference), [q, pool], dtype, factor=3.0)


def test_a_row_gives_the_same_bits_with_a_longer_table_and_other_lengths_beside_it(monkeypatch):
    monkeypatch.setattr(module, "num_splits", lambda *sizes: 3)
    q, _, _, (keys, values, table, lengths) = draw((150, 100), 4, 2, 16, 3)
    q, keys, values = q.half(), keys.half(), values.half()
    settings = {"scale": 0.25, "page_size": PAGE}
    first = decode_attention(q, keys, values, table, lengths, **settings)
    longer = torch.cat((table, table), 1)[:, :5]
    second = decode_attention(q, keys, values, longer, lengths - torch.tensor([0, 60], device=DEVICE), **settings)
    assert torch.equal(first[0], second[0]) and not torch.equal(first[1], second[1])


def test_queries_and_pools_may_be_views():
    """As a packed projection and a pool of keys beside values give them."""
    q, _, _, (keys, values, table, lengths) = draw((70, 3), 2, 1, 32, 2)
    pools, packed = torch.stack((keys, values), 1).float(), torch.cat((q, q), 1).float()
    out = decode_attention(
        packed[:, :2], pools[:, 0], pools[:, 1], torch.cat((table, table), 1)[:, :2], lengths.int(), scale=1.0,
        page_size=PAGE,
    )  # fmt: skip
    expected = decode_attention_reference(q, keys, values, table, lengths, scale=1.0, page_size=PAGE)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)


def test_the_number_of_splits_fills_the_device_and_stays_within_the_keys():
    device = torch.device("cpu")  # two multiprocessors: four programs are wanted
    assert module.num_splits(1, 4096, 64, device) == 4
    assert module.num_splits(3, 4096, 64, device) == 2
    assert module.num_splits(100, 4096, 64, device) == 1
    assert module.num_splits(1, 100, 64, device) == 2


@pytest.mark.parametrize("on_kernels", [True, False])
def test_what_does_not_fit_raises(on_kernels, monkeypatch):
    monkeypatch.setattr("ligermodels.kernels.launch.interpreting", on_kernels)
    q, pool = torch.zeros(2, 4, 16, device=DEVICE), torch.zeros(128, 2, 16, device=DEVICE)
    table, lengths = torch.zeros(2, 1, dtype=torch.int32, device=DEVICE), torch.ones(2, device=DEVICE).int()

    def call(q=q, keys=pool, values=pool, table=table, lengths=lengths, page_size=64, **options):
        return decode_attention(q, keys, values, table, lengths, scale=1.0, page_size=page_size, **options)

    for message, options in {
        "page_size is 48; it must be a power of two": {"page_size": 48},
        r"slots a multiple of page_size 256": {"page_size": 256},
        r"keys \[128, 3, 16\], values \[128, 3, 16\]; expected": {"keys": pool.new_zeros(128, 3, 16)} | {
            "values": pool.new_zeros(128, 3, 16)
        },
        r"block_table has shape \[1, 1\], lengths \[2\]; expected \[2, max_blocks\] and \[2\]": {"table": table[:1]},
        r"sinks has shape \[2\]; needed \[4\]": {"sinks": q.new_zeros(2)},
        r"value_size is None; without values it must be 1 to 15": {"values": None},
        r"value_size is 16; without values it must be 1 to 15": {"values": None, "value_size": 16},
        r"value_size is 8; without values": {"value_size": 8},
        "keys has strides .*; each slot must be contiguous": {"keys": pool.new_zeros(128, 16, 2).mT},
        "values is torch.float16, q torch.float32; they must be equal": {"values": pool.half()},
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match=f"decode_attention: .*{message}"):
            call(**options)
    with pytest.raises(RuntimeError, match=r"decode_attention: has no backward; call it under torch.no_grad\(\)"):
        call(q=q.clone().requires_grad_())


@TENS_OF_GIB
@pytest.mark.gpu
def test_slots_beyond_two_to_the_31_elements_are_read():
    pool = torch.zeros(2**21 + PAGE, 8, 128, dtype=torch.bfloat16, device=DEVICE)
    last = torch.tensor([[2**21 // PAGE]], dtype=torch.int32, device=DEVICE)
    pool[2**21 :] = torch.randn(PAGE, 8, 128, device=DEVICE)
    q = torch.randn(1, 32, 128, dtype=torch.bfloat16, device=DEVICE)
    lengths = torch.tensor([PAGE], device=DEVICE)
    out = decode_attention(q, pool, pool, last, lengths, scale=0.1, page_size=PAGE)
    expected = decode_attention(q, pool[2**21 :], pool[2**21 :], 0 * last, lengths, scale=0.1, page_size=PAGE)
    assert out.any() and relative_error(out, expected.double()) == 0
