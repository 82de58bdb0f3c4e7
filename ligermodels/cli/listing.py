"""`ligermodels list`: lists the architectures and their presets with numbers of parameters."""

import argparse

from ligermodels.cli.flags import Commands, add_command
from ligermodels.hub.names import architecture_list


def add_to(commands: Commands) -> None:
    add_command(commands, "list", run, "list the architectures, their preset sizes and parameters", "")


def run(args: argparse.Namespace) -> None:
    print(architecture_list(), end="")
