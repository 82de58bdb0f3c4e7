"""Routed experts in few bits: they compute what their dequantised weights would, alone and below LoRA."""

import json

import pytest
import torch
from bitsandbytes import functional
from safetensors.torch import load_file, save_file

import ligermodels
from ligermodels.adapters.quantising import quantise
from ligermodels.errors import CheckpointError, InputError
from ligermodels.kernels.quant.nf4 import Nf4, nf4_quantize
from ligermodels.layers.lora import lora_modules
from ligermodels.layers.moe import QuantisedExperts
from ligermodels.weights.bitsandbytes import NF4_STATE
from ligermodels.weights.files import tensor_hashes
from ligermodels.weights.module import named_weights
from tests.cases.moe import GPT_OSS, GRANITEMOE, QWEN3_MOE
from tests.conftest import DEVICE
from tests.kernels.quant.test_nf4 import dequantised_by_bitsandbytes
from tests.layers.adapters import adapt
from tests.layers.quantised_models import PeakBytes, quantised_and_dense
from tests.layers.saved_bytes import saved_by
from tests.suites import slow

EXPERTS, INNER, HIDDEN = 4, 64, 128
SIZES = {
    "num_hidden_layers": 1, "hidden_size": HIDDEN, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64,
    "num_experts_per_tok": 2,
}  # fmt: skip
RAW = QWEN3_MOE | SIZES | {"num_experts": EXPERTS, "moe_intermediate_size": INNER}
IDS = torch.arange(14, device=DEVICE).view(2, 7)
FIRST = "model.layers.0.mlp.experts"


def saved(raw, path, **options):
    ligermodels.export(ligermodels.create(raw, dtype=torch.float16, seed=3, **options), path)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint in half precision; the interpreter computes bf16 wrongly."""
    return saved(RAW, tmp_path_factory.mktemp("base") / "model")


@pytest.fixture(scope="module")
def biased(tmp_path_factory):
    """A family with biases whose files have experts in another order."""
    raw = GPT_OSS | SIZES | {"num_local_experts": EXPERTS, "intermediate_size": INNER}
    return saved(raw, tmp_path_factory.mktemp("biased") / "model")


@pytest.mark.parametrize("base", ["folder", "biased"])
@pytest.mark.usefixtures("path")
def test_logits_are_those_of_the_dequantised_weights(request, base):
    quantised, dense = quantised_and_dense(request.getfixturevalue(base))
    assert isinstance(quantised.model.layers[0].mlp.experts, QuantisedExperts)
    with torch.no_grad():
        assert torch.equal(quantised(IDS).logits, dense(IDS).logits)


@pytest.mark.usefixtures("kernels")
def test_of_one_token_the_experts_that_it_chooses_are_dequantised(folder, monkeypatch):
    quantised, dense = (model.model.layers[0].mlp.experts for model in quantised_and_dense(folder))
    args = torch.randn(1, HIDDEN, device=DEVICE).half(), IDS[:1, 1:3], torch.rand(1, 2, device=DEVICE)
    monkeypatch.delattr(Nf4, "dequantize")  # that of all experts
    with torch.no_grad():
        assert torch.equal(quantised(*args), dense(*args))


@pytest.mark.parametrize("checkpointed", [0, 1])
@pytest.mark.usefixtures("path")
def test_lora_gets_the_gradients_that_it_gets_on_the_dequantised_weights(folder, checkpointed):
    gradients = []
    for model in quantised_and_dense(folder):
        torch.manual_seed(0)
        adapt(model, targets=("q_proj", "experts"))
        if checkpointed:
            model.train().checkpoint_activations(1)
        loss = model(IDS, labels=IDS).loss
        loss.backward()
        gradients.append([loss.detach(), *(p.grad for p in model.parameters() if p.requires_grad)])
    assert len(gradients[0]) == 1 + 2 * 3
    assert all(torch.equal(a, b) and a.abs().max() > 0 for a, b in zip(*gradients, strict=True))


@pytest.mark.usefixtures("kernels")
def test_backward_keeps_no_dequantised_weight(folder):
    """Their bytes belong to the model; what else is kept is as much as with dense weights."""
    sizes = []
    for model in quantised_and_dense(folder):
        adapt(model, targets=("q_proj", "experts"))
        sizes.append(saved_by(model, IDS))
    assert sizes[0] == sizes[1] > 0


def test_every_tensor_of_the_hub_is_quantised_by_itself(folder, tmp_path):
    """An expert's projections have the bits of bitsandbytes (the scales': test_nf4.py), under their own names."""
    ligermodels.export(ligermodels.load(folder, quantize="nf4"), tmp_path / "nf4")
    got, dense = (load_file(path / "model.safetensors") for path in (tmp_path / "nf4", folder))
    names = [f"{FIRST}.{e}.{part}_proj.weight" for e in range(EXPERTS) for part in ("gate", "up", "down")]
    for name in names:
        codes, state = functional.quantize_4bit(dense[name], quant_type="nf4", blocksize=64, compress_statistics=True)
        assert torch.equal(got[name], codes)
        assert torch.equal(got[f"{name}.nested_absmax"], state.state2.absmax)
        assert torch.equal(got[f"{name}.absmax"], nf4_quantize(dense[name]).absmax)
    config = json.loads((tmp_path / "nf4" / "config.json").read_text())["quantization_config"]
    assert "model.layers.0.mlp.gate" in config["llm_int8_skip_modules"]
    assert not any("experts" in name for name in config["llm_int8_skip_modules"])


def test_experts_in_4_bits_are_read_and_written_byte_for_byte(folder, tmp_path):
    ligermodels.export(ligermodels.load(folder, quantize="nf4"), tmp_path / "nf4")
    again = ligermodels.load(tmp_path / "nf4")
    ligermodels.export(again, tmp_path / "again")
    assert isinstance(again.model.layers[0].mlp.experts, QuantisedExperts)
    assert tensor_hashes(tmp_path / "again") == tensor_hashes(tmp_path / "nf4")


def test_experts_that_files_stack_are_one_weight_of_bitsandbytes(tmp_path):
    """The layout of bitsandbytes.nn.parametrize: a weight with three dimensions."""
    folder = saved(GRANITEMOE | SIZES | {"num_local_experts": EXPERTS, "intermediate_size": INNER}, tmp_path / "model")
    model = ligermodels.load(folder, quantize="nf4")
    ligermodels.export(model, tmp_path / "nf4")
    tensors = load_file(tmp_path / "nf4" / "model.safetensors")
    name = "model.layers.0.block_sparse_moe.input_linear.weight"
    assert name + NF4_STATE in tensors
    fields = {key.removeprefix(f"{name}."): value for key, value in tensors.items() if key.startswith(f"{name}.")}
    theirs = dequantised_by_bitsandbytes(tensors[name], functional.QuantState.from_dict(fields, "cpu"))
    assert torch.equal(theirs, model.model.layers[0].mlp.experts.gate_up_proj.dequantize())
    again = named_weights(ligermodels.load(tmp_path / "nf4"))[f"{FIRST}.gate_up_proj"]
    assert torch.equal(again.data, model.model.layers[0].mlp.experts.gate_up_proj.data)


def test_weights_of_another_order_are_not_written_in_4_bits(biased, tmp_path):
    model = ligermodels.load(biased, quantize="nf4")
    with pytest.raises(InputError, match=r"experts\.gate_up_proj: is quantised in another order.*give a dtype"):
        ligermodels.export(model, tmp_path / "nf4")
    with pytest.warns(UserWarning, match="dequantised"):
        ligermodels.export(model, tmp_path / "dense", dtype="float16")
    dense = named_weights(ligermodels.load(tmp_path / "dense"))[f"{FIRST}.gate_up_proj"]
    assert torch.equal(dense, model.model.layers[0].mlp.experts.gate_up_proj.dequantize())


def test_a_checkpoint_in_the_layout_of_transformers_5_is_quantised_as_the_hubs(folder, tmp_path):
    """Whatever the file stacks, an adapter finds the weights that it was trained on."""
    tensors = load_file(folder / "model.safetensors")
    stacked = {name: x for name, x in tensors.items() if not name.startswith(FIRST)}
    of = {part: [tensors[f"{FIRST}.{e}.{part}_proj.weight"] for e in range(EXPERTS)] for part in ("gate", "up", "down")}
    stacked[f"{FIRST}.gate_up_proj"] = torch.cat([torch.stack(of["gate"]), torch.stack(of["up"])], 1)
    stacked[f"{FIRST}.down_proj"] = torch.stack(of["down"])
    (tmp_path / "stacked").mkdir()
    save_file(stacked, tmp_path / "stacked" / "model.safetensors")
    (tmp_path / "stacked" / "config.json").write_bytes((folder / "config.json").read_bytes())
    model, hub = (ligermodels.load(path, quantize="nf4") for path in (tmp_path / "stacked", folder))
    got, expected = (m.model.layers[0].mlp.experts.gate_up_proj for m in (model, hub))
    assert torch.equal(got.data, expected.data)
    for name, quantised in (("ours", model), ("hub's", hub)):
        ligermodels.export(quantised, tmp_path / name)
    assert tensor_hashes(tmp_path / "ours") == tensor_hashes(tmp_path / "hub's")


def test_lora_is_exported_loaded_and_merged_as_on_any_base(folder, tmp_path):
    model = adapt(ligermodels.load(folder, quantize="nf4"), targets=("q_proj", "experts"))
    ligermodels.export_adapter(model, tmp_path / "adapter")
    again = ligermodels.load(folder, quantize="nf4")
    ligermodels.load_adapter(again, tmp_path / "adapter")
    assert len(list(lora_modules(again))) == 3
    with torch.no_grad():
        assert torch.equal(model(IDS.cpu()).logits, again(IDS.cpu()).logits)
    with pytest.warns(UserWarning, match="merged with the dequantised weights"):
        ligermodels.export(model, tmp_path / "merged")
    experts = model.model.layers[0].mlp.experts
    a, b, scale = experts.down_proj.low_rank(torch.float64)
    expected = (experts.base_layer.down_proj.dequantize().double() + scale * b @ a).half()
    merged = ligermodels.load(tmp_path / "merged").model.layers[0].mlp.experts
    assert torch.equal(merged.down_proj, expected)


@slow
def test_the_dense_model_is_never_in_memory(tmp_path):
    """At most one weight is dense, with what quantising it needs: a dozen bytes for each of its elements."""
    folder = saved(RAW | {"num_hidden_layers": 24, "vocab_size": 64}, tmp_path / "model")
    dense = sum(parameter.nbytes for parameter in ligermodels.load(folder).parameters())
    with PeakBytes() as quantised:
        model = ligermodels.load(folder, quantize="nf4")
    held = sum(parameter.nbytes for parameter in model.parameters())
    assert held < 0.4 * dense and quantised.peak <= held + 24 * EXPERTS * 2 * INNER * HIDDEN < 0.8 * dense


def test_one_projection_in_few_bits_is_refused():
    model = ligermodels.create(RAW, dtype=torch.float16, device="meta")
    with pytest.raises(InputError, match=rf"{FIRST}: one projection of routed experts is in few bits"):
        quantise(model, "nf4", [f"{FIRST}.down_proj"])


def test_experts_of_which_one_is_not_quantised_are_refused_before_memory_is_taken(folder, tmp_path, monkeypatch):
    ligermodels.export(ligermodels.load(folder, quantize="nf4"), tmp_path / "nf4")
    file, up = tmp_path / "nf4" / "model.safetensors", f"{FIRST}.1.up_proj.weight"
    tensors = load_file(file)
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(up)}
    save_file(kept | {up: torch.zeros(INNER, HIDDEN, dtype=torch.float16)}, file)
    monkeypatch.setattr(ligermodels.layers.decoder.CausalLM, "to_empty", None)
    with pytest.raises(CheckpointError, match=rf"is in few bits, but is one weight here with {up}, which is not"):
        ligermodels.load(tmp_path / "nf4")


def test_a_weight_that_is_not_finite_is_refused(tmp_path):
    model = ligermodels.create(RAW, dtype=torch.float16)
    with torch.no_grad():
        model.model.layers[0].mlp.experts.down_proj[2, 3, 5] = float("nan")
    ligermodels.export(model, tmp_path / "broken")
    with pytest.raises(CheckpointError, match=r"experts\.2\.down_proj\.weight has values that are not finite"):
        ligermodels.load(tmp_path / "broken", quantize="nf4")
