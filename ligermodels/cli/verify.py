"""`ligermodels verify`: compares a checkpoint in transformers and in ligermodels, and writes a parity certificate."""

import argparse
from pathlib import Path

from ligermodels.cli.flags import Commands, add_command, positive
from ligermodels.cli.parsing import add_device, chosen_device, print_line
from ligermodels.hub.names import refuse_mistyped


def add_verify_command(commands: Commands) -> None:
    parser = add_command(
        commands, "verify", run, "compare a checkpoint with transformers, and write a parity certificate",
        "Qwen/Qwen3-0.6B --output certificates",
    )  # fmt: skip
    parser.add_argument("model", help="a folder or a Hub id")
    parser.add_argument("--output", type=Path, default=Path("certificates"), help="folder of the certificate")
    parser.add_argument("--tokens", type=positive, default=32, help="number of greedy tokens to compare")
    add_device(parser)


def run(args: argparse.Namespace) -> int:
    refuse_mistyped(args.model)
    from ligermodels.verify import verify  # no other command needs it

    certificate = verify(args.model, args.output, device=str(chosen_device(args)), new_tokens=args.tokens)
    for check in certificate.checks:
        print_line(f"{check.outcome:8} {check.name}: {check.result}")
    for subject, line in certificate.scope.items():
        print_line(f"{'scope':8} {subject}: {line}")
    print_line(f"{certificate.page}: {'passed' if certificate.passed else 'failed'}")
    return 0 if certificate.passed else 1
