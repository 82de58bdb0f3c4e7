"""FP8 weights, tensors of other dtypes and tensors that are not computed: read, and written back byte for byte."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import Shard

import ligermodels
from ligermodels.errors import CheckpointError, InputError
from ligermodels.weights import streaming
from ligermodels.weights.exporting import export_weights
from ligermodels.weights.files import tensor_hashes
from ligermodels.weights.loading import load_weights
from ligermodels.weights.writing import write_json
from tests.cases import CASES
from tests.weights.test_loading import as_shard
from tests.weights.tiny import RAW, Tiny, TinyConfig, hub_state, randomized

BLOCK = (4, 4)  # Q is 8 rows and HIDDEN 6 columns: the last blocks of columns are partial
FP8 = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
BY_BLOCK = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK)}
QUANTISED = re.compile(r".*\.(q_proj|down_proj|w1|w3)\.weight")


class Multimodal(Tiny):
    def kept_tensors(self):
        return ("vision_tower", "mtp.{}")


def model(raw=RAW):
    return Multimodal(TinyConfig(raw=dict(raw))).bfloat16()


def quantise(name, weight, by_block):
    """Codes and scales, and the values that they mean, element by element."""
    rows, columns = weight.shape
    if by_block:
        scale = torch.rand(-(-rows // BLOCK[0]), -(-columns // BLOCK[1])) + 0.5
        of_element = scale[torch.arange(rows)[:, None] // BLOCK[0], torch.arange(columns) // BLOCK[1]]
    else:
        scale = torch.tensor(0.7)
        of_element = scale
    codes = (weight.float() / of_element).to(torch.float8_e4m3fn)
    stored = {name: codes, f"{name}_scale_inv": scale}
    if not by_block:
        stored[name.replace("weight", "activation_scale")] = torch.tensor(0.3)
    return stored, (codes.float() * of_element).bfloat16()


def write_checkpoint(folder, by_block=None):
    """A checkpoint with a vision tower, an fp32 norm and, if by_block is given, FP8 weights; returns its values."""
    torch.manual_seed(0)
    folder.mkdir()
    values = {name: x.bfloat16() for name, x in hub_state(randomized(Tiny())).items()}
    stored = dict(values)
    stored["model.norm.weight"] = torch.randn(6)
    values["model.norm.weight"] = stored["model.norm.weight"].bfloat16()
    stored["vision_tower.patch.weight"] = torch.randn(3, 5).half()
    stored["mtp.0.count"] = torch.tensor([3, 4])
    raw = RAW | {"torch_dtype": "bfloat16"}
    if by_block is not None:
        raw["quantization_config"] = BY_BLOCK if by_block else FP8
        for name in filter(QUANTISED.fullmatch, values):
            codes, values[name] = quantise(name, values[name], by_block)
            stored |= codes
    save_file(stored, folder / "model.safetensors")
    write_json(folder / "config.json", raw)
    return raw, values


def read(folder):
    return {name: x for file in folder.glob("*.safetensors") for name, x in load_file(file).items()}


@pytest.mark.parametrize("by_block", [None, False, True])
def test_what_is_untouched_is_written_back_byte_for_byte(tmp_path, by_block):
    raw, values = write_checkpoint(tmp_path / "in", by_block)
    loaded = model(raw)
    load_weights(loaded, tmp_path / "in")
    assert {name: x.tolist() for name, x in hub_state(loaded).items()} == {n: x.tolist() for n, x in values.items()}
    assert set(loaded.kept) == {"vision_tower.patch.weight", "mtp.0.count"}
    assert not any("vision" in name for name in loaded.state_dict())
    export_weights(loaded, tmp_path / "out", source=tmp_path / "in", max_shard_size=400)
    assert tensor_hashes(tmp_path / "out") == tensor_hashes(tmp_path / "in")
    assert (tmp_path / "out" / "config.json").read_bytes() == (tmp_path / "in" / "config.json").read_bytes()


@pytest.mark.parametrize("by_block", [False, True])
def test_after_training_no_weight_is_quantised_and_no_scale_is_left(tmp_path, by_block):
    raw, values = write_checkpoint(tmp_path / "in", by_block)
    loaded = model(raw)
    load_weights(loaded, tmp_path / "in")
    with torch.no_grad():
        loaded.model.layers[1].self_attn.qkv_proj.weight[0, 0] += 1
    changed = "model.layers.1.self_attn.q_proj.weight"
    with pytest.warns(UserWarning, match=rf"model\.safetensors: {changed} has changed: no weight is written quantised"):
        export_weights(loaded, tmp_path / "out", source=tmp_path / "in")
    written, before = read(tmp_path / "out"), read(tmp_path / "in")
    values[changed][0, 0] += 1
    untouched = ("model.norm.weight", "vision_tower.patch.weight", "mtp.0.count")
    values |= {name: before[name] for name in untouched}
    assert written.keys() == values.keys()
    assert all(written[n].dtype == values[n].dtype and torch.equal(written[n], values[n]) for n in values)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == {key: value for key, value in raw.items() if key != "quantization_config"}


def test_a_changed_tensor_of_another_dtype_is_written_in_the_models(tmp_path):
    raw, _ = write_checkpoint(tmp_path / "in")
    loaded = model(raw)
    load_weights(loaded, tmp_path / "in")
    with torch.no_grad():
        loaded.model.norm.weight += 1
    export_weights(loaded, tmp_path / "out", source=tmp_path / "in")
    assert torch.equal(read(tmp_path / "out")["model.norm.weight"], loaded.model.norm.weight)


def test_a_dtype_that_is_asked_for_applies_to_all_weights_but_kept_ones(tmp_path):
    raw, _ = write_checkpoint(tmp_path / "in", by_block=True)
    loaded = model(raw)
    load_weights(loaded, tmp_path / "in")
    export_weights(loaded, tmp_path / "out", source=tmp_path / "in", dtype="float32")
    dtypes = {name: x.dtype for name, x in read(tmp_path / "out").items()}
    assert dtypes.pop("vision_tower.patch.weight") == torch.float16 and dtypes.pop("mtp.0.count") == torch.int64
    assert set(dtypes.values()) == {torch.float32} and not any("scale" in name for name in dtypes)


def test_each_rank_scales_its_own_rows(tmp_path, rank_of):
    raw, _ = write_checkpoint(tmp_path / "in", by_block=True)
    whole = model(raw)
    load_weights(whole, tmp_path / "in")
    parts = []
    for rank in range(3):
        sharded, mesh = model(raw), rank_of(rank, (3,))
        qkv = sharded.model.layers[0].self_attn.qkv_proj
        qkv.weight = as_shard(qkv.weight, mesh, [Shard(0)])
        load_weights(sharded, tmp_path / "in")
        parts.append(qkv.weight.to_local())
    assert torch.equal(torch.cat(parts).bfloat16(), whole.model.layers[0].self_attn.qkv_proj.weight)


def test_kept_tensors_need_the_folder_that_they_come_from(tmp_path):
    raw, _ = write_checkpoint(tmp_path / "in")
    loaded = model(raw)
    load_weights(loaded, tmp_path / "in")
    with pytest.raises(InputError, match=r"is copied from the folder .* was loaded from: pass it as source"):
        export_weights(loaded, tmp_path / "out")
    stored = {name: x for name, x in read(tmp_path / "in").items() if "vision" not in name}
    save_file(stored, tmp_path / "in" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"tensor vision_tower\.patch\.weight, which .*, is missing"):
        export_weights(loaded, tmp_path / "out", source=tmp_path / "in")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda name, x: {}, r"10 without a fitting scale: .*q_proj\.weight lacks .*q_proj\.weight_scale_inv"),
        (lambda name, x: {name: x.double()}, r"without a fitting scale: .*_scale_inv is torch\.float64"),
        (lambda name, x: {name: x / 0}, r"_scale_inv has a scale that is no finite number; download it again"),
        (lambda name, x: {name: x[:1]}, r"without a fitting scale: .*_scale_inv is \[1, 2\] instead of \[2, 2\]"),
    ],
)
def test_a_scale_that_does_not_fit_is_refused(tmp_path, change, message):
    raw, _ = write_checkpoint(tmp_path / "in", by_block=True)
    stored = read(tmp_path / "in")
    for name in [name for name in stored if name.endswith("_scale_inv") and "layers.0.sparse" not in name]:
        stored |= change(name, stored.pop(name))
    save_file(stored, tmp_path / "in" / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        load_weights(model(raw), tmp_path / "in")


def test_values_of_fp8_weights_are_looked_at_once(tmp_path, monkeypatch):
    """Which on a GPU waits for all that was decoded before."""
    looks = []
    monkeypatch.setattr(streaming, "refuse_any_not_finite", lambda sums: looks.append(len(sums)))
    monkeypatch.setattr(streaming, "refuse_not_finite", lambda *_: pytest.fail("looks at a tensor"))
    raw, _ = write_checkpoint(tmp_path / "in", by_block=True)
    load_weights(model(raw), tmp_path / "in")
    assert len(looks) == 1 and looks[0] > 10


@pytest.mark.parametrize("scale", [1.0, 3e38], ids=["NaN", "an overflow"])
@pytest.mark.parametrize("in_bits", [False, True])
def test_values_that_are_not_finite_are_refused_by_the_name_of_their_tensor(tmp_path, scale, in_bits):
    """NaN as a code; a finite scale with which the values are too large."""
    name = "model.layers.0.self_attn.o_proj.weight"
    config = CASES["llama"] | {"quantization_config": BY_BLOCK, "torch_dtype": "bfloat16"}
    ligermodels.export(ligermodels.create(CASES["llama"], dtype="bfloat16"), tmp_path / "in")
    stored = read(tmp_path / "in")
    codes = stored[name].to(torch.float8_e4m3fn)
    codes.view(torch.uint8)[0, 0] = 126 if scale > 1 else 127
    blocks = [-(-size // block) for size, block in zip(codes.shape, BLOCK, strict=True)]
    stored |= {name: codes, f"{name}_scale_inv": torch.full(blocks, scale)}
    save_file(stored, tmp_path / "in" / "model.safetensors")
    write_json(tmp_path / "in" / "config.json", config)
    with pytest.raises(CheckpointError, match=rf"tensor {re.escape(name)} has values that are not finite in bfloat16"):
        ligermodels.load(tmp_path / "in", quantize="fp8" if in_bits else None)
