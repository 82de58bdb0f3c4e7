"""How a Triton kernel is launched, what launchers share, and steps of many kernels that are replayed as CUDA graphs.

Triton's own launch binds, specializes and hashes every argument and queries the driver about every pointer. On the host
that takes longer than the launch itself. Here the first launch of each specialization goes through Triton; later ones
look up the compiled kernel and launch it on bare addresses.
"""

import functools
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# Tests clear this, so that CPU tensors take the reference although the kernels were built for the interpreter.
interpreting = os.environ.get("TRITON_INTERPRET") == "1"
# Whether kernels may use NVIDIA's own instructions.
PTX = tl.constexpr(not triton.knobs.runtime.interpret and torch.version.hip is None)

Launcher = Callable[..., None]  # (programs, *args): launches on the first tensor's device, in its current stream


class Kernel:
    """A Triton kernel, launched by `kernel.bind(META=..., num_warps=...)(programs, *args)`.

    Its signature has pointers first (`…_ptr`, each one a tensor, never None), then numbers, then constants, which
    `bind` sets.
    """

    def __init__(self, function: Callable[..., None], do_not_specialize: Sequence[str]) -> None:
        self.jit = triton.jit(function, do_not_specialize=do_not_specialize)
        self.bind = functools.cache(self._bind)

    def _bind(self, **constants: Any) -> Launcher:
        variants = Variants(self.jit, constants)
        return variants.launch_by_triton if torch.version.hip else _launcher(variants)


def kernel(do_not_specialize: Sequence[str] = ()) -> Callable[[Callable[..., None]], Kernel]:
    """The decorator of kernels that are launched. do_not_specialize: their integers that change from batch to batch."""
    return lambda function: Kernel(function, do_not_specialize)


class Variants:
    """The variants that Triton has compiled of a kernel with its constants: one for each combination of device,
    alignment, dtypes and specialized numbers."""

    def __init__(self, jit: Any, constants: dict[str, Any]) -> None:
        self.jit, self.constants = jit, constants
        names = [name for name in jit.arg_names if name not in constants]
        self.pointers = sum(name.endswith("_ptr") for name in names)
        self.numbers = len(names) - self.pointers
        self.entries: dict[tuple[Any, ...], list[Any]] = {}
        self.find = functools.lru_cache(1024, typed=True)(self._find)  # typed: 1 and 1.0 are compiled differently

    def _find(self, device: int, aligned: tuple[bool, ...] | None, *key: Any) -> list[Any]:
        """The entry of a variant: what `compile` returned for it, or an empty list to fill with that.

        aligned: whether each address is divisible by 16; None if all are. key: the dtype of each pointer, then the
        numbers.
        """
        dtypes, numbers = key[: self.pointers], key[self.pointers :]
        return self.entries.setdefault((device, aligned, *dtypes, *_specializations_of(*numbers)), [])

    def compile(self, programs: int, *args: Any) -> tuple[Any, ...]:
        """Launches through Triton. Returns the function that launches the compiled kernel without it, and the arguments
        of that function before and after the kernel's own."""
        compiled = self.launch_by_triton(programs, *args)
        trailing = [self.constants[name] for name in self.jit.arg_names[len(args) :]]
        return *_entry_point(compiled), trailing

    def launch_by_triton(self, programs: int, *args: Any) -> Any:
        with torch.cuda.device(args[0].get_device()):
            return self.jit[programs,](*args, **self.constants)


def _launcher(variants: Variants) -> Launcher:
    """Generates a function with exactly the kernel's arguments, because a loop over them is slow on the host."""
    tensors, addresses = ([f"{x}{i}" for i in range(variants.pointers)] for x in ("tensor", "address"))
    numbers = [f"number{i}" for i in range(variants.numbers)]
    arguments, values = ", ".join(tensors + numbers), ", ".join(addresses + numbers)
    key = ", ".join([f"{x}.dtype" for x in tensors] + numbers)
    source = f"""
def launcher(variants, find):
    def launch(programs, {arguments}):
        if interpreting:
            return variants.launch_by_triton(programs, {arguments})
        device = tensor0.get_device()
        if device != torch._C._cuda_getDevice():  # a launch goes to the current device
            with torch.cuda.device(device):
                return launch(programs, {arguments})
        {"; ".join(f"{a} = {x}.data_ptr()" for a, x in zip(addresses, tensors, strict=True))}
        aligned = None if ({" | ".join(addresses)}) % 16 == 0 else tuple(x % 16 == 0 for x in ({", ".join(addresses)},))
        compiled = find(device, aligned, {key})
        if compiled:
            run, leading, trailing = compiled
            run(programs, 1, 1, torch._C._cuda_getCurrentRawStream(device), *leading, {values}, *trailing)
        else:
            compiled[:] = variants.compile(programs, {arguments})
    return launch
"""
    namespace: dict[str, Any] = {}
    exec(source, globals(), namespace)  # globals(): the launcher reads this module's `torch` and `interpreting`
    return namespace["launcher"](variants, variants.find)


def _entry_point(compiled: Any) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """The function that launches a compiled kernel, and its arguments between the stream and the kernel's own.

    For Triton 3.6 this is its function in C, whose arguments are private to Triton. For other versions it is the method
    around that function, which takes one to two microseconds more.
    """
    run, function, metadata, hooks = compiled.run, compiled.function, compiled.packed_metadata, (None, None, None)
    if triton.__version__.startswith("3.6.") and not run.global_scratch_size and not run.profile_scratch_size:
        scratch = None, None
        return run.launch, (function, run.launch_cooperative_grid, run.launch_pdl, *scratch, metadata, *hooks)
    return run, (function, metadata, *hooks)


def _specializations_of(*numbers: float | None) -> list[int | None]:
    """What Triton may specialize a kernel for: 1, divisibility by 16 and 64-bit integers; nothing about floats."""
    return [(2 + (x % 16 == 0) if 1 < x < 2**31 else x) if type(x) is int else None for x in numbers]


def cdiv(a: int, b: int) -> int:
    """a / b rounded up. triton.cdiv takes a microsecond."""
    return -(-a // b)


def empty_where(needed: Sequence[bool], *tensors: Tensor | None) -> tuple[Any, ...]:
    """A new contiguous tensor like each of these; None for one that is not needed."""
    pairs = zip(needed, tensors, strict=True)
    return tuple(x.new_empty(x.shape) if need and x is not None else None for need, x in pairs)


def as_matrix(x: Tensor) -> Tensor:
    """[..., N] as [rows, N]. A matrix is returned as it is: a view takes microseconds and is a node of the graph."""
    return x if x.ndim == 2 else x.reshape(-1, x.shape[-1])


def as_rows(x: Tensor) -> Tensor:
    """[..., N] as [rows, N] with unit stride along N and any stride between rows; a view where possible."""
    x = as_matrix(x)
    return x if x.stride(-1) == 1 else x.contiguous()


def as_rows_with_stride(x: Tensor, columns: int) -> tuple[Tensor, int]:
    """x [..., columns] with unit stride along columns, and the stride between rows; x itself if it is contiguous."""
    if x.is_contiguous():
        return x, columns
    x = as_rows(x)
    return x, x.stride(0)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a device; 2 under the interpreter, so that persistent loops take several steps."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@functools.cache  # the driver is queried once, not at every launch
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may use on a CUDA device."""
    return triton.runtime.driver.active.utils.get_device_properties(device.index or 0)["max_shared_mem"]


class RecordedGraphs:
    """CUDA graphs by what tells their steps apart, captured once, then replayed without the host's work. They are in
    one memory pool: they never run at the same time. They read weights at their addresses."""

    def __init__(self) -> None:
        self.graphs: dict[Any, Any] = {}
        self.addresses: list[int] = []
        self.pool: Any = None

    def refresh(self, weights: Iterable[Tensor]) -> None:
        """Drops the graphs if a weight is elsewhere than at their capture."""
        addresses = [weight.data_ptr() for weight in weights]
        if addresses != self.addresses:
            self.graphs, self.addresses = {}, addresses
            self.pool = None  # PyTorch ends a pool with the last of its graphs

    def record(self, step: Callable[[], None]) -> Callable[[], Any]:
        """Captures a step, which does not run it. Returns its replay. Raises RuntimeError for what cannot be captured.

        Other threads, such as one that collates the next batch, may allocate pinned memory meanwhile.
        """
        if self.pool is None:
            self.pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            step()
        return graph.replay
