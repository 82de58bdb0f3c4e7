"""Quantised linears: in a model they compute what their dequantised weights would, in the same fused nodes."""

import pytest
import torch

import ligermodels
from ligermodels.errors import CheckpointError, InputError
from ligermodels.layers.lora import lora_modules
from ligermodels.layers.quantised import FrozenWeights, QuantisedLinear
from ligermodels.weights.module import named_weights
from tests.cases import LLAMA
from tests.conftest import DEVICE
from tests.layers.adapters import adapt
from tests.layers.quantised_models import PeakBytes, quantised_and_dense

LAYERS = 2
RAW = LLAMA | {
    "num_hidden_layers": LAYERS, "hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "attention_bias": True,
}  # fmt: skip
IDS = torch.arange(14, device=DEVICE).view(2, 7)
LINEARS = "self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint in half precision; the interpreter computes bf16 wrongly."""
    path = tmp_path_factory.mktemp("base") / "model"
    ligermodels.export(ligermodels.create(RAW, dtype=torch.float16, seed=3), path)
    return path


def test_the_linears_of_the_blocks_are_quantised_and_nothing_else(folder):
    model = ligermodels.load(folder, quantize="nf4")
    expected = {f"model.layers.{i}.{name}" for i in range(LAYERS) for name in LINEARS}
    assert {name for name, module in model.named_modules() if isinstance(module, FrozenWeights)} == expected
    original = dict(ligermodels.load(folder).named_parameters())
    assert named_weights(model).keys() == original.keys()
    for name, weight in named_weights(model).items():
        assert weight.shape == original[name].shape and weight.dtype == torch.float16 and not weight.requires_grad
        if isinstance(weight, torch.Tensor):
            assert torch.equal(weight, original[name])
        else:  # NF4's mean square error of normal numbers is below 1 % of their variance
            error = weight.dequantize().float() - original[name].float()
            assert 0 < error.square().mean() < 0.01 * original[name].float().var()


def test_every_tensor_of_the_hub_is_quantised_by_itself(folder):
    """A projection has the bits that it would have without those it is packed with."""
    qkv = ligermodels.load(folder, quantize="nf4").model.layers[0].self_attn.qkv_proj.weight
    weight = ligermodels.load(folder).model.layers[0].self_attn.qkv_proj.weight.detach()
    assert qkv.layout.parts == (128, 64, 64)
    for got, part in zip(qkv.layout.unpack(qkv.data), weight.split(qkv.layout.parts), strict=True):
        alone = ligermodels.ops.nf4_weight(part)
        (expected,) = alone.layout.unpack(alone.data)
        assert all(torch.equal(got[name], expected[name]) for name in expected)


@pytest.mark.usefixtures("path")
def test_logits_are_those_of_the_dequantised_weights(folder):
    quantised, dense = quantised_and_dense(folder)
    with torch.no_grad():
        assert torch.equal(quantised(IDS).logits, dense(IDS).logits)


@pytest.mark.parametrize("checkpointed", [0, 1])
@pytest.mark.usefixtures("path")
def test_lora_gets_the_gradients_that_it_gets_on_the_dequantised_weights(folder, checkpointed):
    gradients = []
    for model in quantised_and_dense(folder):
        torch.manual_seed(0)
        adapt(model, targets=("q_proj", "v_proj", "o_proj", "up_proj", "down_proj"))
        model.train()
        if checkpointed:
            model.checkpoint_activations(1)
        loss = model(IDS, labels=IDS).loss
        loss.backward()
        gradients.append([loss.detach(), *(p.grad for p in model.parameters() if p.requires_grad)])
    assert len(gradients[0]) == 1 + 2 * 4 * LAYERS
    assert all(torch.equal(a, b) and a.abs().max() > 0 for a, b in zip(*gradients, strict=True))


def test_casts_change_the_dtype_of_use_and_no_byte(folder):
    model = ligermodels.load(folder, quantize="nf4")
    linear = model.model.layers[0].mlp.down_proj
    before = linear.weight.data.clone()
    model.float()
    assert linear.weight.dtype == model.dtype == torch.float32 and torch.equal(linear.weight.data, before)
    assert torch.equal(linear.weight.dequantize().half(), ligermodels.ops.QuantisedWeight(
        before, linear.weight.layout.with_dtype(torch.float16)).dequantize())  # fmt: skip
    with torch.no_grad():
        assert model(IDS.cpu()).logits.dtype == torch.float32


def test_lora_on_a_quantised_base_is_exported_and_loaded_as_on_any_base(folder, tmp_path):
    model = adapt(ligermodels.load(folder, quantize="nf4"))
    ligermodels.export_adapter(model, tmp_path / "adapter")
    again = ligermodels.load(folder, quantize="nf4")
    ligermodels.load_adapter(again, tmp_path / "adapter")
    assert len(list(lora_modules(again))) == len(LINEARS) * LAYERS
    with torch.no_grad():
        assert torch.equal(model(IDS.cpu()).logits, again(IDS.cpu()).logits)


def test_merging_rounds_the_sum_of_dequantised_weights_and_updates_once(folder, tmp_path):
    model = adapt(ligermodels.load(folder, quantize="nf4"))
    layer = model.model.layers[1].mlp.down_proj
    with pytest.warns(UserWarning, match="merged with the dequantised weights"):
        ligermodels.export(model, tmp_path / "merged")
    update = layer.scale * layer.lora_B.double() @ layer.lora_A.double()
    expected = (layer.base_layer.weight.dequantize().double() + update).half()
    merged = ligermodels.load(tmp_path / "merged")
    assert torch.equal(merged.model.layers[1].mlp.down_proj.weight, expected)


def test_the_dense_model_is_never_in_memory(tmp_path):
    """At most one weight is dense, with what quantising it needs: a dozen bytes for each of its elements."""
    raw = RAW | {"num_hidden_layers": 24, "vocab_size": 64}
    ligermodels.export(ligermodels.create(raw, dtype=torch.float16), tmp_path / "model")
    with PeakBytes() as dense:
        size = sum(parameter.nbytes for parameter in ligermodels.load(tmp_path / "model").parameters())
    with PeakBytes() as quantised:
        model = ligermodels.load(tmp_path / "model", quantize="nf4")
    held = sum(parameter.nbytes for parameter in model.parameters())
    largest = max(module.weight.numel() for module in model.modules() if isinstance(module, QuantisedLinear))
    assert dense.peak >= size  # what is allocated is counted
    assert held < 0.4 * size and quantised.peak <= held + 24 * largest < 0.8 * size


def test_what_cannot_be_quantised_is_refused(folder, tmp_path):
    with pytest.raises(InputError) as refused:
        ligermodels.load(folder, quantize="nf5")
    assert str(refused.value) == "quantize is 'nf5'; did you mean 'nf4'?; choose from: fp8, mxfp4, nf4"
    narrow = tmp_path / "narrow"
    ligermodels.export(ligermodels.create(RAW | {"intermediate_size": 96}), narrow)
    advice = "give fp8, or leave quantize out"
    with pytest.raises(InputError, match=rf"down_proj.weight has 96 columns, which are no multiple of 64; {advice}$"):
        ligermodels.load(narrow, quantize="nf4")
    broken = ligermodels.create(RAW)
    with torch.no_grad():
        broken.model.layers[1].mlp.down_proj.weight[3, 5] = float("inf")
    ligermodels.export(broken, tmp_path / "broken")
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.down_proj.weight has values that are not finite"):
        ligermodels.load(tmp_path / "broken", quantize="nf4")


def test_a_quantised_base_cannot_be_trained_in_full(folder):
    with pytest.raises(InputError, match=r"quantised.*add_lora"):
        ligermodels.load(folder, quantize="nf4").requires_grad_(True)
