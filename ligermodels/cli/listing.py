"""`ligermodels list`: lists the architectures and their presets with numbers of parameters."""

import argparse

from ligermodels.cli.parsing import Commands, add_command
from ligermodels.hub.description import architecture_lines


def add_to(commands: Commands) -> None:
    add_command(commands, "list", run, "list the architectures, their preset sizes and parameters", "")


def run(args: argparse.Namespace) -> None:
    for line in architecture_lines():
        print(line)
