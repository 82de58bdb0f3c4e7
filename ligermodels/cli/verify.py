"""`ligermodels verify`: compares a checkpoint in transformers and in ligermodels, and writes a parity certificate."""

import argparse
import time
from pathlib import Path

from ligermodels.cli.console import add_output_flags
from ligermodels.cli.flags import Commands, add_command, add_device, chosen_device, positive, print_line
from ligermodels.hub.names import refuse_mistyped
from ligermodels.units import counted, duration


def add_verify_command(commands: Commands) -> None:
    parser = add_command(
        commands, "verify", run, "compare a checkpoint with transformers, and write a parity certificate",
        "Qwen/Qwen3-0.6B --output certificates",
    )  # fmt: skip
    parser.add_argument("model", help="a folder or a Hub id")
    parser.add_argument("--output", type=Path, default=Path("certificates"), help="folder of the certificate")
    parser.add_argument("--tokens", type=positive, default=32, help="number of greedy tokens to compare")
    add_device(parser)
    add_output_flags(parser)


def run(args: argparse.Namespace) -> int:
    refuse_mistyped(args.model)
    from ligermodels.verify import as_json, verify  # no other command needs it

    began = time.monotonic()
    certificate = verify(args.model, args.output, device=str(chosen_device(args)), new_tokens=args.tokens)
    with args.console.progress():
        for check in certificate.checks:
            print_line(f"{check.outcome:8} {check.name}: {check.result}")
        for subject, line in certificate.scope.items():
            print_line(f"{'scope':8} {subject}: {line}")
    passed, done = "passed" if certificate.passed else "failed", counted(len(certificate.checks), "check")
    print_line(f"{certificate.page}: {passed}, {done} in {duration(time.monotonic() - began)}")
    args.console.record(as_json(certificate) | {"page": str(certificate.page)})
    return 0 if certificate.passed else 1
