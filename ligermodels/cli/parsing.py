"""What the commands' arguments share: an example in the help, options of the same meaning, the model they name."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ligermodels import hub
from ligermodels.cli.flags import Parser
from ligermodels.layers.decoder import CausalLM

DTYPE_CHOICES = ("float32", "bfloat16", "float16")
Commands = Any  # what add_subparsers returns, which argparse keeps to itself


def add_command(
    commands: Commands, name: str, run: Callable[[argparse.Namespace], int | None], summary: str, example: str
) -> Parser:
    """run: does what the command is for; returns the exit status, None for 0. example: its arguments."""
    parser = commands.add_parser(
        name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=f"example: ligermodels {name} {example}".rstrip(),
    )  # fmt: skip
    parser.set_defaults(run=run, parser=parser)
    return parser


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where it runs")


def add_revision(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--revision", help="branch, tag or commit of a Hub repository")


def add_adapter(parser: argparse.ArgumentParser, use: str) -> None:
    parser.add_argument("--adapter", help=f"LoRA in PEFT's format, a folder or a Hub id, {use}")


def load_with_adapter(model: str | Path, adapter: Path | None, **options: Any) -> CausalLM:
    """The model of a folder or a Hub id, with the adapter of a folder. Raises InputError."""
    loaded = hub.load(model, **options)
    if adapter:
        hub.load_adapter(loaded, adapter)
    return loaded


def add_dtype(parser: argparse.ArgumentParser, meaning: str) -> None:
    parser.add_argument("--dtype", type=parse_dtype, metavar="{" + ",".join(DTYPE_CHOICES) + "}", help=meaning)


def parse_dtype(name: str) -> torch.dtype:
    if name not in DTYPE_CHOICES:
        raise argparse.ArgumentTypeError(f"invalid choice: {name!r} (choose from {', '.join(DTYPE_CHOICES)})")
    return getattr(torch, name)
