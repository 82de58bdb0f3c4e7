import pytest
import torch

from ligermodels.kernels.attention.qk_norm_rope import qk_norm_rope, qk_norm_rope_reference
from ligermodels.kernels.attention.rope import rope_reference
from ligermodels.kernels.norms.rms_norm import rms_norm_reference
from tests.conftest import DEVICE
from tests.kernels.attention.test_rope import angles, draw
from tests.kernels.error_budget import DTYPES, check

pytestmark = pytest.mark.usefixtures("kernels", "poisoned", "few_programs")
WHOLE_ROW_OR_NOT = pytest.mark.parametrize("whole_row", [False, True], ids=["each head", "whole row"])


@pytest.fixture
def few_programs(monkeypatch):
    """One multiprocessor: each persistent program loops over several tokens."""
    monkeypatch.setattr("ligermodels.kernels.attention.qk_norm_rope.multiprocessors", lambda device: 1)


def draw_inputs(batch, length, heads, head_size, whole_row, dtype=torch.float64, gated=False):
    """qkv, q_weight, k_weight."""
    q_width, k_width = (head_size * (h if whole_row else 1) for h in heads)
    shapes = (batch, length, ((1 + gated) * heads[0] + 2 * heads[1]) * head_size), (q_width,), (k_width,)
    return [draw(*shape, dtype=dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", DTYPES)
@WHOLE_ROW_OR_NOT
@pytest.mark.parametrize(
    ("heads", "head_size", "shared", "offset"),
    [((5, 1), 10, True, 0.0), ((3, 3), 80, False, 1.0), ((6, 2), 96, True, 1.0), ((1, 1), 32, False, 0.0)],
)
def test_qk_norm_rope_is_within_the_error_budget(heads, head_size, shared, offset, whole_row, dtype):
    batch, length = 2, 5 if whole_row and DEVICE == "cpu" else 10  # several tokens for each program
    cos, sin = angles(length if shared else batch * length, head_size)
    arguments = cos, sin, *heads, 1e-6, offset
    inputs = draw_inputs(batch, length, heads, head_size, whole_row)
    check(lambda *x: qk_norm_rope(*x, *arguments), lambda *x: qk_norm_rope_reference(*x, *arguments), inputs, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@WHOLE_ROW_OR_NOT
@pytest.mark.parametrize(("heads", "head_size", "rotated"), [((5, 1), 10, 10), ((3, 2), 80, 20), ((6, 2), 96, 94)])
def test_gates_and_dimensions_without_rotation_are_within_the_error_budget(heads, head_size, rotated, whole_row, dtype):
    length = 5 if whole_row and DEVICE == "cpu" else 10
    arguments = *angles(length, rotated), *heads, 1e-6, 1.0, True
    inputs = draw_inputs(2, length, heads, head_size, whole_row, gated=True)
    check(lambda *x: qk_norm_rope(*x, *arguments), lambda *x: qk_norm_rope_reference(*x, *arguments), inputs, dtype)


@pytest.mark.parametrize("function", [qk_norm_rope, qk_norm_rope_reference])
def test_gates_lie_behind_their_queries(function):
    qkv, *weights = draw_inputs(2, 3, (4, 2), 8, False, torch.float32, gated=True)
    q, gate = qkv[..., :64].unflatten(-1, (4, 2, 8)).unbind(-2)
    plain = torch.cat([q.flatten(2), qkv[..., 64:]], -1)
    arguments = *weights, *angles(3, 4), 4, 2, 1e-6, 0.0
    expected = *qk_norm_rope_reference(plain, *arguments), gate
    torch.testing.assert_close(function(qkv, *arguments, True), expected)


@pytest.mark.parametrize("function", [qk_norm_rope, qk_norm_rope_reference])
@WHOLE_ROW_OR_NOT
def test_it_equals_the_norm_followed_by_rope(function, whole_row):
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


def test_the_projection_is_unchanged_and_values_are_a_view_of_it():
    inputs = draw_inputs(2, 3, (4, 2), 8, False, torch.float32)
    original = inputs[0].clone()
    q, k, v = qk_norm_rope(*inputs, *angles(3, 8), 4, 2, 1e-6)
    assert torch.equal(inputs[0], original)
    assert v.data_ptr() == inputs[0][..., 48:].data_ptr()
    assert k.data_ptr() == q[:, :, 3:].data_ptr() + 8 * q.element_size()


@pytest.mark.parametrize("gated", [False, True])
@WHOLE_ROW_OR_NOT
def test_upstream_gradients_of_any_strides_give_the_gradients_of_the_reference(whole_row, gated):
    batch, length, heads, head_size = 2, 9, (6, 2), 20
    arguments = *angles(batch * length, head_size - 4 * gated), *heads, 1e-6, 0.0, gated
    drawn = draw_inputs(batch, length, heads, head_size, whole_row, torch.float32, gated)
    inputs = [x.requires_grad_() for x in drawn]
    # Attention's own layout [B, H, T, D], one gradient expanded along every dimension, one a slice of a wider tensor.
    dq = draw(batch, heads[0], length, head_size, dtype=torch.float32).transpose(1, 2)
    dk = draw(1, dtype=torch.float32).expand(batch, length, heads[1], head_size)
    dv = draw(batch, length, heads[1], 2 * head_size, dtype=torch.float32)[..., :head_size]
    dgate = draw(length, batch, heads[0], head_size, dtype=torch.float32).transpose(0, 1)
    gradients = (dq, dk, dv, dgate)[: 3 + gated]
    expected = torch.autograd.grad(qk_norm_rope_reference(*inputs, *arguments), inputs, gradients)
    got = torch.autograd.grad(qk_norm_rope(*inputs, *arguments), inputs, gradients)
    assert got[0].is_contiguous()
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("on_kernels", [True, False])
def test_shapes_that_do_not_match_raise(on_kernels, monkeypatch):
    monkeypatch.setattr("ligermodels.kernels.launch.interpreting", on_kernels)
    inputs = draw_inputs(1, 2, (4, 2), 8, False, torch.float32)
    with pytest.raises(ValueError, match="with 1 to 4 pairs"):
        qk_norm_rope(*inputs, *angles(2, 10), 4, 2, 1e-6)
    with pytest.raises(ValueError, match="64, is not a multiple of 9 heads"):
        qk_norm_rope(*inputs, *angles(2, 8), 5, 2, 1e-6)
    with pytest.raises(ValueError, match="64, is not a multiple of 12 heads"):
        qk_norm_rope(*inputs, *angles(2, 8), 4, 2, 1e-6, 0.0, True)
    with pytest.raises(ValueError, match="must have 8 each, or 32 and 16"):
        qk_norm_rope(inputs[0], torch.ones(32, device=DEVICE), inputs[2], *angles(2, 8), 4, 2, 1e-6)
