"""What to do with what a run has left: how to go on with it, to generate with it, and to train the same on two devices.

Only what works is advised. Must not know how it was trained or written.
"""

import argparse
import os
import shlex
import sys
from pathlib import Path

import torch

from ligermodels.distributed import World
from ligermodels.errors import InputError
from ligermodels.tokenizer.files import has_tokenizer
from ligermodels.training.data.batches import rows_a_rank
from ligermodels.training.runs.folder import ADAPTER
from ligermodels.training.runs.settings import SETTINGS_FILE


def advice(args: argparse.Namespace, world: World, saved: Path, base: Path | None, *, chats: bool) -> list[str]:
    """Lines, the first of which says what was saved.

    saved: the exported folder, in that of the run. base: of the model that was trained, None of a new one. chats:
    whether it learned to answer.
    """
    adapter = saved.name == ADAPTER
    ways = {}
    if any(has_tokenizer(folder) for folder in (saved, *([base] if adapter and base else []))):
        revision = ["--revision", args.revision] if args.revision else []
        model = [args.model, *revision, "--adapter", str(saved)] if adapter else [str(saved)]
        prompt = '--chat --prompt "Hello!"' if chats else '--prompt "Once upon a time"'
        ways["generate with it"] = f"ligermodels generate {shlex.join(model)} {prompt}"
    if runs_on_two(args, world):
        config = shlex.quote(str(saved.parent / SETTINGS_FILE))
        ways["train the same on two devices"] = f"torchrun --nproc-per-node 2 {script()} --config {config}"
    done = f"Saved {saved}" + (", in PEFT's format" if adapter else "")
    return [f"{done}. To {', and to '.join(ways)}:" if ways else done, *(f"  {command}" for command in ways.values())]


def resume_command(output: Path, world: World) -> str:
    """By what this run was started with; of several hosts, for each of them."""
    return f"{launcher(world)} {script()} --resume {shlex.quote(str(output))}"


def launcher(world: World) -> str:
    if world.size == 1:
        return "python"
    hosts = int(os.environ.get("GROUP_WORLD_SIZE", 1))
    meeting = f"--nnodes {hosts} --rdzv-backend c10d --rdzv-endpoint {os.environ['MASTER_ADDR']} " if hosts > 1 else ""
    return f"torchrun {meeting}--nproc-per-node {os.environ['LOCAL_WORLD_SIZE']}"


def script() -> str:
    """train.py, by the path it was started by."""
    return shlex.quote(sys.argv[0])


def runs_on_two(args: argparse.Namespace, world: World) -> bool:
    """Whether a run of one device can also be one of two, on this host."""
    try:
        rows_a_rank(args.batch_size, args.micro_batch_size, World(world.device, size=2))
    except InputError:
        return False
    return world.size == 1 and (world.device.type == "cpu" or torch.cuda.device_count() > 1)
