"""`ligermodels train`: one training run. Its flags are the fields of TrainConfig and override a settings file."""

import argparse
import os
from collections.abc import Callable
from dataclasses import Field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ligermodels.aliases import TRAIN_ALIASES, flag_of
from ligermodels.cli.console import Console, add_output_flags
from ligermodels.cli.flags import NAMES_OF_VALUES, UNUSABLE_INPUT, Commands, add_for_gpu, print_line
from ligermodels.errors import InputError
from ligermodels.hub.names import architecture_list
from ligermodels.training.planning.contradictions import refuse_contradictions
from ligermodels.training.settings.config import FIELDS, TrainConfig, type_of
from ligermodels.training.settings.fields import choices_of, help_text, parsed_item
from ligermodels.training.settings.settings import config_from_file, config_of_run

if TYPE_CHECKING:
    from ligermodels.training import TrainResult

EXAMPLES = """\
examples:
  ligermodels train --model qwen2                          a million parameters on the embedded stories, on a CPU
  ligermodels train --model llama:8b --data random --steps 10 --no-export --checkpoint-every 0    speed and memory alone
  ligermodels train --model Qwen/Qwen3-8B --data chats.jsonl --lora-rank 16
  torchrun --nproc-per-node 8 train.py --model meta-llama/Meta-Llama-3-8B --data 'web/*.parquet=0.9' code.jsonl=0.1 \\
      --checkpoint-every 500
  torchrun --nproc-per-node 4 train.py --resume runs/Meta-Llama-3-8B
"""
GROUP_NOTES = {
    "data": "SPEC is a .txt, .jsonl, .json, .csv or .tsv file (also .gz or .zst), a .parquet, .arrow or token file, a\n"
    "folder, one of save_to_disk also as FOLDER:SPLIT, a glob, hub:NAME[:SPLIT], stories, chats, shapes, preferences,\n"
    "sums or random; =WEIGHT behind it where several are mixed"
}


def add_train_command(commands: Commands) -> None:
    parser = commands.add_parser(
        "train", help="train a model from new or pretrained weights", description="Trains a decoder language model.",
        usage="ligermodels train --model MODEL | --adapter FOLDER | --resume FOLDER [flags]", epilog=EXAMPLES,
    )  # fmt: skip
    groups: dict[str, Any] = {}
    for field in FIELDS.values():
        name = field.metadata["group"]
        if name not in groups:
            groups[name] = parser.add_argument_group(name, GROUP_NOTES.get(name))
        groups[name].add_argument(flag_of(field.name), **flag_options(field))
    add = groups["run"].add_argument
    add("--config", type=Path, metavar="FILE", help="TOML or YAML with any of these flags; flags come first")
    add("--dry-run", action="store_true", help="print the plan (parameters, memory, tokens, steps) and stop")
    add_for_gpu(parser, "with --dry-run: plan for these GPUs instead of this machine")
    add_output_flags(parser)
    parser.set_defaults(run=run, parser=parser)
    parser.flag_aliases = TRAIN_ALIASES


def flag_options(field: Field) -> dict[str, Any]:
    """The arguments of add_argument. A flag that is not given leaves no attribute, so that a file's value holds."""
    kind, several = type_of(field.name)
    choices = choices_of(kind)
    names = "{" + ",".join(choices) + "}" if choices else ""
    options: dict[str, Any] = {
        "type": reader_of(field), "default": argparse.SUPPRESS,
        "help": help_text(field).replace("%", "%%"),
        "metavar": field.metadata["metavar"] or names or NAMES_OF_VALUES.get(kind, field.name.upper()),
    }  # fmt: skip
    if several:
        options["nargs"] = "*" if field.metadata["may_be_empty"] else "+"
    if kind is bool and not field.default:
        options |= {"nargs": "?", "const": True}
    return options


def reader_of(field: Field) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            return parsed_item(field, type_of(field.name)[0], text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return read


def run(args: argparse.Namespace) -> int | None:
    if getattr(args, "model", None) == "list":
        print(architecture_list(), end="", flush=True)
        return None
    if args.for_gpu and not args.dry_run:
        raise InputError(f"--for-gpu {args.for_gpu} plans a run, and makes none: add --dry-run")
    try:
        config = config_from_flags(args)
        if config.adapter is None:  # which may name the model
            refuse_contradictions(config)
    except InputError as error:
        if os.environ.get("RANK", "0") == "0":
            if args.config and str(args.config) not in str(error):
                raise InputError(f"{args.config}: {error}") from error
            raise
        return UNUSABLE_INPUT  # a rank of torchrun, of which the first reports the error
    if args.quiet:
        config = replace(config, log_every=0)
    return make_run(config, args.dry_run, args.for_gpu, args.console)


def make_run(config: TrainConfig, dry_run: bool, for_gpu: str | None, console: Console) -> int | None:
    """Trains, or prints the plan, perhaps for other GPUs. Returns the exit status of a run that a signal stopped, or of
    a rank whose error another one reports."""
    from ligermodels import distributed  # imports torch, as training does
    from ligermodels.training import plan, train
    from ligermodels.training.run.stopping import SIGNALLED

    distributed.refuse_unfit_environment()  # told by every rank: none may be the first
    try:
        if not dry_run:
            with console.progress():
                result = train(config, loggers=[RecordLogger(console)])
            if distributed.is_first():
                report_result(result, console)
            return SIGNALLED + result.signal if result.signal else None
        text = plan(config, for_gpu).text()
        if distributed.is_first():
            print(text)
    except InputError:
        if distributed.first_to_fail():
            raise
        return UNUSABLE_INPUT
    finally:
        distributed.stop()
    return None


class RecordLogger:
    """Prints the records of a run with --json."""

    def __init__(self, console: Console) -> None:
        self.write = console.record

    def close(self) -> None:
        """Leaves standard output open."""


def report_result(result: "TrainResult", console: Console) -> None:
    """Prints what a run has made: a record with --json, a line with --quiet, which has printed none."""
    exported = result.exported and str(result.exported)
    made = {"folder": str(result.folder), "exported": exported, "step": result.step, "signal": result.signal}
    console.record(made | {"summary": result.summary})
    if console.quiet:
        print_line(f"{result.exported or result.folder}: {result.summary}")


def config_from_flags(args: argparse.Namespace) -> TrainConfig:
    """The settings of a run: the flags that are given, then those of --config or of the run that is resumed."""
    given = {name: value for name, value in vars(args).items() if name in FIELDS}
    folder = given.pop("resume", None)
    if folder and (args.config or "output" in given):
        raise InputError("--resume takes the settings and the folder of its run; leave out --config and --output")
    if folder:
        return config_of_run(folder, **given)
    if args.config:
        return config_from_file(args.config, **given)
    for name, value in given.items():
        choices = choices_of(type_of(name)[0])
        if value == [] and choices:  # meant as a switch; there is no file whose list it would replace
            raise InputError(f"{flag_of(name)}: is given without a value; give {' or '.join(choices)}, or leave it out")
    return TrainConfig(**given)
