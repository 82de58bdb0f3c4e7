"""The Mamba-2 scan: chunks beside the recurrence, documents, states, and step sizes at their limits."""

from functools import partial

import pytest
import torch

from ligermodels.kernels.linear_attention import document_chunks
from ligermodels.kernels.linear_attention.mamba2_scan import mamba2_scan, mamba2_scan_reference, mamba2_step_
from tests.conftest import DEVICE
from tests.kernels.error_budget import DTYPES, check

pytestmark = pytest.mark.usefixtures("kernels", "poisoned")
HEADS, HEAD_SIZE, GROUPS, STATE_SIZE = 16, 12, 2, 20  # so many heads that errors of the gradient of a average out
SIZES = GROUPS, STATE_SIZE
COLUMNS = HEADS * HEAD_SIZE + 2 * GROUPS * STATE_SIZE
# The reference rounds fewer factors than the chunks do, and sums the state in fp32 in another order.
FACTOR = 3.0


def draw(batch, length, documents):
    """xbc, delta, a, d and initial states in float64. Heads forget as slowly and as quickly as those of Granite 4, of
    which a chunk sums logarithms of several hundred."""
    xbc = torch.randn(batch, length, COLUMNS, device=DEVICE, dtype=torch.float64)
    delta = 0.5 * torch.rand(batch, length, HEADS, device=DEVICE, dtype=torch.float64)
    a, d = -torch.linspace(0.1, 48.0, HEADS, device=DEVICE).double(), torch.randn(HEADS, device=DEVICE).double()
    return xbc, delta, a, d, torch.randn(documents, HEADS, STATE_SIZE, HEAD_SIZE, device=DEVICE).double()


def scan(function, xbc, delta, a, d, state=None, cu_seqlens=None):
    y, final = function(xbc, delta, a, d, *SIZES, state, cu_seqlens)
    return y, final.to(xbc.dtype)


def check_scan(inputs, dtype, cu_seqlens=None):
    ours, reference = (partial(scan, f, cu_seqlens=cu_seqlens) for f in (mamba2_scan, mamba2_scan_reference))
    check(ours, reference, inputs, dtype, FACTOR)


def offsets(*lengths):
    return torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fused", [True, False])
def test_chunks_are_within_the_error_budget_of_the_recurrence(dtype, fused, monkeypatch):
    monkeypatch.setattr(document_chunks, "FULL_DEVICE_PROGRAMS", 0.0 if fused else float("inf"))
    check_scan(draw(2, 70, 2), dtype)


def test_documents_of_all_lengths_are_within_the_error_budget():
    lengths = 1, 0, 2, 64, 65, 3
    check_scan(draw(1, sum(lengths), len(lengths)), torch.float32, offsets(*lengths))


def test_a_document_is_computed_as_if_it_were_alone():
    """To the bit, forward and backward, whatever the other documents are; of a and d, whose gradients are sums over
    all documents, with the others' upstream gradients at zero."""
    xbc, delta, a, d, states = (x.float() for x in draw(1, 70, 3))
    upstream = torch.zeros(1, 70, HEADS, HEAD_SIZE, device=DEVICE), torch.zeros_like(states)
    upstream[0][:, 1:67] = torch.randn(1, 66, HEADS, HEAD_SIZE, device=DEVICE)
    upstream[1][1] = torch.randn_like(states[1])

    def run(rows, documents, cu_seqlens):
        leaves = [x.clone().requires_grad_() for x in (xbc[:, rows], delta[:, rows], a, d, states[documents])]
        y, final = mamba2_scan(*leaves[:4], *SIZES, leaves[4], cu_seqlens)
        return y, final, *torch.autograd.grad([y, final], leaves, [upstream[0][:, rows], upstream[1][documents]])

    packed = run(slice(70), slice(3), offsets(1, 66, 3))
    alone = run(slice(1, 67), slice(1, 2), None)
    for whole, part in zip(packed, alone, strict=True):
        same = whole if whole.ndim == 1 else whole[:, 1:67] if whole.shape[0] == 1 else whole[1:2]
        torch.testing.assert_close(same, part, rtol=0.0 if whole.ndim > 1 else 1e-6, atol=0.0)


@pytest.mark.parametrize("decay", [0.0, -50.0])
@pytest.mark.parametrize("delta", [0.0, 1.0])
def test_step_sizes_at_their_limits(decay, delta):
    """A state that forgets nothing or everything, and tokens that leave it as it is."""
    xbc, steps, a, d, state = draw(1, 66, 1)
    inputs = xbc, torch.full_like(steps, delta), torch.full_like(a, decay), d, state
    exact, ours = (
        run_with_gradients(f, [x.to(dtype) for x in inputs])
        for f, dtype in ((mamba2_scan_reference, torch.float64), (mamba2_scan, torch.float32))
    )
    for index, (got, expected) in enumerate(zip(ours, exact, strict=True)):
        assert got.isfinite().all(), index
        torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=2e-5 * expected.abs().max().item() + 1e-7)


def run_with_gradients(function, inputs):
    leaves = [x.clone().requires_grad_() for x in inputs]
    outputs = function(*leaves[:4], *SIZES, leaves[4])
    return *(x.detach() for x in outputs), *torch.autograd.grad(outputs, leaves, [torch.ones_like(x) for x in outputs])


def test_pieces_and_single_tokens_continue_a_sequence():
    """A sequence in two pieces, the second of them token by token in rows of a pool, equals the whole."""
    xbc, delta, a, d, _ = (x.float() for x in draw(2, 9, 2))
    y, final = mamba2_scan(xbc, delta, a, d, *SIZES)
    first, state = mamba2_scan(xbc[:, :5], delta[:, :5], a, d, *SIZES)
    pool = torch.full((4, *state.shape[1:]), 7.0, device=DEVICE)
    row = torch.tensor([2, 0], device=DEVICE)
    pool[row] = state
    rest = [mamba2_step_(xbc[:, t], delta[:, t], a, d, *SIZES, pool, row) for t in range(5, 9)]
    torch.testing.assert_close(torch.cat([first, torch.stack(rest, 1)], 1), y, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(pool[row], final, rtol=1e-4, atol=1e-5)
    assert (pool[[1, 3]] == 7).all(), "rows of other sequences were written"


def test_the_packed_op_can_be_traced():
    xbc, delta, a, d, states = (x.float() for x in draw(1, 5, 2))
    args = xbc, delta, a, d, *SIZES, states, offsets(2, 3)
    torch.library.opcheck(torch.ops.ligermodels.mamba2_scan.default, args)


def test_wrong_shapes_are_refused():
    xbc, delta, a, d, state = (x.float() for x in draw(2, 4, 2))
    with pytest.raises(ValueError, match="xbc has 272 columns, with 16 heads and 3 groups of 20"):
        mamba2_scan(xbc, delta, a, d, 3, STATE_SIZE)
    with pytest.raises(ValueError, match="cu_seqlens needs a batch of one row, but there are 2 rows"):
        mamba2_scan(xbc, delta, a, d, *SIZES, None, offsets(1, 3))
    with pytest.raises(ValueError, match=r"initial_state has shape \[1, 16, 20, 12\]; needed \[2, 16, 20, 12\]"):
        mamba2_scan(xbc, delta, a, d, *SIZES, state[:1])
    with pytest.raises(ValueError, match=r"a has shape \[15\]; needed \[16\]"):
        mamba2_scan(xbc, delta, a[1:], d, *SIZES)
    with pytest.raises(ValueError, match="state_size is 300; the kernels support at most 256"):
        mamba2_scan(torch.zeros(1, 2, 616, device=DEVICE), delta[:1, :2], a, d, 1, 300)
    with pytest.raises(ValueError, match=r"row has shape \[3\]; needed \[2\]"):
        mamba2_step_(xbc[:, 0], delta[:, 0], a, d, *SIZES, state, torch.arange(3))
    with pytest.raises(ValueError, match=r"needed contiguous torch.float32 \[R, 16, 20, 12\]"):
        mamba2_step_(xbc[:, 0], delta[:, 0], a, d, *SIZES, state.half(), torch.arange(2))
