"""Training steps under transformers' Trainer on one GPU: tokens/s and peak memory of full fine-tuning in bf16.

    python -m benchmarks.trainer

Each provider runs in its own process on the same GPU, under the same arguments of Trainer: bf16 weights, torch's fused
AdamW, gradient clipping. Weights and tokens are random. The time is the median of the timed steps after a warm-up. A
provider that is not installed or fails is listed with its error.
"""

import argparse
import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import results
from benchmarks.processes import measured_rows
from benchmarks.train_step import MODELS, hugging_face, liger, ligermodels

WARM_UP = 4
COLUMNS = {
    "model": 14, "provider": 24, "tokens_per_second": 17, "step_ms": 8, "spread_ms": 9, "peak_gib": 8, "loss": 8,
}  # fmt: skip


def face(raw, checkpointing):
    from transformers import AutoConfig

    from ligermodels.integrations.transformers import TransformersModel

    with torch.device("cuda"):
        model = TransformersModel.from_config(AutoConfig.for_model(**raw), dtype=torch.bfloat16)
    if checkpointing:
        model.activation_checkpointing_enable()
    return model.train()


PROVIDERS: dict[str, Callable[[dict[str, Any], bool], Any]] = {
    "hugging face": hugging_face,
    "hugging face + liger": liger,
    "ligermodels, bare": ligermodels,
    "ligermodels, with face": face,
}


def measure(provider: str, model_name: str, batch: int, length: int, steps: int) -> dict[str, Any]:
    """Measures one row. Runs in its own process, because Liger patches the classes of transformers in place."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    torch.manual_seed(0)
    raw = MODELS[model_name]
    model = PROVIDERS[provider](raw, False)
    rows = torch.randint(raw["vocab_size"], (batch * (WARM_UP + steps), length))
    events: list[torch.cuda.Event] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_, **__):
            if len(events) == WARM_UP:
                torch.cuda.reset_peak_memory_stats()
            events.append(torch.cuda.Event(enable_timing=True))
            events[-1].record()

    with tempfile.TemporaryDirectory() as output:
        arguments = TrainingArguments(
            output, per_device_train_batch_size=batch, max_steps=WARM_UP + steps, learning_rate=1e-5,
            optim="adamw_torch_fused", logging_strategy="no", save_strategy="no", report_to=[], disable_tqdm=True,
        )  # fmt: skip
        data = [{"input_ids": row, "labels": row} for row in rows]
        loss = Trainer(model, arguments, train_dataset=data, callbacks=[Clock()]).train().training_loss
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in itertools.pairwise(events[WARM_UP - 1 :])]
    return {
        "tokens_per_second": round(1e3 * batch * length / statistics.median(times)),
        "step_ms": round(statistics.median(times), 1),
        "spread_ms": round(max(times) - min(times), 1),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1),
        "loss": round(loss, 4),
    }


def line(cells: dict[str, Any]) -> str:
    return "  ".join(str(cells.get(name, "")).ljust(width) for name, width in COLUMNS.items()) + cells.get("error", "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["llama-3.2-1b", "qwen2-0.5b"])
    parser.add_argument("--batch", type=int, default=8, help="sequences per step")
    parser.add_argument("--length", type=int, default=2048, help="tokens per sequence")
    parser.add_argument("--steps", type=int, default=8, help=f"timed steps, after a warm-up of {WARM_UP}")
    parser.add_argument("--output", type=Path, default=results.FOLDER, help="folder for the dated JSON file")
    parser.add_argument("--providers", nargs="+", choices=PROVIDERS, default=list(PROVIDERS))
    parser.add_argument("--row", nargs=2, metavar=("MODEL", "PROVIDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.row:
        model_name, provider = args.row
        print(json.dumps(measure(provider, model_name, args.batch, args.length, args.steps)))
        return

    rows = []
    print(line({name: name for name in COLUMNS}))
    keys = [*itertools.product(args.models, args.providers)]
    for (model_name, provider), row in zip(keys, measured_rows("benchmarks.trainer", sys.argv[1:], keys), strict=True):
        rows.append({"model": model_name, "provider": provider} | row)
        print(line(rows[-1]), flush=True)
    report = results.environment() | {"batch": args.batch, "length": args.length, "rows": rows}
    print(results.save(args.output, f"trainer-{args.batch}x{args.length}", report))


if __name__ == "__main__":
    main()
