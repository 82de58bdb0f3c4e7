"""Feed-forward layers over tiles of tokens: equal outputs, gradients within the error budget, and no more products."""

import copy
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import ligermodels
from ligermodels.layers.checkpointing import token_tiles
from ligermodels.layers.checkpointing.token_tiles import TILE_TOKENS, tile_count
from ligermodels.layers.mlp import MLP
from ligermodels.layers.norm import LayerNorm, PreNorm
from ligermodels.memory.blocks import beside_recomputed, saved_by_mlp
from tests.cases import CASES, LLAMA
from tests.conftest import DEVICE
from tests.kernels.error_budget import DTYPES, FACTOR, relative_error
from tests.layers.adapters import adapt
from tests.layers.saved_bytes import peak_bytes

HALF = DTYPES[-1]
ROWS, LENGTH = 2, 26
TILE = 17  # of 52 tokens: three tiles, of 18, 17 and 17


def build(name="llama", change=lambda model: model, layers=1):
    torch.manual_seed(0)
    return change(ligermodels.create(CASES[name] | {"num_hidden_layers": layers}, device=DEVICE))


def step(model, tile, monkeypatch, autocast=False):
    """The loss and the gradients of the trained parameters of a step with activation checkpointing."""
    monkeypatch.setattr(token_tiles, "TILE_TOKENS", tile)
    model.checkpoint_activations()
    device = model.lm_head.weight.device
    ids = torch.randint(3, 99, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0)).to(device)
    trained = [p for p in model.parameters() if p.requires_grad]
    with torch.autocast(device.type, HALF, enabled=autocast):
        loss = model(ids, ids).loss
    return loss.detach(), torch.autograd.grad(loss, trained)


def counted_step(*inputs):
    """A step and the FLOPs of its products."""
    with FlopCounterMode(display=False) as counter:
        results = step(*inputs)
    counts = counter.get_flop_counts()["Global"]
    return *results, sum(counts[op] for op in counts if op in (torch.ops.aten.mm, torch.ops.aten.addmm))


def assert_equal_to_rounding(got, expected):
    for a, b in zip(expected, got, strict=True):
        assert relative_error(b, a.double()) < 1e-6


def test_tiles_have_a_number_of_tokens_or_more():
    assert [tile_count(tokens) for tokens in (0, 1, 2 * TILE_TOKENS - 1, 2 * TILE_TOKENS, 2**18)] == [1, 1, 1, 2, 16]


@pytest.mark.parametrize(
    ("name", "path"),
    [("llama", "kernels"), ("gemma2", "reference"), ("olmo2", "reference"), ("cohere2", "reference")],
)
def test_the_loss_has_the_same_bits_and_gradients_differ_by_the_order_of_sums(name, path, monkeypatch, request):
    if path == "kernels":
        request.getfixturevalue("kernels")
    model = build(name)
    loss, expected, whole = counted_step(model, 1000, monkeypatch)
    tiled_loss, got, tiled = counted_step(model, TILE, monkeypatch)
    assert torch.equal(tiled_loss, loss)
    assert_equal_to_rounding(got, expected)
    gate_up = sum(p.numel() for n, p in model.named_parameters() if "gate_up_proj.weight" in n)
    kept_behind = name in ("gemma2", "olmo2")  # a norm behind the layer keeps its output, for which gate_up runs again
    assert tiled - whole == 2 * ROWS * LENGTH * gate_up * kept_behind


def test_gradients_of_lora_over_tiles(monkeypatch):
    model = build(change=adapt)
    _, expected = step(model, 1000, monkeypatch)
    _, got = step(model, TILE, monkeypatch)
    assert_equal_to_rounding(got, expected)


def test_a_layer_without_a_gate_and_with_biases_over_tiles(monkeypatch):
    """Of a frozen input: the parameters alone have gradients."""
    torch.manual_seed(0)
    layer = MLP(ligermodels.create(CASES["llama"], device="meta").config, bias=True).to(DEVICE)
    norm = PreNorm(LayerNorm(layer.up_proj.in_features, 1e-5, bias=True).to(DEVICE))
    parameters = [*layer.parameters(), *norm.module.parameters()]
    x = torch.randn(1, ROWS * LENGTH, layer.up_proj.in_features, device=DEVICE)
    expected, _, _ = layer(norm, x, x)
    monkeypatch.setattr(token_tiles, "TILE_TOKENS", TILE)
    layer.fused = False
    out, residual, _ = layer(norm, x, x)
    assert_equal_to_rounding([out, residual], [expected, 2 * x])
    gradients = (torch.autograd.grad(y.square().sum(), parameters) for y in (out, expected))
    assert_equal_to_rounding(*gradients)
    with torch.inference_mode():
        assert torch.equal(layer(norm, x, x)[0], out)


def test_a_layer_whose_gradients_have_hooks_or_whose_projection_was_replaced_runs_over_all_tokens_at_once():
    layer = build().model.layers[0].mlp
    assert layer.tiles(2 * TILE_TOKENS) == 2
    hook = layer.down_proj.weight.register_hook(lambda gradient: 2 * gradient)
    assert layer.tiles(2 * TILE_TOKENS) == 1
    hook.remove()
    assert layer.tiles(2 * TILE_TOKENS) == 2
    layer.down_proj = torch.nn.Sequential(layer.down_proj)
    assert layer.tiles(2 * TILE_TOKENS) == 1


@pytest.mark.parametrize("autocast", [False, True])
def test_gradients_in_half_precision_are_within_the_error_budget(autocast, monkeypatch):
    model = build()
    if not autocast:
        model.to(HALF)
    _, exact = step(copy.deepcopy(model).double().cpu(), 1000, monkeypatch)  # kernels have no float64
    _, plain = step(model, 1000, monkeypatch, autocast)
    _, tiled = step(model, TILE, monkeypatch, autocast)
    for reference, a, b in zip(exact, plain, tiled, strict=True):
        assert b.dtype == a.dtype
        reference = reference.to(DEVICE)
        assert relative_error(b, reference) <= FACTOR * relative_error(a, reference)


def test_gradients_over_many_tiles_are_summed_in_fp32():
    """Of 256 equal gradients: in half precision the sum would stop growing."""
    gradient, sums = torch.full((4,), 0.1, dtype=HALF), [None]
    for _ in range(256):
        token_tiles.add_gradients(sums, [gradient])
    assert torch.equal(sums[0].to(HALF), 256 * gradient)


def test_backward_frees_a_block_s_input_when_the_block_is_done(monkeypatch):
    monkeypatch.setattr(token_tiles, "TILE_TOKENS", TILE)
    (block,) = build().model.layers
    block.checkpoint_activations()
    x = torch.randn(1, ROWS * LENGTH, LLAMA["hidden_size"], device=DEVICE, requires_grad=True)
    hidden, norm, kept = 2 * x, PreNorm(block.post_attention_layernorm), []
    reference = weakref.ref(hidden)
    x.register_hook(lambda gradient: kept.append(reference() is not None))
    loss = sum(y.sum() for y in checkpoint(lambda x: block.mlp(norm, x, None)[:2], hidden, use_reentrant=False))
    del hidden
    loss.backward()
    assert kept == [False]


def test_a_frozen_layer_of_a_frozen_input_is_in_no_graph(monkeypatch):
    monkeypatch.setattr(token_tiles, "TILE_TOKENS", TILE)
    (block,) = build().requires_grad_(False).model.layers
    block.checkpoint_activations()
    x = torch.randn(1, ROWS * LENGTH, LLAMA["hidden_size"], device=DEVICE)
    out, residual, _ = block.mlp(PreNorm(block.post_attention_layernorm), x, None)
    assert not out.requires_grad
    assert not residual.requires_grad


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("trained", [False, True])
def test_backward_takes_the_memory_that_the_plan_says(trained, monkeypatch):
    """Half of the tokens, and of their memory, a tile."""
    raw = LLAMA | {"hidden_size": 64, "intermediate_size": 512, "num_attention_heads": 2, "num_key_value_heads": 1}
    tokens, dtype = (1024, torch.bfloat16) if DEVICE == "cuda" else (256, torch.float32)
    model = ligermodels.create(raw | {"num_hidden_layers": 1}, dtype=dtype, device=DEVICE).requires_grad_(trained)
    (block,) = model.model.layers
    norm = PreNorm(block.post_attention_layernorm)
    block.checkpoint_activations()

    def measured(tile):
        monkeypatch.setattr(token_tiles, "TILE_TOKENS", tile)
        x = torch.randn(1, tokens, 64, dtype=dtype, device=DEVICE, requires_grad=True)
        outputs = checkpoint(lambda x: block.mlp(norm, x, None)[:2], x, use_reentrant=False)
        upstream = torch.ones_like(x)
        return peak_bytes(lambda: torch.autograd.backward(outputs, [upstream, upstream]))

    whole, tiled = measured(1000), measured(tokens // 2)
    planned = beside_recomputed(block, tokens, dtype.itemsize) + tokens * saved_by_mlp(block.mlp, 64, dtype.itemsize)
    assert tiled == pytest.approx(planned, rel=0.03)
    assert tiled < 0.8 * whole
