from types import SimpleNamespace

import pytest
import torch

from ligermodels.distributed import World
from ligermodels.training import TrainConfig
from ligermodels.training.data.opening import DocumentLengths
from ligermodels.training.objectives import make_objective
from ligermodels.training.planning.defaults import completed, parameter_precision, precision, schedule, with_choices
from ligermodels.training.settings.config import UNIT_SETTINGS

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def fitted(config, rows, length, *, sft=False, longest=None, ranks=1, device=CPU, held_out=10, beside=0):
    """The settings, and the lines about them, for data of `rows` rows of `length` tokens."""

    class Training(SimpleNamespace):
        def __len__(self):
            return rows

    lengths = DocumentLengths(rows, longest or length, cut=0, holds_most=length)
    data = SimpleNamespace(training=Training(length=length, completion_only=sft), lengths=lengths)
    data.validation = range(held_out)
    world = World(device, size=ranks)
    config, chosen = with_choices(config, precision(config, world))
    config, _ = with_choices(config, parameter_precision(config, world, lambda: torch.bfloat16))
    config, more = with_choices(config, schedule(config, data, 4096, world, beside))
    return completed(config), [*chosen, *more]


@pytest.mark.parametrize(
    ("dtype", "weights", "lora_rank", "ranks", "expected"),
    [
        ("float32", None, None, 1, "float32"),
        ("tf32", None, None, 1, "float32"),
        ("bfloat16", None, None, 1, "bfloat16"),
        ("bfloat16", None, None, 2, "float32"),
        ("bfloat16", None, 8, 1, "float32"),
        ("bfloat16", "bfloat16", 8, 2, "bfloat16"),
        ("float32", "bfloat16", None, 1, "bfloat16"),
    ],
)
def test_the_parameter_dtype_follows_the_compute_dtype_lora_and_the_ranks(dtype, weights, lora_rank, ranks, expected):
    config = TrainConfig(model="llama", dtype=dtype, param_dtype=weights, lora_rank=lora_rank)
    config, _ = with_choices(config, parameter_precision(config, World(CPU, size=ranks), lambda: torch.bfloat16))
    assert (config.dtype, config.param_dtype) == (dtype, expected)


def test_weights_that_are_stored_in_fp32_stay_so():
    config, world = TrainConfig(model="llama", dtype="bfloat16"), World(GPU)
    _, lines = with_choices(config, parameter_precision(config, world, lambda: torch.float32))
    assert lines == ["--param-dtype float32: that of the checkpoint's weights"]
    new, no_lines = with_choices(config, parameter_precision(config, world, lambda: None))
    assert (new.param_dtype, no_lines) == ("bfloat16", [])


@pytest.mark.parametrize("changes", [{"param_dtype": "bfloat16"}, {"lora_rank": 4}, {"dtype": "float32"}], ids=str)
def test_a_checkpoint_is_read_only_where_the_dtype_of_its_weights_decides(changes):
    config = TrainConfig(**{"model": "some/checkpoint", "data": "random", "dtype": "bfloat16"} | changes)

    def unread():
        pytest.fail("the headers are read")

    parameter_precision(config, World(CPU), unread)


def test_chats_for_a_pretrained_model_on_a_gpu_have_three_epochs_of_small_batches():
    config, lines = fitted(TrainConfig(model="a/folder"), rows=1000, length=413, sft=True, device=GPU)
    assert (config.dtype, config.param_dtype, config.activation_checkpointing) == ("bfloat16", "bfloat16", "auto")
    assert (config.batch_size, config.steps, config.warmup, config.eval_every) == (8, 375, 12, 38)
    assert (config.learning_rate, config.epochs, config.micro_batch_size) == (2e-5, None, None)
    assert lines == [
        "--dtype bfloat16: the model is on a GPU",
        "--sequence-length 413: the longest document",
        "--batch-size 8: at least 80 steps an epoch",
        "--steps 375: 3 epochs of chats or completions",
        "--learning-rate 2e-05: full fine-tuning",
        "--warmup 12: 3% of the steps",
        "--eval-every 38: 10 validations",
        "--activation-checkpointing auto: as much as memory demands",
    ]


def test_of_fewer_rows_than_steps_an_epoch_should_have_each_is_a_step():
    config, lines = fitted(TrainConfig(model="a/folder"), rows=11, length=60, sft=True)
    assert (config.batch_size, config.steps) == (1, 33) and "--batch-size 1: fewer than 80 rows" in lines


def test_validations_take_at_most_15_percent_of_the_compute():
    """A step of training takes three forward passes a row, a validation one a held-out row."""
    for model, held_out, validations in (("a/folder", 60, 2), ("llama:135m", 60, 2), ("a/folder", 12, 11)):
        config, lines = fitted(TrainConfig(model=model, epochs=3), rows=100, length=64, sft=True, held_out=held_out)
        passes = 3 * config.steps * config.batch_size
        made = -(-config.steps // config.eval_every) + (model == "a/folder")  # pretrained weights are validated first
        assert made == validations and made * held_out <= 0.15 * (passes + made * held_out)
        if validations == 2:
            assert any("--eval-every" in line and "at most 15% of the compute" in line for line in lines)


def test_the_passes_of_a_teacher_are_part_of_the_compute():
    config, _ = fitted(TrainConfig(model="a/folder", epochs=3), rows=100, length=64, sft=True, held_out=12, beside=9.0)
    made = 1 + -(-config.steps // config.eval_every)
    assert made == 5 and made * 10 * 12 <= 0.15 * (12 * config.steps * config.batch_size + made * 10 * 12)


def test_text_has_one_epoch_of_larger_batches_shared_by_the_ranks():
    config, lines = fitted(TrainConfig(model="a/folder", lora_rank=8), 100_000, 2048, longest=70_000, ranks=8)
    assert (config.dtype, config.batch_size, config.steps) == ("float32", 64, 1563)
    assert (config.warmup, config.eval_every, config.learning_rate) == (47, 157, 2e-4)
    assert "--sequence-length 2048: the longest document has 70,000 tokens" in lines
    assert "--batch-size 64: at most 131,072 tokens a step" in lines
    assert "--learning-rate 0.0002: LoRA" in lines
    few, _ = fitted(TrainConfig(model="a/folder"), rows=49, length=100, ranks=4)
    assert (few.batch_size, few.steps) == (4, 13)  # not fewer than the ranks


def test_given_settings_are_kept_and_what_follows_from_them_fits():
    given = TrainConfig(model="a/folder", epochs=0.5, batch_size=10, learning_rate=0.1, dtype="tf32", eval_every=7)
    config, lines = fitted(given, rows=1000, length=64)
    assert (config.steps, config.warmup, config.batch_size, config.learning_rate) == (50, 2, 10, 0.1)
    assert "--steps 50: 0.5 epochs" in lines
    assert not any(line.startswith(("--dtype", "--batch-size", "--learning-rate", "--eval-every")) for line in lines)
    config, _ = fitted(TrainConfig(model="a/folder", steps=1), rows=1000, length=64)
    assert (config.steps, config.warmup, config.eval_every) == (1, 0, 1)


def test_a_tiny_new_model_keeps_its_own_settings_without_a_word_about_them():
    config, lines = fitted(TrainConfig(model="qwen2"), rows=6000, length=256, device=GPU)
    assert (config.dtype, config.batch_size, config.steps, config.warmup) == ("float32", 4, 800, 30)
    assert config.optimizer == "muon"
    assert fitted(TrainConfig(model="qwen2", steps=6), rows=6000, length=256)[0].warmup == 5  # within the run
    noisy = TrainConfig(model="qwen2", param_rounding="stochastic")  # which Muon does not have
    assert fitted(noisy, rows=6000, length=256)[0].optimizer == "adamw"
    assert (config.sequence_length, config.eval_every, config.activation_checkpointing) == (256, 200, "none")
    assert lines == []
    config, lines = fitted(TrainConfig(model="qwen2", epochs=2), rows=6000, length=256)
    assert (config.steps, lines) == (3000, ["--steps 3000: 2 epochs"])
    large, _ = fitted(TrainConfig(model="qwen2:7b"), rows=6000, length=256, device=GPU)
    assert (large.dtype, large.learning_rate) == ("bfloat16", pytest.approx(4.5e-3 / 32))


@pytest.mark.parametrize(("objective", "groups", "batch", "steps"), [("dpo", 640, 16, 40), ("kto", 1280, 16, 80)])
def test_an_epoch_of_few_pairs_has_forty_steps_and_of_judged_examples_eighty(objective, groups, batch, steps):
    config = TrainConfig(model="a/folder", data=("x",), objective=objective)
    trained = make_objective(config, World(CPU))
    trained.data = SimpleNamespace(training=range(groups), validation=range(64), processor=None)
    chosen = trained.choices(4096)
    assert chosen[UNIT_SETTINGS[objective]] == (batch, f"at least {steps} steps an epoch")
    assert chosen["steps"].value == steps
