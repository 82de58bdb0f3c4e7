import pytest
import torch

from ligermodels.kernels.qk_norm_rope import qk_norm_rope, qk_norm_rope_backward, qk_norm_rope_reference
from ligermodels.kernels.rms_norm import rms_norm_reference
from ligermodels.kernels.rope import rope_reference
from tests.conftest import DEVICE
from tests.kernels.error_budget import DTYPES, check
from tests.kernels.test_rope import angles, draw

pytestmark = pytest.mark.usefixtures("kernels", "poisoned", "few_programs")
KINDS = pytest.mark.parametrize("whole_row", [False, True], ids=["each head", "whole row"])


@pytest.fixture
def few_programs(monkeypatch):
    """So few persistent programs that each strides over several tokens."""
    monkeypatch.setattr("ligermodels.kernels.qk_norm_rope.multiprocessors", lambda device: 1)


def draw_inputs(batch, length, heads, head_size, whole_row, dtype=torch.float64):
    """qkv, q_weight, k_weight."""
    q_width, k_width = (head_size * (h if whole_row else 1) for h in heads)
    shapes = (batch, length, (heads[0] + 2 * heads[1]) * head_size), (q_width,), (k_width,)
    return [draw(*shape, dtype=dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", DTYPES)
@KINDS
@pytest.mark.parametrize(
    ("heads", "head_size", "shared", "offset"),
    [((5, 1), 10, True, 0.0), ((3, 3), 80, False, 1.0), ((6, 2), 96, True, 1.0), ((1, 1), 32, False, 0.0)],
)
def test_qk_norm_rope_is_within_the_error_budget(heads, head_size, shared, offset, whole_row, dtype):
    batch, length = 2, 10
    cos, sin = angles(length if shared else batch * length, head_size)
    arguments = cos, sin, *heads, 1e-6, offset
    inputs = draw_inputs(batch, length, heads, head_size, whole_row)
    check(lambda *x: qk_norm_rope(*x, *arguments), lambda *x: qk_norm_rope_reference(*x, *arguments), inputs, dtype)


@pytest.mark.parametrize("function", [qk_norm_rope, qk_norm_rope_reference])
@KINDS
def test_it_is_the_norm_and_then_rope(function, whole_row):
    cos, sin = angles(3, 8)
    qkv, q_weight, k_weight = draw_inputs(2, 3, (4, 2), 8, whole_row, torch.float32)
    q, k, v = qkv.split((32, 16, 16), -1)
    if whole_row:
        q, k = rms_norm_reference(q, q_weight, 0.1, 1.0), rms_norm_reference(k, k_weight, 0.1, 1.0)
    else:
        q = rms_norm_reference(q.unflatten(-1, (4, 8)), q_weight, 0.1, 1.0).flatten(2)
        k = rms_norm_reference(k.unflatten(-1, (2, 8)), k_weight, 0.1, 1.0).flatten(2)
    expected = rope_reference(torch.cat((q, k, v), -1), cos, sin, 4, 2)
    torch.testing.assert_close(function(qkv, q_weight, k_weight, cos, sin, 4, 2, 0.1, 1.0), expected)


def test_the_projection_is_left_as_it_was_and_values_are_a_view_of_it():
    inputs = draw_inputs(2, 3, (4, 2), 8, False, torch.float32)
    kept = inputs[0].clone()
    q, k, v = qk_norm_rope(*inputs, *angles(3, 8), 4, 2, 1e-6)
    assert torch.equal(inputs[0], kept)
    assert v.data_ptr() == inputs[0][..., 48:].data_ptr()
    assert k.data_ptr() == q[:, :, 3:].data_ptr() + 8 * q.element_size()


@KINDS
def test_upstream_gradients_of_any_strides(whole_row):
    batch, length, heads, head_size = 2, 9, (6, 2), 20
    arguments = *angles(batch * length, head_size), *heads, 1e-6
    inputs = [x.requires_grad_() for x in draw_inputs(batch, length, heads, head_size, whole_row, torch.float32)]
    # Attention's own layout [B, H, T, D], one gradient expanded along every dimension, one cut out of something wider.
    dq = draw(batch, heads[0], length, head_size, dtype=torch.float32).transpose(1, 2)
    dk = draw(1, dtype=torch.float32).expand(batch, length, heads[1], head_size)
    dv = draw(batch, length, heads[1], 2 * head_size, dtype=torch.float32)[..., :head_size]
    expected = torch.autograd.grad(qk_norm_rope_reference(*inputs, *arguments), inputs, (dq, dk, dv))
    got = torch.autograd.grad(qk_norm_rope(*inputs, *arguments), inputs, (dq, dk, dv))
    assert got[0].is_contiguous()
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@KINDS
@pytest.mark.parametrize("frozen", [(1, 2), (0,), (0, 1)], ids=["weights", "input", "all but the keys' weight"])
def test_what_is_frozen_gets_no_gradient_and_changes_no_other(frozen, whole_row):
    inputs, arguments = draw_inputs(1, 20, (4, 2), 12, whole_row, torch.float32), (*angles(20, 12), 4, 2, 1e-6)
    trained = [x.requires_grad_() for i, x in enumerate(inputs) if i not in frozen]
    losses = [sum(x.sin().sum() for x in f(*inputs, *arguments)) for f in (qk_norm_rope, qk_norm_rope_reference)]
    got, expected = (torch.autograd.grad(loss, trained) for loss in losses)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert all(inputs[i].grad is None for i in frozen)


def test_frozen_weights_cost_nothing():
    qkv, *weights = draw_inputs(1, 2, (2, 1), 8, False, torch.float32)
    gradients = draw(1, 2, 2, 8), draw(1, 2, 1, 8), draw(1, 2, 1, 8)
    _, *dweights = qk_norm_rope_backward(*gradients, qkv, *weights, *angles(2, 8), 1e-6, 0.0, False)
    assert [x.numel() for x in dweights] == [0, 0]


@KINDS
def test_weight_gradients_are_bit_identical_from_run_to_run(whole_row):
    qkv, *weights = draw_inputs(2, 40, (4, 2), 32, whole_row, torch.float32)
    weights = [x.requires_grad_() for x in weights]
    outputs = qk_norm_rope(qkv, *weights, *angles(40, 32), 4, 2, 1e-6)
    loss = sum(x.square().sum() for x in outputs[:2])
    first, second = (torch.autograd.grad(loss, weights, retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_zero_tokens_give_zero_weight_gradients():
    inputs = [x.requires_grad_() for x in draw_inputs(2, 0, (2, 1), 8, False, torch.float32)]
    q, k, v = qk_norm_rope(*inputs, *angles(0, 8), 2, 1, 1e-6)
    (q.sum() + k.sum() + v.sum()).backward()
    assert q.shape == (2, 0, 2, 8) and k.shape == v.shape == (2, 0, 1, 8)
    assert inputs[0].grad.shape == inputs[0].shape
    assert all(torch.equal(x.grad, torch.zeros_like(x)) for x in inputs[1:])


@pytest.mark.parametrize("on_kernels", [True, False])
def test_shapes_that_do_not_fit_are_refused(on_kernels, monkeypatch):
    monkeypatch.setattr("ligermodels.kernels.op.interpreting", on_kernels)
    inputs = draw_inputs(1, 2, (4, 2), 8, False, torch.float32)
    with pytest.raises(ValueError, match="and 4 pairs"):
        qk_norm_rope(*inputs, *angles(2, 6), 4, 2, 1e-6)
    with pytest.raises(ValueError, match="no multiple of 9 heads"):
        qk_norm_rope(*inputs, *angles(2, 8), 5, 2, 1e-6)
    with pytest.raises(ValueError, match="needed 8 each, or 32 and 16"):
        qk_norm_rope(inputs[0], torch.ones(32, device=DEVICE), inputs[2], *angles(2, 8), 4, 2, 1e-6)


@KINDS
def test_opcheck(whole_row):
    ops, (cos, sin) = torch.ops.ligermodels, angles(6, 8)
    inputs = draw_inputs(2, 3, (4, 2), 8, whole_row, torch.float32)
    gradients = [draw(2, 3, h, 8, dtype=torch.float32) for h in (4, 2, 2)]
    torch.library.opcheck(ops.qk_norm_rope.default, (*inputs, cos, sin, 4, 2, 1e-6, 1.0))
    for weight_grad in (True, False):
        backward = *gradients, *inputs, cos, sin, 1e-6, 1.0, weight_grad
        torch.library.opcheck(ops.qk_norm_rope_backward.default, backward)


@KINDS
def test_fullgraph_compile_gives_equal_gradients(whole_row):
    projection = draw(8 * 12, 16, dtype=torch.float32)
    x = draw(2, 3, 16, dtype=torch.float32)
    inputs = [t.requires_grad_() for t in (x, projection, *draw_inputs(2, 3, (4, 2), 12, whole_row, torch.float32)[1:])]
    cos, sin = angles(3, 12)

    def loss(x, projection, q_weight, k_weight):
        q, k, v = qk_norm_rope(torch.nn.functional.linear(x, projection), q_weight, k_weight, cos, sin, 4, 2, 1e-6, 1.0)
        return (q * q.sin()).sum() + (k * k.cos()).sum() + v.square().sum()

    backend = "inductor" if DEVICE == "cuda" else "aot_eager"
    compiled = torch.compile(loss, fullgraph=True, backend=backend)
    expected, got = (torch.autograd.grad(f(*inputs), inputs) for f in (loss, compiled))
    for a, b in zip(expected, got, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.gpu
@KINDS
def test_offsets_beyond_two_to_the_31(whole_row):
    length, heads = 2**17 + 1, (96, 16)
    qkv, *weights = draw_inputs(1, 1, heads, 128, whole_row, torch.bfloat16)
    cos, sin = angles(length, 128)
    last = qk_norm_rope_reference(qkv, *weights, cos[-1:], sin[-1:], *heads, 1e-6)
    qkv = torch.cat(
        (torch.zeros(1, length - 1, qkv.shape[-1], device=DEVICE, dtype=qkv.dtype), qkv), 1
    ).requires_grad_()
    outputs = qk_norm_rope(qkv, *weights, cos, sin, *heads, 1e-6)
    torch.testing.assert_close([x[:, -1:] for x in outputs], list(last), rtol=2e-2, atol=2e-2)
    (dqkv,) = torch.autograd.grad(outputs, qkv, outputs)
    tail = qkv.detach()[:, -1:].clone().requires_grad_()
    small = qk_norm_rope(tail, *weights, cos[-1:].clone(), sin[-1:].clone(), *heads, 1e-6)
    torch.testing.assert_close(dqkv[:, -1:], torch.autograd.grad(small, tail, small)[0])
