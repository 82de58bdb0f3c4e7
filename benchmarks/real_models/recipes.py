"""The runs of the comparison: which model is trained on which data, by which library, with which settings.

`defaults` have no setting about learning rates, batches or epochs. `sweep` is coarse, and was what the defaults were
chosen by. The first of a list are the most important: a run that is out of time leaves out the last.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

MODELS = ("smollm2", "gemma3")
SUPERVISED = ("questions", "calls", "topics")
OURS, TRL = "ligermodels", "trl"


@dataclass(frozen=True)
class Recipe:
    """settings: of `TrainConfig`; or of TRL's config, where `objective` chooses the trainer and `lora` adds PEFT's
    default adapter. teacher: the name of the recipe whose model is the teacher of distillation."""

    model: str
    data: str
    label: str = "default"
    settings: dict[str, Any] = field(default_factory=dict)
    library: str = OURS
    teacher: str | None = None
    before: bool = False  # measure the model, do not train it

    @property
    def name(self) -> str:
        objective = self.settings.get("objective", "sft")
        return f"{self.model}-{self.data}-{objective}-{self.library}-{self.label}".replace(" ", "_")


def before(model: str) -> Iterator[Recipe]:
    for data in (*SUPERVISED, "pairs", "prompts"):
        yield Recipe(model, data, "before", before=True)


GRPO = {
    "objective": "grpo",
    "reward": "benchmarks/real_models/brief.py:brief",
    "max_completion_length": 96,
    "steps": 60,
}
LORA: dict[str, Any] = {"lora_rank": 16}


def varied(model: str, data: str, base: dict[str, Any], **lists: list[Any]) -> Iterator[Recipe]:
    """A recipe for each combination of the values in `lists`."""
    combinations: list[dict[str, Any]] = [{}]
    for name, values in lists.items():
        combinations = [found | {name: value} for found in combinations for value in values]
    for found in combinations:
        shown = {**{k: v for k, v in base.items() if k not in GRPO}, **found}
        label = ",".join(f"{SHORT.get(name, name)}={value:g}" for name, value in shown.items() if name != "objective")
        yield Recipe(model, data, label or "default", base | found)


SHORT = {
    "learning_rate": "lr", "batch_size": "batch", "lora_rank": "rank", "lora_alpha": "alpha",
}  # fmt: skip


def defaults(model: str) -> Iterator[Recipe]:
    """One run of each objective without a setting about rates, batches or epochs."""
    yield Recipe(model, "prompts", "default", GRPO)
    yield Recipe(model, "prompts", "default LoRA", GRPO | LORA)
    for data in SUPERVISED:
        yield Recipe(model, data)
        yield Recipe(model, data, "default LoRA", LORA)
    for objective in ("dpo", "kto", "orpo", "simpo", "cpo"):
        yield Recipe(model, "pairs", "default", {"objective": objective})
        yield Recipe(model, "pairs", "default LoRA", {"objective": objective} | LORA)
    teacher = Recipe(model, "questions").name
    yield Recipe(model, "questions", "default", {"objective": "distill"}, teacher=teacher)


def trl(model: str) -> Iterator[Recipe]:
    """TRL with its defaults. A step of GRPO has as many completions as ours, 16 x 8, where TRL's default is 8."""
    if model == "smollm2":
        yield Recipe(model, "prompts", "default", {"objective": "grpo", "max_steps": 60}, TRL)
    for objective in ("kto", "dpo", "orpo"):
        yield Recipe(model, "pairs", "default", {"objective": objective}, TRL)
    for data in SUPERVISED:
        yield Recipe(model, data, "default", {}, TRL)
    yield Recipe(model, "questions", "default LoRA", {"lora": True}, TRL)
    yield Recipe(model, "pairs", "default LoRA", {"objective": "dpo", "lora": True}, TRL)


def float8(model: str) -> Iterator[Recipe]:
    """LoRA on a base in bf16, in FP8, and in FP8 whose products are FP8 too."""
    for data in SUPERVISED:
        yield Recipe(model, data, "bf16", LORA)
        yield Recipe(model, data, "fp8", LORA | {"quantize": "fp8"})
        yield Recipe(model, data, "float8", LORA | {"quantize": "fp8", "float8": True})


def sweep(model: str) -> Iterator[Recipe]:
    small = model == "smollm2"
    sft = {"objective": "sft"}
    yield from varied(
        model, "prompts", GRPO, learning_rate=[1e-6, 5e-6, 1e-5, 2e-5, 3e-5] if small else [1e-6, 5e-6, 2e-5]
    )
    yield from varied(model, "prompts", GRPO | LORA, learning_rate=[1e-5, 1e-4, 3e-4] if small else [1e-5, 1e-4])
    yield from varied(model, "questions", sft, learning_rate=[1e-5, 2e-5, 5e-5, 1e-4, 2e-4])
    yield from varied(model, "calls", sft, learning_rate=[1e-5, 2e-5, 5e-5, 1e-4, 2e-4])
    yield from varied(model, "questions", LORA, learning_rate=[1e-4, 2e-4, 5e-4, 1e-3, 2e-3])
    yield from varied(model, "calls", LORA, learning_rate=[1e-4, 2e-4, 5e-4, 1e-3, 2e-3])
    yield from varied(model, "pairs", {"objective": "dpo"}, learning_rate=[5e-7, 1e-6, 2e-6, 5e-6, 1e-5, 2e-5, 5e-5])
    yield from varied(model, "pairs", {"objective": "dpo"} | LORA, learning_rate=[1e-5, 5e-5, 1e-4, 2e-4, 5e-4])
    yield from varied(model, "topics", sft, learning_rate=[1e-5, 2e-5, 5e-5, 1e-4])
    yield from varied(model, "topics", LORA, learning_rate=[1e-4, 2e-4, 5e-4, 1e-3])
    yield from varied(model, "pairs", {"objective": "orpo"}, learning_rate=[5e-7, 5e-6, 1e-5, 2e-5, 5e-5])
    yield from varied(model, "pairs", {"objective": "kto"}, learning_rate=[1e-6, 5e-6, 1e-5, 2e-5])
    yield from varied(model, "questions", sft, learning_rate=[2e-5, 5e-5], batch_size=[4, 8])
    yield from varied(model, "calls", sft, learning_rate=[2e-5, 5e-5], batch_size=[4, 8])
    yield from varied(model, "questions", LORA, learning_rate=[1e-4, 5e-4], batch_size=[4])
    yield from varied(model, "pairs", {"objective": "orpo"} | LORA, learning_rate=[5e-6, 1e-4, 5e-4])
    yield from varied(model, "pairs", {"objective": "kto"} | LORA, learning_rate=[1e-5, 1e-4, 5e-4])
    for rate in (1e-5, 5e-5, 1e-4):
        settings = {"objective": "distill", "learning_rate": rate}
        yield Recipe(model, "questions", f"lr={rate:g}", settings, teacher=f"{model}-questions-sft-{OURS}-lr=5e-05")
    if small:
        yield from sweep_of_little_things(model)


def sweep_of_little_things(model: str) -> Iterator[Recipe]:
    """What moves the result less than the learning rate, on one model."""
    sft = {"objective": "sft"}
    yield from varied(model, "questions", sft, learning_rate=[5e-5, 1e-4], batch_size=[64])
    yield from varied(model, "questions", sft, learning_rate=[1e-4, 2e-4], batch_size=[128])
    yield from varied(model, "questions", sft, learning_rate=[5e-5, 1e-4], warmup=[10])
    yield from varied(model, "questions", sft, learning_rate=[5e-5, 1e-4], epochs=[1])
    yield from varied(model, "calls", sft, learning_rate=[5e-5, 1e-4], epochs=[1])
    yield from varied(model, "topics", sft, learning_rate=[2e-5, 5e-5], epochs=[3])
    yield from varied(model, "questions", {}, lora_rank=[8, 32], learning_rate=[2e-4, 5e-4])
    yield from varied(model, "questions", LORA | {"lora_alpha": 16}, learning_rate=[2e-4, 5e-4, 1e-3])
    yield from varied(model, "questions", sft, learning_rate=[5e-5], seed=[1, 2])
    yield from varied(model, "pairs", {"objective": "dpo"}, learning_rate=[1e-6, 5e-6], pairs=[8])
    yield from varied(model, "pairs", {"objective": "dpo"}, learning_rate=[1e-6, 5e-6], epochs=[3])
    yield from varied(model, "pairs", {"objective": "simpo"}, learning_rate=[5e-7, 5e-6, 2e-5])
    yield from varied(model, "pairs", {"objective": "cpo"}, learning_rate=[5e-7, 5e-6, 2e-5])
    for rate in (1e-5, 5e-5):
        settings = {"objective": "distill", "learning_rate": rate}
        yield Recipe(model, "calls", f"lr={rate:g}", settings, teacher=f"{model}-calls-sft-{OURS}-lr=5e-05")


SETS = {"before": before, "defaults": defaults, "float8": float8, "sweep": sweep, "trl": trl}
