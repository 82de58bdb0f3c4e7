"""The command line. Each command has its own file, which adds its arguments to the parser and calls the library."""

import sys
from collections.abc import Sequence

import torch

from ligermodels.cli import export, generate, info, listing, train, verify
from ligermodels.cli.flags import UNUSABLE_INPUT, Parser
from ligermodels.errors import InputError, first_line, printable, silence_closed_stdout

INTERRUPTED = 130  # the exit status that a shell reports for SIGINT


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status: 2, after one line on stderr, for invalid input."""
    try:
        args = build_parser().parse_command(sys.argv[1:] if arguments is None else arguments)
        status = args.run(args)
        sys.stdout.flush()
        return status or 0
    except InputError as error:
        return report_error(str(error))
    except torch.OutOfMemoryError as error:
        return report_error(
            f"out of memory on the GPU; `ligermodels info` shows what a model needs: {first_line(error)}"
        )
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        return silence_closed_stdout()


def build_parser() -> Parser:
    """The parser of all commands."""
    root = Parser(prog="ligermodels", description="Decoder language models on fused Triton kernels.")
    commands = root.add_subparsers(required=True, metavar="command")
    for command in (train, listing, info, generate, export, verify):
        command.add_to(commands)
    return root


def report_error(message: str) -> int:
    """Prints one line to stderr; returns the exit status for invalid input."""
    print(printable(f"ligermodels: {message}"), file=sys.stderr)
    return UNUSABLE_INPUT
