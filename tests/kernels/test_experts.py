import pytest
import torch

from ligermodels.kernels.experts import experts, experts_reference, route, sort_by_expert
from ligermodels.kernels.op import widen
from tests.conftest import DEVICE
from tests.kernels.error_budget import DTYPES, check
from tests.kernels.test_linear import saved_bytes

# T, H, I, E, k. Odd sizes, one expert a token, every expert, many experts. Enough tokens for an error of half precision
# to be a mean over many roundings.
SHAPES = [(43, 20, 11, 6, 3), (50, 16, 24, 5, 1), (40, 24, 8, 4, 4), (33, 8, 16, 60, 2)]
pytestmark = pytest.mark.usefixtures("kernels", "poisoned")


def draw_index(tokens, num_experts, k):
    """Different experts a token; the last expert is never chosen unless all are."""
    scores = torch.rand(tokens, num_experts, device=DEVICE)
    scores[:, -1] = -1
    return scores.topk(k).indices


def draw(tokens, hidden, inner, num_experts, k, dtype=torch.float64):
    """x, index, weight, gate_up, down."""
    shapes = [(tokens, hidden), (tokens, k), (num_experts, 2 * inner, hidden), (num_experts, hidden, inner)]
    x, weight, gate_up, down = (torch.randn(s, dtype=dtype, device=DEVICE) for s in shapes)
    return x, draw_index(tokens, num_experts, k), weight, gate_up, down


def in_budget(function, activation):
    """With weights in fp32, as the router gives them, also where the rest is in half precision."""
    return lambda x, index, weight, *rest: function(x, index, widen(weight), *rest, activation)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_experts_and_their_gradients_are_within_the_error_budget(shape, dtype):
    check(in_budget(experts, "silu"), in_budget(experts_reference, "silu"), draw(*shape), dtype)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_activations(activation):
    check(in_budget(experts, activation), in_budget(experts_reference, activation), draw(*SHAPES[0]), torch.float32)


@pytest.mark.parametrize("shape", [(24, 1030, 8, 3, 2), (24, 8, 1030, 3, 2)])
def test_rows_wider_than_a_tile(shape):
    """In half precision: in fp32 it would measure the products, whose sums over 1030 are one chain here."""
    inputs = [x / 3 if x.is_floating_point() else x for x in draw(*shape)]
    check(in_budget(experts, "silu"), in_budget(experts_reference, "silu"), inputs, torch.float16)


def test_an_expert_chosen_twice_by_a_token_counts_twice():
    x, _, weight, gate_up, down = draw(4, 8, 16, 3, 2, torch.float32)
    index = torch.tensor([[1, 1], [0, 2], [2, 2], [0, 0]], device=DEVICE)
    expected = experts_reference(x, index, weight, gate_up, down, "silu")
    torch.testing.assert_close(experts(x, index, weight, gate_up, down, "silu"), expected)


def test_experts_without_tokens_get_zero_gradients():
    x, index, weight, gate_up, down = draw(3, 8, 16, 9, 2, torch.float32)
    leaves = gate_up.requires_grad_(), down.requires_grad_()
    gradients = torch.autograd.grad(experts(x, index, weight, *leaves, "silu").sin().sum(), leaves)
    idle = [expert for expert in range(9) if expert not in index]
    for gradient in gradients:
        assert torch.equal(gradient[idle], torch.zeros_like(gradient[idle]))
        assert gradient[index.unique()].abs().amax((1, 2)).min() > 0


def test_only_gate_up_and_the_routing_are_kept_for_backward():
    tokens, hidden, inner, num_experts, k = 8, 64, 32, 4, 2
    x, index, *rest = draw(tokens, hidden, inner, num_experts, k, torch.float32)
    gate_up, down = (p.requires_grad_() for p in rest[1:])
    kept = saved_bytes(lambda x, w: experts(x, index, w, gate_up, down, "silu"), x.requires_grad_(), rest[0])
    routing = tokens * k * (8 + 8 + 4) + num_experts * 4  # token and row of each slot, its weight; offsets
    assert kept - 4 * (gate_up.numel() + down.numel()) == tokens * k * 2 * inner * 4 + routing


def test_sorting_is_stable_and_counts_every_expert():
    index = torch.tensor([[3, 1], [1, 0], [3, 1]], device=DEVICE)
    slot, row, offsets = sort_by_expert(index, 5)
    assert slot.tolist() == [3, 1, 2, 5, 0, 4]
    assert row.tolist() == [[4, 1], [2, 0], [5, 3]]
    assert offsets.tolist() == [1, 4, 4, 6, 6] and offsets.dtype == torch.int32


def test_route_normalizes_over_the_chosen_experts():
    logits = torch.randn(6, 10, dtype=torch.float64, requires_grad=True)
    weight, index = route(logits, 3, True)
    expected = torch.softmax(logits.gather(1, index), -1)
    upstream = torch.randn(6, 3, dtype=torch.float64)
    torch.testing.assert_close(weight.double(), expected, rtol=1e-6, atol=1e-7)
    got, wanted = (torch.autograd.grad(w.double(), logits, upstream)[0] for w in (weight, expected))
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-7)
    assert torch.equal(route(logits, 3, False)[0], torch.softmax(logits.float(), -1).topk(3).values)
    assert weight.dtype == torch.float32


def test_unknown_activations_and_odd_widths_are_refused():
    x, index, weight, gate_up, down = draw(*SHAPES[0], torch.float32)
    with pytest.raises(ValueError, match="no activation 'relu'"):
        experts(x, index, weight, gate_up, down, "relu")
    with pytest.raises(ValueError, match="even width"):
        experts(x, index, weight, gate_up[:, 1:], down, "silu")
