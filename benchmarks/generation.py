"""Generation on one GPU in bf16: new tokens/s of whole runs, prefill included, and the time of a decode step.

    python -m benchmarks.generation llama-3-8b-1 qwen2-0.5b-1 --provider ligermodels "hugging face"

Weights and prompts are random, decoding is greedy, and no token ends a sample. Each case runs twice in one process; the
second counts, as the first compiles kernels and captures CUDA graphs. "limit" is the time in which the weights that a
step reads, and its keys and values, can be copied at the copy ceiling of the same run.
"""

import argparse
import gc
import itertools
import json
import random
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import torch

import ligermodels
from benchmarks import results, timing
from benchmarks.train_step import MODELS
from ligermodels.generation.engine import Engine
from ligermodels.memory.model import count_parameters

QWEN3_30B_A3B = MODELS["qwen3-30b-a3b-8-layers"] | {"num_hidden_layers": 48}
HUGGING_FACE = "hugging face"


@dataclass(frozen=True)
class Case:
    """A model's config.json, and for each request the lengths of its prompt and of what is generated."""

    raw: dict
    requests: list[tuple[int, int]]


def mixed(count: int) -> list[tuple[int, int]]:
    """Prompts of 64 to 512 tokens, each followed by 64 to 2,048 new ones."""
    draw = random.Random(0)
    return [(draw.randint(64, 512), draw.randint(64, 2048)) for _ in range(count)]


CASES = {
    "llama-3-8b-1": Case(MODELS["llama-3-8b"], [(128, 256)]),
    "llama-3-8b-64": Case(MODELS["llama-3-8b"], [(512, 512)] * 64),
    "llama-3-8b-256-mixed": Case(MODELS["llama-3-8b"], mixed(256)),
    "qwen2-0.5b-1": Case(MODELS["qwen2-0.5b"], [(128, 512)]),
    "gemma-2-2b-1": Case(MODELS["gemma-2-2b"], [(128, 256)]),
    "qwen3-30b-a3b-1": Case(QWEN3_30B_A3B, [(128, 256)]),
    "llama-3-8b-prefill-32k": Case(MODELS["llama-3-8b"] | {"max_position_embeddings": 65536}, [(32768, 1)]),
}


def prompts(case: Case) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    vocab_size = case.raw["vocab_size"]
    return [torch.randint(vocab_size, (length,), generator=generator).tolist() for length, _ in case.requests]


def run_engine(model, case: Case) -> dict[str, float]:
    """Seconds of a whole run, and the median milliseconds of its steps with all rows."""
    tokens = sum(-(-(prompt + new) // 64) * 64 for prompt, new in case.requests)
    engine = Engine(model, max_tokens=tokens, max_length=max(map(sum, case.requests)), max_rows=len(case.requests))
    seconds, steps = 0.0, []
    for _ in range(2):
        for prompt, (_, new) in zip(prompts(case), case.requests, strict=True):
            engine.submit(prompt, max_new_tokens=new, stop_tokens=())
        torch.cuda.synchronize()
        begin = time.perf_counter()
        steps = [(time.perf_counter(), len(drawn)) for drawn in engine.run()]
        seconds = time.perf_counter() - begin
    times = sorted(b - a for (a, _), (b, rows) in itertools.pairwise(steps) if rows == len(case.requests))
    return {"seconds": seconds, "step_ms": 1e3 * times[len(times) // 2] if times else float("nan")}


def training_forward(model, case: Case) -> float:
    """Seconds of a forward pass of training over the prompt, its loss included."""
    ids = torch.tensor(prompts(case), device="cuda")
    times = []
    for _ in range(3):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        model.train()(ids, labels=ids)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    model.eval()
    return times[-1]


def run_hugging_face(case: Case) -> dict[str, float]:
    """`generate` with a static cache and its compilation, of requests of equal lengths."""
    from transformers import AutoConfig, AutoModelForCausalLM

    (prompt, new), *others = case.requests
    if any(other != (prompt, new) for other in others):
        raise ValueError("requests of different lengths")
    config = AutoConfig.for_model(**case.raw)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    ids = torch.tensor(prompts(case), device="cuda")
    options = {"do_sample": False, "cache_implementation": "static", "eos_token_id": None, "pad_token_id": 0}
    seconds = first = 0.0
    for _ in range(2):
        for count in (1, new):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            out = model.generate(ids, max_new_tokens=count, min_new_tokens=count, **options)
            torch.cuda.synchronize()
            first, seconds = (
                (time.perf_counter() - begin, seconds) if count == 1 else (first, time.perf_counter() - begin)
            )
        assert out.shape[1] == prompt + new
    return {"seconds": seconds, "step_ms": 1e3 * (seconds - first) / (new - 1)}


def limit_ms(model, case: Case, copy_gb_per_s: float) -> float:
    """The time of a step's reads: active weights, and keys and values at the mean length."""
    config, parameters = model.config, count_parameters(model)
    weights = parameters.active - (0 if config.tie_word_embeddings else parameters.embedding)
    keys = sum(prompt + new / 2 for prompt, new in case.requests) * 2 * config.key_value_size * config.num_hidden_layers
    return 2 * (weights + keys) / copy_gb_per_s / 1e6


def run_case(name: str, provider: str, copy_gb_per_s: float) -> dict:
    case = CASES[name]
    new = sum(count for _, count in case.requests)
    row = {"case": name, "provider": provider}
    try:
        if provider == HUGGING_FACE:
            figures = run_hugging_face(case)
        else:
            model = ligermodels.create(case.raw, dtype=torch.bfloat16, device="cuda").eval()
            figures = run_engine(model, case) | {"limit_ms": limit_ms(model, case, copy_gb_per_s)}
            if new == len(case.requests):
                figures["training_forward_seconds"] = training_forward(model, case)
    except Exception as error:  # a provider that fails is a row of its own
        traceback.print_exc()
        return row | {"error": f"{type(error).__name__}: {str(error)[:300]}"}
    read = sum(length for length, _ in case.requests)
    return (
        row | figures | {"new_tokens_per_s": new / figures["seconds"], "prompt_tokens_per_s": read / figures["seconds"]}
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", nargs="*", choices=[[], *CASES], default=list(CASES), help="all if none is given")
    parser.add_argument("--provider", nargs="+", default=["ligermodels"], choices=["ligermodels", HUGGING_FACE])
    parser.add_argument("--output", type=Path, default=results.FOLDER, help="folder of the dated results")
    args = parser.parse_args()
    ceilings = timing.ceilings()
    rows = []
    for name in args.case:
        for provider in args.provider:
            rows.append(run_case(name, provider, ceilings["copy_gb_per_s"]))
            print(json.dumps(rows[-1]), flush=True)
            gc.collect()
            torch.cuda.empty_cache()
    report = results.environment() | {"benchmark": "generation", "ceilings": ceilings, "rows": rows}
    print(results.save(args.output, "generation", report))


if __name__ == "__main__":
    main()
