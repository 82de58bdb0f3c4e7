"""Whole steps of GRPO on one GPU: sampling, scoring and the update timed apart, beside TRL with transformers' sampler.

    python -m benchmarks.grpo_step --prompts 16 --generations 8 --prompt 512 --completion 512

Weights (bf16), prompts and rewards are random, and no completion ends before `--completion` tokens, so that all
providers compute the same. The step is sampling and one update; the score, a pass without gradients over the same rows
as --iterations or --beta need, is timed beside it and is not part of the step. Times are medians after a warm-up.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import results
from benchmarks.dpo_step import (
    RATE,
    SIZES,
    WARM_UP,
    clock,
    device,
    hugging_face,
    random_ids,
    reset_peak,
    step_clock,
    trl_settings,
    words_tokenizer,
)
from benchmarks.processes import measured_rows

QWEN = {
    "model_type": "qwen2", "vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960,
    "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2, "rope_theta": 1000000.0,
    "max_position_embeddings": 32768, "tie_word_embeddings": True,
}  # fmt: skip
MODELS = {"qwen2.5-1.5b": QWEN, "tiny": SIZES["tiny"]}
SIZES.update(MODELS)
Times = dict[str, list[float]]  # seconds of each timed step, by phase


def random_prompts(args: argparse.Namespace) -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [random_ids(args, args.prompt, generator) for _ in range(args.prompts)]


def ours(args: argparse.Namespace) -> Times:
    import ligermodels
    from ligermodels import losses
    from ligermodels.generation.engine import Engine
    from ligermodels.training.data.preferences import Group, collate_groups
    from ligermodels.training.objectives.grpo.sampling import SamplingPlan, engine_size
    from ligermodels.training.optimizers.building import build_optimizer, clip_and_step, set_learning_rate
    from ligermodels.training.parallel.fsdp import gradient_norm

    model = ligermodels.create(SIZES[args.model], dtype=torch.bfloat16, device=device()).train()
    optimizer = build_optimizer(model)
    set_learning_rate(optimizer, RATE)
    prompts, size = random_prompts(args), args.generations * args.completion
    tokens, longest, rows = engine_size(args.prompt, args.prompts, SamplingPlan(args.generations, 1.0, args.completion))
    engine = Engine(model, max_tokens=tokens, max_length=longest, max_rows=rows)

    def sample() -> list:
        model.eval()
        for ids in prompts:
            engine.submit(
                ids.tolist(), max_new_tokens=args.completion, n=args.generations, temperature=1.0, stop_tokens=(),
                seed=0,
            )  # fmt: skip
        found = sorted(engine, key=lambda sample: (sample.request, sample.sample))
        model.train()
        return found

    def pack(samples: list) -> list:
        sides = [np.array(sample.ids) for sample in samples]
        groups = [
            Group(ids, tuple(sides[first : first + args.generations]), (None,) * args.generations)
            for first, ids in zip(range(0, len(sides), args.generations), prompts, strict=True)
        ]
        return [row.to(device()) for row in collate_groups(groups, range(args.prompts), args.row)]

    def logprobs(row):
        return model(**row.model_inputs, logprobs={"extras": ("entropy",)}).logprobs.logprobs

    def score(packed: list) -> None:
        with torch.no_grad():
            for row in packed:
                logprobs(row)

    def update(packed: list) -> None:
        total = torch.zeros((), device=device())
        for row in packed:
            advantages = torch.randn(len(row.completions) - 1, device=device())
            loss = losses.dapo(logprobs(row), None, advantages, row.completions) / (args.prompts * size)
            loss.backward()
            total += loss.detach()
        clip_and_step(optimizer, total, gradient_norm(model), 1.0)
        optimizer.zero_grad()

    times: Times = {"sample": [], "score": [], "update": []}
    for number in range(WARM_UP + args.steps):
        if number == WARM_UP:
            reset_peak()
        began = clock()
        packed = pack(sample())
        sampled = clock()
        score(packed)
        scored = clock()
        update(packed)
        for phase, seconds in (("sample", sampled - began), ("score", scored - sampled), ("update", clock() - scored)):
            times[phase].append(seconds)
    return {phase: seconds[WARM_UP:] for phase, seconds in times.items()}


def trl(args: argparse.Namespace) -> Times:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    generator, sampled = np.random.default_rng(1), []

    def reward(completions, **_):
        return generator.random(len(completions)).tolist()

    class Trainer(GRPOTrainer):
        def _generate(self, *arguments):
            began = clock()
            found = super()._generate(*arguments)
            sampled.append(clock() - began)
            return found

    micro = max(1, args.row // (args.prompt + args.completion))
    sequences = args.prompts * args.generations
    prompts = [{"prompt": " ".join(f"w{number}" for number in ids)} for ids in random_prompts(args)]
    steps: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        arguments = GRPOConfig(
            **trl_settings(args, folder, min(micro, sequences), checkpointing=False), num_generations=args.generations,
            gradient_accumulation_steps=max(1, sequences // micro), max_completion_length=args.completion,
            generation_kwargs={"min_new_tokens": args.completion}, temperature=1.0,
        )  # fmt: skip
        Trainer(
            hugging_face(args), reward, args=arguments, train_dataset=Dataset.from_list(prompts),
            processing_class=words_tokenizer(SIZES[args.model]["vocab_size"]), callbacks=[step_clock(steps)],
        ).train()  # fmt: skip
    sampled = sampled[-len(steps) :]
    return {"sample": sampled, "update": [whole - part for whole, part in zip(steps, sampled, strict=True)]}


PROVIDERS: dict[str, Callable[[argparse.Namespace], Times]] = {"ligermodels": ours, "trl": trl}


def measure(provider: str, args: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    times = PROVIDERS[provider](args)
    medians = {phase: statistics.median(seconds) for phase, seconds in times.items()}
    whole = medians["sample"] + medians["update"]
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    new = args.prompts * args.generations * args.completion
    return {f"{phase}_s": round(seconds, 3) for phase, seconds in medians.items()} | {
        "step_s": round(whole, 3), "sampled_tokens_per_second": round(new / medians["sample"]),
        "peak_gib": round(peak / 2**30, 1),
    }  # fmt: skip


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="qwen2.5-1.5b")
    parser.add_argument("--prompts", type=int, default=16, help="of a step")
    parser.add_argument("--generations", type=int, default=8, help="completions of a prompt")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--completion", type=int, default=512, help="tokens of a completion")
    parser.add_argument("--row-tokens", dest="row", type=int, default=8192, help="most tokens of a micro-batch")
    parser.add_argument("--steps", type=int, default=3, help=f"timed steps, after a warm-up of {WARM_UP}")
    parser.add_argument("--seconds", type=float, default=260, help="most seconds of a row")
    parser.add_argument("--providers", nargs="+", choices=PROVIDERS, default=list(PROVIDERS))
    parser.add_argument("--output", type=Path, default=results.FOLDER, help="folder for the dated JSON file")
    parser.add_argument("--row", dest="measured", metavar="PROVIDER", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main() -> None:
    args = parse()
    if args.measured:
        print(json.dumps(measure(args.measured, args)))
        return
    rows = []
    keys = [(provider,) for provider in args.providers]
    for key, found in zip(keys, measured_rows("benchmarks.grpo_step", sys.argv[1:], keys, args.seconds), strict=True):
        rows.append({"provider": key[0]} | found)
        print(rows[-1], flush=True)
    names = "model", "prompts", "generations", "prompt", "completion", "row"
    shape = {name: getattr(args, name) for name in names}
    print(results.save(args.output, f"grpo-step-{args.model}", results.environment() | shape | {"rows": rows}))


if __name__ == "__main__":
    main()
