"""The command line. Each command has its own file, which adds its arguments to the parser and calls the library."""

import errno
import io
import os
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module

from ligermodels import __version__
from ligermodels.cli.console import directed, warnings_in_a_line
from ligermodels.cli.flags import UNUSABLE_INPUT, Parser
from ligermodels.errors import InputError, exhausted_memory, first_line, print_to_stderr, printable, silence_closed

SPINS = "1000"  # some microseconds: most threads of a short operation arrive within them
INTERRUPTED = 130  # the exit status that a shell reports for SIGINT
# Command -> its file. Only the file of the given command is imported: `list` waits for no torch.
COMMANDS = {
    "train": "train", "list": "info", "info": "info", "generate": "generate", "export": "export", "verify": "verify",
    "board": "board", "completion": "completion",
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status: 2, after one line on stderr, for invalid input."""
    prepare_streams()
    wait_without_spinning()
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        args = build_parser(COMMANDS.keys() & set(arguments[:1]) or COMMANDS).parse_command(arguments)
        with directed(args) as args.console, warnings_in_a_line():
            status = args.run(args)
        sys.stdout.flush()
        return status or 0
    except InputError as error:
        return report_error(str(error))
    except KeyboardInterrupt:
        print_to_stderr("ligermodels: interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        return silence_closed(sys.stdout)
    except Exception as error:
        exhausted = exhausted_memory(error)
        if exhausted:
            advice = "take a smaller batch, prompt or dtype; `ligermodels info` shows what a model needs"
            return report_error(f"out of memory on the {exhausted}; {advice}: {first_line(error)}")
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
            return report_error(str(InputError(f"{error.filename}: is longer than a path can be; shorten it")))
        if isinstance(error, OSError) and not can_print():
            silence_closed(sys.stdout)
            return report_error(f"standard output: not written: {error.strerror}; make room there")
        raise


def build_parser(names: Iterable[str] = COMMANDS) -> Parser:
    """The parser of these commands."""
    root = Parser(prog="ligermodels", description="Decoder language models on fused Triton kernels.")
    root.add_argument("--version", action="version", version=f"ligermodels {__version__}")
    commands = root.add_subparsers(required=True, metavar="command")
    for name in names:
        getattr(import_module(f"{__name__}.{COMMANDS[name]}"), f"add_{name}_command")(commands)
    return root


def report_error(message: str) -> int:
    """Prints one line to stderr; returns the exit status for invalid input."""
    print_to_stderr(printable(f"ligermodels: {message}"))
    return UNUSABLE_INPUT


def prepare_streams() -> None:
    """Makes printing work whatever the standard streams are.

    With PYTHONUNBUFFERED standard output gets a buffer: what could not be written stays in it, for `can_print`.
    /dev/null is opened in place of those that the caller has closed, as `>&-` does: Python has None in their place, and
    the next file that is opened would get the lowest of their descriptors, with all that libraries print there.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
    if isinstance(sys.stdout, io.TextIOWrapper):
        if isinstance(sys.stdout.buffer, io.RawIOBase):
            sys.stdout = os.fdopen(sys.stdout.fileno(), "w", 1, sys.stdout.encoding, closefd=False)
        sys.stdout.reconfigure(errors="backslashreplace")  # of characters that its encoding does not have


def wait_without_spinning() -> None:
    """Lets threads of OpenMP sleep while they wait for each other, unless the environment says how they wait.

    OpenMP reads it when torch is imported. By default they spin for milliseconds: beside another busy process they then
    keep the core that the thread they wait for needs, and training takes ten times as long.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)  # of GCC's library, in torch's wheels
        os.environ.setdefault("KMP_BLOCKTIME", "0")  # milliseconds, of Intel's


def can_print() -> bool:
    """Whether standard output can be written, with what was printed before."""
    try:
        sys.stdout.flush()
    except OSError:
        return False
    return True
