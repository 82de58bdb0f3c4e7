"""The settings of a run as a file: --config, and the train.toml that a run leaves.

TOML, its keys are the flags with underscores. Knows of the flags which are no settings and which leave the result
as it is, nothing else.
"""

import argparse
import json
import os
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ligermodels.errors import InputError, first_line, suggest_closest

SETTINGS_FILE = "train.toml"
ONLY_ON_THE_COMMAND_LINE = ("help", "config", "resume")
# What is said to a process, not of the run it makes; the folder of a run is the one its settings lie in.
NOT_SETTINGS = ("output", "resume", "config", "allow_changes", "dry_run")
# Settings that leave the result of training as it is, but for the rounding of sums taken in another order.
WITHOUT_EFFECT = (
    *("allow_bad_lines", "micro_batch_size", "activation_checkpointing", "compile", "lora_export", "checkpoint_every"),
    *("keep_checkpoints", "no_export", "on_nan", "dp_replicate", "eval_every", "log_to", "profile"),
)


def read_settings(file: Path) -> dict[str, Any]:
    """The content of a TOML file. Raises InputError."""
    try:
        return tomllib.loads(file.read_text(encoding="utf-8-sig"))  # some editors begin it with a mark
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise InputError(f"{file}: is not TOML: {first_line(error)}") from error


def read_flags(file: Path, flags: Iterable[argparse.Action]) -> dict[str, Any]:
    """A file's settings, converted as the command line's. Raises InputError that names the file and the key."""
    content = read_settings(file)
    known = {flag.dest: flag for flag in flags if flag.dest not in ONLY_ON_THE_COMMAND_LINE}
    for key in content:
        if key not in known:
            raise InputError(
                f"{file}: {key}: no such flag{suggest_closest(key, known)}; `python train.py --help` shows them"
            )
    return {key: converted(known[key], value, f"{file}: {key}") for key, value in content.items()}


def converted(flag: argparse.Action, value: Any, place: str) -> Any:
    """A value of TOML as the flag takes it on the command line."""
    takes_list = flag.nargs in ("+", "*")
    values = value if isinstance(value, list) else [value]
    if isinstance(value, list) and not takes_list:
        raise InputError(f"{place} is a list; must be one value")
    if flag.nargs == "+" and not values:
        raise InputError(f"{place} is empty; give at least one value, or leave it out")
    if any(not isinstance(one, str | bool | int | float) for one in values):
        raise InputError(f"{place} is {value!r}; must be text, a number, true or false")
    texts = [str(one).lower() if isinstance(one, bool) else str(one) for one in values]
    try:
        read = [flag.type(text) if callable(flag.type) else text for text in texts]
    except argparse.ArgumentTypeError as error:
        raise InputError(f"{place} {error}") from error
    return read if takes_list else read[0]


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """What describes a run, in the values of JSON and TOML; flags that are not set are left out."""
    return {name: plain(x) for name, x in vars(args).items() if name not in NOT_SETTINGS and x is not None}


def plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def write_settings(args: argparse.Namespace, file: Path) -> None:
    """The run's train.toml, which is enough to start the same again, from the same working directory."""
    lines = [f"{name} = {toml(value)}" for name, value in settings(args).items()]
    header = "# All settings of this run. Into a new folder it is made again by: python train.py --config train.toml"
    beside = file.with_name(f".{file.name}")
    beside.write_text("\n".join([header, *lines, ""]), encoding="utf-8")
    os.replace(beside, file)  # a run that dies here can still be resumed


def toml(value: str | bool | int | float | list[str]) -> str:
    return str(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)


def differences(saved: Mapping[str, Any], args: argparse.Namespace) -> list[str]:
    """The settings that change the result of training and are not what they were, as "learning_rate: 0.001, was 0.01".

    saved: what `settings` or `read_settings` gives of the run that is resumed.
    """
    now = settings(args)
    names = [name for name in {**now, **saved} if name not in WITHOUT_EFFECT]
    return [
        f"{name}: {shown(now.get(name))}, was {shown(saved.get(name))}"
        for name in names
        if now.get(name) != saved.get(name)
    ]


def shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "not set" if value is None else " ".join(value) if isinstance(value, list) else str(value)
