"""Training from a GGUF file."""

import torch

import ligermodels
from ligermodels.training import TrainConfig, train
from ligermodels.training.data import embedded
from tests.gguf.files import write_model
from tests.interop.folders import new_tokenizer, tiny_model


def test_a_file_is_trained_and_exported_with_its_tokenizer(tmp_path, monkeypatch):
    monkeypatch.setattr(embedded, "TRAINING_STORIES", 20)
    monkeypatch.setattr(embedded, "VALIDATION_STORIES", 4)
    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48, "head_dim": 16}
    file = write_model(tiny_model("llama", **sizes), tmp_path)
    settings = {"data": "stories", "steps": 1, "sequence_length": 16, "batch_size": 1, "learning_rate": 1e-3}
    result = train(TrainConfig(model=str(file), output=str(tmp_path / "run"), **settings))
    trained, before = ligermodels.load(result.exported), ligermodels.load(file)
    assert not torch.equal(trained.lm_head.weight, before.lm_head.weight)
    assert (trained.lm_head.weight - before.lm_head.weight).abs().max() <= 1.1e-3
    assert ligermodels.load_tokenizer(result.exported).chat_template == new_tokenizer().chat_template
