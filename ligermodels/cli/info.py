"""`ligermodels info` shows a model's parameters, files and memory, without loading its weights; `ligermodels list` the
architectures and their presets with numbers of parameters."""

import argparse
from pathlib import Path

from ligermodels.cli.console import add_output_flags
from ligermodels.cli.flags import Commands, add_command, add_dtype, add_for_gpu, add_revision, positive
from ligermodels.errors import InputError
from ligermodels.hub.names import architecture_list, refuse_mistyped

PICTURES = (".png", ".svg", ".pdf")


def add_info_command(commands: Commands) -> None:
    parser = add_command(
        commands, "info", run, "show a model's parameters, its files, and the memory for training and generation",
        "Qwen/Qwen3-8B --batch-size 8 --sequence-length 4096",
    )  # fmt: skip
    parser.add_argument("model", help="a folder, a Hub id, or a preset such as qwen2:tiny; no weights are downloaded")
    parser.add_argument("--batch-size", type=positive, help="rows per batch (default: 1), with --for-gpu of a step")
    parser.add_argument("--sequence-length", type=positive, default=2048, help="tokens per row")
    add_dtype(parser, "dtype of weights, gradients, AdamW states and activations (default: that of the weights)")
    parser.add_argument(
        "--activation-checkpointing",
        choices=["none", "selective", "full"],
        help="full: keep only block inputs; selective: attention and the products around it too (default: none, with "
        "--for-gpu as much as memory demands)",
    )
    parser.add_argument("--lora-rank", type=positive, default=16, help="rank of LoRA on all projections")
    parser.add_argument("--plot", type=Path, metavar="PICTURE", help="draw the memory too: a new .png, .svg or .pdf")
    add_for_gpu(parser, "say what fits there of full fine-tuning, LoRA and QLoRA, in bfloat16, and what would make it")
    add_revision(parser)
    add_output_flags(parser)


def run(args: argparse.Namespace) -> None:
    if args.plot is not None and args.plot.suffix.lower() not in PICTURES:
        raise InputError(f"--plot {args.plot}: must end with {', '.join(PICTURES)}")
    if args.for_gpu and args.dtype not in (None, "bfloat16"):
        raise InputError(f"--dtype {args.dtype}: --for-gpu plans in bfloat16; leave one of them out")
    refuse_mistyped(args.model)
    from ligermodels.cli.info_report import print_report  # imports torch

    print_report(args)


def add_list_command(commands: Commands) -> None:
    def run(args: argparse.Namespace) -> None:
        print(architecture_list(), end="")

    add_command(commands, "list", run, "list the architectures, their preset sizes and parameters", "")
