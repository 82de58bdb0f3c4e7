"""Fused nodes and unfused operations give equal gradients, and the right one of the two runs."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ligermodels
from ligermodels.kernels.decoding.few_rows_linear import FEW_ROWS
from ligermodels.kernels.linear.linear import LowRank
from ligermodels.layers import fused
from ligermodels.layers.fused import fusible_weights, norm_then_linear
from ligermodels.layers.lora import LoRALinear
from ligermodels.layers.norm import LayerNorm, PreNorm
from ligermodels.layers.packed import PackedLinear
from tests.cases import CASES, LLAMA
from tests.conftest import DEVICE
from tests.layers.adapters import adapt
from tests.suites import slow

LAYERS = 2
BIASED = LLAMA | {"num_hidden_layers": LAYERS, "attention_bias": True, "mlp_bias": True}


class Scaled(torch.autograd.Function):
    """A linear that does not use torch's, like a float8 linear. The scale stands for that of a quantised weight."""

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
    """Replaces an nn.Linear and takes over its weights, as a float8 linear does."""

    def forward(self, x):
        return Scaled.apply(x, self.weight, self.bias)


def record_inputs(linear, seen):
    """Adds a hook that appends the width of each input to `seen`."""
    linear.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].shape[-1]))


def scale_all(model):
    """Replaces every linear by a ScaledLinear."""
    for module in model.model.modules():
        if type(module) in (nn.Linear, PackedLinear):
            module.__class__ = ScaledLinear


def gradients(change=lambda model: None, raw=BIASED, compiled=False):
    """The gradients of all trained parameters after one step. change: modifies the model first."""
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


PARAMETERS = LAYERS * (4 * 2 + 2) + 3  # layers with four biased projections and two norms; embedding, norm, head
ADAPTERS = LAYERS * 4 * 2


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("rows", [FEW_ROWS, FEW_ROWS + 1])
def test_inference_of_few_rows_takes_their_kernels_with_equal_logits(rows, monkeypatch):
    """The linears of a layer: norm and qkv, o, norm and gate_up, activation and down."""
    called = []
    for name in ("few_rows_linear", "few_rows_norm_linear", "few_rows_gated_linear"):
        kernel = getattr(fused, name)
        monkeypatch.setattr(fused, name, lambda *x, kernel=kernel: called.append(kernel.__name__) or kernel(*x))
    ids = torch.randint(3, 99, (1, rows), device=DEVICE)
    model = ligermodels.create(BIASED, device=DEVICE)
    expected = model(ids).logits
    assert not called
    with torch.no_grad():
        got = model(ids).logits
    layer = ["few_rows_norm_linear", "few_rows_linear", "few_rows_norm_linear", "few_rows_gated_linear"]
    assert called == (LAYERS * layer if rows <= FEW_ROWS else [])
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("kernels")
def test_a_linear_with_a_hook_takes_the_unfused_path_with_equal_gradients():
    """The hook sees the input of every projection, which a fused node does not materialise."""
    seen = []

    def hook_all(model):
        for module in model.model.modules():
            if type(module) in (nn.Linear, PackedLinear):
                record_inputs(module, seen)

    assert_equal(gradients(hook_all), gradients(), PARAMETERS)
    assert seen == LAYERS * [48, 48, 48, 80]  # the inputs of qkv, o, gate_up and down


@pytest.mark.usefixtures("kernels")
def test_a_replaced_linear_takes_the_unfused_path_with_equal_gradients():
    assert_equal(gradients(scale_all), gradients(), PARAMETERS)


@pytest.mark.usefixtures("kernels")
def test_lora_gradients_are_equal_fused_unfused_and_over_a_replaced_linear():
    seen = []

    def hooked(model):
        for module in adapt(model).modules():
            if isinstance(module, LoRALinear):
                record_inputs(module, seen)

    def replaced(model):
        scale_all(adapt(model))

    fused = gradients(adapt)
    assert_equal(gradients(hooked), fused, ADAPTERS)
    assert seen == LAYERS * [48, 48, 48, 80]
    assert_equal(gradients(replaced), fused, ADAPTERS)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", ["gemma2", "olmo2", "granite", "qwen3"])
def test_lora_gradients_are_equal_fused_and_unfused_in_every_kind_of_block(name, monkeypatch):
    raw = CASES[name] | {"num_hidden_layers": 1}
    fused = gradients(adapt, raw)
    monkeypatch.setattr("ligermodels.layers.fused.fusible_weights", lambda projection, dtype: None)
    assert_equal(fused, gradients(adapt, raw), 8)


def layer_norm_then_linear(norm, projection, rows):
    """The outputs and the gradients of the parameters."""
    outputs = norm_then_linear(PreNorm(norm), projection, *rows)
    sum(y.sin().sum() for y in outputs).backward()
    return [*outputs, *(p.grad for module in (norm, projection) for p in module.parameters() if p.requires_grad)]


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("path", ["kernels", "reference"])
def test_a_layer_norm_and_its_projection_are_equal_fused_and_unfused(path, lora, request, monkeypatch):
    """On the reference path bit for bit."""
    if path == "kernels":
        request.getfixturevalue("kernels")
    elif DEVICE != "cpu":
        pytest.skip("references run on CPU tensors")
    calls, node = [], fused.layer_norm_linear
    monkeypatch.setattr(fused, "layer_norm_linear", lambda *inputs: calls.append(inputs) or node(*inputs))
    norm, projection = LayerNorm(48, 1e-5, bias=True).to(DEVICE), nn.Linear(48, 20).to(DEVICE)
    projection = LoRALinear(projection, rank=2, alpha=3.0).to(DEVICE) if lora else projection
    rows = torch.randn(2, 3, 7, 48, device=DEVICE)
    got = layer_norm_then_linear(norm, projection, rows)
    assert len(calls) == 1
    for module in (norm, projection):
        module.zero_grad()
    projection.register_forward_hook(lambda module, inputs, output: None)
    expected = layer_norm_then_linear(norm, projection, rows)
    assert len(calls) == 1
    exact = {"rtol": 0, "atol": 0} if path == "reference" else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(got, expected, **exact)


@slow
@pytest.mark.usefixtures("kernels")
def test_a_training_step_with_lora_compiles_to_one_graph_with_equal_gradients():
    raw = BIASED | {"num_hidden_layers": 1}
    assert_equal(gradients(adapt, raw, compiled=True), gradients(adapt, raw), ADAPTERS // LAYERS)


@pytest.mark.usefixtures("kernels")
def test_activation_checkpointing_with_lora_gives_equal_gradients():
    assert_equal(gradients(lambda model: adapt(model).checkpoint_activations()), gradients(adapt), ADAPTERS)


def test_only_plain_linears_and_lora_over_them_take_the_fused_path():
    plain = nn.Linear(4, 6)
    weight, bias, low_rank = fusible_weights(plain, torch.float32)
    assert weight is plain.weight and bias is plain.bias and low_rank is None
    lora = LoRALinear(plain, rank=2, alpha=3.0, dropout=0.1).eval()
    assert fusible_weights(lora, torch.float32) == (weight, bias, LowRank(lora.lora_A, lora.lora_B, ((0, 6),), 1.5))
    hooked, hooked_backward = nn.Linear(4, 6), nn.Linear(4, 6)
    record_inputs(hooked, [])
    hooked_backward.register_full_backward_hook(lambda module, dx, dy: None)
    for other in (
        hooked,
        hooked_backward,
        ScaledLinear(4, 6),
        nn.Sequential(plain),
        lora.train(),
        LoRALinear(hooked, 2, 3.0),
        LoRALinear(ScaledLinear(4, 6), 2, 3.0),
    ):
        assert fusible_weights(other, torch.float32) is None, other
