"""`ligermodels completion` prints the script by which a shell completes commands, flags and their values."""

import argparse
import re

from ligermodels import cli
from ligermodels.cli.flags import Commands, add_command
from ligermodels.lazy_imports import import_package

# Behind the script for bash, which alone would complete no file names.
FILES_IN_BASH = "complete -o bashdefault -o default -F _shtab_ligermodels ligermodels"


def add_completion_command(commands: Commands) -> None:
    parser = add_command(
        commands, "completion", run, "print the script by which a shell completes these commands",
        "bash > ~/.local/share/bash-completion/completions/ligermodels",
    )  # fmt: skip
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))


def run(args: argparse.Namespace) -> None:
    shtab = import_package("shtab", "completion")
    root = cli.build_parser()
    (commands,) = (action.choices for action in root._actions if isinstance(action.choices, dict))
    for parser in commands.values():
        for action in parser._actions:
            shown = re.fullmatch(r"\{(.+)\}|(on\|off)", str(action.metavar))  # as the usage shows a flag's values
            action.choices = action.choices or (re.split(r"[,|]", shown[1] or shown[2]) if shown else None)
            if not action.choices and action.nargs != 0 and args.shell != "bash":
                action.complete = shtab.FILE
    print(shtab.complete(root, args.shell))
    if args.shell == "bash":
        print(FILES_IN_BASH)
