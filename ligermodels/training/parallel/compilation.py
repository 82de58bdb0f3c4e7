"""How torch computes a run: blocks that are compiled, and algorithms that are deterministic.

The blocks already run fused kernels, so torch.compile gains little: on an H200 with the shape of Llama-3-8B and
8 × 2048 tokens, compiled blocks trained 12,993 tokens/s and eager blocks 13,009, both in 94.4 GiB
(benchmarks/results/2026-11-21-fsdp2-two-gpus.json). It can help where a block runs other code, such as float8 or a
projection of the user's.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ligermodels.errors import InputError
from ligermodels.kernels.dispatch import runs_kernels
from ligermodels.layers.decoder import CausalLM
from ligermodels.memory.model import decoder_blocks

# The code of one block is compiled for every combination of: first block or later block, sliding window or full
# attention, activation checkpointing or not, training or validation, static or dynamic lengths. torch's limit is 8.
RECOMPILE_LIMIT = 64
CUBLAS_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
CUBLAS_WORKSPACES = (":4096:8", ":16:8")  # those with which cuBLAS is deterministic; the first is the faster one


def compile_blocks(model: CausalLM, device: torch.device) -> None:
    """Applies torch.compile to every block, in place. It is compiled at its first call; parameter names stay.

    The FSDP2 hooks stay outside the compiled code, and so does activation checkpointing, except where it keeps results:
    which ones is then decided in the graph. Blocks of the same structure share
    compiled code. A length that changes from batch to batch becomes dynamic when it changes first. Call this function
    after LoRA is added and before sharding.
    device: the device it will train on. Raises InputError for a model with states on a CPU: there they are computed in
    a loop over tokens, which torch.compile would unroll.
    """
    if any(block.mixer.state_flops for block in decoder_blocks(model)) and not runs_kernels(
        torch.empty(0, device=device)
    ):
        raise InputError("--compile: this model has layers with states, which need a GPU to be compiled; leave it out")
    torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
    for block in model.blocks:
        name = "forward_checkpointed" if block.kept else "forward_block"
        setattr(block, name, torch.compile(getattr(block, name), fullgraph=True))


@contextmanager
def deterministic_algorithms(enabled: bool, *, compiled: bool) -> Iterator[None]:
    """If enabled, torch takes deterministic algorithms inside, and raises RuntimeError in operations that have none.

    compiled: whether torch.compile is used. Must be entered before the process's first matrix product on a GPU: cuBLAS
    reads the size of its workspace once. Raises InputError if the environment sets an unsuitable one.
    """
    if not enabled:
        yield
        return
    workspace = os.environ.setdefault(CUBLAS_VARIABLE, CUBLAS_WORKSPACES[0])
    if workspace not in CUBLAS_WORKSPACES:
        raise InputError(
            f"--deterministic: {CUBLAS_VARIABLE} is {workspace!r}; unset it, or set {CUBLAS_WORKSPACES[0]}"
        )
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic  # a module that declares no attribute
    filled = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False  # a debugging aid that takes time
    try:
        with kernels_not_chosen_by_time(compiled):
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory = filled


@contextmanager
def kernels_not_chosen_by_time(compiled: bool) -> Iterator[None]:
    """The compiler measures no variants of a kernel: the fastest may be another in the next run."""
    if not compiled:
        yield
        return
    from torch._inductor import config  # two seconds

    with config.patch(deterministic=True):
        yield
