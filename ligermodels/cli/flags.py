"""How command lines read their flags: help that shows defaults and examples, values with rules, errors of one line.

A type of this file states what a value is and what it must be, for a message that begins with the flag's name.
"""

import argparse
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ligermodels.aliases import Alias, alias_hint, flag_of
from ligermodels.errors import InputError, suggest_closest
from ligermodels.units import is_whole_number

UNUSABLE_INPUT = 2  # exit status
Commands = Any  # the return type of add_subparsers, which argparse does not export
NAMES_OF_VALUES = {int: "N", float: "N", bool: "on|off", Path: "PATH"}  # in the usage


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
