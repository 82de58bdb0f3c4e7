"""Options that several commands have, loading the model that they name, and the prompt of `generate`.

Torch is imported where a command runs, not where its flags are declared: help and errors of usage do not wait for it.
"""

import argparse
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ligermodels import hub
from ligermodels.configs.quantisation import FORMATS
from ligermodels.errors import InputError, print_to_stderr, printable
from ligermodels.units import counted

if TYPE_CHECKING:
    import torch

    from ligermodels.layers.decoder import CausalLM

DTYPE_CHOICES = ("float32", "bfloat16", "float16")
IMAGE_COMMAND = "/image"  # begins a line that names an image of the next message


def print_line(line: str) -> None:
    """Prints a line. Parts of it may come from a file: characters that would control the terminal are escaped."""
    print(printable(line))


def add_device(parser: argparse.ArgumentParser) -> None:
    """Adds --device, which `chosen_device` reads."""
    parser.add_argument("--device", type=parse_device, help="device to run on (default: a GPU if there is one)")


def parse_device(text: str) -> str:
    if not re.fullmatch(r"cpu|cuda(:\d{1,4})?", text):
        raise argparse.ArgumentTypeError(f"is {text!r}; must be cpu, cuda or cuda:NUMBER")
    return text


def chosen_device(args: argparse.Namespace) -> "torch.device":
    """The device of --device. Raises InputError for a GPU that this machine does not have."""
    import torch

    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InputError(
            f"--device: is {args.device!r}, but torch {torch.__version__} sees "
            f"{counted(torch.cuda.device_count(), 'GPU')}; use cpu"
        )
    return device


def add_revision(parser: argparse.ArgumentParser) -> None:
    """Adds --revision."""
    parser.add_argument("--revision", help="branch, tag or commit of a Hub repository")


def add_adapter(parser: argparse.ArgumentParser, use: str) -> None:
    """Adds --adapter. use: completes its help."""
    parser.add_argument("--adapter", help=f"LoRA adapter in PEFT's format (folder or Hub id) {use}")


def resolve_model(model: str, args: argparse.Namespace) -> tuple[Path, Path | None]:
    """The folders of a model and of its adapter, if it has one, by --adapter and --revision. The name of an adapter
    stands for it and its base. Raises InputError."""
    remedy = f"name its base: {args.parser.prog} BASE --adapter {model}"
    return hub.resolve_with_adapter(model, args.adapter, revision=args.revision, remedy=remedy)


def load_with_adapter(model: Path, adapter: Path | None, **options: Any) -> "CausalLM":
    """Loads the model of a folder, and the adapter in another. Raises InputError."""
    loaded = hub.load(model, **options)
    if adapter:
        with warnings.catch_warnings(record=True) as caught:
            hub.load_adapter(loaded, adapter)
        print_warnings(caught)
    return loaded


def print_warnings(caught: list[warnings.WarningMessage]) -> None:
    """Prints each warning as a line on stderr, and empties the list."""
    while caught:
        print_to_stderr(printable(f"ligermodels: warning: {caught.pop(0).message}"))


def add_dtype(parser: argparse.ArgumentParser, meaning: str) -> None:
    """Adds --dtype, the name of a dtype. meaning: its help."""
    parser.add_argument("--dtype", type=parse_dtype, metavar="{" + ",".join(DTYPE_CHOICES) + "}", help=meaning)


def add_quantize(parser: argparse.ArgumentParser, meaning: str) -> None:
    """Adds --quantize. meaning: its help."""
    parser.add_argument("--quantize", choices=FORMATS, help=meaning)


def parse_dtype(name: str) -> str:
    if name not in DTYPE_CHOICES:
        raise argparse.ArgumentTypeError(f"invalid choice: {name!r} (choose from {', '.join(DTYPE_CHOICES)})")
    return name


def given_prompt(args: argparse.Namespace) -> str | None:
    """The prompt of the command line or of standard input; None for a conversation. Raises InputError without one."""
    if args.prompt not in (None, "-") or (args.prompt is None and args.chat):
        return args.prompt
    if args.prompt is None and sys.stdin.isatty():
        raise InputError("generate: --prompt is missing; give a text, pipe one in, or hold a conversation with --chat")
    text = "".join(lines_of_stdin()).rstrip("\n")
    if not text:
        raise InputError("generate: standard input is empty; pipe the prompt in, or give --prompt TEXT")
    return text


def lines_of_stdin() -> Iterator[str]:
    """The lines of standard input, each as soon as it is there. Raises InputError where it is not text."""
    try:
        yield from iter(sys.stdin.readline, "")
    except UnicodeDecodeError as error:
        raise InputError(f"standard input: is not text in {error.encoding}; convert it") from error
