"""Settings that a run chooses where none are given, to fit its model, its data and its devices; each with its reason.

A new model of the smallest preset has the settings that suit the embedded data. For all others the precision is chosen
before the model is created, the rest when the data is tokenised and packed.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch

from ligermodels.aliases import flag_of
from ligermodels.distributed import World
from ligermodels.training.data import Data
from ligermodels.training.data.preferences import PreferenceData
from ligermodels.training.optimizers.schedules import default_image_learning_rate, default_learning_rate
from ligermodels.training.settings.config import SUPERVISED, RunConfig, TrainConfig
from ligermodels.units import counted

TORCH_DTYPES = {"float32": torch.float32, "tf32": torch.float32, "bfloat16": torch.bfloat16}
TINY = {
    "dtype": "float32", "sequence_length": 256, "batch_size": 4, "eval_every": 200,
    "activation_checkpointing": "none",
}  # fmt: skip
TINY_GROUPS = {"dtype": "float32", "activation_checkpointing": "none"}  # of a tiny model that is trained on groups
TINY_STEPS, TINY_WARMUP = 800, 30  # with Muon; AdamW needs 1600 for as many right answers
SFT_EPOCHS, TEXT_EPOCHS = 3, 1
SFT_TOKENS_PER_STEP, TEXT_TOKENS_PER_STEP = 2**15, 2**17
MIN_STEPS_PER_EPOCH = 80  # small data has smaller batches; with 40 a small model learns a quarter less
WARMUP_FRACTION = 0.03
VALIDATIONS = 10
VALIDATION_SHARE = 0.15  # of a run's compute, at most
TRAINING_PASSES = 3  # forward passes that a forward and a backward pass take together


class Choice(NamedTuple):
    """A value that is chosen for a setting. reason says why; it is empty where the value is a constant."""

    value: Any
    reason: str = ""


def with_choices(config: TrainConfig, choices: Mapping[str, Choice]) -> tuple[TrainConfig, list[str]]:
    """The settings with `choices` for those that are not given, and a line for each choice that has a reason."""
    made = {name: choice for name, choice in choices.items() if getattr(config, name) is None}
    lines = [
        f"{flag_of(name)} {as_flag_value(choice.value)}: {choice.reason}"
        for name, choice in made.items()
        if choice.reason
    ]
    return replace(config, **{name: choice.value for name, choice in made.items()}), lines


def as_flag_value(value: Any) -> str:
    match value:
        case bool():
            return "on" if value else "off"
        case float():
            return f"{value:g}"
        case tuple():
            return " ".join(value) or "none"
    return str(value)


def precision(config: TrainConfig, world: World) -> dict[str, Choice]:
    """The compute dtype, and all that a new tiny model has."""
    tiny = {name: Choice(value) for name, value in tiny_values(config).items()}
    on_gpu = world.device.type == "cuda"
    dtype = Choice("bfloat16", "the model is on a GPU") if on_gpu else Choice("float32", "the model is on a CPU")
    return tiny | ({} if config.is_tiny else {"dtype": dtype})


def parameter_precision(
    config: TrainConfig, world: World, stored: Callable[[], torch.dtype | None]
) -> dict[str, Choice]:
    """The dtype of the trained parameters of a run whose compute dtype is known.

    stored: reads that of most weights of the checkpoint; called only where the choice depends on it. fp32 weights stay
    so: after rounding to bf16 each is half a step away from the next number that bf16 has, and the first small updates
    would change none.
    The dtype is a setting of the run from here on: it resumes with the same on any number of ranks.
    """
    half = config.dtype == "bfloat16" and world.size == 1 and not config.with_lora
    if half and config.param_dtype is None and stored() == torch.float32:
        return {"param_dtype": Choice("float32", "that of the checkpoint's weights")}
    return {"param_dtype": Choice("bfloat16" if half else "float32")}


def tiny_values(config: TrainConfig) -> dict[str, Any]:
    """What a new tiny model has, with a warmup that is shorter than the run; empty for other models."""
    if not config.is_tiny:
        return {}
    if config.objective not in SUPERVISED:
        return TINY_GROUPS
    optimizer = "adamw" if config.param_rounding == "stochastic" else "muon"
    return TINY | {"optimizer": optimizer, "warmup": min(TINY_WARMUP, (config.steps or TINY_STEPS) - 1)}


def schedule(
    config: TrainConfig, data: Data, hidden_size: int, world: World, passes_beside: float = 0
) -> dict[str, Choice]:
    """The batch, the steps, the learning rate and what follows from them. hidden_size: of the model. passes_beside: of
    the objective."""
    length, rows, sft = data.training.length, len(data.training), data.training.completion_only
    batch = fitting_batch_size(rows, length, SFT_TOKENS_PER_STEP if sft else TEXT_TOKENS_PER_STEP, world)
    steps = run_length(config, rows, config.batch_size or batch.value, sft=sft)
    taken = config.steps or steps.value
    rate = default_learning_rate(hidden_size, pretrained=not config.has_new_weights, lora=config.with_lora)
    trained = "new weights" if config.has_new_weights else "LoRA" if config.with_lora else "full fine-tuning"
    return {
        "sequence_length": Choice(length, length_reason(data, length)),
        "batch_size": batch,
        "steps": steps,
        "learning_rate": Choice(rate, "" if config.is_tiny else trained),
        "warmup": Choice(min(math.ceil(WARMUP_FRACTION * taken), taken - 1), f"{WARMUP_FRACTION:.0%} of the steps"),
        "eval_every": validation_interval(
            config,
            taken,
            (TRAINING_PASSES + passes_beside) * (config.batch_size or batch.value),
            (1 + passes_beside) * len(data.validation),
        ),
        "activation_checkpointing": Choice("auto", "as much as memory demands"),
    }


def validation_interval(config: TrainConfig, steps: int, step_passes: float, validation_passes: float) -> Choice:
    """How many steps are between validations: at most VALIDATIONS in a run, less where they would cost more than
    VALIDATION_SHARE of its compute. step_passes, validation_passes: the forward passes that each of them takes."""
    affordable = VALIDATION_SHARE / (1 - VALIDATION_SHARE) * steps * step_passes / max(1.0, validation_passes)
    before = not config.has_new_weights  # pretrained weights are validated before the first step too
    number = max(1, min(VALIDATIONS, int(affordable) - before))
    limit = "" if number == VALIDATIONS else f", at most {VALIDATION_SHARE:.0%} of the compute"
    return Choice(math.ceil(steps / number), f"{counted(number, 'validation')}{limit}")


def image_choices(config: TrainConfig, data: Data, hidden_size: int) -> dict[str, Choice]:
    """What differs where the data have images: the rate of new weights, and the limits of images of any size."""
    if data.processor is None:
        return {}
    chosen = image_limits(data)
    if config.has_new_weights:
        chosen["learning_rate"] = Choice(default_image_learning_rate(hidden_size))
    return chosen


def image_limits(data: Data | PreferenceData) -> dict[str, Choice]:
    """The limits of images of any size; empty for data without such images."""
    limits = None if data.processor is None else data.processor.images.token_range
    if limits is None:
        return {}
    return {"image_tokens": Choice("{}:{}".format(*limits), "other images are resized")}


def length_reason(data: Data, length: int) -> str:
    return (
        "the longest document"
        if length == data.lengths.longest
        else f"the longest document has {data.lengths.longest:,} tokens"
    )


def fitting_batch_size(rows: int, length: int, tokens: int, world: World) -> Choice:
    """A global batch of at most `tokens` tokens, less for small data. Each rank has a power of two, or all that share
    rows have, which divides well into micro-batches."""
    budget, share = tokens // length, rows // MIN_STEPS_PER_EPOCH
    few = f"at least {MIN_STEPS_PER_EPOCH} steps an epoch" if share else f"fewer than {MIN_STEPS_PER_EPOCH} rows"
    reason = f"at most {tokens:,} tokens a step" if budget <= share else few
    of_rank = max(1, min(budget, share) // world.data_size)
    return Choice(2 ** (of_rank.bit_length() - 1) * world.data_size, reason)


def run_length(config: TrainConfig, rows: int, batch_size: int, *, sft: bool) -> Choice:
    """The number of steps. An epoch is as many rows as all sources have together."""
    if config.is_tiny and config.epochs is None:
        return Choice(TINY_STEPS)
    epochs = config.epochs or (SFT_EPOCHS if sft else TEXT_EPOCHS)
    reason = "" if config.epochs else " of chats or completions" if sft else " of text"
    return Choice(math.ceil(epochs * rows / batch_size), f"{counted_epochs(epochs)}{reason}")


def counted_epochs(epochs: float) -> str:
    return f"{epochs:g} epoch{'' if epochs == 1 else 's'}"


def completed(config: TrainConfig) -> RunConfig:
    """The settings of a run, when all are chosen. Steps replace epochs."""
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    return RunConfig(**(values | {"epochs": None}))
