import weakref

import pytest
import torch

import ligermodels.kernels.moe.expert_product as products
import ligermodels.kernels.moe.experts as module
from ligermodels.kernels.dispatch import widen
from ligermodels.kernels.moe.experts import experts, experts_reference, route
from tests.conftest import DEVICE
from tests.kernels.error_budget import DTYPES, FACTOR, check
from tests.kernels.linear.test_linear import alive_at, saved_bytes

# T, H, I, E, k. Odd sizes, one expert per token, all experts, many experts. Enough tokens that the half-precision error
# is a mean over many roundings.
SHAPES = [(43, 20, 11, 6, 3), (50, 16, 24, 5, 1), (40, 24, 8, 4, 4), (33, 8, 16, 60, 2)]
TOKENS = 24 if DEVICE == "cuda" else 6  # for wide rows
pytestmark = pytest.mark.usefixtures("kernels", "poisoned")


def draw_index(tokens, num_experts, k):
    """k distinct experts per token; the last expert is chosen only if k is the number of experts."""
    scores = torch.rand(tokens, num_experts, device=DEVICE)
    scores[:, -1] = -1
    return scores.topk(k).indices


def draw(tokens, hidden, inner, num_experts, k, dtype=torch.float64):
    """x, index, weight, gate_up, down."""
    shapes = [(tokens, hidden), (tokens, k), (num_experts, 2 * inner, hidden), (num_experts, hidden, inner)]
    x, weight, gate_up, down = (torch.randn(s, dtype=dtype, device=DEVICE) for s in shapes)
    return x, draw_index(tokens, num_experts, k), weight, gate_up, down


def in_budget(function, activation):
    """Passes the routing weights in fp32, as the router computes them, also if everything else is in half precision."""
    return lambda x, index, weight, *rest: function(x, index, widen(weight), *rest, activation)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_experts_and_their_gradients_are_within_the_error_budget(shape, dtype):
    """Twice the factor in fp32, where the error of a product grows with the length of its sums: we compute dw from dp,
    a sum over H; the reference computes it from an expert's output, a sum over I, which is shorter here."""
    factor = 2 * FACTOR if dtype == torch.float32 else FACTOR
    check(in_budget(experts, "silu"), in_budget(experts_reference, "silu"), draw(*shape), dtype, factor)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_gelu_activations_are_within_the_error_budget(activation):
    check(in_budget(experts, activation), in_budget(experts_reference, activation), draw(*SHAPES[0]), torch.float32)


def with_biases(function, activation):
    """Takes the biases of gate_up and down behind the other inputs; the routing weights in fp32."""

    def call(x, index, weight, gate_up, down, gate_up_bias, down_bias):
        options = {"gate_up_bias": gate_up_bias, "down_bias": down_bias}
        return function(x, index, widen(weight), gate_up, down, activation, **options)

    return call


def draw_biases(hidden, inner, num_experts):
    """Of gate_up so large that many gates and ups are beyond the limits of "clamped_silu"."""
    sizes = (5.0, 2 * inner), (1.0, hidden)
    return [scale * torch.randn(num_experts, n, dtype=torch.float64, device=DEVICE) for scale, n in sizes]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[3], (TOKENS, 1030, 8, 3, 2)])
def test_biases_and_the_clamped_activation_are_within_the_error_budget(shape, dtype):
    functions = [with_biases(function, "clamped_silu") for function in (experts, experts_reference)]
    check(*functions, [*draw(*shape), *draw_biases(*shape[1:4])], dtype, 2 * FACTOR)


def test_the_clamped_activation_and_its_gradients_are_those_of_the_formula():
    """In float64, by hand: at the limits, beyond them and far beyond, with and without a bias."""
    values = torch.tensor([-900.0, -7.1, -7.0, -6.9, -0.3, 0.0, 0.5, 6.9, 7.0, 7.1, 900.0], dtype=torch.float64)
    gate, up = (x.flatten().requires_grad_() for x in torch.meshgrid(values, values, indexing="ij"))
    clamped = gate.clamp(max=7.0)
    expected = clamped * torch.sigmoid(1.702 * clamped) * (up.clamp(-7.0, 7.0) + 1.0)
    gradients = torch.autograd.grad(expected.sum(), (gate, up))
    size = len(gate)
    eye = torch.eye(2 * size, device=DEVICE)
    x, down = torch.cat([gate, up]).detach().float().to(DEVICE)[None].requires_grad_(), eye[None, :, :size]
    for rows, bias in ((eye, None), (torch.zeros_like(eye), x.detach()[0])):
        inputs = x if bias is None else torch.zeros_like(x).requires_grad_()
        bias = None if bias is None else bias[None].clone().requires_grad_()
        index, weight = torch.zeros(1, 1, dtype=torch.int64, device=DEVICE), torch.ones(1, 1, device=DEVICE)
        y = experts(inputs, index, weight, rows[None], down, "clamped_silu", gate_up_bias=bias)
        torch.testing.assert_close(y[0, :size].double().cpu(), expected.detach(), rtol=2e-6, atol=1e-6)
        (gradient,) = torch.autograd.grad(y.sum(), inputs if bias is None else bias)
        torch.testing.assert_close(gradient[0].double().cpu(), torch.cat(gradients), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("trained", [("weight",), ("gate_up_bias",), ("down_bias",), ("x", "down_bias")])
def test_gradients_of_some_inputs_are_those_of_all(trained):
    names = "x", "weight", "gate_up", "down", "gate_up_bias", "down_bias"
    x, index, *rest = [t.float() if t.is_floating_point() else t for t in draw(*SHAPES[0])]
    tensors = dict(zip(names, [x, *rest, *(b.float() for b in draw_biases(*SHAPES[0][1:4]))], strict=True))

    def gradients(leaves):
        inputs = {name: t.detach().requires_grad_(name in leaves) for name, t in tensors.items()}
        y = experts(
            inputs["x"], index, inputs["weight"], inputs["gate_up"], inputs["down"], "clamped_silu",
            gate_up_bias=inputs["gate_up_bias"], down_bias=inputs["down_bias"],
        )  # fmt: skip
        return dict(zip(leaves, torch.autograd.grad(y.sin().sum(), [inputs[name] for name in leaves]), strict=True))

    every = gradients(names)
    assert all(torch.equal(gradient, every[name]) for name, gradient in gradients(trained).items())


@pytest.mark.parametrize("shape", [(TOKENS, 1030, 8, 3, 2), (TOKENS, 8, 1030, 3, 2)])
def test_rows_wider_than_a_tile_are_within_the_error_budget(shape):
    check(in_budget(experts, "silu"), in_budget(experts_reference, "silu"), draw(*shape), torch.float32)


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


def test_only_gate_up_and_the_routing_are_saved_for_backward():
    tokens, hidden, inner, num_experts, k = 8, 64, 32, 4, 2
    x, index, *rest = draw(tokens, hidden, inner, num_experts, k, torch.float32)
    gate_up, down = (p.requires_grad_() for p in rest[1:])
    saved = saved_bytes(lambda x, w: experts(x, index, w, gate_up, down, "silu"), x.requires_grad_(), rest[0])
    routing = (tokens * k + num_experts) * 4  # row of each slot, offsets
    assert saved - 4 * (gate_up.numel() + down.numel()) == tokens * k * 2 * inner * 4 + routing


def test_a_retained_graph_gives_the_same_gradients_again():
    x, index, *rest = draw(40, 16, 24, 6, 3, torch.float32)
    leaves = [x.requires_grad_(), *(p.requires_grad_() for p in rest)]
    loss = experts(x, index, *rest, "silu").sin().sum()
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(first, torch.autograd.grad(loss, leaves), strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize("inner", [9, 24, 1100])  # one vector per thread, and one element per thread
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_in_place_gradient_and_product_overwrite_gate_up_and_the_gradient_of_the_product(inner, dtype):
    rows = 37
    gate_up, dproduct = (torch.randn(rows, columns, device=DEVICE).to(dtype) for columns in (2 * inner, inner))
    routing = torch.rand(rows, device=DEVICE), torch.randperm(rows, device=DEVICE).int()
    arguments = dproduct, gate_up, *routing, None, None, "silu", True, True, True
    expected = products._launch_product_backward(*arguments)
    dgate_up, dweight, product = products._launch_product_backward(*arguments, inplace=True)
    assert dgate_up.data_ptr() == gate_up.data_ptr() and product.data_ptr() == dproduct.data_ptr()
    for a, b in zip((dgate_up, dweight, product), expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("retained", [False, True])
def test_gate_up_is_freed_before_the_weight_gradients_are_computed(retained, monkeypatch):
    x, index, *rest = draw(6, 16, 8, 4, 2, torch.float32)
    leaves = [p.requires_grad_() for p in rest[1:]]
    references = []

    def pack(saved):
        saved = saved.detach()
        if saved.shape == (6 * 2, 2 * 8):
            references.append(weakref.ref(saved))
        return saved

    alive = alive_at(monkeypatch, module, "grouped_weight_gradient", references)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        y = experts(x, index, *rest, "silu")
    torch.autograd.grad(y.sum(), leaves, retain_graph=retained)
    assert alive == [retained] * 2


def test_router_weights_are_normalized_over_the_chosen_experts():
    logits = torch.randn(6, 10, dtype=torch.float64, requires_grad=True)
    weight, index = route(logits, 3, True)
    expected = torch.softmax(logits.gather(1, index), -1)
    upstream = torch.randn(6, 3, dtype=torch.float64)
    torch.testing.assert_close(weight.double(), expected, rtol=1e-6, atol=1e-7)
    got, wanted = (torch.autograd.grad(w.double(), logits, upstream)[0] for w in (weight, expected))
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-7)
    assert torch.equal(route(logits, 3, False)[0], torch.softmax(logits.float(), -1).topk(3).values)
    assert weight.dtype == torch.float32


def test_unknown_activations_and_odd_widths_raise():
    x, index, weight, gate_up, down = draw(*SHAPES[0], torch.float32)
    with pytest.raises(ValueError, match="unknown activation 'relu'"):
        experts(x, index, weight, gate_up, down, "relu")
    with pytest.raises(ValueError, match="even number"):
        experts(x, index, weight, gate_up[:, 1:], down, "silu")
    with pytest.raises(ValueError, match=r"down_bias has shape \[6, 21\]; needed \[6, 20\]"):
        experts(x, index, weight, gate_up, down, down_bias=x.new_zeros(6, 21))


@pytest.mark.parametrize(
    "cut",
    [
        lambda x, *rest: (x[1:], *rest),
        lambda x, index, weight, *rest: (x, index, weight[:, 1:], *rest),
        lambda *inputs: (*inputs[:-1], inputs[-1][:, :, 1:]),
        lambda x, *rest: (x[:, 1:], *rest),
        lambda *inputs: (*inputs[:-1], inputs[-1][1:]),
    ],
)
def test_shapes_that_disagree_raise(cut):
    inputs = draw(*SHAPES[0], torch.float32)
    with pytest.raises(ValueError, match=r"experts: (x|expert_weight|down) has shape .*; needed \["):
        experts(*cut(*inputs), "silu")


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "num_experts"), [(4096, 8), (1024, 64)], ids=["many rows", "many experts"])
def test_peak_memory_of_a_step_is_as_documented(tokens, num_experts):
    """`counted` in elements: the peak while dGU or dD is computed, without y and dx."""
    hidden, inner, k = 512, 1024, 2
    x, index, weight, *rest = draw(tokens, hidden, inner, num_experts, k, torch.bfloat16)
    leaves = [x.requires_grad_(), weight.float().requires_grad_(), *(p.requires_grad_() for p in rest)]
    dy, rows, matrix, routing = torch.randn_like(x), tokens * k, num_experts * inner * hidden, 2**20
    counted = max(rows * (3 * inner + hidden) + 2 * matrix, rows * (inner + hidden) + 3 * matrix)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(experts(leaves[0], index, *leaves[1:], "silu"), leaves, dy)
    assert torch.cuda.max_memory_allocated() - before <= 2 * (counted + 2 * tokens * hidden) + routing
