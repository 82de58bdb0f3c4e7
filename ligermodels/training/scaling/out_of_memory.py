"""What to say when a GPU's memory was not enough: what the step needed, and which flags lower it."""

from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ligermodels.errors import InputError, first_line
from ligermodels.training.scaling.activation_checkpointing import Needs
from ligermodels.units import memory_size


@contextmanager
def explained(args: Namespace, needs: Needs, micro_batch_size: int, recomputed: int, blocks: int) -> Iterator[None]:
    """Raises InputError where a GPU's memory is not enough, be it that of one rank alone."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        sizes = {"micro_batch_size": micro_batch_size, "recomputed": recomputed, "blocks": blocks}
        raise InputError(explain_out_of_memory(error, args, needs, **sizes)) from error


def explain_out_of_memory(
    error: BaseException, args: Namespace, needs: Needs, *, micro_batch_size: int, recomputed: int, blocks: int
) -> str:
    """One line.

    micro_batch_size: rows a rank computes at a time. recomputed: how many of the model's `blocks` are computed again.
    """
    needed = needs(checkpointed_blocks=recomputed)
    parts = ", ".join(f"{name} {memory_size(size)}" for name, size in needed.parts.items() if size)
    return (
        f"out of GPU memory with --micro-batch-size {micro_batch_size} --sequence-length {args.sequence_length}, "
        f"{recomputed} of {blocks} blocks recomputed: a step needs about {memory_size(needed.peak)} ({parts}), "
        f"the GPU has {memory_size(total_memory())}; less need: "
        f"{'; '.join(remedies(args, needs, micro_batch_size, recomputed, blocks))}. {first_line(error)}"
    )


def remedies(args: Namespace, needs: Needs, micro_batch_size: int, recomputed: int, blocks: int) -> Iterator[str]:
    """Flags that are not set so yet, the cheapest first, with what would be needed where only activations change."""
    if recomputed < blocks:
        lowest = memory_size(needs(checkpointed_blocks=blocks).peak)
        yield f"--activation-checkpointing full ({lowest}), or auto for no more than it takes"
    if micro_batch_size > 1:
        half = micro_batch_size // 2
        then = memory_size(needs(batch_size=half, checkpointed_blocks=recomputed).peak)
        yield f"--micro-batch-size {half} ({then}), accumulation makes up for it"
    if args.dtype != "bfloat16":
        yield "--dtype bfloat16"
    elif args.param_dtype == "float32" and args.lora_rank is None:
        yield "--param-dtype bfloat16"
    if args.optimizer == "adamw":
        yield "--optimizer adamw8bit or --optimizer-state-dtype bfloat16"
    if args.lora_rank is None:
        yield "--lora-rank 16"
    shorter = needs(sequence_length=args.sequence_length // 2, checkpointed_blocks=recomputed).peak
    yield f"--sequence-length {args.sequence_length // 2} ({memory_size(shorter)})"
    if args.dp_replicate > 1:
        yield "--dp-replicate 1"
    yield "more GPUs, among which torchrun shares weights, gradients and states"


def total_memory() -> int:
    return torch.cuda.get_device_properties().total_memory if torch.cuda.is_available() else 0
