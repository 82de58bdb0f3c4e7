import pytest
import torch

from ligermodels.kernels.attention.rope import rope_, rope_backward, rope_reference
from tests.conftest import DEVICE
from tests.kernels.error_budget import DTYPES, check

HEADS = [(5, 1), (2, 2), (33, 3)]
pytestmark = pytest.mark.usefixtures("kernels", "poisoned")


def draw(*shape, dtype=torch.float64):
    return torch.randn(shape, dtype=dtype, device=DEVICE)


def angles(rows, head_size):
    phases = 100 * torch.rand(rows, head_size // 2, dtype=torch.float64, device=DEVICE)
    return phases.cos().float(), phases.sin().float()


def rotated_copy(qkv, cos, sin, heads):
    return rope_(qkv.clone(), cos, sin, *heads)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shared", [True, False], ids=["shared positions", "positions per row"])
@pytest.mark.parametrize("head_size", [32, 20])
@pytest.mark.parametrize("heads", HEADS)
def test_rope_is_within_the_error_budget(heads, head_size, shared, dtype):
    batch, length = 2, 3
    cos, sin = angles(length if shared else batch * length, head_size)
    qkv = draw(batch, length, (heads[0] + 2 * heads[1]) * head_size)
    check(
        lambda qkv: rotated_copy(qkv, cos, sin, heads), lambda qkv: rope_reference(qkv, cos, sin, *heads), [qkv], dtype
    )


@pytest.mark.parametrize("function", [rotated_copy, lambda qkv, cos, sin, heads: rope_reference(qkv, cos, sin, *heads)])
def test_rope_equals_a_complex_multiplication(function):
    batch, length, heads, head_size = 2, 4, (3, 1), 12
    cos, sin = angles(batch * length, head_size)
    qkv = draw(batch, length, 5 * head_size, dtype=torch.float32)
    pairs = qkv.double().view(batch, length, 5, 2, head_size // 2)
    phases = torch.complex(cos.double(), sin.double()).view(batch, length, 1, head_size // 2)
    rotated = torch.complex(pairs[..., 0, :], pairs[..., 1, :])[:, :, :4] * phases
    expected = torch.cat((rotated.real, rotated.imag), -1).float()
    q, k, v = function(qkv, cos, sin, heads)
    torch.testing.assert_close(q, expected[:, :, :3])
    torch.testing.assert_close(k, expected[:, :, 3:])
    assert torch.equal(v, qkv.view(batch, length, 5, head_size)[:, :, 4:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "half-split"])
@pytest.mark.parametrize(("head_size", "rotated"), [(64, 48), (10, 10), (80, 32), (15, 6), (32, 32)])
def test_partial_and_interleaved_rotation_are_within_the_error_budget(head_size, rotated, interleaved, dtype):
    batch, length, heads = 2, 3, (5, 2)
    cos, sin = angles(batch * length, rotated)
    qkv = draw(batch, length, 9 * head_size)
    check(
        lambda qkv: rope_(qkv.clone(), cos, sin, *heads, interleaved),
        lambda qkv: rope_reference(qkv, cos, sin, *heads, interleaved),
        [qkv],
        dtype,
    )


@pytest.mark.parametrize("function", [rope_, rope_reference])
def test_interleaved_rope_multiplies_adjacent_pairs_and_copies_the_other_dimensions(function):
    (cos, sin), qkv = angles(4, 6), draw(1, 4, 4 * 11, dtype=torch.float32)
    pairs = torch.view_as_complex(qkv.view(1, 4, 4, 11)[..., :6].double().unflatten(-1, (3, 2)).contiguous())
    expected = torch.view_as_real(pairs * torch.complex(cos.double(), sin.double())[:, None]).flatten(-2).float()
    q, k, v = function(qkv.clone(), cos, sin, 2, 1, True)
    torch.testing.assert_close(torch.cat((q, k), 2)[..., :6], expected[:, :, :3])
    assert torch.equal(torch.cat((q, k), 2)[..., 6:], qkv.view(1, 4, 4, 11)[:, :, :3, 6:])
    assert torch.equal(v, qkv.view(1, 4, 4, 11)[:, :, 3:])


def test_rope_writes_into_the_memory_of_the_projection():
    qkv, (cos, sin) = draw(2, 3, 7 * 8, dtype=torch.float32), angles(3, 8)
    qkv.requires_grad_()
    projection = qkv * 1
    original = projection.detach().clone()
    q, k, v = rope_(projection, cos, sin, 5, 1)
    assert q.data_ptr() == projection.data_ptr()
    assert all(x.untyped_storage().data_ptr() == projection.data_ptr() for x in (k, v))
    torch.testing.assert_close(q, rope_reference(original, cos, sin, 5, 1)[0])
    assert q.requires_grad and k.requires_grad and v.requires_grad


def test_rope_without_gradients_rotates_in_place_too():
    qkv, (cos, sin) = draw(2, 3, 7 * 8, dtype=torch.float32), angles(3, 8)
    expected = rope_reference(qkv.clone(), cos, sin, 5, 1)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            projection = qkv.clone()
            q, k, _ = rope_(projection, cos, sin, 5, 1)
            assert q.data_ptr() == projection.data_ptr() and not q.requires_grad
            torch.testing.assert_close((q, k), expected[:2])


def test_autograd_raises_if_the_projection_was_saved_for_backward():
    x = draw(1, 2, 3 * 4, dtype=torch.float32).requires_grad_()
    projection = x * 1
    loss = projection.square().sum()
    q, _, _ = rope_(projection, *angles(2, 4), 1, 1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (loss + q.sum()).backward()


def test_upstream_gradients_of_any_strides_are_packed_exactly():
    batch, length, heads, head_size = 2, 3, (6, 2), 20
    cos, sin = angles(batch * length, head_size)
    qkv = draw(batch, length, 10 * head_size, dtype=torch.float32).requires_grad_()
    # Attention's own layout [B, H, T, D], one gradient expanded along every dimension, one a slice of a wider tensor.
    dq = draw(batch, heads[0], length, head_size, dtype=torch.float32).transpose(1, 2)
    dk = draw(1, dtype=torch.float32).expand(batch, length, heads[1], head_size)
    dv = draw(batch, length, heads[1], 2 * head_size, dtype=torch.float32)[..., :head_size]
    reference = rope_reference(qkv, cos, sin, *heads)
    (expected,) = torch.autograd.grad(reference, qkv, (dq, dk, dv))
    (got,) = torch.autograd.grad(rotated_copy(qkv, cos, sin, heads), qkv, (dq, dk, dv))
    assert got.is_contiguous()
    torch.testing.assert_close(got, expected)


def test_infinite_gradients_of_values_are_copied_and_spread_nowhere():
    dq = dk = torch.zeros(1, 1, 1, 8, device=DEVICE)
    dv = torch.full((1, 1, 1, 8), float("inf"), device=DEVICE)
    assert torch.equal(rope_backward(dq, dk, dv, *angles(1, 8), False)[0, 0, 16:], dv.flatten())


@pytest.mark.parametrize("on_kernels", [True, False])
def test_shapes_and_strides_that_do_not_match_raise(on_kernels, monkeypatch):
    monkeypatch.setattr("ligermodels.kernels.launch.interpreting", on_kernels)
    cos, sin = angles(2, 8)
    with pytest.raises(ValueError, match="25, is not a multiple of 3 heads"):
        rope_(torch.zeros(1, 2, 3 * 8 + 1, device=DEVICE), cos, sin, 1, 1)
    with pytest.raises(ValueError, match="with 1 to 3 pairs"):
        rope_(torch.zeros(1, 2, 3 * 7, device=DEVICE), cos, sin, 1, 1)
    with pytest.raises(ValueError, match="with 1 to 8 pairs"):
        rope_(torch.zeros(1, 2, 3 * 16, device=DEVICE), cos[:, :0], sin[:, :0], 1, 1)
    with pytest.raises(ValueError, match=r"or \[9, pairs\]"):
        rope_(torch.zeros(3, 3, 3 * 8, device=DEVICE), cos, sin, 1, 1)
    with pytest.raises(ValueError, match="both must be contiguous"):
        rope_(torch.zeros(1, 2, 3 * 8, device=DEVICE), cos, torch.stack((sin, sin), -1)[..., 0], 1, 1)
    with pytest.raises(ValueError, match="to rotate it in place the last must be 1"):
        rope_(torch.zeros(1, 2, 3 * 8, 2, device=DEVICE)[..., 0], cos, sin, 1, 1)
