"""A run on pictures: it trains, resumes on its data, and exports a folder from which questions are answered alike."""

import re

import pytest
import torch

import ligermodels
from ligermodels.errors import InputError
from ligermodels.layers.vision_positions import Grid
from ligermodels.memory import training_memory
from ligermodels.training import TrainConfig, train
from ligermodels.training.data import embedded
from ligermodels.training.data.embedded import shape_question
from ligermodels.training.data.embedded_shapes import shape_conversations
from ligermodels.training.reporting.flops import flops_per_patch, flops_per_token
from ligermodels.training.runs.preparing import plan


@pytest.mark.parametrize("family", ["qwen2_vl", "gemma3", "llava"])
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


QUICK = {"data": ("shapes",), "steps": 2, "batch_size": 2, "sequence_length": 128}


@pytest.fixture
def few_shapes(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(embedded, "TRAINING_SHAPES", 24)
    monkeypatch.setattr(embedded, "VALIDATION_SHAPES", 4)
    monkeypatch.setattr(embedded, "VALIDATION_QUESTIONS", 2)


@pytest.mark.usefixtures("few_shapes")
def test_frozen_parts_stay_and_parts_have_their_own_learning_rates(tmp_path):
    """A projector with a thousandth of the rate of the text moves a thousandth as far in the first step."""

    def changes(**settings):
        config = TrainConfig(model="qwen2_vl", **QUICK | {"steps": 1}, output=tmp_path / f"{len(settings)}", **settings)
        model = train(config).model
        before = dict(ligermodels.create("qwen2_vl", size="tiny", seed=0).named_parameters())
        matrices = {name: p for name, p in model.named_parameters() if p.ndim > 1}
        moved = {name: (p - before[name]).abs().max().item() for name, p in matrices.items()}
        return {part: max(moved[f"{part}.{name}"] for name, p in getattr(model, part).named_parameters() if p.ndim > 1)
                for part in ("visual", "projector", "model")}  # fmt: skip

    every = changes()
    assert every["visual"] > 1e-5 and every["projector"] > 1e-5
    some = changes(train_parts=("projector", "text"), projector_learning_rate=1e-6)
    assert some["visual"] == 0 and some["model"] == pytest.approx(every["model"], rel=0.01)
    assert some["projector"] == pytest.approx(1e-3 * every["projector"], rel=0.01)


@pytest.mark.usefixtures("few_shapes")
def test_a_plan_counts_patches_and_limits_images():
    """Pictures of 56 pixels are 2 x 2 features of 2 x 2 patches; one feature each with --image-tokens 1."""
    made = plan(TrainConfig(model="qwen2_vl", **QUICK))
    assert any(line.startswith("--image-tokens 4:1024") for line in made.chosen)
    model = ligermodels.create("qwen2_vl", size="tiny", device="meta")
    assert made.images.tokens == 4 * 24 and made.images.most_patches in (16, 32)
    tokens = made.rows * 128
    patches = flops_per_patch(model, [Grid(1, 4, 4)]) * 16 * 24 / tokens
    assert made.flops == pytest.approx(flops_per_token(model, 128) + patches, rel=1e-6)
    text = training_memory(model, 2, 128, torch.float32).activations
    assert made.memory.activations > text
    assert "images" in dict(made.table())

    limited = plan(TrainConfig(model="qwen2_vl", **QUICK, image_tokens="1"))
    assert limited.images.tokens == 24 and limited.images.most_patches < made.images.most_patches
    frozen = plan(TrainConfig(model="qwen2_vl", **QUICK, train_parts=("projector", "text")))
    assert frozen.trained == sum(p.numel() for name in ("projector", "text") for p in model.parts()[name])
    assert frozen.flops < made.flops and frozen.memory.activations < made.memory.activations


REFUSED = {
    "parts of a text model": ({"model": "llama", "train_parts": ("text",)}, "--train-parts: llama is a model of text"),
    "a rate of a text model": ({"model": "llama", "vision_learning_rate": 1e-5}, "--vision-learning-rate: llama is a"),
    "a rate of a frozen part": (
        {"train_parts": ("text",), "vision_learning_rate": 1e-5}, "--vision-learning-rate: the vision is not trained",
    ),
    "parts beside LoRA": ({"train_parts": ("text",), "lora_rank": 4}, "--train-parts is for training without LoRA"),
    "limits of pictures": ({"model": "gemma3", "image_tokens": "64"}, "--image-tokens 64: the images of this model"),
    "no limits": ({"image_tokens": "9:4"}, "image_tokens is '9:4'; must be the most tokens of an image, or few"),
}  # fmt: skip


@pytest.mark.usefixtures("few_shapes")
@pytest.mark.parametrize("fault", REFUSED)
def test_settings_of_images_that_do_not_fit_are_refused(fault):
    settings, message = REFUSED[fault]
    with pytest.raises(InputError, match=re.escape(message)):
        plan(TrainConfig(**{"model": "qwen2_vl"} | QUICK | settings))
