"""A run on pictures: it trains, resumes on its data, and exports a folder from which questions are answered alike."""

import pytest
import torch

import ligermodels
from ligermodels.training import TrainConfig, train
from ligermodels.training.data import embedded
from ligermodels.training.data.embedded import shape_question
from ligermodels.training.data.embedded_shapes import shape_conversations


@pytest.mark.parametrize("family", ["qwen2_vl", "gemma3"])
def test_shapes_train_and_export(family, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(embedded, "TRAINING_SHAPES", 24)
    monkeypatch.setattr(embedded, "VALIDATION_SHAPES", 4)
    monkeypatch.setattr(embedded, "VALIDATION_QUESTIONS", 2)
    config = TrainConfig(
        model=family, data=("shapes",), steps=2, batch_size=2, sequence_length=128, eval_every=2,
        output=str(tmp_path / "run"),
    )  # fmt: skip
    result = train(config)
    losses = [record["loss"] for record in result.metrics if "loss" in record]
    assert len(losses) == 2 and losses[1] < losses[0]
    [validation] = [record for record in result.metrics if "validation_loss" in record and record["step"] == 2]
    assert validation["questions"] == 2

    processor, model = ligermodels.load_processor(result.exported), ligermodels.load(result.exported)
    (picture, messages), *_ = shape_conversations(7, 1)
    prompt, _ = shape_question(picture, messages)
    inputs = processor.apply_chat_template(prompt, add_generation_prompt=True)
    with torch.no_grad():
        trained = result.model.eval()(**inputs).logits
        assert torch.equal(model(**inputs).logits, trained)
        other = processor.apply_chat_template(
            shape_question(next(shape_conversations(8, 1))[0], messages)[0], add_generation_prompt=True
        )
        assert torch.equal(inputs["input_ids"], other["input_ids"])
        assert not torch.equal(model(**other).logits, trained)
