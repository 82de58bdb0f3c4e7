"""Pinned host memory, to and from which a GPU copies while it computes, and how much memory the host has to give."""

import math
import mmap
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ligermodels.errors import InputError

CGROUP = Path("/sys/fs/cgroup")  # version 2


def pinned_memory(nbytes: int, device: torch.device) -> Tensor:
    """Zeros, uint8 [nbytes], in host memory: pinned where `device` is a GPU.

    Not by torch's allocator of pinned memory, which rounds sizes up to powers of two. Raises InputError where the
    system pins no more memory.
    """
    if device.type != "cuda" or not nbytes:
        return torch.zeros(nbytes, dtype=torch.uint8)
    pages = mmap.mmap(-1, nbytes)  # a page can be registered once; shared, so that forks copy none
    memory, runtime = torch.frombuffer(pages, dtype=torch.uint8), torch.cuda.cudart()
    error = runtime.cudaHostRegister(memory.data_ptr(), nbytes, 0)
    if int(error) != 0:
        raise InputError(f"--offload: {nbytes:,} bytes of host memory cannot be pinned ({error}); offload less")
    weakref.finalize(memory, runtime.cudaHostUnregister, memory.data_ptr()).atexit = False
    return memory


def available_host_memory() -> int:
    """Bytes that this process may still take without swapping, including the page cache."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return int(min(1024 * int(fields["MemAvailable"].split()[0]), available_in_group()))


def available_in_group() -> float:
    """Bytes that the process's control group, such as a container, may still take; infinite without a limit."""
    limit = CGROUP / "memory.max"
    if not limit.is_file() or (text := limit.read_text().strip()) == "max":
        return math.inf
    statistics = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
    used = int((CGROUP / "memory.current").read_text()) - int(statistics["inactive_file"])
    return int(text) - used


def event_on(stream: Any, module: Any) -> Any:
    """An event behind all that is on the stream of a device module by now."""
    event = module.Event()
    event.record(stream)
    return event


def read_async(x: Tensor) -> Callable[[], list[float]]:
    """Starts the copy of a device vector to the host, and returns a function that returns its values.

    The function waits for the copy, but not for work that was queued after it.
    """
    if not x.is_cuda:
        return x.tolist
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def read() -> list[float]:
        copied.synchronize()
        return host.tolist()

    return read
