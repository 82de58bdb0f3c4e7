"""The same models trained on the same data by TRL, with TRL's defaults; measured as ours, also while they train.

Defaults are those of TRL's configs: fp32 parameters under bf16 autocast, AdamW without weight decay, a learning rate
that falls linearly to 0 without warmup, 3 epochs, batches of 8. Text is packed into rows of 2048 tokens, because TRL
would otherwise cut each document after 1024.
"""

import copy
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets.fingerprint
import trl
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from benchmarks.real_models.brief import brief
from benchmarks.real_models.measure import Measure, read
from benchmarks.real_models.recipes import Recipe

# On Python 3.12 dill recurses without end in the trainers that datasets hash; nothing here is cached by its hash.
datasets.fingerprint.Hasher.hash = classmethod(lambda cls, value: datasets.fingerprint.generate_random_fingerprint())

Record = dict[str, Any]
VALIDATIONS = 5
CURVES = {
    "loss": "loss", "reward": "reward", "rewards/margins": "rewards/margins", "grad_norm": "grad_norm",
    "rewards/accuracies": "rewards/accuracies", "completions/mean_length": "completions/mean_length",
}  # fmt: skip


def train_with_trl(recipe: Recipe, place: Any, output: Path, measure: Measure) -> Record:
    """As `run.train_with_ours`. place: a `run.Place`."""
    settings = dict(recipe.settings)
    objective, lora = settings.pop("objective", "sft"), settings.pop("lora", False)
    settings |= {"max_steps": place.steps} if place.steps else {}
    config, trainer_class, records = TRAINERS[objective]
    own: Record = {"packing": True, "max_length": 2048} if recipe.data == "topics" else {}
    if objective == "grpo":
        own = {"per_device_train_batch_size": 32, "gradient_accumulation_steps": 4, "max_completion_length": 96}
        own = {"max_completion_length": 8} if place.steps else own  # a trial
    if objective == "orpo":
        own = {"model_init_kwargs": {"dtype": "float32"}}  # as the other trainers; its default is that of the file
    args = config(
        output_dir=str(output), report_to="none", save_strategy="no", logging_steps=5, seed=0, disable_tqdm=True,
        use_cpu=place.device == "cpu", **own, **settings,
    )  # fmt: skip
    folder = place.models[recipe.model]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    watch = Watch(recipe.data, tokenizer, output / "watched", measure)
    given: Record = {"reward_funcs": brief} if objective == "grpo" else {}
    if lora:
        from peft import LoraConfig

        given["peft_config"] = LoraConfig(task_type="CAUSAL_LM")
    data = Dataset.from_list(records(read(place.data / f"{recipe.data}-train.jsonl")))
    began = time.monotonic()
    trainer = trainer_class(
        model=folder, args=args, train_dataset=data, processing_class=tokenizer,
        callbacks=[watch], **given,
    )  # fmt: skip
    trainer.train()
    seconds = time.monotonic() - began - watch.seconds
    exported = output / "model"
    write_model(trainer.model, tokenizer, exported)
    return {
        "exported": str(exported), "seconds": seconds, "steps": trainer.state.global_step, "validations": watch.found,
        "curves": curves(trainer.state.log_history),
        "chosen": {"learning_rate": args.learning_rate, "batch_size": args.per_device_train_batch_size},
    }  # fmt: skip


class Watch(TrainerCallback):
    """Measures the model before the first step and after each fifth of them."""

    def __init__(self, data: str, tokenizer: Any, folder: Path, measure: Measure) -> None:
        self.data, self.tokenizer, self.folder, self.measure = data, tokenizer, folder, measure
        self.found: list[Record] = []
        self.seconds = 0.0  # that measuring took

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.validate(state, kwargs["model"])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % max(1, state.max_steps // VALIDATIONS) == 0 or state.global_step == state.max_steps:
            self.validate(state, kwargs["model"])

    def validate(self, state: Any, model: Any) -> None:
        began = time.monotonic()
        write_model(model, self.tokenizer, self.folder)
        ours, tokenizer = self.measure.load(self.folder)
        found = self.measure.quick(ours, tokenizer, self.data)
        shutil.rmtree(self.folder)
        if "loss" in found:
            found["validation_loss"] = found.pop("loss")
        self.found.append({"step": state.global_step, **found})
        self.seconds += time.monotonic() - began


def write_model(model: Any, tokenizer: Any, folder: Path) -> None:
    """A folder with the weights as they are trained, LoRA merged."""
    if hasattr(model, "merge_and_unload"):
        model = copy.deepcopy(model).merge_and_unload()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def curves(history: Sequence[Record]) -> Record:
    """{curve: [[step, value], …]}."""
    shown = {
        name: [[record["step"], record[key]] for record in history if key in record] for name, key in CURVES.items()
    }
    return {name: curve for name, curve in shown.items() if curve}


def supervised(records: list[Record]) -> list[Record]:
    """Chats as prompts with completions, of which TRL trains on the completions alone."""
    if "text" in records[0]:
        return records
    return [{"prompt": r["messages"][:-1], "completion": r["messages"][-1:]} for r in records]


def judged(records: list[Record]) -> list[Record]:
    return [
        {"prompt": record["prompt"], "completion": record[side], "label": side == "chosen"}
        for record in records
        for side in ("chosen", "rejected")
    ]


def unchanged(records: list[Record]) -> list[Record]:
    return records


TRAINERS: dict[str, tuple[Any, Any, Callable[[list[Record]], list[Record]]]] = {
    "sft": (trl.SFTConfig, trl.SFTTrainer, supervised),
    "dpo": (trl.DPOConfig, trl.DPOTrainer, unchanged),
    "kto": (trl.KTOConfig, trl.KTOTrainer, judged),
    "orpo": (ORPOConfig, ORPOTrainer, unchanged),
    "grpo": (trl.GRPOConfig, trl.GRPOTrainer, unchanged),
}
