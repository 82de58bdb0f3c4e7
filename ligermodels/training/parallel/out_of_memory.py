"""The error message for an out-of-memory error of a run: the memory that a step needs, and flags that reduce it."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ligermodels.distributed import world_size
from ligermodels.errors import InputError, exhausted_memory, first_line
from ligermodels.training.parallel.activation_checkpointing import MemoryEstimator
from ligermodels.training.settings.config import RunConfig
from ligermodels.units import memory_size


@contextmanager
def out_of_memory_advice(
    config: RunConfig, estimate: MemoryEstimator, micro_batch_size: int, checkpointed_blocks: int, blocks: int
) -> Iterator[None]:
    """Turns an out-of-memory error of the GPU or the host into an InputError, also if it happens on one rank only.

    Its arguments are those of `out_of_memory_message`.
    """
    try:
        yield
    except Exception as error:
        exhausted = exhausted_memory(error)
        if exhausted is None:
            raise
        if exhausted == "host" and torch.cuda.is_available():
            raise InputError(
                f"out of host memory, which holds the data, and copies of weights and optimizer states while they are "
                f"saved: end other processes, or use fewer ranks on this host. {first_line(error)}"
            ) from error
        sizes = {"micro_batch_size": micro_batch_size, "checkpointed_blocks": checkpointed_blocks, "blocks": blocks}
        raise InputError(out_of_memory_message(error, config, estimate, **sizes)) from error


def out_of_memory_message(
    error: BaseException, config: RunConfig, estimate: MemoryEstimator, *, micro_batch_size: int,
    checkpointed_blocks: int, blocks: int,
) -> str:  # fmt: skip
    """Returns one line, about the GPU, or the host where there is no GPU.

    estimate: see MemoryEstimator. micro_batch_size: rows per forward pass of a rank. checkpointed_blocks: how many of
    the model's `blocks` have activation checkpointing.
    """
    needed = estimate(checkpointed_blocks=checkpointed_blocks)
    parts = ", ".join(f"{name} {memory_size(size)}" for name, size in needed.parts.items() if size)
    flags = memory_saving_flags(config, estimate, micro_batch_size, checkpointed_blocks, blocks)
    place = "GPU" if torch.cuda.is_available() else "host"
    return (
        f"out of {place} memory with --micro-batch-size {micro_batch_size} --sequence-length {config.sequence_length}, "
        f"activation checkpointing on {checkpointed_blocks} of {blocks} blocks: a step needs about "
        f"{memory_size(needed.peak)} ({parts}), the {place} has {memory_size(total_memory())}; to use less: "
        f"{'; '.join(flags)}. {first_line(error)}"
    )


def memory_saving_flags(
    config: RunConfig, estimate: MemoryEstimator, micro_batch_size: int, checkpointed_blocks: int, blocks: int
) -> Iterator[str]:
    """Yields flags that reduce memory and are not set yet, those that cost the least speed or quality first.

    Flags that change only the activations come with the estimate of the peak that they lead to.
    """
    lowest = estimate(checkpointed_blocks=blocks, kept_tensors=0).peak
    if lowest < estimate(checkpointed_blocks=checkpointed_blocks).peak:
        yield f"--activation-checkpointing full ({memory_size(lowest)}), or auto for as little as needed"
    if micro_batch_size > 1:
        half = micro_batch_size // 2
        peak = memory_size(estimate(batch_size=half, checkpointed_blocks=checkpointed_blocks).peak)
        yield f"--micro-batch-size {half} ({peak}), with gradient accumulation"
    if config.objective == "sft" and not config.low_memory_loss:
        lower = estimate(checkpointed_blocks=checkpointed_blocks, low_memory_loss=True).peak
        if lower < estimate(checkpointed_blocks=checkpointed_blocks).peak:
            yield f"--low-memory-loss ({memory_size(lower)})"
    if config.dtype != "bfloat16":
        yield "--dtype bfloat16"
    elif config.param_dtype == "float32" and not config.with_lora:
        yield "--param-dtype bfloat16"
    if config.optimizer == "adamw":
        yield "--optimizer adamw8bit or --optimizer-state-dtype bfloat16"
    if not config.with_lora and "optimizer" not in config.offload and world_size() == 1:
        yield "--offload optimizer"
    if not config.with_lora:
        yield "--lora-rank 16"
    shorter = estimate(sequence_length=config.sequence_length // 2, checkpointed_blocks=checkpointed_blocks).peak
    yield f"--sequence-length {config.sequence_length // 2} ({memory_size(shorter)})"
    if config.dp_replicate > 1:
        yield "--dp-replicate 1"
    yield "more GPUs, over which FSDP2 shards parameters, gradients and optimizer state"


def total_memory() -> int:
    """Bytes of the GPU; without one those of the host, or fewer where the process may not have them (`ulimit -v`)."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_properties().total_memory
    host, limit = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), resource.getrlimit(resource.RLIMIT_AS)[0]
    return host if limit == resource.RLIM_INFINITY else min(host, limit)
