import re
from pathlib import Path

import pytest

from ligermodels.errors import HubError
from ligermodels.hub.models import select_architecture
from ligermodels.hub.names import (
    ABSENT_FAMILIES,
    known_models,
    list_architectures,
    nearest_model,
    normalized_name,
    refuse_mistyped,
)

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("meta-llama/Llama-3-8B", "meta-llama/Meta-Llama-3-8B"),
        ("Llama-3-8B", "meta-llama/Meta-Llama-3-8B"),
        ("llama3-8b", "meta-llama/Meta-Llama-3-8B"),
        ("meta-llama/Llama-3-8B-instruct", "meta-llama/Meta-Llama-3-8B-Instruct"),
        ("meta-llama/Meta-Llama-3.1-8B", "meta-llama/Llama-3.1-8B"),
        ("qwen2.5-7b", "Qwen/Qwen2.5-7B"),
        ("Qwen/Qwen25-7B", "Qwen/Qwen2.5-7B"),
        ("mistral/Mistral-7B-v0.3", "mistralai/Mistral-7B-v0.3"),
        ("google/gemma2-2b", "google/gemma-2-2b"),
        ("phi-4-mini", "microsoft/Phi-4-mini-instruct"),
        ("gpt2", None),
        ("google-bert/bert-base-uncased", None),
    ],
)
def test_a_mistyped_name_gets_the_most_similar_known_model(typed, meant):
    assert nearest_model(typed, known_models()) == meant


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("mamba", None),
        ("mamba2", None),
        ("voxtral", None),
        ("qwne2", "qwen2"),
        ("lama", "llama"),
        ("cohere", "cohere2"),
        ("LLAMA", "llama"),
        ("phi", None),
    ],
)
def test_a_word_alone_gets_a_family_that_is_spelled_almost_like_it(typed, meant):
    assert nearest_model(typed, list_architectures()) == meant


@pytest.mark.parametrize("name", ["mamba", "BERT", "phi:tiny"])
def test_a_well_known_family_that_is_absent_is_refused_without_a_hint(name):
    with pytest.raises(HubError, match=f"^{name}: is not among the families; `ligermodels list` shows them$"):
        refuse_mistyped(name)
    assert not ABSENT_FAMILIES & set(list_architectures())


def test_a_path_to_nothing_is_said_to_be_that_with_the_folder_beside_it(tmp_path):
    (tmp_path / "qwen-chat").mkdir()
    wrong = tmp_path / "qwen-caht"
    with pytest.raises(HubError, match=f"^{wrong}: does not exist; did you mean '{tmp_path}/qwen-chat'\\?$"):
        refuse_mistyped(str(wrong))
    for name in ("./nothing/here", "../nothing/here", "~/nothing/here"):
        with pytest.raises(HubError, match=f"^{name}: does not exist"):
            refuse_mistyped(name)


@pytest.mark.parametrize(("kind", "hint"), [("mamba", ""), ("LLAMA", "; did you mean 'llama'?")])
def test_a_model_type_is_hinted_at_whatever_its_case_but_not_in_place_of_an_absent_family(kind, hint):
    message = f"config: model_type {kind!r} is not supported{hint}; `ligermodels list` shows all"
    with pytest.raises(HubError, match=f"^{re.escape(message)}$"):
        select_architecture({"model_type": kind}, "config")


def test_every_id_is_valid_on_the_hub_and_no_two_are_equal_after_normalisation():
    assert all(re.fullmatch(r"[\w-]+/[\w.-]+", name) for name in known_models())
    assert len({normalized_name(name) for name in known_models()}) == len(known_models())


def test_the_models_named_on_their_page_are_known():
    text = (ROOT / "docs/models.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\]\(https://huggingface\.co/([\w.-]+/[\w.-]+)\)", text))
    assert len(named) > 15 and named <= set(known_models())
