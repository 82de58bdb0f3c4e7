"""A checkpoint has as many layers that predict further tokens as its config.json says, or none."""

import pytest
import torch
from safetensors.torch import load_file, save_file

import ligermodels
from ligermodels.errors import CheckpointError
from ligermodels.weights.files import open_checkpoint
from ligermodels.weights.loading import plan_loading
from tests.cases import CASES

GROUPED, QWEN = "num_nextn_predict_layers", "mtp_num_hidden_layers"
FAMILIES = {  # case -> (the field, the name of a layer, the first number)
    "glm4_moe": (GROUPED, "model.layers.{}", 3),
    "glm4_moe_lite": (GROUPED, "model.layers.{}", 3),
    "deepseek_v3": (GROUPED, "model.layers.{}", 3),
    "qwen3_5_text": (QWEN, "mtp.layers.{}", 0),
    "qwen3_5_moe": (QWEN, "mtp.layers.{}", 0),
    "qwen3_next": (QWEN, "mtp.layers.{}", 0),
}


def counting(raw, field, count):
    """The config.json `raw`, which counts `count` layers."""
    text = raw.get("text_config")
    return raw | ({field: count} if text is None else {"text_config": text | {field: count}})


@pytest.mark.parametrize("name", FAMILIES)
def test_layers_of_further_tokens_are_as_many_as_config_json_says_or_none(name, tmp_path):
    field, layer, first = FAMILIES[name]
    model = ligermodels.create(counting(CASES[name], field, 2), device="meta")
    assert model.config.num_hidden_layers == first or not first
    ligermodels.export(ligermodels.create(model.config.raw), tmp_path)
    others = load_file(tmp_path / "model.safetensors")

    def kept(*numbers):
        """What a plan keeps of a checkpoint with these layers."""
        added = {f"{layer.format(number)}.eh_proj.weight": torch.zeros(2) for number in numbers}
        save_file(others | added, tmp_path / "model.safetensors")
        return plan_loading(model, open_checkpoint(tmp_path)).kept

    assert kept() == ()
    assert kept(first, first + 1) == tuple(f"{layer.format(first + i)}.eh_proj.weight" for i in range(2))
    with pytest.raises(CheckpointError) as some:
        kept(first + 1)
    assert str(some.value) == (
        f"{tmp_path}: its files have {layer.format(first + 1)} to predict further tokens, but {field} in config.json "
        "is 2; correct that, or download the folder again"
    )
    with pytest.raises(CheckpointError, match=rf"{layer.format(first + 2)}"):
        kept(first, first + 1, first + 2)


def test_no_layer_of_further_tokens_is_kept_where_config_json_counts_none(tmp_path):
    raw = counting(CASES["qwen3_5_text"], QWEN, 0)
    ligermodels.export(ligermodels.create(raw), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors") | {"mtp.layers.7.x": torch.zeros(1)}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"have mtp\.layers\.7 .*{QWEN} in config\.json is 0; correct that"):
        ligermodels.load(tmp_path)
