"""The command line. Each command has its own file, which adds its arguments to the parser and calls the library."""

import sys
from collections.abc import Iterable, Sequence
from importlib import import_module

from ligermodels import __version__
from ligermodels.cli.flags import UNUSABLE_INPUT, Parser
from ligermodels.errors import InputError, first_line, silence_closed_stdout

INTERRUPTED = 130  # the exit status that a shell reports for SIGINT
# Command -> its file. Only the file of the given command is imported: `list` does not wait for torch.
COMMANDS = {
    "train": "train",
    "list": "listing",
    "info": "info",
    "generate": "generate",
    "export": "export",
    "verify": "verify",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status: 2, after one line on stderr, for invalid input."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        args = build_parser(COMMANDS.keys() & set(arguments[:1]) or COMMANDS).parse_command(arguments)
        status = args.run(args)
        sys.stdout.flush()
        return status or 0
    except InputError as error:
        return report_error(str(error))
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":  # torch's, which only some commands import
            raise
        return report_error(
            f"out of memory on the GPU; `ligermodels info` shows what a model needs: {first_line(error)}"
        )
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        return silence_closed_stdout()


def build_parser(names: Iterable[str] = COMMANDS) -> Parser:
    """The parser of these commands."""
    root = Parser(prog="ligermodels", description="Decoder language models on fused Triton kernels.")
    root.add_argument("--version", action="version", version=f"ligermodels {__version__}")
    commands = root.add_subparsers(required=True, metavar="command")
    for name in names:
        import_module(f"{__name__}.{COMMANDS[name]}").add_to(commands)
    return root


def report_error(message: str) -> int:
    """Prints one line to stderr; returns the exit status for invalid input."""
    print(f"ligermodels: {message}", file=sys.stderr)
    return UNUSABLE_INPUT
