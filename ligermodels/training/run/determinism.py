"""Reruns with the same bits: torch's deterministic algorithms for the time of a run. Must not know the run."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ligermodels.errors import InputError

CUBLAS_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
CUBLAS_WORKSPACES = (":4096:8", ":16:8")  # those with which cuBLAS is deterministic; the first is the faster one


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
