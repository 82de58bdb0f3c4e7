"""Runs that continue an adapter: they begin where it ended, keep its settings, and resume bit by bit."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ligermodels
from ligermodels.errors import InputError
from ligermodels.training import TrainConfig, plan
from ligermodels.training.data.reader import read_tokenizer_and_end
from ligermodels.training.data.run_tokenizer import GENERATION_CONFIG
from ligermodels.training.settings.settings import read_settings, with_base_of_adapter
from tests.training.launching import records

DATA = ["--data", "own.txt", "--batch-size", "2", "--sequence-length", "64"]
SMALL = [*DATA, "--warmup", "0", "--learning-rate", "2e-3"]
LORA = ["--lora-rank", "4", "--lora-alpha", "6", "--lora-dropout", "0.3", "--lora-targets", "q_proj"]


@pytest.fixture(scope="module")
def first(launcher):
    """The folder of a LoRA run on a tiny model, which exports its adapter."""
    launcher.succeed("--model", "llama", "--steps", "1", "--output", "origin", *SMALL)
    saved = ["--modules-to-save", "lm_head", "--lora-export", "adapter"]
    launcher.succeed("--model", "origin/model", "--steps", "2", "--output", "first", *LORA, *saved, *SMALL)
    return launcher.folder / "first"


@pytest.fixture(scope="module")
def second(first, launcher):
    """The folder of a run that continues its adapter."""
    continued = ["--adapter", "first/adapter", "--steps", "4", "--checkpoint-every", "2"]
    launcher.succeed(*continued, "--output", "second", *SMALL)
    return launcher.folder / "second"


def validation_losses(folder):
    return [record["validation_loss"] for record in records(folder) if "validation_loss" in record]


def test_a_run_continues_an_adapter_where_it_ended_and_exports_an_adapter(first, second):
    assert validation_losses(second)[0] == pytest.approx(validation_losses(first)[-1], rel=1e-6)
    assert validation_losses(second)[-1] < validation_losses(second)[0]
    base = str(first.parent / "origin/model")
    saved = read_settings(second / "train.toml")
    assert (saved["model"], saved["adapter"]) == (base, "first/adapter")
    assert not saved.keys() & {"lora_rank", "lora_alpha", "lora_export"}

    before, after = (json.loads((run / "adapter/adapter_config.json").read_text()) for run in (first, second))
    assert before == after and after["base_model_name_or_path"] == base
    assert (after["r"], after["lora_alpha"], after["target_modules"], after["modules_to_save"]) == (
        4, 6, ["q_proj"], ["lm_head"],
    )  # fmt: skip
    assert {file.name for file in (second / "adapter").iterdir()} == {
        "adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    old, new = (load_file(run / "adapter/adapter_model.safetensors") for run in (first, second))
    assert old.keys() == new.keys() and not any(torch.equal(old[name], new[name]) for name in old)


def test_a_run_that_continues_an_adapter_resumes_bit_by_bit_and_can_be_merged(second, launcher):
    killed = Path(shutil.copytree(second, second.with_name("second-resumed")))
    shutil.rmtree(killed / "adapter")
    shutil.rmtree(killed / "checkpoints/step-000004")
    launcher.succeed("--resume", "second-resumed")
    for file in (second / "adapter").iterdir():
        assert (killed / "adapter" / file.name).read_bytes() == file.read_bytes(), file.name
    shutil.rmtree(killed / "adapter")
    launcher.succeed("--resume", "second-resumed", "--lora-export", "merged")
    expected = ligermodels.load(second.parent / "origin/model")
    ligermodels.load_adapter(expected, second / "adapter")
    ids = torch.arange(24)[None]
    merged = ligermodels.load(killed / "model")
    torch.testing.assert_close(merged(ids).logits, expected(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"lora_rank": 8},
            "--lora-rank 8: .*adapter_config.json has r 4, which --adapter continues: leave the flag out",
        ),
        ({"lora_alpha": 8}, "--lora-alpha 8.0: .* has lora_alpha 6"),
        ({"lora_dropout": 0.1}, "--lora-dropout 0.1: .* has lora_dropout 0.3"),
        ({"lora_targets": "k_proj"}, "--lora-targets k_proj: .* has target_modules q_proj"),
        ({"modules_to_save": ("lm_head", "norm")}, "--modules-to-save lm_head norm: .* has modules_to_save lm_head"),
        ({"model": "llama"}, "--adapter .*first/adapter: llama is a family with new weights"),
    ],
)
def test_settings_that_contradict_the_adapter_are_refused_by_name(settings, message, first):
    with pytest.raises(InputError, match=message):
        plan(TrainConfig(adapter=str(first / "adapter"), **settings))


def test_an_adapter_that_names_no_base_needs_the_model(first, tmp_path):
    nameless = Path(shutil.copytree(first / "adapter", tmp_path / "nameless"))
    config = json.loads((nameless / "adapter_config.json").read_text())
    (nameless / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": None}))
    with pytest.raises(InputError, match="base_model_name_or_path is None; it names no model; give it by --model"):
        with_base_of_adapter(TrainConfig(adapter=str(nameless)))
    same = {"lora_rank": 4, "lora_alpha": 6, "lora_targets": "q_proj", "modules_to_save": "lm_head"}
    given = TrainConfig(adapter=str(nameless), model="base/model", **same)
    assert with_base_of_adapter(given) == given


def test_the_tokenizer_and_the_end_of_text_of_the_adapter_come_first(first, tmp_path):
    ligermodels.export(ligermodels.create("llama", size="tiny"), tmp_path / "bare")
    adapter = Path(shutil.copytree(first / "adapter", tmp_path / "adapter"))
    (adapter / "generation_config.json").write_text(json.dumps(GENERATION_CONFIG))
    tokenizer, end = read_tokenizer_and_end(tmp_path / "bare", adapter)
    assert (tokenizer.file, end) == (adapter / "tokenizer.json", 0)
