"""Whole training steps on one GPU and under FSDP2 on several: tokens/s and peak memory of full fine-tuning.

    python -m benchmarks.sharded_step --model llama-3-8b --batch 8 --length 2048 --gpus 2

    python -m benchmarks.sharded_step --batch 1 --length 131072 --activation-checkpointing full --warm-up 1 \
        --rows "one GPU, bf16 weights" "bf16 weights, shared rows"
    python -m benchmarks.sharded_step --batch 2 --length 8192 --activation-checkpointing full --gpus 4 \
        --rows "hugging face" "hugging face + liger" "bf16 weights"

The compute dtype is bf16. Peers are sharded block by block by FSDP2 too; their bf16 weights are rounded to nearest by
PyTorch's fused AdamW, ours keep the bits that rounding loses. Each row is a separate torchrun launch on the same GPUs,
with random weights and the same number of random tokens on each GPU, or on all GPUs that share its rows; the time is
the median of the timed steps. Gradient clipping and the all-reduces are those of train.py. The single-GPU rows run on
all GPUs at the same time, independently: the GPUs of one host differ by 1.5 %, and under FSDP2 all ranks run at the
speed of the slowest.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks import results, timing
from benchmarks.train_step import MODELS, hugging_face, liger
from ligermodels import create, distributed
from ligermodels.layers.checkpointing.host_memory import read_async
from ligermodels.memory.model import training_memory
from ligermodels.training.optimizers import build_optimizer, clip_and_step, set_learning_rate
from ligermodels.training.parallel import fsdp
from ligermodels.training.parallel.compilation import compile_blocks
from ligermodels.training.parallel.context_parallel import context_group
from ligermodels.training.planning.plan import state_sizes

ROWS: dict[str, dict[str, Any]] = {  # differences from bf16 weights sharded over all GPUs
    "one GPU, bf16 weights": {"independent": True},
    "one GPU, bf16 weights, compiled blocks": {"independent": True, "compiled": True},
    "fp32 weights": {"param_dtype": torch.float32},
    "fp32 weights, kept gathered": {"param_dtype": torch.float32, "keep_unsharded": True},
    "bf16 weights": {},
    "bf16 weights, kept gathered": {"keep_unsharded": True},
    "bf16 weights, shared rows": {"shares_rows": True},  # context parallelism over all GPUs
    "bf16 weights, shared experts": {"shares_experts": True},  # expert parallelism over all GPUs
}
PEERS = {
    "hugging face": (hugging_face, torch.bfloat16),
    "hugging face + liger": (liger, torch.bfloat16),
    "hugging face, fp32 weights": (hugging_face, torch.float32),
    "hugging face + liger, fp32 weights": (liger, torch.float32),
}
MAX_GRAD_NORM = 1.0


def measure(
    model_name: str, batch: int, length: int, warm_up: int, steps: int, checkpointing: str, *, independent=False,
    param_dtype=torch.bfloat16, compiled=False, keep_unsharded=False, shares_rows=False, shares_experts=False,
) -> dict:  # fmt: skip
    """Measures one row on this rank. keep_unsharded: parameters are not resharded after forward. shares_rows: each rank
    has a part of every row, which are packed into one. shares_experts: each rank has a part of the experts."""
    world = independent_world() if independent else distributed.start()
    if shares_rows:
        world = replace(world, context=world.size)
    model = create(MODELS[model_name], dtype=param_dtype, device="meta")
    expert_ranks = world.size if shares_experts else 1
    blocks = len(model.blocks) if checkpointing == "full" else 0
    model.checkpoint_activations(blocks)
    needs = training_memory(
        model, batch, length, torch.bfloat16, shards=world.size, keep_unsharded=keep_unsharded,
        checkpointed_blocks=blocks, context=world.context, expert_ranks=expert_ranks,
        optimizer_states=state_sizes(build_optimizer(model)).all,
    )  # fmt: skip
    if compiled:
        compile_blocks(model, world.device)
    fsdp.shard(model, world, torch.bfloat16, reshard_after_forward=not keep_unsharded, expert_parallel=expert_ranks)
    model.to_empty(device=world.device)
    model.initialize(0)
    optimizer = build_optimizer(model)
    set_learning_rate(optimizer, 1e-6)
    generator = torch.Generator().manual_seed(world.data_rank)
    ids = torch.randint(model.config.vocab_size, (batch, length), generator=generator).to(world.device)
    inputs: dict[str, Any] = {"input_ids": ids, "labels": ids}
    if shares_rows:
        offsets = torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=world.device)
        inputs = {"input_ids": ids.view(1, -1), "labels": ids.view(1, -1), "cu_seqlens": offsets, "max_seqlen": length}
        inputs["context"] = context_group(world)
    count = torch.tensor(batch * (length - 1), device=world.device)
    row = {"estimated_gib": round(needs.peak / 2**30, 1)}

    def step() -> float:
        loss = model(**inputs, num_items_in_batch=distributed.total(count) // world.context).loss
        loss.backward()
        fsdp.sum_replicated_gradients(model)
        loss, norm = distributed.total(loss.detach()), fsdp.gradient_norm(model)
        read = read_async(torch.stack([loss, norm]))
        clip_and_step(optimizer, loss, norm, MAX_GRAD_NORM)
        optimizer.zero_grad()
        return read()[0]

    return time_rank(step, batch * length // world.context, world, warm_up, steps) | row


def measure_peer(
    name: str, model_name: str, batch: int, length: int, warm_up: int, steps: int, checkpointing: str
) -> dict:
    """Measures one row of `PEERS` on this rank."""
    world = distributed.start()
    torch.manual_seed(0)
    make, dtype = PEERS[name]
    model = make(MODELS[model_name], checkpointing == "full", dtype=dtype)
    for part in [*model.model.layers, model]:
        fully_shard(part, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    ids = torch.randint(model.config.vocab_size, (batch, length), device=world.device)

    def step() -> float:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return time_rank(step, batch * length, world, warm_up, steps)


def time_rank(
    step: Callable[[], float], tokens: int, world: distributed.World, warm_up: int, steps: int
) -> dict[str, Any]:
    """What a row reports of this rank, which computes so many tokens a step."""
    times, loss = [], 0.0
    for _ in range(warm_up + steps):
        start = time.perf_counter()
        loss = step()
        times.append(1e3 * (time.perf_counter() - start))
    timed = times[warm_up:]
    row = {
        "gpus": world.size,
        "rank": int(os.environ["RANK"]),
        "tokens_per_second_per_gpu": round(1e3 * tokens / statistics.median(timed)),
        "step_ms": round(statistics.median(timed), 1),
        "spread_ms": round(max(timed) - min(timed), 1),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1),
        "loss": round(loss, 4),
    }
    distributed.wait_for_all()
    distributed.stop()
    return row


def independent_world() -> distributed.World:
    """A world of one rank on this process's GPU, independent of the other processes of the launch."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return distributed.World(device)


def run(row: str, gpus: int) -> list[dict]:
    """The rows of one launch: one per rank if the ranks are independent, otherwise that of rank 0."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}"]
    command = [*launcher, "-m", "benchmarks.sharded_step", *sys.argv[1:], "--row", row]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return [{"error": done.stderr.strip().splitlines()[-1][:200]}]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="llama-3-8b")
    parser.add_argument("--batch", type=int, default=8, help="sequences per GPU and step")
    parser.add_argument("--length", type=int, default=2048, help="tokens per sequence")
    parser.add_argument("--activation-checkpointing", choices=("none", "full"), default="none")
    parser.add_argument("--steps", type=int, default=8, help="timed steps")
    parser.add_argument("--warm-up", type=int, default=3, help="steps before them")
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count())
    parser.add_argument("--output", type=Path, default=results.FOLDER, help="folder for the dated JSON file")
    data_parallel = [name for name in ROWS if "shared" not in name]
    parser.add_argument("--rows", nargs="+", choices=[*ROWS, *PEERS], default=data_parallel)
    parser.add_argument("--row", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.row:
        shape = args.batch, args.length, args.warm_up, args.steps, args.activation_checkpointing
        if args.row in PEERS:
            row = measure_peer(args.row, args.model, *shape)
        else:
            row = measure(args.model, *shape, **ROWS[args.row])
        if row["gpus"] == 1 or row["rank"] == 0:
            print(json.dumps(row), flush=True)
        return

    rows = []
    for name in args.rows:
        for row in run(name, args.gpus):
            rows.append({"weights": name} | row)
            print(rows[-1], flush=True)
    settings = {"model": args.model, "batch": args.batch, "length": args.length}
    settings |= {"activation_checkpointing": args.activation_checkpointing}
    report = results.environment() | {"ceilings": timing.ceilings()} | settings | {"rows": rows}
    print(results.save(args.output, f"sharded-step-{args.model}-{args.batch}x{args.length}-{args.gpus}-gpus", report))


if __name__ == "__main__":
    main()
