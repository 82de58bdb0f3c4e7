"""Reward models: the Hub's sequence classification with one label, of every family that transformers has it for."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

import ligermodels
from ligermodels.errors import CheckpointError, ConfigError, InputError
from ligermodels.layers.reward_model import RewardModel, reward_model_class
from ligermodels.weights.files import tensor_hashes
from tests.cases import CASES
from tests.reference_model import save_reference, tokens

FAMILIES = {raw["model_type"]: name for name, raw in reversed(CASES.items())}  # the first case of each model_type
CLASSIFIED = {
    model_type: name
    for model_type, name in FAMILIES.items()
    if type(AutoConfig.for_model(model_type)) in AutoModelForSequenceClassification._model_mapping
}


def raw_of(name, **fields):
    return CASES[name] | {"architectures": ["ForSequenceClassification"], "id2label": {"0": "LABEL_0"}} | fields


def save_classifier(name, folder):
    """A checkpoint of transformers' own, as its save_pretrained writes it."""
    (folder / "in").mkdir()
    (folder / "in" / "config.json").write_text(json.dumps(raw_of(name)))
    config = AutoConfig.from_pretrained(folder / "in")
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32, **eager).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator) + (parameter.ndim == 1))
    model.save_pretrained(folder / "in")
    return model


@pytest.mark.parametrize("model_type", CLASSIFIED)
def test_scores_and_exports_equal_those_of_transformers(model_type, tmp_path):
    reference = save_classifier(CLASSIFIED[model_type], tmp_path)
    model = ligermodels.load(tmp_path / "in")
    assert type(model).__name__ == type(reference).__name__ and isinstance(model, RewardModel)
    (ids,) = tokens(CASES[CLASSIFIED[model_type]], 1, 23)[None]
    expected = reference(ids).logits
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)

    ligermodels.export(model, tmp_path / "out")
    assert tensor_hashes(tmp_path / "out") == tensor_hashes(tmp_path / "in")
    read = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    assert type(read) is type(reference) and read.config.num_labels == 1
    torch.testing.assert_close(read(ids).logits, expected, rtol=1e-4, atol=1e-4)


def test_the_head_reads_the_last_token_that_is_not_padding():
    model = ligermodels.create(CASES["llama"] | {"pad_token_id": 0}, reward_model=True)
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 0, 0], [0, 11, 12, 13]])
    mask = ids != 0
    alone = torch.cat([model(row[kept][None]).logits for row, kept in zip(ids, mask, strict=True)])
    torch.testing.assert_close(model(ids, attention_mask=mask).logits, alone)
    packed = ids[mask][None]
    ends = torch.tensor([0, 4, 6, 9], dtype=torch.int32)
    torch.testing.assert_close(model(packed, cu_seqlens=ends).logits, alone)
    torch.testing.assert_close(model(packed, cu_seqlens=ends, rows=torch.tensor([8, 3])).logits, alone[[2, 0]])
    model.config.pad_token_id = 8  # as where the padding is the end token: the Hub's classifiers skip it
    torch.testing.assert_close(model(packed, cu_seqlens=ends).logits[0], model(ids[:1, :3]).logits[0])
    model.config.pad_token_id = None
    with pytest.raises(ValueError, match=r"pass attention_mask, or set config\.pad_token_id"):
        model(ids)


@pytest.mark.parametrize("name", ["qwen2", "gemma3"])
def test_a_language_model_becomes_a_reward_model_with_a_new_head(name, tmp_path):
    save_reference(CASES[name], tmp_path / "in")
    language = ligermodels.load(tmp_path / "in")
    with pytest.warns(UserWarning, match="in: has no score head; the reward model gets a new one, to be trained"):
        model = ligermodels.load(tmp_path / "in", reward_model=True)
    for (key, old), (same, new) in zip(language.model.named_parameters(), model.model.named_parameters(), strict=True):
        assert key == same and torch.equal(old, new)
    ids = tokens(CASES[name], 1)
    expected = language.final_hidden(ids)[:, -1] @ model.score.weight.T
    torch.testing.assert_close(model(ids).logits, expected)
    ligermodels.export(model, tmp_path / "out")
    exported = json.loads((tmp_path / "out" / "config.json").read_text())
    assert exported["architectures"] == [model.hub_class] and exported["id2label"] == {"0": "LABEL_0"}
    assert not any("lm_head" in tensor for tensor in tensor_hashes(tmp_path / "out"))
    torch.testing.assert_close(ligermodels.load(tmp_path / "out")(ids).logits, expected)


def test_lora_trains_the_head_as_a_whole(tmp_path):
    ligermodels.export(ligermodels.create(CASES["llama"]), tmp_path / "base")
    with pytest.warns(UserWarning, match="new one"):
        model = ligermodels.load(tmp_path / "base", reward_model=True)
    ligermodels.add_lora(model, rank=2, modules_to_save=["score"])
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert "score.weight" in trained and all("lora" in name or name == "score.weight" for name in trained)
    with torch.no_grad():
        for parameter in filter(lambda x: x.requires_grad, model.parameters()):
            parameter.normal_(0, 0.1)
    ids = tokens(CASES["llama"], 1)
    ligermodels.export_adapter(model, tmp_path / "adapter")
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["task_type"] == "SEQ_CLS"
    with pytest.warns(UserWarning, match="new one"):
        again = ligermodels.load(tmp_path / "base", reward_model=True)
    ligermodels.load_adapter(again, tmp_path / "adapter")
    torch.testing.assert_close(again(ids).logits, model(ids).logits)


def test_what_is_no_reward_model_is_refused(tmp_path):
    save_reference(raw_of("llama"), tmp_path / "in")
    with pytest.raises(CheckpointError, match=r"1 missing: score\.weight; 1 unexpected: lm_head\.weight"):
        ligermodels.load(tmp_path / "in")
    with pytest.raises(ConfigError, match="id2label has 3 labels; a reward model has one"):
        ligermodels.create(raw_of("llama", id2label={str(n): "x" for n in range(3)}))
    with pytest.raises(ConfigError, match="id2label has 2 labels"):  # transformers' default
        ligermodels.create({key: value for key, value in raw_of("llama").items() if key != "id2label"})
    model = ligermodels.create(raw_of("llama"))
    with pytest.raises(InputError, match="is a reward model, without a language-model head: it cannot generate"):
        ligermodels.generate(model, [[1, 2]], max_new_tokens=1)
    assert reward_model_class(type(ligermodels.create(CASES["llama"])), "llama") is type(model)
