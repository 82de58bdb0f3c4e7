"""FlashAttention 4, where it is installed: the numbers of attention over packed documents, windows and softcaps."""

import pytest
import torch

from ligermodels.kernels import flash_attention as module
from ligermodels.kernels.attention import attention, attention_reference
from tests.conftest import DEVICE
from tests.kernels.error_budget import check

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def small_work(monkeypatch):
    if DEVICE == "cpu" or not module.head_dims(torch.cuda.current_device()):
        pytest.skip("needs flash-attn-4 and a Hopper GPU")
    monkeypatch.setattr(module, "FEWEST_ELEMENTS", 0)


def draw(batch, length, size, heads=4, kv_heads=2):
    """q, k, v as views of one packed projection, as in the layers."""
    packed = torch.randn(batch, length, heads + 2 * kv_heads, size, dtype=torch.float64, device=DEVICE)
    return packed.split((heads, kv_heads, kv_heads), dim=2)


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


def test_one_compiled_graph_and_activation_checkpointing_give_the_same_numbers():
    q, k, v = (x.bfloat16().requires_grad_() for x in draw(1, 700, 64))

    def attend(q, k, v, cu_seqlens):
        return attention(q, k, v, cu_seqlens=cu_seqlens, max_seqlen=700)

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    for cu_seqlens in (offsets(0, 100, 700), offsets(0, 1, 2, 600, 700)):
        expected = attend(q, k, v, cu_seqlens)
        upstream = torch.randn_like(expected)
        gradients = torch.autograd.grad(expected, (q, k, v), upstream)
        for function in (compiled, checkpointed(attend)):
            out = function(q, k, v, cu_seqlens)
            assert torch.equal(out, expected)
            for got, want in zip(torch.autograd.grad(out, (q, k, v), upstream), gradients, strict=True):
                torch.testing.assert_close(got, want, rtol=2e-2, atol=1e-3)  # its sums are in no fixed order


def checkpointed(function):
    return lambda *inputs: torch.utils.checkpoint.checkpoint(function, *inputs, use_reentrant=False)


def test_deterministic_algorithms_give_the_same_bits():
    q, k, v = (x.bfloat16().requires_grad_() for x in draw(1, 2000, 128))
    torch.use_deterministic_algorithms(True)
    try:
        runs = [torch.autograd.grad(attention(q, k, v, softcap=20.0).sum(), (q, k, v)) for _ in range(3)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))


def test_head_dimensions_with_wrong_gradients_are_left_to_torch():
    for size in (16, 40, 80):
        assert not module.runs_flash_attention(torch.empty(1, 700, 4, size, dtype=torch.bfloat16, device=DEVICE))
