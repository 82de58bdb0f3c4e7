"""`ligermodels list`: the architectures, their presets and how many parameters these have."""

import argparse

from ligermodels.architectures import ARCHITECTURES
from ligermodels.cli.parsing import Commands, add_command
from ligermodels.hub import create


def add_to(commands: Commands) -> None:
    add_command(commands, "list", run, "list the architectures, their preset sizes and parameters", "")


def run(args: argparse.Namespace) -> None:
    for name, architecture in sorted(ARCHITECTURES.items()):
        presets = [f"{size} ({parameters(name, size)})" for size in architecture.SIZES]
        print(f"{name:12} {', '.join(presets) or 'from a checkpoint'}")


def parameters(architecture: str, size: str) -> str:
    """8030261248 -> "8.0B"."""
    count = sum(parameter.numel() for parameter in create(architecture, size=size, device="meta").parameters())
    return f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.1f}M"
