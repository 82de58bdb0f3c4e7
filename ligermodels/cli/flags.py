"""How command lines read their flags: help that shows defaults and examples, values with rules, errors of one line.

A type of this file states what a value is and what it must be, for a message that begins with the flag's name. Here are
also the flags that several commands have, and what they name. Torch is imported where a command runs, not where its
flags are declared: help and errors of usage do not wait for it.
"""

import argparse
import itertools
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ligermodels import hub
from ligermodels.aliases import Alias, alias_hint, flag_of
from ligermodels.configs.quantisation import FORMATS
from ligermodels.errors import InputError, print_to_stderr, printable, suggest_closest
from ligermodels.gpus import parse_gpus
from ligermodels.units import counted, is_whole_number

if TYPE_CHECKING:
    import torch

    from ligermodels.layers.decoder import CausalLM

UNUSABLE_INPUT = 2  # exit status
Commands = Any  # the return type of add_subparsers, which argparse does not export
NAMES_OF_VALUES = {int: "N", float: "N", bool: "on|off", Path: "PATH"}  # in the usage
DTYPE_CHOICES = ("float32", "bfloat16", "float16")
IMAGE_COMMAND = "/image"  # begins a line that names an image of the next message


class Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows each flag's default, unless it has none, and examples as they are written."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if any(action.default is none for none in (None, False, argparse.SUPPRESS)) or action.default == []:
            return action.help
        return super()._get_help_string(action)

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        return "N" if action.type else super()._get_default_metavar_for_optional(action)


class Parser(argparse.ArgumentParser):
    """Raises InputError, of one line, where argparse prints its usage and exits.

    flag_aliases: what other tools call the flags of this command.
    """

    flag_aliases: Sequence[Alias] = ()

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=Formatter, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise InputError(message.removeprefix("argument "))

    def parse_command(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parses as parse_args does. Raises InputError for an unknown flag, and for a list that is given twice."""
        args, unknown = self.parse_known_args(arguments)
        command = args.parser
        for word in unknown:
            name = word.partition("=")[0]
            if not name.startswith("-"):
                raise InputError(f"{name}: belongs to no flag; `{command.prog} --help` lists them all")
            raise InputError(f"{name}: no such flag{hint_of_flag(word, arguments, command)}")
        for action in command._actions:
            given = [word for word in arguments if word.partition("=")[0] in action.option_strings]
            if action.nargs in ("+", "*") and len(given) > 1:
                raise InputError(
                    f"{action.option_strings[0]} is given {len(given)} times; give all its values behind one"
                )
        return args


def hint_of_flag(word: str, arguments: Sequence[str], command: Parser) -> str:
    """The end of a message about a flag, one of the arguments, that the command does not have."""
    name, equals, value = word.partition("=")
    behind = itertools.takewhile(lambda text: not text.startswith("--"), arguments[arguments.index(word) + 1 :])
    names = [option for action in command._actions for option in action.option_strings]
    known = {option.removeprefix("--").replace("-", "_") for option in names}
    hint = alias_hint(name, [value] if equals else [*behind], command.flag_aliases, known, flag_with_value)
    return hint or f"{suggest_closest(name, names)}; --help lists them all"


def flag_with_value(name: str, value: str | None) -> str:
    return flag_of(name) if value is None else f"{flag_of(name)} {value}"


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


def add_for_gpu(parser: argparse.ArgumentParser, meaning: str) -> None:
    """Adds --for-gpu, GPUs that this machine need not have. meaning: its help."""
    parser.add_argument("--for-gpu", type=gpus, metavar="24GB|h100[,N]", help=meaning)


def gpus(text: str) -> str:
    """GPUs as `parse_gpus` reads them."""
    try:
        parse_gpus(text)
    except InputError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def whole_number(least: int, rule: str) -> Callable[[str], int]:
    """A whole number from `least` on, which `rule` says in words."""

    def read(text: str) -> int:
        if not is_whole_number(text) or int(text) < least:
            raise argparse.ArgumentTypeError(f"is {text!r}; must be {rule}")
        return int(text)

    return read


def number(holds: Callable[[float], bool], rule: str) -> Callable[[str], float]:
    """A number for which `holds`, which `rule` says in words; never NaN."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not holds(value):
            raise argparse.ArgumentTypeError(f"is {text!r}; must be {rule}")
        return value

    return read


positive = whole_number(1, "a whole number above zero")


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
    parser.add_argument("--dtype", choices=DTYPE_CHOICES, help=meaning)


def add_quantize(parser: argparse.ArgumentParser, meaning: str) -> None:
    """Adds --quantize. meaning: its help."""
    parser.add_argument("--quantize", choices=FORMATS, help=meaning)


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
