"""Frozen weights in FP8 and in MXFP4: quantised while loaded, or kept as a checkpoint has them."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import ligermodels
from ligermodels.errors import CheckpointError, InputError
from ligermodels.kernels.quant.fp8 import fp8_quantize
from ligermodels.layers.moe import QuantisedExperts
from ligermodels.layers.quantised import QuantisedLinear
from ligermodels.weights.files import tensor_hashes
from ligermodels.weights.module import named_weights
from tests.cases.moe import GPT_OSS, GRANITEMOE, QWEN3_MOE
from tests.conftest import DEVICE
from tests.layers.adapters import adapt
from tests.layers.quantised_models import quantised_and_dense

EXPERTS, INNER, HIDDEN = 4, 96, 160  # no whole blocks of FP8
SIZES = {
    "num_hidden_layers": 1, "hidden_size": HIDDEN, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64,
    "num_experts_per_tok": 2,
}  # fmt: skip
RAW = QWEN3_MOE | SIZES | {"num_experts": EXPERTS, "moe_intermediate_size": INNER}
SINKS = GPT_OSS | SIZES | {"num_local_experts": EXPERTS, "intermediate_size": INNER}
IDS = torch.arange(14, device=DEVICE).view(2, 7)
FIRST = "model.layers.0"


def saved(raw, path):
    ligermodels.export(ligermodels.create(raw, dtype=torch.float16, seed=3), path)
    return path


def changed(source, path, change, config):
    """A copy of a checkpoint with `change` of its tensors and the quantization_config `config`."""
    path.mkdir()
    raw = json.loads((source / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(raw | {"quantization_config": config}))
    save_file(change(load_file(source / "model.safetensors")), path / "model.safetensors")
    return path


def in_fp8(scale_dtype, by_block=True, ending="_proj.weight"):
    """Stores the linears and experts of the blocks in FP8, or those whose names have this ending."""

    def change(tensors):
        stored = {}
        for name, x in tensors.items():
            stored[name] = x
            if name.endswith(ending):
                codes, scale = fp8_quantize(x)
                scale = scale.to(scale_dtype)
                stored[name] = codes
                stored[f"{name}_scale_inv"] = scale if by_block else scale.max()
        return stored

    return change


def in_mxfp4(tensors):
    """Stores the experts of gpt-oss as its checkpoints do, with random codes."""
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        shape = experts, outputs, inputs // 32
        tensors[f"{name}_blocks"] = torch.randint(256, (*shape, 16), dtype=torch.uint8, generator=generator)
        tensors[f"{name}_scales"] = torch.randint(117, 123, shape, dtype=torch.uint8, generator=generator)
    return tensors


BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Checkpoints in half precision, and their quantised copies. The interpreter computes bf16 wrongly."""
    path = tmp_path_factory.mktemp("formats")
    dense, sinks = saved(RAW, path / "dense"), saved(SINKS, path / "sinks")
    return {
        "dense": dense,
        "sinks": sinks,
        "fp8": changed(dense, path / "fp8", in_fp8(torch.bfloat16), BLOCKS),
        "by tensor": changed(
            dense, path / "by tensor", in_fp8(torch.float32, False), BLOCKS | {"weight_block_size": None}
        ),
        "mxfp4": changed(sinks, path / "mxfp4", in_mxfp4, {"quant_method": "mxfp4"}),
    }


CASES = {
    "quantised in fp8": ("dense", "fp8"),
    "stored in fp8": ("fp8", "fp8"),
    "stored in fp8 by tensor": ("by tensor", "fp8"),
    "stored in mxfp4": ("mxfp4", "mxfp4"),
    "mxfp4 quantised in fp8": ("mxfp4", "fp8"),
}
BY_KERNELS = "stored in fp8", "stored in mxfp4"


@pytest.mark.parametrize("name", CASES)
def test_lora_on_the_base_is_that_on_the_dequantised_weights(folders, name, request):
    if name in BY_KERNELS:
        request.getfixturevalue("kernels")
    folder, scheme = CASES[name]
    gradients = []
    for model in quantised_and_dense(folders[folder], scheme):
        torch.manual_seed(0)
        adapt(model, targets=("q_proj", "experts"))
        loss = model(IDS, labels=IDS).loss
        loss.backward()
        gradients.append([loss.detach(), *(p.grad for p in model.parameters() if p.requires_grad)])
    assert len(gradients[0]) == 1 + 2 * 3
    assert all(torch.equal(a, b) and a.abs().max() > 0 for a, b in zip(*gradients, strict=True))


def test_linears_and_experts_are_in_fp8_and_nothing_else(folders):
    model, original = ligermodels.load(folders["dense"], quantize="fp8"), ligermodels.load(folders["dense"])
    quantised = {name for name, weight in named_weights(model).items() if not isinstance(weight, torch.Tensor)}
    linears = {f"{FIRST}.self_attn.{name}_proj.weight" for name in ("qkv", "o")}
    assert quantised == linears | {f"{FIRST}.mlp.experts.{name}_proj" for name in ("gate_up", "down")}
    for name in quantised:
        weight, dense = named_weights(model)[name], original.get_parameter(name)
        assert weight.dtype == torch.float16 and weight.nbytes < 1.05 * weight.numel()
        error = weight.dequantize().float() - dense.float()  # of e4m3: at most 1 / 16, on average far less
        assert 0 < error.square().mean() < 0.002 * dense.float().square().mean()


@pytest.mark.parametrize("name", ["stored in fp8", "stored in fp8 by tensor", "stored in mxfp4"])
def test_stored_bits_have_the_values_of_a_dense_model_and_are_written_back(folders, tmp_path, name):
    folder, scheme = CASES[name]
    model, dense = ligermodels.load(folders[folder], quantize=scheme), ligermodels.load(folders[folder])
    values = named_weights(model)
    bits = [name for name, weight in values.items() if not isinstance(weight, torch.Tensor)]
    assert len(bits) == (2 if scheme == "mxfp4" else 4)
    for weight, expected in dense.named_parameters():
        got = values[weight]
        assert torch.equal(got if isinstance(got, torch.Tensor) else got.dequantize(), expected)
    assert sum(values[name].nbytes for name in bits) < 0.54 * sum(dense.get_parameter(name).nbytes for name in bits)
    ligermodels.export(model, tmp_path / "again")
    assert tensor_hashes(tmp_path / "again") == tensor_hashes(folders[folder])
    before, after = (json.loads((path / "config.json").read_text()) for path in (folders[folder], tmp_path / "again"))
    assert after["quantization_config"] == before["quantization_config"]


def test_what_is_quantised_in_fp8_is_a_checkpoint_in_fp8(folders, tmp_path):
    model = ligermodels.load(folders["dense"], quantize="fp8")
    ligermodels.export(model, tmp_path / "fp8")
    tensors = load_file(tmp_path / "fp8" / "model.safetensors")
    codes, scale = fp8_quantize(load_file(folders["dense"] / "model.safetensors")[f"{FIRST}.self_attn.v_proj.weight"])
    assert torch.equal(tensors[f"{FIRST}.self_attn.v_proj.weight"].float(), codes.float())
    assert torch.equal(tensors[f"{FIRST}.self_attn.v_proj.weight_scale_inv"], scale)
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]
    assert config == BLOCKS | {"modules_to_not_convert": ["model.embed_tokens", f"{FIRST}.mlp.gate", "lm_head"]}
    dense, kept = (ligermodels.load(tmp_path / "fp8", quantize=scheme) for scheme in (None, "fp8"))
    for name, weight in named_weights(kept).items():
        if not isinstance(weight, torch.Tensor):
            assert torch.equal(weight.data, named_weights(model)[name].data)
            assert torch.equal(weight.dequantize(), dense.get_parameter(name))


def test_lora_on_attention_is_merged_and_experts_are_written_byte_for_byte(folders, tmp_path):
    model = adapt(ligermodels.load(folders["mxfp4"], quantize="mxfp4"), targets=("q_proj", "o_proj"))
    assert isinstance(model.model.layers[0].mlp.experts, QuantisedExperts)
    assert not any(isinstance(module, QuantisedLinear) for module in model.modules())
    ligermodels.export(model, tmp_path / "merged")
    got, before = (load_file(path / "model.safetensors") for path in (tmp_path / "merged", folders["mxfp4"]))
    assert got.keys() == before.keys()
    changed = {name for name in got if not torch.equal(got[name], before[name])}
    assert changed == {f"{FIRST}.self_attn.q_proj.weight", f"{FIRST}.self_attn.o_proj.weight"}
    ids = IDS.cpu()
    with torch.no_grad():
        again = ligermodels.load(tmp_path / "merged", quantize="mxfp4")
        torch.testing.assert_close(again(ids).logits, model(ids).logits, rtol=0.02, atol=0.02)


def test_what_does_not_fit_is_refused_by_name(folders, tmp_path):
    with pytest.raises(
        InputError, match="quantize mxfp4: keeps what a checkpoint has in MXFP4, and this one has nothing"
    ):
        ligermodels.load(folders["dense"], quantize="mxfp4")
    stacked = saved(
        GRANITEMOE | SIZES | {"num_local_experts": EXPERTS, "intermediate_size": INNER}, tmp_path / "stacked"
    )
    with pytest.raises(InputError, match=r"input_linear\.weight: stacks experts, and checkpoints in FP8 have matrices"):
        ligermodels.export(ligermodels.load(stacked, quantize="fp8"), tmp_path / "fp8")

    def partly(tensors):
        stored, name = in_fp8(torch.float32)(tensors), f"{FIRST}.self_attn.k_proj.weight"
        del stored[f"{name}_scale_inv"]
        return stored | {name: tensors[name]}

    part = changed(folders["dense"], tmp_path / "part", partly, BLOCKS)
    with pytest.raises(CheckpointError, match=r"q_proj\.weight is in few bits, but is one weight here with .*k_proj"):
        ligermodels.load(part, quantize="fp8")

    def broken(tensors):
        stored = in_fp8(torch.float32)(tensors)
        stored[f"{FIRST}.self_attn.o_proj.weight"].view(torch.uint8)[3, 5] = 127
        return stored

    with pytest.raises(CheckpointError, match=r"tensor .*o_proj\.weight has values that are not finite"):
        ligermodels.load(changed(folders["dense"], tmp_path / "broken", broken, BLOCKS), quantize="fp8")
