"""How command lines read their flags: help that shows defaults and examples, and the values that several flags take.

A type of this file says what a value is and what it must be, for a message that begins with the flag's name.
"""

import argparse
from collections.abc import Callable
from typing import Any

from ligermodels.errors import suggest_closest


class Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows defaults as they would be given, but none where there is none, and examples as they are written."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default = action.default
        if default is None or default is False or default == []:
            return action.help
        if default is True or isinstance(default, list):
            return f"{action.help} (default: {'on' if default is True else ' '.join(default)})"
        return super()._get_help_string(action)

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        return "N" if action.type else super()._get_default_metavar_for_optional(action)


class Parser(argparse.ArgumentParser):
    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=Formatter, allow_abbrev=False, **options)


def whole(least: int, rule: str, most: int | None = None) -> Callable[[str], int]:
    """A whole number from `least` to `most`, which is what `rule` says."""

    def read(text: str) -> int:
        if not (text.isascii() and text.isdecimal()) or int(text) < least or (most is not None and int(text) > most):
            raise argparse.ArgumentTypeError(f"is {text!r}; must be {rule}")
        return int(text)

    return read


def number(holds: Callable[[float], bool], rule: str) -> Callable[[str], float]:
    """A number for which `holds`, which is what `rule` says; not a number never does."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not holds(value):
            raise argparse.ArgumentTypeError(f"is {text!r}; must be {rule}")
        return value

    return read


def one_of(*names: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(
                f"is {text!r}; must be one of {', '.join(names)}{suggest_closest(text, names)}"
            )
        return text

    return read


def switch(text: str) -> bool:
    """On the command line "on" and "off", in a file true and false as well."""
    values = {"on": True, "true": True, "off": False, "false": False}
    if text not in values:
        raise argparse.ArgumentTypeError(f"is {text!r}; must be on or off")
    return values[text]


positive = whole(1, "a whole number above zero")
count = whole(0, "a whole number, 0 or more")
above_zero = number(lambda x: 0 < x < float("inf"), "a number above 0")
not_negative = number(lambda x: 0 <= x < float("inf"), "a number, 0 or more")
