"""How a Triton kernel is launched, and what launchers share. Must not know any particular op.

Triton's own launch binds, specialises and hashes every argument, which takes longer on the host than the launch. Here
the first launch of a variant is Triton's; later ones look up the compiled kernel and pass it bare addresses.
"""

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
from torch import Tensor

# Tests clear this to run CPU tensors through the reference although the kernels were built for the interpreter.
interpreting = os.environ.get("TRITON_INTERPRET") == "1"


class Kernel:
    """A Triton kernel, launched by `kernel.bind(META=..., num_warps=...)(programs, *args)`.

    Its signature has the pointers first (`…_ptr`, all of them tensors), then numbers, then constants.
    """

    def __init__(self, function: Callable[..., None], do_not_specialize: Sequence[str]) -> None:
        self.jit = triton.jit(function, do_not_specialize=do_not_specialize)
        self.bind = functools.cache(self._bind)

    def _bind(self, **constants: Any) -> "Launcher":
        variants = Variants(self.jit, constants)
        return variants.launch_by_triton if torch.version.hip else _launcher(variants)


Launcher = Callable[..., None]  # of (programs, *args): on the first tensor's device, in its current stream


class Variants:
    """What Triton has compiled of a kernel with its constants, to be launched in a shorter way than Triton's.

    Triton binds, specialises and hashes all arguments at every launch and asks the driver about each pointer, which
    takes longer than the launch itself. Here the first launch of a kind is Triton's; the next ones look up what it
    compiled and run that on bare addresses.
    """

    def __init__(self, jit: Any, constants: dict[str, Any]) -> None:
        self.jit, self.constants = jit, constants
        names = [name for name in jit.arg_names if name not in constants]
        self.pointers = sum(name.endswith("_ptr") for name in names)
        self.numbers = len(names) - self.pointers
        self.kinds: dict[tuple[Any, ...], list[Any]] = {}
        self.find = functools.lru_cache(1024, typed=True)(self._find)  # 1 is not 1.0 here

    def _find(self, device: int, aligned: tuple[bool, ...] | None, *kinds: Any) -> list[Any]:
        """What `compile` returned for such dtypes and numbers; the empty list to put it in where there was nothing."""
        dtypes, numbers = kinds[: self.pointers], kinds[self.pointers :]
        return self.kinds.setdefault((device, aligned, *dtypes, *_kinds_of(*numbers)), [])

    def compile(self, programs: int, *args: Any) -> tuple[Any, ...]:
        """Launches through Triton; returns what the same launch calls without it, and its arguments around ours."""
        compiled = self.launch_by_triton(programs, *args)
        back = [self.constants[name] for name in self.jit.arg_names[len(args) :]]
        return *_entry(compiled), back

    def launch_by_triton(self, programs: int, *args: Any) -> Any:
        with torch.cuda.device(args[0].get_device()):
            return self.jit[programs,](*args, **self.constants)


def _launcher(variants: Variants) -> Launcher:
    """A function of exactly the kernel's arguments: on the host, a loop over them takes longer than what it does."""
    tensors, addresses = ([f"{x}{i}" for i in range(variants.pointers)] for x in ("tensor", "address"))
    numbers = [f"number{i}" for i in range(variants.numbers)]
    arguments, values = ", ".join(tensors + numbers), ", ".join(addresses + numbers)
    kinds = ", ".join([f"{x}.dtype" for x in tensors] + numbers)
    source = f"""
def launcher(variants, find):
    def launch(programs, {arguments}):
        if interpreting:
            return variants.launch_by_triton(programs, {arguments})
        device = tensor0.get_device()
        if device != torch._C._cuda_getDevice():  # where all of this would launch otherwise
            with torch.cuda.device(device):
                return launch(programs, {arguments})
        {"; ".join(f"{a} = {x}.data_ptr()" for a, x in zip(addresses, tensors, strict=True))}
        aligned = None if ({" | ".join(addresses)}) % 16 == 0 else tuple(x % 16 == 0 for x in ({", ".join(addresses)},))
        compiled = find(device, aligned, {kinds})
        if compiled:
            run, front, back = compiled
            run(programs, 1, 1, torch._C._cuda_getCurrentRawStream(device), *front, {values}, *back)
        else:
            compiled[:] = variants.compile(programs, {arguments})
    return launch
"""
    namespace: dict[str, Any] = {}
    exec(source, globals(), namespace)
    return namespace["launcher"](variants, variants.find)


def _entry(compiled: Any) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """What launches a compiled kernel, and its arguments between the stream and those of the kernel.

    Of Triton 3.6 its function in C, whose arguments are private to Triton; of others the method around theirs, which
    takes one to two microseconds more.
    """
    run, function, metadata, hooks = compiled.run, compiled.function, compiled.packed_metadata, (None, None, None)
    if triton.__version__.startswith("3.6.") and not run.global_scratch_size and not run.profile_scratch_size:
        scratch = None, None
        return run.launch, (function, run.launch_cooperative_grid, run.launch_pdl, *scratch, metadata, *hooks)
    return run, (function, metadata, *hooks)


def _kinds_of(*numbers: float | None) -> list[int | None]:
    """What Triton may compile a kernel anew for: 1, divisibility by 16 and 64-bit integers; not for floats."""
    return [(2 + (x % 16 == 0) if 1 < x < 2**31 else x) if type(x) is int else None for x in numbers]


def kernel(do_not_specialize: Sequence[str] = ()) -> Callable[[Callable[..., None]], Kernel]:
    """Decorates what is launched; do_not_specialize: its integers that change from batch to batch."""
    return lambda function: Kernel(function, do_not_specialize)


def cdiv(a: int, b: int) -> int:
    """a / b rounded up; Triton's takes a microsecond."""
    return -(-a // b)


def as_matrix(x: Tensor) -> Tensor:
    """[..., N] as [rows, N], without the microseconds of a view, a node of the graph, where it is one."""
    return x if x.ndim == 2 else x.reshape(-1, x.shape[-1])


def as_rows(x: Tensor) -> Tensor:
    """[..., N] as [rows, N] with unit stride along N and any stride between rows; a view where possible."""
    x = as_matrix(x)
    return x if x.stride(-1) == 1 else x.contiguous()


def as_rows_with_stride(x: Tensor, columns: int) -> tuple[Tensor, int]:
    """x [..., columns] with unit stride along them, and the stride between rows; x itself where it is contiguous."""
    if x.is_contiguous():
        return x, columns
    x = as_rows(x)
    return x, x.stride(0)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a device; a few under the interpreter, so that persistent loops are exercised."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@functools.cache  # the driver is asked once, not at every launch
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may use on a CUDA device."""
    return triton.runtime.driver.active.utils.get_device_properties(device.index or 0)["max_shared_mem"]
