"""Load and export give back the same bytes and fields, and the reference implementation reads what was written."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import ligermodels
from ligermodels.weights.exporting import export_weights
from tests.cases import CASES
from tests.oracle import reference_model, save_reference, tokens


def bits(folder):
    """The tensors of a folder by name, as raw bytes with dtype and shape."""
    tensors = {name: x for file in folder.glob("*.safetensors") for name, x in load_file(file).items()}
    return {name: (x.dtype, x.shape, x.contiguous().view(torch.uint8).tolist()) for name, x in tensors.items()}


def config(folder):
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("name", CASES)
def test_export_gives_back_what_was_loaded(name, tmp_path):
    reference = save_reference(CASES[name], tmp_path / "in")
    model = ligermodels.load(tmp_path / "in")
    ligermodels.export(model, tmp_path / "out")

    assert bits(tmp_path / "out") == bits(tmp_path / "in")
    written = config(tmp_path / "out")
    assert {key: written[key] for key in CASES[name]} == CASES[name]
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager", dtype=torch.float32)
    input_ids = tokens(CASES[name])
    assert torch.equal(read(input_ids).logits, reference(input_ids).logits)


@pytest.mark.parametrize("name", CASES)
def test_the_spelling_of_transformers_5_reads_to_the_same_model(name, tmp_path):
    """What save_pretrained writes: rope_parameters, layer_types, dtype. Exported, both spellings are there."""
    reference_model(CASES[name]).save_pretrained(tmp_path / "new")
    save_reference(CASES[name], tmp_path / "old")
    assert "rope_parameters" in config(tmp_path / "new") and "rope_theta" not in config(tmp_path / "new")
    old, new = (ligermodels.load(tmp_path / folder) for folder in ("old", "new"))
    input_ids = tokens(CASES[name])
    assert torch.equal(old(input_ids).logits, new(input_ids).logits)

    ligermodels.export(new, tmp_path / "out")
    written = config(tmp_path / "out")
    assert written["rope_theta"] == CASES[name]["rope_theta"]
    assert written["torch_dtype"] == written["dtype"] == "float32"
    assert written.items() >= config(tmp_path / "new").items()


@pytest.mark.parametrize("name", ["llama-tied", "qwen2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sharded_half_precision(name, dtype, tmp_path):
    reference_model(CASES[name], dtype).save_pretrained(tmp_path / "in", max_shard_size="40KB")
    assert len(list((tmp_path / "in").glob("*.safetensors"))) > 2
    model = ligermodels.load(tmp_path / "in")
    assert model.lm_head.weight.dtype == dtype
    export_weights(model, tmp_path / "out", source=tmp_path / "in", max_shard_size=40_000)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    assert bits(tmp_path / "out") == bits(tmp_path / "in")
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=dtype)
    assert read.state_dict().keys() == reference_model(CASES[name]).state_dict().keys()
