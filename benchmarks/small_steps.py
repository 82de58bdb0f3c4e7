"""Steps of runs on small batches, which the host prepares for longer than the GPU computes: milliseconds a step.

    python -m benchmarks.small_steps --model smollm2-135m --batch 16 --length 104 --lora-rank 16

ligermodels' rows are runs of `train`, with metrics, clipping and the exact AdamW; "without graphs" runs their
micro-batches as they come. Others are the loops of `benchmarks.train_step` and `benchmarks.lora_step`, without metrics
and clipping. Random weights and documents as long as a row; the median of the last steps.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks import lora_step, results, timing, train_step
from benchmarks.processes import measured_rows

MODELS = train_step.MODELS
PEERS = {
    False: ("hugging face", "hugging face + liger"),
    True: ("hugging face + peft, LoRA", "hugging face + peft + liger, LoRA"),
}
OURS, WITHOUT_GRAPHS = "ligermodels", "ligermodels, without graphs"


class Clock:
    """A logger of a run that notes when each of its steps ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def write(self, record: Mapping[str, Any]) -> None:
        if "grad_norm" in record:
            self.ends.append(time.perf_counter())

    def close(self) -> None:
        """There is nothing to close."""


def save_model(folder: Path, raw: Mapping[str, Any], texts: list[str]) -> None:
    import ligermodels
    from ligermodels.training.data.run_tokenizer import save_tokenizer, train_tokenizer

    tokenizer = train_tokenizer(texts, vocab_size=512)
    model = ligermodels.create(dict(raw), dtype=torch.bfloat16, device="meta").to_empty(device="cuda")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter.data, std=0.02)
    ligermodels.export(model, folder, also=lambda path: save_tokenizer(tokenizer, path))


def run_of(args: argparse.Namespace, folder: Path, graphs: bool) -> dict[str, Any]:
    """Makes a run of `train` in this folder; returns its row."""
    from ligermodels.training import TrainConfig, loop, train
    from ligermodels.training.micro_batches import MicroBatches

    draw = random.Random(0)
    texts = [" ".join(f"w{draw.randrange(200)}" for _ in range(args.length)) for _ in range(args.batch * 32)]
    (folder / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    save_model(folder / "model", MODELS[args.model] | {"bos_token_id": 0, "eos_token_id": 0}, texts)
    torch.cuda.empty_cache()
    replays: list[Callable[[], Any]] = []

    class Noted(MicroBatches):
        def record(self, step: Callable[[], None]) -> Callable[[], Any]:
            replays.append(super().record(step))
            return replays[-1]

    clock, further = Clock(), {"lora_rank": args.lora_rank} if args.lora_rank else {}
    torch.cuda.reset_peak_memory_stats()
    config = TrainConfig(
        model=str(folder / "model"), data=[str(folder / "data.jsonl")], output=folder / "run", steps=args.steps,
        batch_size=args.batch, sequence_length=args.length, eval_every=args.steps, checkpoint_every=0, no_export=True,
        learning_rate=1e-5, activation_checkpointing="none", **further,
    )  # fmt: skip
    captures = loop.captures_graphs if graphs else lambda run: False
    with patch.multiple(loop, MicroBatches=Noted, captures_graphs=captures):
        train(config, loggers=[clock])
    gaps = [after - before for before, after in zip(clock.ends, clock.ends[1:], strict=False)][args.steps // 2 :]
    row = row_of([1000 * gap for gap in gaps]) | {"graphs": len(replays)}
    return row | {"device_ms": device_time(replays[0])} if replays else row


def device_time(replay: Callable[[], Any]) -> float:
    """Milliseconds of the GPU for a replay: forward and backward."""
    times = []
    for _ in range(10):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return round(statistics.median(times), 3)


def row_of(milliseconds: list[float]) -> dict[str, Any]:
    return {
        "ms": round(statistics.median(milliseconds), 2), "fastest": round(min(milliseconds), 2),
        "slowest": round(max(milliseconds), 2), "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
    }  # fmt: skip


def measure(provider: str, args: argparse.Namespace) -> dict[str, Any]:
    if provider in (OURS, WITHOUT_GRAPHS):
        with tempfile.TemporaryDirectory() as folder:
            return run_of(args, Path(folder), graphs=provider == OURS)
    shape = args.batch, args.length
    if args.lora_rank:
        others = {"targets": ["all-linear"], "rank": args.lora_rank, "layers": None, "gpu_memory": None, "warm_up": 3}
        row = lora_step.measure(provider, False, argparse.Namespace(**vars(args), **others))
    else:
        row = train_step.measure(provider, args.model, *shape, "none", args.steps, 3, 1.0, 80.0, 1)
    return row | {"ms": round(1000 * args.batch * args.length / row["tokens_per_second"], 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="smollm2-135m")
    parser.add_argument("--batch", type=int, default=16, help="sequences per step")
    parser.add_argument("--length", type=int, default=104, help="tokens per sequence")
    parser.add_argument("--lora-rank", type=int, default=0, help="0 trains all weights")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--output", type=Path, default=results.FOLDER, help="folder for the dated JSON file")
    parser.add_argument("--row", nargs=1, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.row:
        print(json.dumps(measure(args.row[0], args)))
        return
    rows = []
    providers = [(name,) for name in (OURS, WITHOUT_GRAPHS, *PEERS[args.lora_rank > 0])]
    for (name,), row in zip(providers, measured_rows("benchmarks.small_steps", sys.argv[1:], providers), strict=True):
        rows.append({"provider": name} | row)
        print(rows[-1], flush=True)
    kind = f"lora-{args.lora_rank}" if args.lora_rank else "full"
    settings = {"model": args.model, "batch": args.batch, "length": args.length, "lora_rank": args.lora_rank}
    report = results.environment() | {"ceilings": timing.ceilings()} | settings | {"rows": rows}
    print(results.save(args.output, f"small-steps-{args.model}-{kind}-{args.batch}x{args.length}", report))


if __name__ == "__main__":
    main()
