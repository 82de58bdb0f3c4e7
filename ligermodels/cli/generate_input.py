"""The prompt of `ligermodels generate`, from the command line or standard input, and what limits a conversation."""

import argparse
import sys
from collections.abc import Iterator

from ligermodels.errors import InputError

IMAGE_COMMAND = "/image"  # begins a line that names an image of the next message
CACHE_TOKENS = 16384  # on a CPU, or of a conversation with a model that was trained for less; 2 GiB for Llama-3-8B


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
