import json
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import nn

import ligermodels
from ligermodels import hub
from ligermodels.architectures import ARCHITECTURES
from ligermodels.errors import CheckpointError, HubError, InputError
from ligermodels.hub import models
from ligermodels.hub.adapters import base_model
from ligermodels.hub.models import meant_size
from tests.weights.tiny import LAYERS, RAW, Tiny, randomized


@dataclass(frozen=True)
class FakeConfig:
    raw: dict
    tie_word_embeddings: bool
    alternative_names: ClassVar = {}
    num_hidden_layers: ClassVar = LAYERS

    @classmethod
    def from_dict(cls, raw):
        return cls(raw, raw.get("tie_word_embeddings", False))


class Fake(Tiny):
    """The tiny model with the attributes that hub needs of an architecture."""

    Config = FakeConfig
    SIZES = {"tiny": RAW, "tied": RAW | {"tie_word_embeddings": True}}  # noqa: RUF012

    @classmethod
    def of_config(cls, raw):
        return cls

    def to_empty(self, **where):
        super().to_empty(**where)
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        return self

    def initialize(self, seed):
        randomized(self, seed)


@pytest.fixture(autouse=True)
def architectures(monkeypatch):
    monkeypatch.setattr(models, "ARCHITECTURES", {"tiny": Fake, "other": Fake})


def same(model, other) -> bool:
    return all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("size", ["tiny", "tied"])
def test_create_export_load_gives_the_same_model(tmp_path, size):
    model = hub.create("tiny", size=size, seed=3)
    hub.export(model, tmp_path / "out")
    loaded = hub.load(tmp_path / "out")
    assert same(model, loaded) and loaded.source == tmp_path / "out"
    assert not loaded.training and model.training
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == (size == "tied")


def test_create_takes_the_names_that_other_entrances_take(tmp_path):
    tiny, tied = hub.create("tiny", seed=3), hub.create("tiny:tied", seed=3)
    assert same(tiny, hub.create("tiny", size="tiny", seed=3)) and same(tied, hub.create("tiny", size="tied", seed=3))
    hub.export(tied, tmp_path / "out")
    for name in (tmp_path / "out", str(tmp_path / "out"), tmp_path / "out" / "config.json"):
        assert same(tied, hub.create(name, seed=3))
    with pytest.raises(HubError, match="tiny:tied: is an architecture and has no weights to load"):
        hub.load("tiny:tied")


def test_load_uses_the_dtype_of_the_config_by_default(tmp_path):
    hub.export(hub.create("tiny", size="tiny", dtype=torch.bfloat16), tmp_path / "out")
    assert hub.load(tmp_path / "out").lm_head.weight.dtype == torch.bfloat16
    assert hub.load(tmp_path / "out", dtype=torch.float32).lm_head.weight.dtype == torch.float32


@pytest.mark.parametrize("name", ["bfloat16", "torch.bfloat16"])
def test_a_dtype_may_be_given_by_its_name(tmp_path, name):
    hub.export(hub.create("tiny", size="tiny", dtype="float16"), tmp_path / "half", dtype=name)
    assert hub.load(tmp_path / "half").lm_head.weight.dtype == torch.bfloat16
    assert hub.load(tmp_path / "half", dtype="float32").lm_head.weight.dtype == torch.float32
    with pytest.raises(InputError, match="dtype is 'bf16'; must be one of float64, float32, float16"):
        hub.load(tmp_path / "half", dtype="bf16")


def test_export_accepts_a_dtype_and_a_shard_size(tmp_path):
    model = hub.create("tiny", size="tiny")
    hub.export(model, tmp_path / "out", dtype=torch.bfloat16, max_shard_size="0.3KB")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    assert same(hub.load(tmp_path / "out"), model.bfloat16())


def test_a_folder_in_the_hub_cache_is_named_by_its_hub_id_and_commit_and_another_by_its_absolute_path(
    tmp_path, monkeypatch
):
    cached = tmp_path / "models--meta-llama--Llama-3.2-1B" / "snapshots" / "4e20de36"
    assert base_model(cached) == ("meta-llama/Llama-3.2-1B", "4e20de36")
    assert base_model(tmp_path / "my--model") == (str(tmp_path / "my--model"), None)
    monkeypatch.chdir(tmp_path)
    assert base_model(Path("other/../my--model")) == (str(tmp_path / "my--model"), None)


@pytest.mark.parametrize(
    "device",
    ["cpu", torch.device("cpu"), *(pytest.param(cuda, marks=pytest.mark.gpu) for cuda in (0, "cuda", "cuda:0"))],
)
def test_load_accepts_every_form_of_a_device(tmp_path, device):
    model = hub.create("tiny", size="tiny", seed=3)
    hub.export(model, tmp_path / "out")
    loaded = hub.load(tmp_path / "out", device=device)
    assert {parameter.device for parameter in loaded.parameters()} == {torch.empty(0, device=device).device}
    assert same(model, loaded.cpu())


@pytest.mark.parametrize("absent", ["missing", None])
def test_load_uses_the_stored_dtype_if_the_config_has_none(tmp_path, absent):
    hub.export(hub.create("tiny", size="tiny", dtype=torch.float16), tmp_path / "out")
    raw = RAW | {"torch_dtype": None}
    if absent == "missing":
        del raw["torch_dtype"]
    (tmp_path / "out" / "config.json").write_text(json.dumps(raw))
    assert hub.load(tmp_path / "out").lm_head.weight.dtype == torch.float16


def test_an_unknown_dtype_is_refused(tmp_path):
    hub.export(hub.create("tiny", size="tiny"), tmp_path / "out")
    (tmp_path / "out" / "config.json").write_text(json.dumps(RAW | {"torch_dtype": "int4"}))
    with pytest.raises(CheckpointError, match=r"config\.json: dtype 'int4' is not one of"):
        hub.load(tmp_path / "out")


def test_create_accepts_a_dict_a_file_and_a_folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(RAW))
    models = [hub.create(source) for source in (RAW, tmp_path, str(tmp_path / "config.json"))]
    assert all(same(models[0], model) for model in models)
    assert not same(models[0], hub.create(RAW, seed=1))


def test_create_on_meta_allocates_nothing():
    model = hub.create("tiny", size="tiny", device="meta", dtype=torch.bfloat16)
    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in model.parameters())


def test_a_revision_of_a_folder_is_refused(tmp_path):
    hub.export(hub.create("tiny", size="tiny"), tmp_path / "out")
    with pytest.raises(HubError, match="out: is a folder and has no revision 'main'; leave it out"):
        hub.load(tmp_path / "out", revision="main")


def test_architectures_are_listed_in_order():
    names = hub.list_architectures()
    assert names == sorted(ARCHITECTURES) and ligermodels.list_architectures() == names


def test_an_unknown_model_type_gets_a_suggestion_and_what_lists_the_supported_ones(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(RAW | {"model_type": "tinny", "auto_map": {"AutoModel": "x.Y"}}))
    with pytest.raises(HubError) as caught:
        hub.load(tmp_path)
    assert "model_type 'tinny' is not supported; did you mean 'tiny'?; `ligermodels list` shows" in str(caught.value)
    assert str(tmp_path / "config.json") in str(caught.value)


@pytest.mark.parametrize("model_type", [None, 5, ["tiny"]])
def test_a_model_type_that_is_not_a_string_is_refused(model_type):
    with pytest.raises(HubError, match=r"config: model_type .* is not supported"):
        hub.create(RAW | {"model_type": model_type})


def test_auto_map_of_a_known_model_type_is_ignored(tmp_path):
    hub.export(hub.create(RAW | {"auto_map": {"AutoModel": "evil.Model"}}), tmp_path / "out")
    (tmp_path / "out" / "evil.py").write_text("raise SystemExit('remote code was run')")
    assert isinstance(hub.load(tmp_path / "out"), nn.Module)


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [("7b", "2-7b"), ("13B", "8b"), ("100m", "135m"), ("400b", "70b"), ("tinny", "tiny"), ("huge", None)],
)
def test_the_hint_for_a_size_is_the_nearest_number_of_parameters(wrong, meant):
    hint = "" if meant is None else f"; did you mean {meant!r}?"
    sizes = ("tiny", "135m", "2-7b", "8b", "70b")
    assert meant_size(wrong, sizes) == f"{hint}; choose from: tiny, 135m, 2-7b, 8b, 70b"


@pytest.mark.parametrize(
    ("source", "size", "names"),
    [
        ("tiny", "tinny", "tiny: size 'tinny' is not a preset; did you mean 'tiny'?; choose from: tiny, tied"),
        ("tiny:tinny", None, "tiny: size 'tinny' is not a preset; did you mean 'tiny'?; choose from: tiny, tied"),
        ("tiny:", None, "tiny: size '' is not a preset; choose from: tiny, tied"),
        ("tiny:tied", "tiny", "tiny:tied: has a size, and size='tiny' is given too; leave one out"),
        ("tinny", None, "tinny: is neither an architecture nor a config.json; did you mean 'tiny'?"),
        ("tinny", "tiny", "tinny: size 'tiny' needs the name of an architecture; did you mean 'tiny'?"),
    ],
)
def test_create_refuses_an_unknown_architecture_or_preset(source, size, names):
    with pytest.raises(HubError) as caught:
        hub.create(source, size=size)
    assert names in str(caught.value)


def test_the_error_for_an_architecture_without_presets_says_what_to_do(monkeypatch):
    monkeypatch.setattr(Fake, "SIZES", {})
    with pytest.raises(HubError, match=r"tiny: has no presets; load a checkpoint, or pass a config\.json"):
        hub.create("tiny", size="tiny")
