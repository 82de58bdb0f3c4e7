"""Shared parts of the commands: the help's example, options that several commands have, loading the named model."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ligermodels import hub
from ligermodels.cli.flags import Parser
from ligermodels.errors import printable
from ligermodels.layers.decoder import CausalLM

DTYPE_CHOICES = ("float32", "bfloat16", "float16")
Commands = Any  # the return type of add_subparsers, which argparse does not export


def add_command(
    commands: Commands, name: str, run: Callable[[argparse.Namespace], int | None], summary: str, example: str
) -> Parser:
    """Adds a command to the parser. run: runs it; returns the exit status, None for 0. example: its arguments."""
    parser = commands.add_parser(
        name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=f"example: ligermodels {name} {example}".rstrip(),
    )  # fmt: skip
    parser.set_defaults(run=run, parser=parser)
    return parser


def print_line(line: str) -> None:
    """Prints a line. Parts of it may come from a file: characters that would control the terminal are escaped."""
    print(printable(line))


def add_device(parser: argparse.ArgumentParser) -> None:
    """Adds --device."""
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="device to run on")


def add_revision(parser: argparse.ArgumentParser) -> None:
    """Adds --revision."""
    parser.add_argument("--revision", help="branch, tag or commit of a Hub repository")


def add_adapter(parser: argparse.ArgumentParser, use: str) -> None:
    """Adds --adapter. use: completes its help."""
    parser.add_argument("--adapter", help=f"LoRA adapter in PEFT's format (folder or Hub id) {use}")


def load_with_adapter(model: str | Path, adapter: Path | None, **options: Any) -> CausalLM:
    """Loads the model of a folder or a Hub id, and the adapter in a folder. Raises InputError."""
    loaded = hub.load(model, **options)
    if adapter:
        hub.load_adapter(loaded, adapter)
    return loaded


def add_dtype(parser: argparse.ArgumentParser, meaning: str) -> None:
    """Adds --dtype. meaning: its help."""
    parser.add_argument("--dtype", type=parse_dtype, metavar="{" + ",".join(DTYPE_CHOICES) + "}", help=meaning)


def parse_dtype(name: str) -> torch.dtype:
    """The torch dtype of a name in DTYPE_CHOICES."""
    if name not in DTYPE_CHOICES:
        raise argparse.ArgumentTypeError(f"invalid choice: {name!r} (choose from {', '.join(DTYPE_CHOICES)})")
    return getattr(torch, name)
