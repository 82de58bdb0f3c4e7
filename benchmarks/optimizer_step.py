"""The optimizer step of a whole model on one GPU: milliseconds, bytes moved, and the share of the copy rate.

    python -m benchmarks.optimizer_step --model llama-3-8b

bf16 weights and gradients, random; ours are exact, where a provider does not say "nearest". A provider is a function
from parameters to an optimizer; each runs in its own process. The limit is the time to copy the bytes that a step reads
and writes at least, at the rate measured in the same run.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import results, timing
from benchmarks.processes import measured_rows
from benchmarks.train_step import MODELS

OPTIONS: dict[str, Any] = {"lr": 1e-5, "betas": (0.9, 0.95), "weight_decay": 0.1}


def our_adamw(params, **options):
    from ligermodels.training.optimizers.adamw import AdamW

    return AdamW(params, **OPTIONS, **options)


def our_adamw8bit(params, **options):
    from ligermodels.training.optimizers.adamw import AdamW8bit

    return AdamW8bit(params, **OPTIONS, **options)


def torch_adamw(params):
    return torch.optim.AdamW(params, **OPTIONS, fused=True)


def torchao_adamw8bit(params):
    from torchao.optim import AdamW8bit

    return AdamW8bit(params, **OPTIONS)


def bitsandbytes_adamw8bit(params):
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(params, **OPTIONS)


# The optimizer, and the bytes that a step moves at least for each bf16 weight.
PROVIDERS: dict[str, tuple[Callable[..., Any], int]] = {
    "pytorch, AdamW": (torch_adamw, 14),
    "ligermodels, AdamW": (our_adamw, 18),
    "ligermodels, AdamW, nearest": (partial(our_adamw, param_rounding="nearest"), 14),
    "torchao, AdamW8bit": (torchao_adamw8bit, 10),
    "bitsandbytes, AdamW8bit": (bitsandbytes_adamw8bit, 10),
    "ligermodels, AdamW8bit": (our_adamw8bit, 14),
    "ligermodels, AdamW8bit, nearest": (partial(our_adamw8bit, param_rounding="nearest"), 10),
}


def measure(provider: str, model_name: str, steps: int) -> dict:
    """Measures one row: the median time of a step, and the memory of the states."""
    import ligermodels

    make, bytes_of_weight = PROVIDERS[provider]
    model = ligermodels.create(MODELS[model_name], dtype=torch.bfloat16, device="cuda")
    params = list(model.parameters())
    for parameter in params:
        parameter.grad = torch.randn_like(parameter)
    before = torch.cuda.memory_allocated()
    optimizer = make(params)
    for _ in range(3):
        optimizer.step()
    states = torch.cuda.memory_allocated() - before
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(steps)]
    for begin, end in events:
        begin.record()
        optimizer.step()
        end.record()
    torch.cuda.synchronize()
    times = [begin.elapsed_time(end) for begin, end in events]
    weights, ms = sum(x.numel() for x in params), statistics.median(times)
    limit = weights * bytes_of_weight / timing.ceilings()[timing.COPY] / 1e6
    return {
        "ms": round(ms, 2), "limit_ms": round(limit, 2), "share": round(limit / ms, 3),
        "spread_ms": round(max(times) - min(times), 2), "states_gib": round(states / 2**30, 2),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="llama-3-8b")
    parser.add_argument("--steps", type=int, default=20, help="timed steps, after a warm-up of 3")
    parser.add_argument("--providers", nargs="+", choices=PROVIDERS, default=list(PROVIDERS))
    parser.add_argument("--output", type=Path, default=results.FOLDER, help="folder for the dated JSON file")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.row:
        print(json.dumps(measure(args.row, args.model, args.steps)))
        return
    rows = []
    keys = [(provider,) for provider in args.providers]
    for (provider,), row in zip(keys, measured_rows("benchmarks.optimizer_step", sys.argv[1:], keys), strict=True):
        rows.append({"provider": provider} | row)
        print(rows[-1], flush=True)
    report = results.environment() | {"ceilings": timing.ceilings(), "model": args.model, "rows": rows}
    print(results.save(args.output, f"optimizer-step-{args.model}", report))


if __name__ == "__main__":
    main()
