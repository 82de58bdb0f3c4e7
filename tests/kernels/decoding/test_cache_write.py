import pytest
import torch

from ligermodels.kernels.attention.qk_norm_rope import qk_norm_rope
from ligermodels.kernels.attention.rope import rope_
from ligermodels.kernels.decoding.cache_write import (
    CacheSlots,
    qk_norm_rope_write_cache,
    rope_write_cache_,
    write_cache,
)
from tests.conftest import DEVICE, TENS_OF_GIB
from tests.kernels.error_budget import DTYPES

BATCH, LENGTH = 2, 3
SLOTS = 7, 2, 11, 0, 5, 4
pytestmark = [
    pytest.mark.usefixtures("kernels"),
    pytest.mark.parametrize("on_kernels", [True, False], ids=["kernel", "reference"]),
]


@pytest.fixture(autouse=True)
def choose_path(on_kernels, kernels, monkeypatch):
    if not on_kernels and DEVICE == "cuda":
        pytest.skip("CUDA tensors run the kernels")
    monkeypatch.setattr("ligermodels.kernels.launch.interpreting", on_kernels and DEVICE == "cpu")


def draw(*shape, dtype=torch.float32):
    return torch.randn(shape, device=DEVICE).to(dtype)


def angles(rows, rotated):
    phases = 100 * torch.rand(rows, rotated // 2, device=DEVICE)
    return phases.cos(), phases.sin()


def empty_cache(kv_heads, size, dtype=torch.float32, slots=SLOTS):
    """Views of one pool with keys beside values, filled with 9."""
    pool = torch.full((12, 2, kv_heads, size), 9.0, device=DEVICE, dtype=dtype)
    return CacheSlots(pool[:, 0], pool[:, 1], torch.tensor(slots, device=DEVICE))


def assert_holds(cache, k, v):
    """The cache has k and v at its slots, and is unchanged elsewhere."""
    for pool, x in zip(cache[:2], (k, v), strict=True):
        expected = torch.full_like(pool, 9.0)
        expected[cache.slots] = x.flatten(0, 1)
        assert torch.equal(pool, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "size", "rotated", "interleaved"),
    [((5, 1), 32, 32, False), ((33, 3), 20, 20, False), ((2, 2), 80, 32, False), ((5, 2), 15, 6, True)],
)
def test_rope_write_gives_the_bits_of_rope_and_writes_them_to_the_cache(heads, size, rotated, interleaved, dtype):
    qkv = draw(BATCH, LENGTH, (heads[0] + 2 * heads[1]) * size, dtype=dtype)
    tables, cache = angles(BATCH * LENGTH, rotated), empty_cache(heads[1], size, dtype)
    expected = rope_(qkv.clone(), *tables, *heads, interleaved)
    q, k, v = rope_write_cache_(qkv, *tables, *heads, interleaved, cache)
    assert torch.equal(q, expected[0]) and torch.equal(k, expected[1]) and torch.equal(v, expected[2])
    assert_holds(cache, k, v)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("whole_row", [True, False], ids=["norm of rows", "norm of heads"])
@pytest.mark.parametrize(
    ("heads", "size", "rotated", "gated"), [((33, 3), 20, 20, False), ((2, 2), 256, 256, False), ((3, 2), 80, 20, True)]
)
def test_qk_norm_rope_write_gives_what_qk_norm_rope_does_and_writes_it_to_the_cache(
    heads, size, rotated, gated, whole_row, dtype
):
    qkv = draw(BATCH, LENGTH, ((1 + gated) * heads[0] + 2 * heads[1]) * size, dtype=dtype)
    weights = [draw(size * (h if whole_row else 1), dtype=dtype) for h in heads]
    tables, cache = angles(LENGTH, rotated), empty_cache(heads[1], size, dtype)
    arguments = qkv, *weights, *tables, *heads, 1e-5, 1.0
    q, k, v, *gates = qk_norm_rope_write_cache(*arguments, cache, gated)
    torch.testing.assert_close((q, k, v, *gates), qk_norm_rope(*arguments, gated))
    assert_holds(cache, k, v)


@pytest.mark.parametrize("dtype", DTYPES)
def test_write_copies_keys_and_values_of_any_strides(dtype):
    k = draw(BATCH, 3, LENGTH, 20, dtype=dtype).transpose(1, 2)
    v = draw(BATCH, LENGTH, 3, 40, dtype=dtype)[..., ::2]
    cache = empty_cache(3, 20, dtype)
    write_cache(k, v, cache)
    assert_holds(cache, k, v)


def test_tokens_may_share_a_slot_that_nothing_reads():
    cache = empty_cache(1, 16, slots=(0, 3, 0, 0, 8, 0))
    k = draw(BATCH, LENGTH, 1, 16)
    write_cache(k, -k, cache)
    written = k.flatten(0, 1)[[1, 4]]
    assert torch.equal(cache.keys[[3, 8]], written) and torch.equal(cache.values[[3, 8]], -written)


def test_what_does_not_fit_raises():
    k, cache = draw(1, 2, 1, 16), empty_cache(1, 16, slots=(0, 1))
    with pytest.raises(ValueError, match=r"slots \[6\]; expected twice \[slots, 1, 16\] and \[2\]"):
        write_cache(k, k, empty_cache(1, 16))
    with pytest.raises(ValueError, match=r"keys have shape \[12, 2, 16\]"):
        write_cache(k, k, empty_cache(2, 16, slots=(0, 1)))
    with pytest.raises(ValueError, match="each slot of keys and values must be contiguous"):
        write_cache(k, k, cache._replace(keys=draw(12, 1, 32)[..., ::2]))
    with pytest.raises(ValueError, match=r"slots torch.int32;\n?.*expected twice torch.float32, and torch.int64"):
        write_cache(k, k, cache._replace(slots=cache.slots.int()))
    qkv, tables = draw(1, 2, 3 * 16), angles(2, 16)
    with pytest.raises(RuntimeError, match=r"rope_write_cache_: has no backward; call it under torch.no_grad\(\)"):
        rope_write_cache_(qkv.requires_grad_(), *tables, 1, 1, False, cache)
    with pytest.raises(ValueError, match="they must have 16 each, or 16 and 16"):
        qk_norm_rope_write_cache(qkv.detach(), draw(8), draw(8), *tables, 1, 1, 1e-5, 0.0, cache)


@TENS_OF_GIB
@pytest.mark.gpu
def test_slots_beyond_two_to_the_31_elements_are_written():
    pool = torch.zeros(2**21 + 1, 8, 128, dtype=torch.bfloat16, device=DEVICE)
    cache = CacheSlots(pool, torch.zeros_like(pool), torch.tensor([2**21], device=DEVICE))
    qkv = draw(1, 1, 48 * 128, dtype=torch.bfloat16)
    _, k, v = rope_write_cache_(qkv, *angles(1, 128), 32, 8, False, cache)
    assert torch.equal(cache.keys[-1:], k[0]) and torch.equal(cache.values[-1:], v[0])
    assert not cache.keys[:-1].any()
