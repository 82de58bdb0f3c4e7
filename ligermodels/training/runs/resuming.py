"""When a run may go on: it is not finished, and goes on as it began, unless it is told otherwise."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ligermodels.errors import InputError
from ligermodels.training.checkpoints.files import checkpoint_step, committed_steps
from ligermodels.training.runs.folder import ADAPTER, CHECKPOINTS, MODEL
from ligermodels.training.runs.settings import SETTINGS_FILE, differences, read_settings
from ligermodels.units import counted

# Settings that say which tensors a checkpoint has, and in which dtypes: it fits no other.
SAVED = ("param_dtype", "optimizer", "optimizer_state_dtype", "lora_rank", "lora_targets")


def refuse_resuming(args: argparse.Namespace) -> None:
    """Raises InputError where the run of --resume is finished, or the command line changes what it comes to."""
    if args.resume is None:
        return
    changed = differences(read_settings(args.resume / SETTINGS_FILE), args)
    steps = last_step(args.resume)
    unfit = [change for change in changed if steps and change.partition(":")[0] in SAVED]
    if unfit:
        raise InputError(
            f"--resume {args.resume}: {'; '.join(unfit)}: its checkpoints are of that; leave it, or begin another run"
        )
    if changed and not args.allow_changes:
        raise InputError(f"--resume {args.resume}: {'; '.join(changed)}: leave it, or add --allow-changes")
    for exported, another in ((MODEL, f"begin another with --model {args.resume / MODEL}, or "), (ADAPTER, "")):
        if (args.resume / exported).exists():
            raise InputError(
                f"--resume {args.resume}: the run is finished; {another}move {args.resume / exported} away to go on "
                "from the last checkpoint"
            )
    if steps >= args.steps and args.no_export:
        raise InputError(
            f"--resume {args.resume}: it has taken {counted(steps, 'step')} already; give more --steps with "
            "--allow-changes, or --no-export off"
        )


def last_step(output: Path) -> int:
    """That of the newest checkpoint; 0 if there is none."""
    return max(map(checkpoint_step, committed_steps(output / CHECKPOINTS)), default=0)


def refuse_other_data(args: argparse.Namespace, saved: Mapping[str, Any] | None, fingerprint: str) -> None:
    """saved: what the newest checkpoint keeps of the run. Raises InputError where its data were others."""
    if saved and saved["data_fingerprint"] != fingerprint and not args.allow_changes:
        raise InputError(
            f"--resume {args.resume}: the data are not what they were: documents, their order or their tokens differ; "
            "bring them back, or add --allow-changes"
        )
