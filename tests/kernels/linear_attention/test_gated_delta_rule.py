"""The gated delta rule: chunks beside the recurrence, documents, states, and gates at their limits."""

from functools import partial

import pytest
import torch

from ligermodels.kernels.linear_attention import document_chunks
from ligermodels.kernels.linear_attention.gated_delta_rule import (
    gated_delta_rule,
    gated_delta_rule_reference,
    gated_delta_step_,
)
from tests.conftest import DEVICE
from tests.kernels.error_budget import DTYPES, check

pytestmark = pytest.mark.usefixtures("kernels", "poisoned")
KEY_HEADS, KEY_SIZE, VALUE_HEADS, VALUE_SIZE = 1, 20, 3, 12
COLUMNS = 2 * KEY_HEADS * KEY_SIZE + VALUE_HEADS * VALUE_SIZE
# The reference rounds fewer factors than the chunks do, and sums the state in fp32 in another order.
FACTOR = 3.0


def draw(batch, length, documents):
    """qkv, g, beta and initial states in float64."""
    qkv = torch.randn(batch, length, COLUMNS, device=DEVICE, dtype=torch.float64)
    g, beta = (torch.rand(batch, length, VALUE_HEADS, device=DEVICE, dtype=torch.float64) for _ in range(2))
    return qkv, -0.3 * g, beta, torch.randn(documents, VALUE_HEADS, KEY_SIZE, VALUE_SIZE, device=DEVICE).double()


def rule(function, qkv, g, beta, state=None, cu_seqlens=None):
    o, final = function(qkv, g, beta, KEY_HEADS, KEY_SIZE, state, cu_seqlens)
    return o, final.to(qkv.dtype)


def check_rule(inputs, dtype, cu_seqlens=None):
    ours, reference = (partial(rule, f, cu_seqlens=cu_seqlens) for f in (gated_delta_rule, gated_delta_rule_reference))
    check(ours, reference, inputs, dtype, FACTOR)


def offsets(*lengths):
    return torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wide", [True, False])
def test_chunks_are_within_the_error_budget_of_the_recurrence(dtype, wide, monkeypatch):
    monkeypatch.setattr(document_chunks, "FULL_DEVICE_PROGRAMS", 0.0 if wide else float("inf"))
    check_rule(draw(2, 70, 2), dtype)


def test_the_rate_of_decay_of_a_head_gets_an_exact_gradient():
    """It is a sum over all tokens, in which most of what they share cancels: an error of all gradients of g stays."""
    qkv, g, beta, _ = draw(4, 23, 4)

    def with_rates(function, qkv, rates, g, beta):
        return rule(function, qkv, rates.exp() * g, beta)

    ours, reference = (partial(with_rates, f) for f in (gated_delta_rule, gated_delta_rule_reference))
    check(ours, reference, (qkv, torch.randn_like(g[0, 0]), g, beta), torch.float32, FACTOR)


def test_documents_of_all_lengths_are_within_the_error_budget():
    lengths = 1, 0, 2, 64, 65, 3
    check_rule(draw(1, sum(lengths), len(lengths)), torch.float32, offsets(*lengths))


def test_a_document_is_computed_as_if_it_were_alone():
    """To the bit, forward and backward, whatever the other documents are."""
    qkv, g, beta, states = (x.float() for x in draw(1, 70, 3))
    upstream = torch.randn(1, 70, VALUE_HEADS, VALUE_SIZE, device=DEVICE), torch.randn_like(states)

    def run(rows, documents, cu_seqlens):
        leaves = [x.clone().requires_grad_() for x in (qkv[:, rows], g[:, rows], beta[:, rows], states[documents])]
        o, final = gated_delta_rule(*leaves[:3], KEY_HEADS, KEY_SIZE, leaves[3], cu_seqlens)
        return o, final, *torch.autograd.grad([o, final], leaves, [upstream[0][:, rows], upstream[1][documents]])

    packed = run(slice(70), slice(3), offsets(1, 66, 3))
    alone = run(slice(1, 67), slice(1, 2), None)
    for whole, part in zip(packed, alone, strict=True):
        same = whole[:, 1:67] if whole.shape[0] == 1 else whole[1:2]
        assert torch.equal(same, part)


@pytest.mark.parametrize("g", [0.0, -50.0])
@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_gates_at_their_limits(g, beta):
    """Also with equal keys, for which the inversion is hardest, and with a key of zeros."""
    qkv, _, _, state = draw(1, 66, 1)
    qkv[:, :40, KEY_SIZE : 2 * KEY_SIZE] = qkv[:, :1, KEY_SIZE : 2 * KEY_SIZE]
    qkv[:, 50, : 2 * KEY_SIZE] = 0
    gates = torch.full((2, 1, 66, VALUE_HEADS), g, device=DEVICE, dtype=torch.float64)
    gates[1] = beta
    inputs = qkv, *gates.unbind(), state
    exact, ours = (
        run_with_gradients(f, [x.to(dtype) for x in inputs])
        for f, dtype in ((gated_delta_rule_reference, torch.float64), (gated_delta_rule, torch.float32))
    )
    for index, (got, expected) in enumerate(zip(ours, exact, strict=True)):
        assert got.isfinite().all(), index
        torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=2e-5 * expected.abs().max().item() + 1e-7)


def run_with_gradients(function, inputs):
    leaves = [x.clone().requires_grad_() for x in inputs]
    outputs = function(*leaves[:3], KEY_HEADS, KEY_SIZE, leaves[3])
    return *(x.detach() for x in outputs), *torch.autograd.grad(outputs, leaves, [torch.ones_like(x) for x in outputs])


def test_pieces_and_single_tokens_continue_a_sequence():
    """A sequence in two pieces, the second of them token by token in rows of a pool, equals the whole."""
    qkv, g, beta, _ = (x.float() for x in draw(2, 9, 2))
    o, final = gated_delta_rule(qkv, g, beta, KEY_HEADS, KEY_SIZE)
    first, state = gated_delta_rule(qkv[:, :5], g[:, :5], beta[:, :5], KEY_HEADS, KEY_SIZE)
    pool = torch.full((4, *state.shape[1:]), 7.0, device=DEVICE)
    row = torch.tensor([2, 0], device=DEVICE)
    pool[row] = state
    rest = [gated_delta_step_(qkv[:, t], g[:, t], beta[:, t], KEY_HEADS, KEY_SIZE, pool, row) for t in range(5, 9)]
    torch.testing.assert_close(torch.cat([first, torch.stack(rest, 1)], 1), o, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(pool[row], final, rtol=1e-4, atol=1e-5)
    assert (pool[[1, 3]] == 7).all(), "rows of other sequences were written"


def test_the_packed_op_can_be_traced():
    qkv, g, beta, states = (x.float() for x in draw(1, 5, 2))
    args = qkv, g, beta, KEY_HEADS, KEY_SIZE, states, offsets(2, 3), 1e-6
    torch.library.opcheck(torch.ops.ligermodels.gated_delta_rule.default, args)


def test_wrong_shapes_are_refused():
    qkv, g, beta, state = (x.float() for x in draw(2, 4, 2))
    with pytest.raises(ValueError, match="qkv has 76 columns, with 2 key heads of 20 and 3 value heads"):
        gated_delta_rule(qkv, g, beta, 2, KEY_SIZE)
    with pytest.raises(ValueError, match="cu_seqlens needs a batch of one row, but there are 2 rows"):
        gated_delta_rule(qkv, g, beta, KEY_HEADS, KEY_SIZE, None, offsets(1, 3))
    with pytest.raises(ValueError, match=r"initial_state has shape \[1, 3, 20, 12\]; needed \[2, 3, 20, 12\]"):
        gated_delta_rule(qkv, g, beta, KEY_HEADS, KEY_SIZE, state[:1])
    with pytest.raises(ValueError, match="beta has shape"):
        gated_delta_rule(qkv, g, beta[:, 1:], KEY_HEADS, KEY_SIZE)
    with pytest.raises(ValueError, match="keys have 300 elements; the kernels support at most 256"):
        gated_delta_rule(torch.zeros(1, 2, 700, device=DEVICE), g[:1, :2, :1], beta[:1, :2, :1], 1, 300)
    with pytest.raises(ValueError, match=r"needed contiguous torch.float32 \[R, 3, 20, 12\]"):
        gated_delta_step_(qkv[:, 0], g[:, 0], beta[:, 0], KEY_HEADS, KEY_SIZE, state.half(), torch.arange(2))
