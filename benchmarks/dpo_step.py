"""Whole steps of DPO on one GPU: useful tokens/s and peak memory, with LoRA or of all weights, beside TRL.

    python -m benchmarks.dpo_step --prompt 512 --completion 512
    python -m benchmarks.dpo_step --prompt 1024 --completion 256 --lora-rank 64

Useful tokens are a prompt and a completion of each side, 2 P + 2 n a pair, whatever was computed. Weights are bf16 and
random, as are the tokens. With LoRA the reference is the base, computed in each step; of all weights it was computed
before, and no provider's time has it. A micro-batch has `--row-tokens`; the time is the median of the timed steps after
a warm-up. TRL needs datasets, accelerate and, with LoRA, peft.
"""

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import results
from benchmarks.processes import measured_rows
from benchmarks.train_step import MODELS

TINY = {
    "model_type": "llama", "vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512,
}  # fmt: skip
SIZES = MODELS | {"tiny": TINY}
WARM_UP = 2
RATE, BETA = 1e-6, 0.1


def clock() -> float:
    """Seconds, once the device is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def reset_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def random_ids(args: argparse.Namespace, length: int, generator: np.random.Generator) -> np.ndarray:
    return generator.integers(2, SIZES[args.model]["vocab_size"], length)


def random_pairs(args: argparse.Namespace, count: int) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Prompts with both completions."""
    generator = np.random.default_rng(0)
    lengths = args.prompt, args.completion, args.completion
    return [tuple(random_ids(args, length, generator) for length in lengths) for _ in range(count)]  # type: ignore[misc]


def ours(args: argparse.Namespace, checkpointing: bool, share: bool) -> list[float]:
    """Returns the seconds of each timed step."""
    import ligermodels
    from ligermodels import losses
    from ligermodels.layers.lora import lora_disabled
    from ligermodels.training.data.preferences import Group, collate_groups
    from ligermodels.training.optimizers.building import build_optimizer, clip_and_step, set_learning_rate
    from ligermodels.training.parallel.fsdp import gradient_norm

    model = ligermodels.create(SIZES[args.model], dtype=torch.bfloat16, device=device()).train()
    if args.lora_rank:
        ligermodels.add_lora(model, rank=args.lora_rank)
    if checkpointing:
        model.checkpoint_activations()
    optimizer = build_optimizer(model)
    set_learning_rate(optimizer, RATE)
    groups = [Group(prompt, tuple(sides), (None, None)) for prompt, *sides in random_pairs(args, args.pairs)]
    rows = [row.to(device()) for row in collate_groups(groups, range(args.pairs), args.row, share_prompts=share)]
    known = torch.zeros(2 * args.pairs, dtype=torch.float64, device=device())  # the reference of full fine-tuning
    extras = {"entropy": False, "extras": ("entropy", "greedy")}  # what a run logs

    def reference_sums(row):
        if not args.lora_rank:
            return known[: len(row.completions) - 1]
        with torch.no_grad(), lora_disabled(model):
            found = model(**row.model_inputs, logprobs=extras).logprobs.logprobs[: row.supervised]
        return losses.pair_sums(found, row.completions)

    def step() -> None:
        total = torch.zeros((), device=device())
        for row in rows:
            reference = reference_sums(row)
            found = model(**row.model_inputs, logprobs=extras).logprobs.logprobs[: row.supervised]
            loss = losses.dpo(found, row.completions, reference, beta=BETA).loss / args.pairs
            loss.backward()
            total += loss.detach()
        clip_and_step(optimizer, total, gradient_norm(model), 1.0)
        optimizer.zero_grad()

    seconds = []
    for number in range(WARM_UP + args.steps):
        if number == WARM_UP:
            reset_peak()
        began = clock()
        step()
        seconds.append(clock() - began)
    return seconds[WARM_UP:]


def words_tokenizer(vocab_size: int) -> Any:
    """A tokenizer for transformers without files: token 5 is the word w5."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "</s>": 1} | {f"w{number}": number for number in range(2, vocab_size)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>")


def hugging_face(args: argparse.Namespace) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**SIZES[args.model])
    with torch.device(device()):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def step_clock(seconds: list[float]) -> Any:
    """A callback of transformers' Trainer that appends the seconds of each step behind the warm-up."""
    from transformers import TrainerCallback

    class StepClock(TrainerCallback):
        def on_step_begin(self, arguments, state, *_, **__):
            if state.global_step == WARM_UP:
                reset_peak()
            self.began = clock()

        def on_step_end(self, arguments, state, *_, **__):
            if state.global_step > WARM_UP:
                seconds.append(clock() - self.began)

    return StepClock()


def lora_config(args: argparse.Namespace) -> Any:
    from peft import LoraConfig

    return LoraConfig(r=args.lora_rank, lora_alpha=2 * args.lora_rank, target_modules="all-linear")


def trl_settings(args: argparse.Namespace, folder: str, sequences: int, checkpointing: bool) -> dict[str, Any]:
    """Arguments of TRL's trainers: sequences of a micro-batch."""
    return {
        "output_dir": folder, "per_device_train_batch_size": sequences, "max_steps": WARM_UP + args.steps,
        "learning_rate": RATE, "optim": "adamw_torch_fused" if device().type == "cuda" else "adamw_torch",
        "logging_strategy": "no", "save_strategy": "no", "report_to": [], "disable_tqdm": True,
        "gradient_checkpointing": checkpointing, "bf16": device().type == "cuda", "use_cpu": device().type == "cpu",
    }  # fmt: skip


def trl(args: argparse.Namespace, checkpointing: bool) -> list[float]:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    class Trainer(DPOTrainer):
        def _prepare_dataset(self, dataset, *_, **__):
            return dataset  # it has token ids

    names = "prompt_ids", "chosen_ids", "rejected_ids"
    records = [dict(zip(names, (ids.tolist() for ids in pair), strict=True)) for pair in random_pairs(args, args.pairs)]
    most = max(1, args.row // (2 * (args.prompt + args.completion)))
    micro = max(size for size in range(1, most + 1) if args.pairs % size == 0)  # each step has all pairs
    seconds: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        arguments = DPOConfig(
            **trl_settings(args, folder, micro, checkpointing), beta=BETA, max_length=None,
            gradient_accumulation_steps=args.pairs // micro, precompute_ref_log_probs=not args.lora_rank,
        )  # fmt: skip
        Trainer(
            hugging_face(args), args=arguments, train_dataset=Dataset.from_list(records),
            processing_class=words_tokenizer(SIZES[args.model]["vocab_size"]), callbacks=[step_clock(seconds)],
            peft_config=lora_config(args) if args.lora_rank else None,
        ).train()  # fmt: skip
    return seconds


PROVIDERS: dict[str, Callable[[argparse.Namespace, bool], list[float]]] = {
    "ligermodels": lambda args, checkpointing: ours(args, checkpointing, share=True),
    "ligermodels, prompts not shared": lambda args, checkpointing: ours(args, checkpointing, share=False),
    "trl": trl,
}


def measure(provider: str, args: argparse.Namespace, checkpointing: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    seconds = PROVIDERS[provider](args, checkpointing)
    median = statistics.median(seconds)
    useful = 2 * args.pairs * (args.prompt + args.completion)
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    return {
        "useful_tokens_per_second": round(useful / median), "step_ms": round(1e3 * median, 1),
        "spread_ms": round(1e3 * (max(seconds) - min(seconds)), 1), "peak_gib": round(peak / 2**30, 1),
    }  # fmt: skip


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SIZES, default="llama-3-8b")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--completion", type=int, default=512, help="tokens of each completion")
    parser.add_argument("--pairs", type=int, default=16, help="of a step")
    parser.add_argument("--row-tokens", dest="row", type=int, default=8192, help="most tokens of a micro-batch")
    parser.add_argument("--lora-rank", type=int, default=0, help="0: all weights are trained")
    parser.add_argument("--steps", type=int, default=6, help=f"timed steps, after a warm-up of {WARM_UP}")
    parser.add_argument("--seconds", type=float, default=240, help="most seconds of a row")
    parser.add_argument("--providers", nargs="+", choices=PROVIDERS, default=list(PROVIDERS))
    parser.add_argument("--activation-checkpointing", nargs="+", choices=("none", "full"), default=["none", "full"])
    parser.add_argument("--output", type=Path, default=results.FOLDER, help="folder for the dated JSON file")
    parser.add_argument(
        "--row", dest="measured", nargs=2, metavar=("PROVIDER", "CHECKPOINTING"), help=argparse.SUPPRESS
    )
    return parser.parse_args(arguments)


def main() -> None:
    args = parse()
    if args.measured:
        provider, checkpointing = args.measured
        print(json.dumps(measure(provider, args, checkpointing == "full")))
        return
    keys = list(itertools.product(args.providers, args.activation_checkpointing))
    rows = []
    for key, found in zip(keys, measured_rows("benchmarks.dpo_step", sys.argv[1:], keys, args.seconds), strict=True):
        rows.append(dict(zip(("provider", "activation_checkpointing"), key, strict=True)) | found)
        print(rows[-1], flush=True)
    shape = {name: getattr(args, name) for name in ("model", "prompt", "completion", "pairs", "row", "lora_rank")}
    print(results.save(args.output, f"dpo-step-{args.model}", results.environment() | shape | {"rows": rows}))


if __name__ == "__main__":
    main()
