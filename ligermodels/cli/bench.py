"""`ligermodels bench`: the ops beside their peers."""

import argparse
import importlib
import sys
from pathlib import Path

from ligermodels.cli.parsing import Commands, add_command
from ligermodels.errors import InputError

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def add_to(commands: Commands) -> None:
    parser = add_command(
        commands, "bench", run, "time the ops beside their peers, on a GPU", "rms_norm --provider liger ligermodels"
    )
    parser.add_argument("op", nargs="*", help="all of them where none is named")
    parser.add_argument("--provider", nargs="+", default=[], help="all of them where none is named")
    parser.add_argument("--output", type=Path, default=BENCHMARKS / "results", help="folder of the dated results")


def run(args: argparse.Namespace) -> None:
    """They lie beside the package in a checkout, and are not installed with it."""
    if not (BENCHMARKS / "suite.py").is_file():
        raise InputError(f"bench: no {BENCHMARKS}; run it from a checkout of the repository (pip install -e .)")
    sys.path.insert(0, str(BENCHMARKS.parent))
    importlib.import_module("benchmarks.suite").run(args.op, args.provider, args.output)
