"""4-bit checkpoints of bitsandbytes: read with their bits, written back byte for byte, and read by transformers."""

import json
import re

import pytest
import torch
from bitsandbytes import functional
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import ligermodels
from ligermodels.errors import CheckpointError, ConfigError, InputError
from ligermodels.kernels.quant.nf4 import PartlyNf4
from ligermodels.layers.quantised import QuantisedLinear
from ligermodels.weights.bitsandbytes import NF4_STATE
from ligermodels.weights.files import tensor_hashes
from ligermodels.weights.module import named_weights
from tests.cases import LLAMA
from tests.layers.adapters import adapt

RAW = LLAMA | {
    "num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32,
}  # fmt: skip
PROJECTIONS = "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    path = tmp_path_factory.mktemp("original") / "model"
    ligermodels.export(ligermodels.create(RAW, dtype=torch.bfloat16, seed=3), path)
    return path


def quantised_by_transformers(original, path, skipped=("lm_head",)):
    """A checkpoint that transformers has quantised and written, without the modules `skipped`."""
    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16, llm_int8_skip_modules=[*skipped],
    )  # fmt: skip
    theirs = AutoModelForCausalLM.from_pretrained(original, quantization_config=config, dtype=torch.bfloat16)
    theirs.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def stored(original, tmp_path_factory):
    return quantised_by_transformers(original, tmp_path_factory.mktemp("stored") / "model")


def their_values(folder):
    """What bitsandbytes dequantises from each weight of a checkpoint in 4 bits."""
    tensors = load_file(folder / "model.safetensors")
    values = {}
    for name in [key.removesuffix(NF4_STATE) for key in tensors if key.endswith(NF4_STATE)]:
        fields = {key.removeprefix(f"{name}."): value for key, value in tensors.items() if key.startswith(f"{name}.")}
        state = functional.QuantState.from_dict(fields, "cpu")
        values[name] = functional.dequantize_4bit(tensors[name], state)
    return values


def our_values(model):
    """The dequantised weights by the Hub's names."""
    values = {}
    for name, module in model.named_modules():
        if isinstance(module, QuantisedLinear):
            parts = {"qkv_proj": PROJECTIONS[:3], "gate_up_proj": PROJECTIONS[4:6]}
            owner, _, last = name.rpartition(".")
            names = [f"{owner}.{part}.weight" for part in parts.get(last, (last,))]
            values |= zip(names, module.weight.dequantize().split(module.weight.layout.parts), strict=True)
    return values


def test_a_stored_model_has_the_values_that_bitsandbytes_reads(stored):
    model = ligermodels.load(stored)
    expected, got = their_values(stored), our_values(model)
    assert len(expected) == 2 * len(PROJECTIONS) and got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_a_stored_model_is_written_back_byte_for_byte(stored, tmp_path):
    ligermodels.export(ligermodels.load(stored), tmp_path / "again")
    assert tensor_hashes(tmp_path / "again") == tensor_hashes(stored)
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (stored, tmp_path / "again"))
    assert after["quantization_config"] == before["quantization_config"]


LAYER = "model.layers.0."
SKIPPED = {  # modules that are not quantised: how many weights these are, and how many packed ones have others too
    "a linear": ([f"{LAYER}mlp.down_proj"], 1, 0),
    "all of a block's attention": ([f"{LAYER}self_attn"], 4, 0),
    "one part of a packed linear": ([f"{LAYER}self_attn.q_proj"], 1, 1),
    "parts of both packed linears": ([f"{LAYER}self_attn.k_proj", f"{LAYER}mlp.up_proj"], 2, 2),
}


@pytest.mark.parametrize("name", SKIPPED)
def test_modules_that_are_not_quantised_stay_so(name, original, tmp_path):
    """They are read and written back byte for byte, and LoRA trains beside them as on the dequantised weights."""
    skipped, weights, mixed = SKIPPED[name]
    folder = quantised_by_transformers(original, tmp_path / "stored", [*skipped, "lm_head"])
    model = ligermodels.load(folder)
    expected, got = their_values(folder), our_values(model)
    assert len(expected) == 2 * len(PROJECTIONS) - weights and expected.keys() <= got.keys()
    dense = load_file(original / "model.safetensors")
    assert all(torch.equal(value, expected.get(name, dense[name])) for name, value in got.items())
    assert sum(isinstance(x.layout, PartlyNf4) for x in named_weights(model).values() if hasattr(x, "layout")) == mixed
    ligermodels.export(model, tmp_path / "again")
    assert tensor_hashes(tmp_path / "again") == tensor_hashes(folder)
    before, after = (json.loads((path / "config.json").read_text()) for path in (folder, tmp_path / "again"))
    assert after["quantization_config"] == before["quantization_config"]

    with pytest.warns(UserWarning, match="dequantised"):
        ligermodels.export(model, tmp_path / "dense", dtype="bfloat16")
    ids, gradients = torch.arange(12)[None], []
    for source in (folder, tmp_path / "dense"):
        torch.manual_seed(0)
        trained = adapt(ligermodels.load(source))
        trained(ids, ids).loss.backward()
        gradients.append({name: p.grad for name, p in trained.named_parameters() if p.requires_grad})
    assert gradients[0].keys() == gradients[1].keys()
    assert all(torch.equal(gradients[0][name], gradient) for name, gradient in gradients[1].items())
    assert all(gradient.abs().max() > 0 for gradient in gradients[1].values())


def test_transformers_reads_what_we_quantise(original, tmp_path):
    ours = ligermodels.load(original, quantize="nf4")
    ligermodels.export(ours, tmp_path / "nf4")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "nf4", device_map="cpu")
    expected, compared = our_values(ours), 0
    for name, module in theirs.named_modules():
        if hasattr(module, "weight") and hasattr(module.weight, "quant_state"):
            weight = module.weight
            assert torch.equal(functional.dequantize_4bit(weight.data, weight.quant_state), expected[f"{name}.weight"])
            compared += 1
    assert compared == len(expected) and not hasattr(theirs.lm_head.weight, "quant_state")


def test_the_dense_model_and_a_merged_one_are_written_in_a_float_dtype(stored, tmp_path):
    model = ligermodels.load(stored)
    with pytest.warns(UserWarning, match="dequantised") as of_dense:
        ligermodels.export(model, tmp_path / "dense", dtype="bfloat16")
    with pytest.warns(UserWarning, match="dequantised") as of_merged:
        ligermodels.export(adapt(ligermodels.load(stored)), tmp_path / "merged")
    assert [str(warned.message).partition("the model's ")[2] for warned in (*of_dense, *of_merged)] == [
        "weights are quantised: their dequantised values are written; for the original weights, export the original "
        "model",
        "weights are quantised: LoRA is merged with the dequantised weights, and each sum is rounded once; for the "
        "original weights, merge the adapter with the original model",
    ]
    for folder in ("dense", "merged"):
        assert "quantization_config" not in json.loads((tmp_path / folder / "config.json").read_text())
        assert {x.dtype for x in load_file(tmp_path / folder / "model.safetensors").values()} == {torch.bfloat16}
    dense = named_weights(ligermodels.load(tmp_path / "dense"))
    values = {n: w if isinstance(w, torch.Tensor) else w.dequantize() for n, w in named_weights(model).items()}
    assert all(torch.equal(dense[name], value) for name, value in values.items())


def changed_config(folder, **fields):
    file = folder / "config.json"
    raw = json.loads(file.read_text())
    raw["quantization_config"] |= fields
    file.write_text(json.dumps(raw))


@pytest.mark.parametrize(
    ("field", "value"),
    [("bnb_4bit_quant_type", "fp4"), ("bnb_4bit_use_double_quant", False), ("load_in_4bit", False),
     ("bnb_4bit_quant_storage", "bfloat16")],
)  # fmt: skip
def test_another_kind_of_bitsandbytes_is_refused(stored, copied, field, value):
    changed_config(copied, **{field: value})
    with pytest.raises(ConfigError, match=rf"{field} is {value!r}.*load the original with quantize='nf4'"):
        ligermodels.load(copied)


def test_weights_of_bitsandbytes_are_refused_by_name_where_config_json_does_not_mention_them(copied):
    file = copied / "config.json"
    raw = json.loads(file.read_text())
    del raw["quantization_config"]
    file.write_text(json.dumps(raw))
    with pytest.raises(CheckpointError) as refused:
        ligermodels.load(copied, allow_unexpected=True)
    weight = re.search(r"model\.layers\.\d\.[a-z_.]+\.weight", str(refused.value))[0]
    assert weight + NF4_STATE in load_file(copied / "model.safetensors")
    assert str(refused.value) == (
        f"{file}: has no quantization_config of bitsandbytes, but model.safetensors has {weight} in 4 bits; download "
        "config.json again, or load the original model with quantize='nf4' instead"
    )


@pytest.fixture
def copied(stored, tmp_path):
    folder = tmp_path / "copied"
    folder.mkdir()
    for file in stored.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


Q = "model.layers.0.self_attn.q_proj.weight"


def state_with(tensors, **fields):
    state = json.loads(tensors[Q + NF4_STATE].numpy().tobytes()) | fields
    return {Q + NF4_STATE: torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)}


DAMAGE = {
    "a block of another size": (lambda t: state_with(t, blocksize=128), "q_proj.weight: blocksize is 128"),
    "another type": (lambda t: state_with(t, quant_type="fp4"), "quant_type is 'fp4'"),
    "another shape": (lambda t: state_with(t, shape=[64, 128]), r"q_proj.weight is .*\[8192, 1\].*needs.*\[4096, 1\]"),
    "no shape": (lambda t: state_with(t, shape=None), "shape is None"),
    "an offset that is not finite": (lambda t: state_with(t, nested_offset=float("nan")), "nested_offset is nan"),
    "an offset beyond fp32": (lambda t: state_with(t, nested_offset=1e308), "q_proj.weight has values that are not"),
    "a scale that is not a number": (
        lambda t: {f"{Q}.nested_absmax": t[f"{Q}.nested_absmax"] * torch.nan}, "q_proj.weight has values that are not",
    ),
    "a scale that overflows": (
        lambda t: {f"{Q}.nested_absmax": t[f"{Q}.nested_absmax"] * 0 + 3e38, f"{Q}.absmax": t[f"{Q}.absmax"] * 0 + 255}
        | state_with(t, nested_offset=3e38),
        "q_proj.weight has values that are not finite in",
    ),
    "no JSON": (lambda t: {Q + NF4_STATE: torch.zeros(9, dtype=torch.uint8)}, "is not JSON"),
    "brackets": (lambda t: {Q + NF4_STATE: torch.full((4000,), ord("["), dtype=torch.uint8)}, "is not JSON"),
    "a state in another dtype": (
        lambda t: {Q + NF4_STATE: torch.zeros(9, dtype=torch.bfloat16)},
        "nf4 has 18 bytes of torch.bfloat16, and is no description",
    ),
    "no scales": (lambda t: {f"{Q}.absmax": None}, r"q_proj.weight.absmax is missing"),
    "scales of another dtype": (lambda t: {f"{Q}.absmax": t[f"{Q}.absmax"].float()}, "absmax is torch.float32"),
    "another map of one part": (
        lambda t: {f"{Q}.nested_quant_map": t[f"{Q}.nested_quant_map"] / 2}, "different values for the same codes",
    ),
    "a part that is not quantised, of another shape": (
        lambda t: {key: None for key in t if key.startswith(f"{Q}.")} | {Q: torch.zeros(64, 128)},
        r"q_proj.weight is \[64, 128\] instead of \[128, 128\]",
    ),
    "a part that is not quantised, in integers": (
        lambda t: {key: None for key in t if key.startswith(f"{Q}.")} | {Q: torch.zeros(128, 128, dtype=torch.int8)},
        "q_proj.weight is torch.int8",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_checkpoint_is_refused(copied, name):
    damage, message = DAMAGE[name]
    tensors = load_file(copied / "model.safetensors")
    changed = tensors | damage(tensors)
    save_file({k: v.contiguous() for k, v in changed.items() if v is not None}, copied / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        ligermodels.load(copied)


def test_advice_for_other_numbers_of_columns_can_be_followed(tmp_path, copied):
    tensors = load_file(copied / "model.safetensors")
    save_file(tensors | state_with(tensors, shape=[128, 96]), copied / "model.safetensors")
    with pytest.raises(CheckpointError) as refused:
        ligermodels.load(copied)
    assert str(refused.value) == (
        f"{copied / 'model.safetensors'}: {Q} has 96 columns, no multiple of 64; load the original model with "
        "quantize='fp8', or without quantize"
    )
    ligermodels.export(ligermodels.create(RAW | {"intermediate_size": 96}), tmp_path / "original")
    with pytest.raises(InputError, match=r"down_proj.weight has 96 columns"):
        ligermodels.load(tmp_path / "original", quantize="nf4")
    narrow = named_weights(ligermodels.load(tmp_path / "original", quantize="fp8"))
    assert narrow["model.layers.0.mlp.down_proj.weight"].scheme == "fp8"


def test_a_stored_model_is_not_quantised_otherwise(stored, original):
    with pytest.raises(InputError, match=r"is in NF4 already; leave out quantize='fp8'"):
        ligermodels.load(stored, quantize="fp8")
