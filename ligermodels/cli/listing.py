"""`ligermodels list`: lists the architectures and their presets with numbers of parameters. Imports no torch."""

import argparse
from importlib.resources import files

from ligermodels.cli.flags import Commands, add_command


def add_to(commands: Commands) -> None:
    add_command(commands, "list", run, "list the architectures, their preset sizes and parameters", "")


def run(args: argparse.Namespace) -> None:
    print(architecture_list(), end="")


def architecture_list() -> str:
    """One line per architecture: its presets with their numbers of parameters, as `hub.description` computes them."""
    return files("ligermodels").joinpath("hub", "architectures.txt").read_text(encoding="utf-8")
