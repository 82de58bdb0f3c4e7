"""The causal convolution: documents, states, single tokens."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from ligermodels.kernels.linear_attention.causal_conv import (
    causal_conv,
    causal_conv_reference,
    causal_conv_state,
    causal_conv_step_,
)
from tests.conftest import DEVICE
from tests.kernels.error_budget import DTYPES, check

pytestmark = pytest.mark.usefixtures("kernels", "poisoned")
LENGTHS = 1, 0, 2, 3, 66
OFFSETS = torch.tensor([0, *LENGTHS]).cumsum(0).int()


def draw(batch, length, documents, taps=4, channels=21):
    shapes = (batch, length, channels), (channels, taps), (channels,), (documents, taps - 1, channels)
    return [torch.randn(shape, device=DEVICE, dtype=torch.float64) for shape in shapes]


def convolve(function, x, weight, bias, state, activation="silu", cu_seqlens=None):
    return function(x, weight, bias, activation, state, cu_seqlens)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("taps", "activation"), [(4, "silu"), (3, None), (2, "silu")])
def test_documents_are_within_the_error_budget(taps, activation, dtype):
    settings = {"activation": activation, "cu_seqlens": OFFSETS.to(DEVICE)}
    ours, reference = (partial(convolve, f, **settings) for f in (causal_conv, causal_conv_reference))
    check(ours, reference, draw(1, sum(LENGTHS), len(LENGTHS), taps), dtype)


def test_the_reference_is_the_convolution_of_torch():
    x, weight, bias, _ = draw(2, 9, 2)
    expected = F.conv1d(F.pad(x.mT, (3, 0)), weight[:, None], bias, groups=weight.shape[0]).mT
    torch.testing.assert_close(causal_conv_reference(x, weight, bias, None), expected)
    torch.testing.assert_close(causal_conv_reference(x, weight, bias), F.silu(expected))


def test_no_document_sees_another():
    """To the bit, forward and backward."""
    x, weight, _, _ = (y.float() for y in draw(1, 72, 3))
    upstream = torch.randn_like(x)

    def run(rows, cu_seqlens=None):
        leaf = x[:, rows].clone().requires_grad_()
        y = causal_conv(leaf, weight, cu_seqlens=cu_seqlens)
        return y, *torch.autograd.grad(y, leaf, upstream[:, rows])

    packed = run(slice(72), torch.tensor([0, 2, 69, 72], device=DEVICE, dtype=torch.int32))
    for whole, part in zip(packed, run(slice(2, 69)), strict=True):
        assert torch.equal(whole[:, 2:69], part)


def test_pieces_and_single_tokens_continue_a_sequence():
    x, weight, bias, _ = (y.float() for y in draw(2, 9, 2))
    y = causal_conv(x, weight, bias)
    state = causal_conv_state(x[:, :2], 4)
    assert torch.equal(state, F.pad(x[:, :2], (0, 0, 1, 0))), "a short sequence is preceded by zeros"
    pieces = [causal_conv(x[:, :2], weight, bias), causal_conv(x[:, 2:3], weight, bias, initial_state=state)]
    state = causal_conv_state(x[:, 2:3], 4, state)
    pool = torch.full((3, *state.shape[1:]), 7.0, device=DEVICE)
    row = torch.tensor([2, 0], device=DEVICE)
    pool[row] = state
    pieces += [causal_conv_step_(x[:, t], weight, bias, "silu", pool, row)[:, None] for t in range(3, 9)]
    torch.testing.assert_close(torch.cat(pieces, 1), y, rtol=1e-5, atol=1e-6)
    assert torch.equal(pool[row], x[:, -3:]) and (pool[1] == 7).all()


def test_the_state_of_packed_documents_is_that_of_each():
    x, _, _, state = (y.float() for y in draw(1, sum(LENGTHS), len(LENGTHS)))
    packed = causal_conv_state(x, 4, state, OFFSETS.to(DEVICE))
    alone = [causal_conv_state(d, 4, s) for d, s in zip(x.split(LENGTHS, 1), state.split(1), strict=True) if d.numel()]
    assert torch.equal(packed[[0, 2, 3, 4]], torch.cat(alone))
    assert torch.equal(packed[1], state[1]), "a document without tokens leaves its state"


def test_a_slice_of_a_wider_projection_is_not_copied():
    x, weight, _, _ = (y.float() for y in draw(1, 5, 1))
    wide = torch.cat([x, x], -1)[..., : x.shape[-1]]
    assert torch.equal(causal_conv(wide, weight), causal_conv(x, weight))


def test_wrong_arguments_are_refused():
    x, weight, bias, state = (y.float() for y in draw(2, 4, 2))
    with pytest.raises(ValueError, match="activation is 'gelu'; \"silu\" or None is needed"):
        causal_conv(x, weight, bias, "gelu")
    with pytest.raises(ValueError, match="weight has 5 taps; the kernels support 2 to 4"):
        causal_conv(x, torch.zeros(21, 5, device=DEVICE))
    with pytest.raises(ValueError, match="cu_seqlens needs a batch of one row, but there are 2 rows"):
        causal_conv(x, weight, cu_seqlens=OFFSETS)
    with pytest.raises(ValueError, match=r"initial_state has shape \[1, 3, 21\]; needed \[2, 3, 21\]"):
        causal_conv(x, weight, initial_state=state[:1])
    with pytest.raises(ValueError, match=r"x has shape \[2, 4, 21\]; needed \[B, C\]"):
        causal_conv_step_(x, weight, bias, "silu", state, torch.arange(2))
