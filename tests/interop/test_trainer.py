"""Transformers' Trainer trains our models, bare and with their face, as it trains its own with the same weights."""

import random

import pytest
import torch
from safetensors.torch import load_file
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

import ligermodels
from tests.interop.models import FAMILIES, KINDS, OURS, VOCABULARY

TOLERANCE = 1e-5  # relative: of fp32 sums in another order, after a few steps of AdamW


def documents(count, seed=0):
    """Rows of 4 to 15 tokens, whose first labels are not supervised."""
    draw = random.Random(seed)
    rows = [[draw.randrange(3, VOCABULARY) for _ in range(draw.randrange(4, 16))] for _ in range(count)]
    return [{"input_ids": row, "labels": [-100, -100, *row[2:]]} for row in rows]


def pad(rows, left=False):
    """A batch padded to its longest row."""
    longest = max(len(row["input_ids"]) for row in rows)
    values = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    rows = [row | {"attention_mask": [1] * len(row["input_ids"])} for row in rows]
    return {
        name: torch.tensor(
            [
                filling + row[name] if left else row[name] + filling
                for row in rows
                for filling in [[value] * (longest - len(row[name]))]
            ]
        )
        for name, value in values.items()
    }


COLLATORS = {
    "padding": pad,
    "left padding": lambda rows: pad(rows, left=True),
    "padding-free": DataCollatorWithFlattening(),
    "padding-free, with offsets": DataCollatorWithFlattening(return_flash_attn_kwargs=True),
}


def statistics(prediction):
    """Numbers that depend on every logit of a supervised token."""
    return {"correct": float(((prediction.predictions == prediction.label_ids) & (prediction.label_ids != -100)).sum())}


def trainer_of(model, output, *, collator="padding", trainer=Trainer, **arguments):
    settings = {
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 3, "learning_rate": 1e-3,
        "per_device_eval_batch_size": 2, "logging_steps": 1, "save_strategy": "no", "report_to": [],
        "disable_tqdm": True, "use_cpu": True,
    }  # fmt: skip
    functions = {name: arguments.pop(name) for name in ("compute_metrics", "compute_loss_func") if name in arguments}
    return trainer(
        model,
        TrainingArguments(str(output), **(settings | arguments)),
        train_dataset=documents(16),
        eval_dataset=documents(4, seed=1),
        data_collator=COLLATORS[collator],
        preprocess_logits_for_metrics=lambda logits, labels: logits[:, :-1].argmax(-1),
        **functions,
    )


def train(model, output, **arguments):
    """The losses and gradient norms of the steps, in order."""
    trainer = trainer_of(model, output, **arguments)
    trainer.train()
    return curve(trainer)


def curve(trainer):
    steps = [record for record in trainer.state.log_history if "loss" in record]
    return torch.tensor([[step["loss"], step["grad_norm"]] for step in steps])


def assert_same(got, expected):
    torch.testing.assert_close(got, expected, rtol=TOLERANCE, atol=0)


@pytest.mark.parametrize(
    ("family", "collator"),
    [
        *((family, "padding") for family in ("llama", "gemma3_text", "qwen3_moe")),
        *((family, "padding-free") for family in ("llama", "qwen2-tied", "qwen3_moe")),
        *(("mistral", collator) for collator in ("left padding", "padding-free, with offsets")),
    ],
)
def test_steps_equal_those_of_transformers_own_model(family, collator, folders, tmp_path):
    """Over two micro-batches each, whose numbers of supervised tokens differ."""
    curves = {kind: train(load(folders[family]), tmp_path, collator=collator) for kind, load in KINDS.items()}
    for kind in OURS:
        assert_same(curves[kind], curves["transformers"])


@pytest.mark.parametrize("kind", OURS)
def test_evaluation_returns_the_loss_and_the_logits(kind, folders, tmp_path):
    def evaluate(load):
        trainer = trainer_of(load(folders["llama"]), tmp_path, compute_metrics=shifted)
        return trainer.evaluate()

    def shifted(prediction):
        prediction.label_ids = prediction.label_ids[:, 1:]
        return statistics(prediction)

    got, expected = evaluate(KINDS[kind]), evaluate(KINDS["transformers"])
    assert got["eval_correct"] == expected["eval_correct"]
    assert got["eval_loss"] == pytest.approx(expected["eval_loss"], rel=TOLERANCE)


def squared_logits(outputs, labels, num_items_in_batch=None):
    return outputs.logits[labels != -100].square().mean(-1).sum() / num_items_in_batch


@pytest.mark.parametrize(
    ("kind", "options"), [("face", {"compute_loss_func": squared_logits}), ("bare", {"label_smoothing_factor": 0.2})]
)
def test_losses_of_the_trainers_own_are_of_the_logits(kind, options, folders, tmp_path):
    got, expected = (train(KINDS[k](folders["qwen2-tied"]), tmp_path, **options) for k in (kind, "transformers"))
    assert_same(got, expected)


@pytest.mark.parametrize("kind", OURS)
def test_activation_checkpointing_changes_no_number(kind, folders, tmp_path):
    model = KINDS[kind](folders["llama"])
    checkpointed = train(model, tmp_path, gradient_checkpointing=True)
    assert all(block.activation_checkpointing for block in model.model.layers)
    assert torch.equal(checkpointed, train(KINDS[kind](folders["llama"]), tmp_path))


@pytest.mark.parametrize(("kind", "family"), [("face", "qwen2-tied"), ("bare", "llama")])
def test_a_resumed_run_has_the_steps_of_an_uninterrupted_one(kind, family, folders, tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    whole = train(KINDS[kind](folders[family]), tmp_path, **saving)
    resumed = trainer_of(KINDS[kind](folders[family]), tmp_path, **saving)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert torch.equal(curve(resumed), whole)


@pytest.mark.parametrize("kind", OURS)
def test_the_best_model_is_loaded_at_the_end(kind, folders, tmp_path):
    every_step = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    trainer = trainer_of(KINDS[kind](folders["qwen2-tied"]), tmp_path, **every_step, **best)
    trainer.train()
    assert trainer.state.best_global_step < trainer.state.global_step  # the loss falls
    assert trainer.evaluate()["eval_loss"] == trainer.state.best_metric


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_of_the_face_loads_everywhere(family, folders, tmp_path):
    model = KINDS["face"](folders[family])
    train(model, tmp_path, save_strategy="steps", save_steps=2, max_steps=2)
    ids = torch.arange(3, 43).reshape(2, 20)
    model.eval()
    for load in KINDS.values():
        loaded = load(tmp_path / "checkpoint-2")
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "qwen2-tied"])
def test_the_saved_weights_of_a_bare_model_load_into_one(family, folders, tmp_path):
    model = ligermodels.load(folders[family])
    trainer = trainer_of(model, tmp_path)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    other = ligermodels.load(folders[family])
    other.load_state_dict(load_file(tmp_path / "saved" / "model.safetensors"))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_a_run_resumes_from_weights_in_several_files(folders, tmp_path):
    model = KINDS["face"](folders["qwen2-tied"])
    train(model, tmp_path, save_strategy="steps", save_steps=2, max_steps=2)
    checkpoint = tmp_path / "checkpoint-2"
    model.save_pretrained(checkpoint, max_shard_size=20_000)
    assert len(list(checkpoint.glob("*.safetensors"))) > 3 and not (checkpoint / "model.safetensors").exists()
    resumed = trainer_of(KINDS["face"](folders["qwen2-tied"]), tmp_path, max_steps=2)
    resumed.train(resume_from_checkpoint=str(checkpoint))  # nothing is left to do
    assert all(torch.equal(a, b) for a, b in zip(resumed.model.parameters(), model.parameters(), strict=True))
