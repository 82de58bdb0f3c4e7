import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ligermodels
from ligermodels.kernels.linear import LowRank
from ligermodels.layers.fused import fusible_weights
from ligermodels.layers.lora import LoRALinear
from tests.cases import CASES, LLAMA
from tests.conftest import DEVICE
from tests.layers.adapters import adapt

BIASED = LLAMA | {"attention_bias": True, "mlp_bias": True}


class Scaled(torch.autograd.Function):
    """A linear by other means than torch's, as float8's: the scale stands for that of a quantized weight."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight * 0.5, None) * 2 + (0 if bias is None else bias)

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        rows = dy.flatten(0, -2)
        return dy @ weight, rows.t() @ x.flatten(0, -2), rows.sum(0) if ctx.needs_input_grad[2] else None


class ScaledLinear(nn.Linear):
    """Takes a Linear's place, weights and all, as a float8 linear does."""

    def forward(self, x):
        return Scaled.apply(x, self.weight, self.bias)


def watch(linear, seen):
    linear.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].shape[-1]))


def scale_all(model):
    for module in model.model.modules():
        if type(module) is nn.Linear:
            module.__class__ = ScaledLinear


def gradients(change=lambda model: None, raw=BIASED, compiled=False):
    """Of every trained parameter after one step of a model that `change` was done to."""
    ids = torch.randint(3, 99, (2, 8), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    model = ligermodels.create(raw, device=DEVICE)
    torch.manual_seed(1)
    change(model)
    call = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    call(ids, ids).loss.backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def assert_equal(got, expected, count):
    assert len(got) == len(expected) == count
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


PARAMETERS = 3 * (4 * 2 + 2) + 3  # in three layers four projections with a bias and two norms; embedding, norm, head
ADAPTERS = 3 * 4 * 2


@pytest.mark.usefixtures("kernels")
def test_a_watched_linear_takes_the_composed_path_with_equal_gradients():
    """A hook sees every projection's input, which a fused node would never materialise for it."""
    seen = []

    def watch_all(model):
        for module in model.model.modules():
            if isinstance(module, nn.Linear):
                watch(module, seen)

    assert_equal(gradients(watch_all), gradients(), PARAMETERS)
    assert seen == 3 * [48, 48, 48, 80]  # the inputs of qkv, o, gate_up and down in three layers


@pytest.mark.usefixtures("kernels")
def test_a_replaced_linear_takes_the_composed_path_with_equal_gradients():
    assert_equal(gradients(scale_all), gradients(), PARAMETERS)


@pytest.mark.usefixtures("kernels")
def test_lora_trains_alike_fused_composed_and_over_a_replaced_linear():
    seen = []

    def watched(model):
        for module in adapt(model).modules():
            if isinstance(module, LoRALinear):
                watch(module, seen)

    def replaced(model):
        scale_all(adapt(model))

    fused = gradients(adapt)
    assert_equal(gradients(watched), fused, ADAPTERS)
    assert seen == 3 * [48, 48, 48, 80]
    assert_equal(gradients(replaced), fused, ADAPTERS)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", ["gemma2", "olmo2", "granite", "qwen3"])
def test_lora_trains_alike_fused_and_without_kernels_in_every_kind_of_block(name, monkeypatch):
    raw = CASES[name] | {"num_hidden_layers": 1}
    fused = gradients(adapt, raw)
    monkeypatch.setattr("ligermodels.layers.fused.fusible_weights", lambda projection, dtype: None)
    assert_equal(fused, gradients(adapt, raw), 8)


@pytest.mark.usefixtures("kernels")
def test_a_step_with_lora_compiles_as_one_graph_with_equal_gradients():
    assert_equal(gradients(adapt, compiled=True), gradients(adapt), ADAPTERS)


@pytest.mark.usefixtures("kernels")
def test_a_block_with_lora_is_recomputed_to_the_same_gradients():
    assert_equal(gradients(lambda model: adapt(model).checkpoint_activations()), gradients(adapt), ADAPTERS)


def test_only_a_plain_linear_and_lora_over_one_are_read_by_a_node():
    plain = nn.Linear(4, 6)
    weight, bias, low_rank = fusible_weights(plain, torch.float32)
    assert weight is plain.weight and bias is plain.bias and low_rank is None
    lora = LoRALinear(plain, rank=2, alpha=3.0, dropout=0.1).eval()
    assert fusible_weights(lora, torch.float32) == (weight, bias, LowRank(lora.lora_A, lora.lora_B, ((0, 6),), 1.5))
    watched, watched_backward = nn.Linear(4, 6), nn.Linear(4, 6)
    watch(watched, [])
    watched_backward.register_full_backward_hook(lambda module, dx, dy: None)
    for other in (
        watched,
        watched_backward,
        ScaledLinear(4, 6),
        nn.Sequential(plain),
        lora.train(),
        LoRALinear(watched, 2, 3.0),
        LoRALinear(ScaledLinear(4, 6), 2, 3.0),
    ):
        assert fusible_weights(other, torch.float32) is None, other
