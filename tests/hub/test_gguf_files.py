"""GGUF models by their names on the Hub: owner/model:FILE, or a part of the file's name."""

import pytest
import torch

import ligermodels
from ligermodels.cli import main
from ligermodels.errors import HubError
from ligermodels.hub.adapters import base_model

pytest.importorskip("gguf")
from tests.gguf.files import family_model, write_model

NAME = "owner/model-GGUF"


@pytest.fixture
def model():
    return family_model("llama")


@pytest.fixture
def repository(server, model, tmp_path, monkeypatch):
    """A repository with two models, and a vision tower that is none."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    files = {f"model-{kind.upper()}.gguf": write_model(model, tmp_path, kind).read_bytes() for kind in ("f32", "q8_0")}
    server.add(NAME, files | {"mmproj-F16.gguf": b"no language model", "README.md": b""})
    return server


@pytest.mark.parametrize("name", ["model-F32.gguf", "F32", "f32"])
def test_a_file_is_found_by_its_name_or_a_part_of_it(repository, model, name):
    loaded = ligermodels.load(f"{NAME}:{name}")
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters(), strict=True))
    assert ligermodels.load_tokenizer(f"{NAME}:{name}").encode("Hi")[0] == 0
    assert not [request for request in repository.requests if "Q8_0" in request.path]
    commit = repository.repositories[NAME].refs["main"]
    assert base_model(loaded.source) == (f"{NAME}:model-F32.gguf", commit)


def test_create_reads_the_configuration_alone(repository, model):
    new = ligermodels.create(f"{NAME}:F32", seed=7)
    assert new.config.hidden_size == model.config.hidden_size and new.source is None
    assert not torch.equal(new.head.weight, model.head.weight)


def test_info_and_generate_take_the_name(repository, capsys):
    assert main(["info", f"{NAME}:Q8_0"]) == 0
    assert "model-Q8_0.gguf" in capsys.readouterr().out
    assert main(["generate", f"{NAME}:model-Q8_0.gguf", "--prompt", "Hi", "--max-new-tokens", "2"]) == 0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (NAME, "has no config.json, but GGUF; name one of its files: owner/model-GGUF:model-F32.gguf, owner"),
        (f"{NAME}:model", "several GGUF models are 'model': model-F32.gguf, model-Q8_0.gguf; it has owner/model-GGUF:"),
        (f"{NAME}:Q4", "no GGUF model is 'Q4'; it has owner/model-GGUF:model-F32.gguf, owner/model-GGUF:model-Q8_0.g"),
        (f"{NAME}:other.gguf", "has no file other.gguf; it has owner/model-GGUF:model-F32.gguf"),
        ("owner/none:x.gguf", "owner/none: is no folder, and is not a repository of the Hub"),
    ],
)
def test_a_name_that_is_no_file_is_refused_with_those_that_are(repository, name, words):
    for call in (ligermodels.load, ligermodels.load_tokenizer):
        if call is ligermodels.load_tokenizer and name == NAME:
            continue  # without config.json a folder may have a tokenizer alone
        with pytest.raises(HubError) as error:
            call(name)
        assert words in str(error.value)
