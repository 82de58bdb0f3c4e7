"""MXFP4 checkpoints (gpt-oss): read exactly, written back byte for byte, or in 16 bits once a weight has changed."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import Shard

import ligermodels
from ligermodels.errors import CheckpointError
from ligermodels.weights.files import tensor_hashes
from ligermodels.weights.loading import load_weights
from tests.cases import CASES
from tests.layers.adapters import adapt
from tests.reference_model import reference_model
from tests.test_round_trip import reread
from tests.weights.test_loading import as_shard

WEIGHTS = "model.safetensors"
RAW = CASES["gpt_oss"] | {"dtype": "bfloat16", "torch_dtype": "bfloat16"}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens", "lm_head"]}
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
EXPERTS = "model.layers.1.mlp.experts."


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A folder with random codes, and scales from the smallest, 2^-127, to 2^-2."""
    folder = tmp_path_factory.mktemp("mxfp4")
    generator = torch.Generator().manual_seed(0)
    reference_model(RAW, torch.bfloat16).save_pretrained(folder)
    stored = load_file(folder / WEIGHTS)
    for name in [name for name in stored if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = stored.pop(name).shape
        blocks = experts, outputs, inputs // 32
        stored[f"{name}_blocks"] = torch.randint(256, (*blocks, 16), dtype=torch.uint8, generator=generator)
        stored[f"{name}_scales"] = torch.randint(118, 126, blocks, dtype=torch.uint8, generator=generator)
    stored[f"{EXPERTS}down_proj_scales"][0, 0, 0] = 0
    save_file(stored, folder / WEIGHTS, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(RAW | {"quantization_config": MXFP4}))
    return folder


def copy_of(checkpoint, folder, **changes):
    """A copy of the folder with some tensors replaced; None removes one."""
    shutil.copytree(checkpoint, folder)
    stored = {**load_file(folder / WEIGHTS), **changes}
    save_file({name: x for name, x in stored.items() if x is not None}, folder / WEIGHTS, {"format": "pt"})
    return folder


def element(stored, name, expert, row, column):
    """One element of a quantised tensor, by the definition of the format."""
    byte = int(stored[f"{name}_blocks"][expert, row, column // 32, column % 32 // 2])
    code = byte >> 4 if column % 2 else byte & 15
    return (
        (-1) ** (code >> 3) * VALUES[code & 7] * 2.0 ** (int(stored[f"{name}_scales"][expert, row, column // 32]) - 127)
    )


def config(folder):
    return json.loads((folder / "config.json").read_text())


def test_every_element_has_its_value(checkpoint):
    stored, model = load_file(checkpoint / WEIGHTS), ligermodels.load(checkpoint)
    assert model.dtype == torch.bfloat16
    experts = model.get_submodule(EXPERTS.removesuffix("."))
    for expert, row, column in [(0, 0, 0), (0, 0, 1), (0, 0, 31), (0, 1, 0), (4, 95, 31), (2, 50, 17)]:
        expected = element(stored, f"{EXPERTS}down_proj", expert, row, column)
        assert experts.down_proj[expert, row, column].item() == expected
    for expert, row, column in [(0, 0, 0), (0, 31, 95), (4, 32, 64), (3, 63, 33), (1, 40, 2)]:
        alternating = 2 * (row % 32) + row // 32  # gate rows come first here, and alternate with up in the file
        expected = element(stored, f"{EXPERTS}gate_up_proj", expert, alternating, column)
        assert experts.gate_up_proj[expert, row, column].item() == expected


def test_the_values_are_those_of_the_reference(checkpoint):
    model, packed = ligermodels.load(checkpoint), ligermodels.create(CASES["gpt_oss"], dtype=torch.bfloat16)
    packed.load_state_dict(reread(checkpoint, torch.bfloat16).state_dict())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), packed.parameters(), strict=True))


def test_what_is_untouched_is_written_back_byte_for_byte(checkpoint, tmp_path):
    ligermodels.export(ligermodels.load(checkpoint), tmp_path / "out", max_shard_size=20_000)
    assert tensor_hashes(tmp_path / "out") == tensor_hashes(checkpoint)
    assert config(tmp_path / "out")["quantization_config"] == MXFP4


@pytest.mark.filterwarnings("ignore:.*has changed. no weight is written quantised")
def test_a_changed_model_is_written_in_16_bits_under_the_names_of_16_bit_files(checkpoint, tmp_path):
    model = ligermodels.load(checkpoint)
    with torch.no_grad():
        model.get_parameter(f"{EXPERTS}down_proj")[0, 0, 0] += 1
    ligermodels.export(model, tmp_path / "out")
    written = load_file(tmp_path / "out" / WEIGHTS)
    assert written.keys() == reference_model(RAW).state_dict().keys()
    assert {x.dtype for x in written.values()} == {torch.bfloat16}
    assert "quantization_config" not in config(tmp_path / "out")
    again = ligermodels.load(tmp_path / "out")
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))


@pytest.mark.filterwarnings("ignore:.*has changed. no weight is written quantised")
def test_updates_of_the_experts_are_merged_in_16_bits(checkpoint, tmp_path):
    model = adapt(ligermodels.load(checkpoint), targets=["experts"])
    ligermodels.export(model, tmp_path / "out")
    merged, lora = load_experts(tmp_path / "out"), model.get_submodule(EXPERTS.removesuffix("."))
    for name in ("gate_up_proj", "down_proj"):
        a, b, scale = getattr(lora, name).low_rank(torch.float64)
        expected = (getattr(lora.base_layer, name).double() + scale * b @ a).bfloat16()
        assert torch.equal(getattr(merged, name), expected)


def load_experts(folder):
    return ligermodels.load(folder).get_submodule(EXPERTS.removesuffix("."))


def test_another_dtype_dequantises(checkpoint, tmp_path):
    ligermodels.export(ligermodels.load(checkpoint), tmp_path / "out", dtype="float32")
    written = load_file(tmp_path / "out" / WEIGHTS)
    assert written[f"{EXPERTS}down_proj"].shape == (5, 32, 96) and f"{EXPERTS}down_proj_blocks" not in written
    assert "quantization_config" not in config(tmp_path / "out")


def test_each_rank_reads_its_own_experts(checkpoint, rank_of):
    whole = load_experts(checkpoint)
    parts = []
    for rank in range(3):
        model = ligermodels.create(config(checkpoint), dtype=torch.bfloat16)
        experts, mesh = model.get_submodule(EXPERTS.removesuffix(".")), rank_of(rank, (3,))
        for name in ("gate_up_proj", "down_proj"):
            setattr(experts, name, as_shard(getattr(experts, name), mesh, [Shard(0)]))
        load_weights(model, checkpoint)
        parts.append([experts.gate_up_proj.to_local(), experts.down_proj.to_local()])
    gate_up, down = (torch.cat(shards) for shards in zip(*parts, strict=True))
    assert torch.equal(gate_up, whole.gate_up_proj) and torch.equal(down, whole.down_proj)


DOWN = f"{EXPERTS}down_proj"
FAULTS = {
    "a scale is missing": ({f"{DOWN}_scales": None}, r"down_proj_blocks lacks .*down_proj_scales"),
    "a scale has another dtype": (
        {f"{DOWN}_scales": torch.zeros(5, 96, 1)},
        r"down_proj_scales is torch\.float32 \[5, 96, 1\] instead of torch\.uint8 \[5, 96, 1\]",
    ),
    "a scale has another shape": (
        {f"{DOWN}_scales": torch.zeros(5, 96, 2, dtype=torch.uint8)},
        r"down_proj_scales is torch\.uint8 \[5, 96, 2\] instead of torch\.uint8 \[5, 96, 1\]",
    ),
    "a scale that is not a number": (
        {f"{DOWN}_scales": torch.full((5, 96, 1), 255, dtype=torch.uint8)},
        r"down_proj_scales has a scale that is no finite number; download it again",
    ),
    "a single block": (
        {f"{DOWN}_blocks": torch.tensor(3, dtype=torch.uint8)},
        r"down_proj_blocks is \[\], no blocks of 16 bytes",
    ),
    "blocks of another size": (
        {f"{DOWN}_blocks": torch.zeros(5, 96, 2, 8, dtype=torch.uint8)},
        r"down_proj_blocks is \[5, 96, 2, 8\] instead of \[5, 96, 32\]",
    ),
    "too few blocks": (
        {f"{DOWN}_blocks": torch.zeros(5, 95, 1, 16, dtype=torch.uint8)},
        r"down_proj_blocks is \[5, 95, 32\] instead of \[5, 96, 32\]",
    ),
    "another 8-bit format": (
        {f"{EXPERTS}down_proj_bias": torch.zeros(5, 96, dtype=torch.float8_e5m2)},
        r"down_proj_bias is torch\.float8_e5m2",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_tensors_that_do_not_fit_are_refused(name, checkpoint, tmp_path):
    changes, message = FAULTS[name]
    with pytest.raises(CheckpointError, match=message):
        ligermodels.load(copy_of(checkpoint, tmp_path / "in", **changes))


@pytest.mark.parametrize("quantize", [None, "mxfp4"])
def test_a_scale_that_overflows_is_refused(checkpoint, tmp_path, quantize):
    changes = {f"{DOWN}_scales": torch.full((5, 96, 1), 254, dtype=torch.uint8)}
    with pytest.raises(CheckpointError, match=r"tensor .*down_proj_blocks has values that are not finite in bfloat16"):
        ligermodels.load(copy_of(checkpoint, tmp_path / "in", **changes), quantize=quantize)


def test_blocks_without_the_quantization_config_are_refused(checkpoint, tmp_path):
    folder = copy_of(checkpoint, tmp_path / "in")
    (folder / "config.json").write_text(json.dumps(RAW))
    with pytest.raises(CheckpointError, match=r"missing: .*gate_up_proj|of the wrong shape: .*_blocks"):
        ligermodels.load(folder)
