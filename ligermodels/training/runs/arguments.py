"""The flags of train.py. What the command line says comes before what a file of settings says.

Must not know what the flags do.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from ligermodels.cli.flags import Parser, above_zero, count, not_negative, number, one_of, positive, switch, whole
from ligermodels.errors import InputError, nearest, reader_left
from ligermodels.hub import list_architectures
from ligermodels.hub.description import architecture_lines
from ligermodels.training.data.sources import WITHOUT_FILES, parse_spec
from ligermodels.training.optimizers import OPTIMIZERS
from ligermodels.training.optimizers.schedules import SCHEDULES
from ligermodels.training.reporting.loggers import LOGGERS, require
from ligermodels.training.runs.settings import SETTINGS_FILE, read_flags
from ligermodels.units import counted

DEFAULT_SIZE = "tiny"
EXAMPLES = """\
examples:
  python train.py --model qwen2                            a million parameters on the embedded stories, on a CPU
  python train.py --model llama:8b --dtype bfloat16 --steps 10 --no-export              speed and memory alone
  python train.py --model Qwen/Qwen3-8B --data chats.jsonl --dtype bfloat16 --lora-rank 16
  torchrun --nproc-per-node 8 train.py --model meta-llama/Meta-Llama-3-8B --data 'web/*.parquet=0.9' code.jsonl=0.1 \\
      --dtype bfloat16 --activation-checkpointing auto --checkpoint-every 500
  torchrun --nproc-per-node 4 train.py --resume runs/Meta-Llama-3-8B
"""


class Flags(Parser):
    def error(self, message: str) -> NoReturn:
        raise InputError(message.removeprefix("argument "))


def flags() -> Flags:
    root = Flags(
        prog="python train.py", usage="python train.py --model MODEL | --resume FOLDER [flags]",
        description="Trains a decoder language model.", epilog=EXAMPLES,
    )  # fmt: skip
    fraction = number(lambda x: 0 < x < 1, "a number between 0 and 1")
    bound = number(lambda x: x > 0, "a number above 0, or inf for none")
    probability = number(lambda x: 0 <= x < 1, "a number from 0 to below 1")

    seed = whole(0, "a whole number, 0 or more and below 2^62", 2**62 - 1)  # torch takes 64 bits

    def choice(*names: str) -> dict[str, Any]:
        return {"type": one_of(*names), "metavar": "{" + ",".join(names) + "}"}

    on_off: dict[str, Any] = {"type": switch, "metavar": "on|off"}
    flag: dict[str, Any] = on_off | {"nargs": "?", "const": True, "default": False}

    add = root.add_argument_group("model").add_argument
    add("--model", help="a family (new weights), with its size as llama:8b, a Hub id or a folder; list shows families")
    add("--size", default=DEFAULT_SIZE, help="preset of the family")
    add("--revision", help="branch, tag or commit of a Hub id")

    add = root.add_argument_group(
        "data",
        "SPEC is a .txt, .jsonl or .json file (also .gz or .zst), a .parquet or token file, a folder, a glob,\n"
        "hub:NAME[:SPLIT], stories, chats or random; =WEIGHT behind it where several are mixed",
    ).add_argument
    several: dict[str, Any] = {"nargs": "+", "metavar": "SPEC"}
    add("--data", **several, help="what to train on (default: the stories if the vocabulary is theirs, else random)")
    add("--validation-data", **several, help="what to validate on (default: a part of --data)")
    add("--validation-fraction", type=fraction, help="the part of --data that is kept for validation (default: 0.01, "
        "of large data at most about 131,000 tokens)")  # fmt: skip
    add("--sequence-length", type=whole(2, "a whole number above 1"), default=256, help="tokens a row")
    add("--packing", **on_off, default=True, help="fill rows with several documents; none sees another")
    add("--allow-bad-lines", type=count, default=0, help="leave out up to this many lines that cannot be read")

    add = root.add_argument_group("training").add_argument
    add("--steps", type=positive, default=2200, help="updates of the weights")
    add("--batch-size", type=positive, default=4, help="rows a step, over all ranks and micro-batches")
    add("--micro-batch-size", type=positive, help="rows a rank computes at a time (default: its share of a step)")
    add("--optimizer", **choice(*OPTIMIZERS), default="adamw", help="adamw8bit needs torchao")
    add(
        "--optimizer-state-dtype",
        **choice("float32", "bfloat16"),
        help="dtype of the optimizer's states (default: the weights')",
    )
    add("--learning-rate", type=above_zero, help="the peak (default: 1e-5; LoRA: 1e-4; new weights: 4.5e-3 at width "
        "128, 1/width)")  # fmt: skip
    add("--schedule", **choice(*SCHEDULES), default="cosine", help="wsd: warmup, stable, decay")
    add("--warmup", type=count, default=30, help="steps to the peak")
    add("--weight-decay", type=not_negative, default=0.1, help="of matrices")
    add("--max-grad-norm", type=bound, default=1.0, help="largest gradient norm; inf: any")
    add("--dtype", **choice("float32", "tf32", "bfloat16"), default="float32", help="computed in")
    add(
        "--param-dtype", **choice("float32", "bfloat16"),
        help="dtype of those that are trained (default: bfloat16 for --dtype bfloat16 on one process, else float32; "
        "LoRA: float32)",
    )  # fmt: skip
    add("--float8", **flag, help="matrix products of the blocks in float8, through torchao; with --compile")
    add("--activation-checkpointing", **choice("none", "auto", "full"), default="none", help="blocks that keep"
        " only their inputs for backward and recompute the rest; auto: as many as memory demands")  # fmt: skip
    add("--compile", **flag, help="torch.compile each block")
    add("--seed", type=seed, default=0, help="of new weights, of the data's order and of dropout")

    add = root.add_argument_group("LoRA").add_argument
    add("--lora-rank", type=positive, help="train low-rank updates of this rank (default: all weights)")
    add("--lora-alpha", type=above_zero, default=32.0, help="updates are scaled by alpha / rank")
    add("--lora-dropout", type=probability, default=0.0, help="of the updates' input")
    add(
        "--lora-targets",
        nargs="+",
        metavar="NAME",
        default=["all-linear"],
        help="projections, as q_proj v_proj or q_proj,v_proj, or experts",
    )
    add("--lora-export", **choice("merged", "adapter"), default="merged", help="a whole model, or PEFT's format")

    add = root.add_argument_group("run").add_argument
    add("--output", type=Path, metavar="FOLDER", help="a new folder (default: runs/MODEL, numbered if it exists)")
    add("--resume", type=Path, metavar="FOLDER", help="go on with the run of this folder, by its train.toml")
    add("--allow-changes", **flag, help="resume although settings that change the result differ")
    add("--config", type=Path, metavar="FILE", help="TOML with any of these flags; the command line comes first")
    add("--checkpoint-every", type=count, default=0, help="steps; with --no-export after the last one too; 0: only "
        "when stopped")  # fmt: skip
    add("--keep-checkpoints", type=positive, default=2, help="the newest ones")
    add("--no-export", **flag, help="write no model at the end")
    add("--on-nan", **choice("stop", "skip"), default="stop", help="at a loss or gradient that is not finite")
    add(
        "--dp-replicate",
        type=positive,
        default=1,
        help="copies of a sharded model, each shared by ranks / replicas ranks",
    )

    add = root.add_argument_group("what one sees").add_argument
    add("--eval-every", type=positive, default=550, help="steps between validations")
    add("--log-to", **choice(*LOGGERS), nargs="*", default=[],
        help="beside metrics.jsonl; nothing is sent anywhere without it")  # fmt: skip
    add("--profile", type=positive, metavar="STEP", help="trace three steps from this one on")
    add("--dry-run", **flag, help="print the plan (parameters, memory, tokens, steps) and stop")
    return root


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The flags of a run, each under its name with underscores; those of --config or of a resumed run where not given.

    Raises InputError. SystemExit after --help and --model list.
    """
    parser = flags()
    args = parsed(parser, argv)
    if args.resume and (args.config or args.output):
        raise InputError("--resume takes the settings and the folder of its run; leave out --config and --output")
    file = args.resume / SETTINGS_FILE if args.resume else args.config
    if file:
        parser.set_defaults(**read_flags(file, parser._actions))
        args = parsed(parser, argv)
    if args.model == "list":
        raise SystemExit(list_models())
    if args.resume:
        args.output = args.resume
    refuse_contradictions(args)
    require(args.log_to)
    return args


def list_models() -> int:
    """Prints what `ligermodels list` prints; returns the exit status."""
    try:
        print("\n".join(architecture_lines()), flush=True)
    except BrokenPipeError:
        return reader_left()
    return 0


def parsed(parser: Flags, argv: Sequence[str]) -> argparse.Namespace:
    args, unknown = parser.parse_known_args(argv)
    for word in unknown:
        name = word.partition("=")[0]
        if not name.startswith("-"):
            raise InputError(f"{name}: belongs to no flag; `python train.py --help` shows them all")
        raise InputError(f"{name}: no such flag{nearest(name, option_names(parser))}; --help shows them all")
    for action in parser._actions:
        given = [word for word in argv if word.partition("=")[0] in action.option_strings]
        if action.nargs in ("+", "*") and len(given) > 1:
            raise InputError(f"{action.option_strings[0]} is given {len(given)} times; give all its values behind one")
    family, colon, size = (args.model or "").partition(":")
    if colon and family in list_architectures():
        args.model, args.size = family, size
    args.lora_targets = " ".join(args.lora_targets).replace(",", " ").split() or args.lora_targets
    return args


def title(args: argparse.Namespace) -> str:
    """The model as --model takes it, a family with its size where that is not the default."""
    return args.model if args.size == DEFAULT_SIZE else f"{args.model}:{args.size}"


def option_names(parser: Flags) -> list[str]:
    return [name for action in parser._actions for name in action.option_strings]


def refuse_contradictions(args: argparse.Namespace) -> None:
    """What no file and no machine is needed to see. Raises InputError."""
    if args.allow_changes and not args.resume:
        raise InputError("--allow-changes goes with --resume, which is missing")
    if args.model is None:
        raise InputError("--model is missing: a family, a Hub id or a folder; --model list shows the families")
    is_family = args.model in list_architectures()
    if args.size != DEFAULT_SIZE and not is_family:
        raise InputError(f"--size {args.size} goes with a family, which {args.model} is not; --model list shows them")
    if args.revision and is_family:
        raise InputError(f"--revision {args.revision} goes with a Hub id; {args.model} is a family, with new weights")
    if args.profile and args.profile > args.steps:
        raise InputError(f"--profile {args.profile}: the run has {counted(args.steps, 'step')}; name one of them")
    if args.validation_fraction is not None:
        refuse_idle_fraction(args)
    if args.optimizer == "adamw8bit" and args.optimizer_state_dtype:
        raise InputError(
            f"--optimizer-state-dtype {args.optimizer_state_dtype}: --optimizer adamw8bit has 8-bit states; "
            "leave one of the two out"
        )
    if args.float8 and not args.compile:
        raise InputError("--float8 takes twice the time of bfloat16 unless blocks are compiled: add --compile")
    if is_family and args.lora_rank and args.lora_export == "adapter":
        raise InputError(f"--lora-export adapter: the new weights of {args.model} below it would be lost; leave it out")
    idle = [
        f"--{name.replace('_', '-')}"
        for name in ("lora_alpha", "lora_dropout", "lora_targets", "lora_export")
        if args.lora_rank is None and getattr(args, name) != flags().get_default(name)
    ]
    if idle:
        raise InputError(f"{idle[0]} goes with --lora-rank, which is missing")


def refuse_idle_fraction(args: argparse.Namespace) -> None:
    if args.validation_data:
        raise InputError("--validation-fraction is a part of --data, and --validation-data is given: leave one out")
    if all(parse_spec(text).name in WITHOUT_FILES for text in args.data or []):
        raise InputError(
            f"--validation-fraction is a part of files in --data; {', '.join(WITHOUT_FILES)} are validated on data of "
            "their own: leave it out"
        )
