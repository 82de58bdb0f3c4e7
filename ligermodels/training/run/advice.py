"""The commands that a run prints at its end: how to resume it, generate with its model, and train on two GPUs.

Only commands that work are printed.
"""

import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.distributed.run import get_args_parser

from ligermodels.distributed import World
from ligermodels.errors import InputError
from ligermodels.tokenizer.files import has_tokenizer
from ligermodels.training.data.rows.run_rows import split_global_batch
from ligermodels.training.run.folder import ADAPTER
from ligermodels.training.settings.config import RunConfig
from ligermodels.training.settings.settings import SETTINGS_FILE

SCRIPT = "train.py"
NODE_RANK = re.compile(r"(--node[-_]rank[=\0])[^\0]*")  # between words is a zero


def advice(config: RunConfig, world: World, exported: Path, *, chats: bool) -> list[str]:
    """Lines for the user; the first says what was saved.

    exported: the model's or the adapter's folder, inside that of the run; an adapter names its base model. chats:
    whether the model was trained on conversations.
    """
    commands = {}
    if has_tokenizer(exported) and config.objective != "reward":
        prompt = "--chat" if chats else '--prompt "Once upon a time"'
        commands["generate with it"] = f"ligermodels generate {shlex.quote(str(exported))} {prompt}"
    if runs_on_two(config, world):
        file = shlex.quote(str(exported.parent / SETTINGS_FILE))
        commands["train the same on two GPUs"] = f"torchrun --nproc-per-node 2 {torchrun_target()} --config {file}"
    saved = f"Saved {exported}" + (", in PEFT's format" if exported.name == ADAPTER else "")
    if not commands:
        return [saved]
    return [f"{saved}. To {', and to '.join(commands)}:", *(f"  {command}" for command in commands.values())]


def resume_command(output: Path, world: World, *, allow_changes: bool = False) -> str:
    """The command that resumes a run as this one was started; on several hosts, for each of them.

    allow_changes: whether the run was resumed with other settings than those of its last checkpoint.
    """
    allowed = " --allow-changes" if allow_changes else ""
    return f"{launch_command(world)} --resume {shlex.quote(str(output))}{allowed}"


def launch_command(world: World) -> str:
    if world.size == 1:
        return f"python {shlex.quote(sys.argv[0])}" if is_script() else "ligermodels train"
    given = torchrun_arguments(parent_command()) or ["--nproc-per-node", os.environ["LOCAL_WORLD_SIZE"]]
    return f"torchrun {shlex.join(given)} {torchrun_target()}"


def parent_command() -> list[str]:
    """The words of the command that started this process; none where the system does not tell."""
    try:
        return os.fsdecode(Path(f"/proc/{os.getppid()}/cmdline").read_bytes()).split("\0")[:-1]
    except OSError:
        return []


def torchrun_arguments(command: Sequence[str]) -> list[str]:
    """What a command gives to torchrun itself, such as the hosts and where they meet; nothing if it is another. Each
    host has its own rank, which is left open."""
    names = (index for index, word in enumerate(command) if Path(word).name in ("torchrun", "torch.distributed.run"))
    given = list(command[next(names, len(command)) + 1 :])
    if not given:
        return []
    started = get_args_parser().parse_args(given).training_script_args
    words = [word for word in given[: len(given) - len(started) - 1] if word not in ("-m", "--module")]
    if not words:
        return []
    return NODE_RANK.sub(r"\1NODE_RANK", "\0".join(words)).split("\0")


def torchrun_target() -> str:
    """What torchrun starts: the script that this process was started with, else the installed package."""
    return shlex.quote(sys.argv[0]) if is_script() else "-m ligermodels train"


def is_script() -> bool:
    return Path(sys.argv[0]).name.endswith(SCRIPT)


def runs_on_two(config: RunConfig, world: World) -> bool:
    """Whether a run on one GPU can also run on two of this host."""
    try:
        split_global_batch(config.units, config.micro_batch_size, World(world.device, size=2))
    except InputError:
        return False
    return world.size == 1 and world.device.type == "cuda" and torch.cuda.device_count() > 1
