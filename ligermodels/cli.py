"""The command line: `ligermodels list`, `ligermodels generate`, `ligermodels bench`."""

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from ligermodels import hub
from ligermodels.architectures import ARCHITECTURES
from ligermodels.errors import InputError
from ligermodels.generate import model_stop_tokens, stream

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status: 2, after one line on stderr, for input that cannot be used."""
    args = parser().parse_args(arguments)
    try:
        args.command(args)
    except InputError as error:
        print(f"ligermodels: {error}", file=sys.stderr)
        return 2
    return 0


def parser() -> argparse.ArgumentParser:
    formatter = argparse.ArgumentDefaultsHelpFormatter
    root = argparse.ArgumentParser(prog="ligermodels", description="Decoder language models on fused Triton kernels.")
    commands = root.add_subparsers(required=True, metavar="command")

    listing = commands.add_parser("list", help="the architectures and their preset sizes")
    listing.set_defaults(command=list_models)

    generating = commands.add_parser("generate", help="continue a prompt", formatter_class=formatter)
    generating.add_argument("model", help="a folder or a Hub id")
    generating.add_argument("--prompt", required=True)
    generating.add_argument("--max-new-tokens", type=int, default=128)
    generating.add_argument("--temperature", type=float, default=0.0, help="0 takes the most likely token")
    generating.add_argument("--top-k", type=int)
    generating.add_argument("--top-p", type=float)
    generating.add_argument("--seed", type=int)
    generating.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    generating.set_defaults(command=generate_text)

    benchmarking = commands.add_parser("bench", help="time the ops beside their peers")
    benchmarking.add_argument("op", nargs="*", help="all of them where none is named")
    benchmarking.add_argument("--provider", nargs="+", default=[], help="all of them where none is named")
    benchmarking.add_argument("--output", type=Path, default=BENCHMARKS / "results", help="folder of the dated results")
    benchmarking.set_defaults(command=run_benchmarks)
    return root


def list_models(args: argparse.Namespace) -> None:
    for name, architecture in sorted(ARCHITECTURES.items()):
        print(f"{name:12} {' '.join(architecture.SIZES) or 'from a checkpoint'}")


def generate_text(args: argparse.Namespace) -> None:
    """Prints the prompt and, token by token, what follows it."""
    folder = hub.resolve(args.model)
    tokenizer = hub.load_tokenizer(folder)
    model = hub.load(folder, device=args.device)
    prompt, stops = tokenizer.encode(args.prompt), model_stop_tokens(model)
    ids: list[int] = []
    printed = 0
    print(args.prompt, end="", flush=True)
    for (token,) in stream(model, [prompt], args.max_new_tokens, args.temperature, args.top_k, args.top_p, args.seed):
        if token in stops:
            break
        ids.append(token)
        text = tokenizer.decode(ids)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # else a character's bytes are not all there yet
            print(text[printed:], end="", flush=True)
            printed = len(text)
    print()


def run_benchmarks(args: argparse.Namespace) -> None:
    """They lie beside the package in a checkout, and are not installed with it."""
    if not (BENCHMARKS / "suite.py").is_file():
        raise InputError(f"bench: no {BENCHMARKS}; run it from a checkout of the repository (pip install -e .)")
    sys.path.insert(0, str(BENCHMARKS.parent))
    importlib.import_module("benchmarks.suite").run(args.op, args.provider, args.output)


if __name__ == "__main__":
    sys.exit(main())
