"""python -m benchmarks [op ...] [--provider ...] [--output DIR]: times the ops and their peers on a GPU."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import suite
from ligermodels.errors import InputError

UNUSABLE_INPUT = 2  # exit status


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Time the ops and their peers, on a GPU.",
        epilog="example: python -m benchmarks rms_norm --provider liger ligermodels",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("op", nargs="*", help="ops to time; all if none is given")
    parser.add_argument("--provider", nargs="+", default=argparse.SUPPRESS, help="providers to time; all if not given")
    results = Path(__file__).with_name("results")
    parser.add_argument("--output", type=Path, default=results, help="folder of the dated results")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the suite; returns the exit status: 2, after one line on stderr, for invalid arguments or without a GPU."""
    args = build_parser().parse_args(arguments)
    try:
        suite.run(args.op, getattr(args, "provider", []), args.output)
    except InputError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return UNUSABLE_INPUT
    return 0


if __name__ == "__main__":
    sys.exit(main())
