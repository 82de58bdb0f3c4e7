"""What the commands' arguments share: help that shows defaults and an example, and options of the same meaning."""

import argparse
from collections.abc import Callable
from typing import Any

import torch

DTYPES = ("float32", "bfloat16", "float16")
Commands = Any  # what add_subparsers returns, which argparse keeps to itself


class Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows defaults, but none where there is none, and the example as it is written."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False or action.default == []:
            return action.help
        return super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=Formatter, allow_abbrev=False, **options)


def add_command(
    commands: Commands, name: str, run: Callable[[argparse.Namespace], int | None], summary: str, example: str
) -> Parser:
    """run: does what the command is for; returns the exit status, None for 0. example: its arguments."""
    parser = commands.add_parser(
        name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=f"example: ligermodels {name} {example}".rstrip(),
    )  # fmt: skip
    parser.set_defaults(run=run)
    return parser


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where it runs")


def add_revision(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--revision", help="branch, tag or commit of a Hub repository")


def add_dtype(parser: argparse.ArgumentParser, meaning: str) -> None:
    parser.add_argument("--dtype", type=dtype, metavar="{" + ",".join(DTYPES) + "}", help=meaning)


def dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise argparse.ArgumentTypeError(f"invalid choice: {name!r} (choose from {', '.join(DTYPES)})")
    return getattr(torch, name)


def positive(text: str) -> int:
    """A whole number above zero."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"is {text!r}; must be a whole number above zero")
    return int(text)


def byte_size(count: int) -> str:
    """1536 -> "1.5 KB": in powers of 1000, as files are sold."""
    return scaled(count, 1000, ("B", "KB", "MB", "GB", "TB"))


def memory_size(count: int) -> str:
    """1536 -> "1.5 KiB": in powers of 1024, as memory is sold."""
    return scaled(count, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def scaled(count: float, step: int, units: tuple[str, ...]) -> str:
    for unit in units[:-1]:
        if count < step:
            return f"{count:.{0 if unit == 'B' else 1}f} {unit}"
        count /= step
    return f"{count:.1f} {units[-1]}"
