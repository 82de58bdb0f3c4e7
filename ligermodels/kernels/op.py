"""How an op is registered and dispatched. Knows torch and triton; must not know any particular op.

Three paths, chosen per call:
- CPU tensors: the public function runs its `<op>_reference` in plain PyTorch (`runs_kernels` says no).
- CUDA or ROCm tensors, or any tensor under `TRITON_INTERPRET=1`: the Triton kernels, inside an `autograd.Function`. The
  launcher is called directly, because the dispatcher costs several microseconds a call.
- While something traces (torch.compile, fake tensors, selective checkpointing, FLOP counters): the same launcher
  through the registered op `torch.ops.ligermodels.<name>`, which the tracer can see. As launchers only ever run on real
  tensors, no Python float reaches Triton as fp64 by way of a compiler.
"""

import functools
import operator
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from torch.utils._pytree import tree_map_only

LIBRARY = torch.library.Library("ligermodels", "DEF")

# Tests clear this to send CPU tensors to the reference although the kernels were built for the interpreter.
interpreting = os.environ.get("TRITON_INTERPRET") == "1"


def runs_kernels(x: Tensor) -> bool:
    """Whether ops on `x` run as Triton kernels rather than as their plain PyTorch reference."""
    return x.device.type != "cpu" or interpreting


def autocast(*operands: Any) -> tuple[Any, ...]:
    """What ends in a matrix product takes its operands through here: they come in the dtype of `torch.autocast`.

    operands: tensors, tuples of them, None. Outside of autocast, on another device than its, and in fp64 they stay as
    they are. Gradients come back in each operand's own dtype.
    """
    if not torch._C._is_any_autocast_enabled():  # the one question asked outside of it
        return operands
    return tree_map_only(Tensor, _autocast, operands)


def _autocast(x: Tensor) -> Tensor:
    kind = x.device.type
    takes_part = torch.is_autocast_enabled(kind) and x.is_floating_point() and x.dtype != torch.float64
    return x.to(torch.get_autocast_dtype(kind)) if takes_part else x


def traced(args: tuple[Any, ...]) -> bool:
    """Whether a compiler, a dispatch mode or a tensor subclass must see the call as a registered op."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return True
    for arg in args:
        if isinstance(arg, Tensor) and (type(arg) not in (Tensor, torch.nn.Parameter) or arg.is_meta):
            return True
    return False


def register(schema: str, launcher: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """Registers `ligermodels::<schema>` and returns the function to call it by.

    schema: as in native_functions.yaml; an argument that is written to is declared, as `Tensor(a!)`.
    launcher: runs the kernels; its first argument is a tensor, on whose device it runs.
    fake: the outputs' shapes, dtypes and strides from the inputs' alone.
    """
    name = schema.partition("(")[0]
    launcher = on_device_of_first_tensor(launcher)
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, launcher, "CUDA")  # ROCm's dispatch key as well
    LIBRARY.impl(name, launcher, "CPU")  # reached under TRITON_INTERPRET=1 only
    torch.library.register_fake(f"ligermodels::{name}", fake, lib=LIBRARY)
    registered = getattr(torch.ops.ligermodels, name).default

    def call(*args: Any) -> Any:
        return registered(*args) if traced(args) else launcher(*args)

    return call


def on_device_of_first_tensor(launcher: Callable[..., Any]) -> Callable[..., Any]:
    """Triton launches on the current device: make that the tensor's."""

    def launch(x: Tensor, *args: Any) -> Any:
        if not x.is_cuda or x.get_device() == torch.cuda.current_device():
            return launcher(x, *args)
        with torch.cuda.device(x.device):
            return launcher(x, *args)

    return launch


class Kernel:
    """A Triton kernel with a shorter way to launch it again: `kernel[grid](*args, META=..., num_warps=...)`.

    Triton binds, specialises and hashes all arguments at every launch and asks the driver about each pointer, which
    takes longer than the launch itself. Here the first launch of a kind is Triton's; the next ones look up what it
    compiled and run that on bare addresses. A kernel's signature has its pointers first (`…_ptr`, all of them tensors),
    then numbers, then constants, which are given by keyword.
    """

    def __init__(self, function: Callable[..., None], do_not_specialize: Sequence[str]) -> None:
        self.jit = triton.jit(function, do_not_specialize=do_not_specialize)
        self.pointers = sum(name.endswith("_ptr") for name in self.jit.arg_names)
        self.compiled: dict[tuple[Any, ...], Callable[..., None]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        # Under ROCm Triton also specialises on a tensor's size: there, and in the interpreter, it launches by itself.
        if interpreting or torch.version.hip:
            return self.jit[grid]
        return functools.partial(self._launch, grid + (1,) * (3 - len(grid)))

    def _launch(self, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        tensors, numbers = args[: self.pointers], args[self.pointers :]
        device, addresses = tensors[0].get_device(), [*map(Tensor.data_ptr, tensors)]
        alignment = [x % 16 == 0 for x in addresses] if functools.reduce(operator.or_, addresses) % 16 else ()
        dtypes, kinds = map(_dtype_of, tensors), map(_kind_of_number, numbers)
        key = (device, *constants, *constants.values(), *dtypes, *kinds, *alignment)
        run = self.compiled.get(key)
        if run is None:
            self.compiled[key] = self._compile(grid, args, constants)
        else:
            run(*grid, torch._C._cuda_getCurrentRawStream(device), *addresses, *numbers)

    def _compile(self, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any]) -> Callable[..., None]:
        """Launches through Triton; returns what launches the same kernel on the grid, a stream and the arguments."""
        compiled = self.jit[grid](*args, **constants)
        last = [constants[name] for name in self.jit.arg_names[len(args) :]]
        launch, function, metadata = compiled.run, compiled.function, compiled.packed_metadata

        def run(x: int, y: int, z: int, stream: int, *values: Any) -> None:
            launch(x, y, z, stream, function, metadata, None, None, None, *values, *last)  # None: no launch hooks

        return run


_dtype_of = operator.attrgetter("dtype")


def _kind_of_number(x: float | None) -> float | None:
    """What Triton may compile a kernel anew for: 1, divisibility by 16 and 64-bit integers; not for floats."""
    if not isinstance(x, int):
        return None
    return 2 + (x % 16 == 0) if 1 < x < 2**31 else x


def kernel(do_not_specialize: Sequence[str] = ()) -> Callable[[Callable[..., None]], Kernel]:
    """Decorates what is launched; do_not_specialize: its integers that change from batch to batch."""
    return lambda function: Kernel(function, do_not_specialize)


def widen(x: Tensor) -> Tensor:
    """`x` in the dtype that references compute in: fp32 for the half precisions, else its own."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def as_rows(x: Tensor) -> Tensor:
    """[..., N] as [rows, N] with unit stride along N and any stride between rows; a view where possible."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(-1) == 1 else x.contiguous()


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a device; a few under the interpreter, so that persistent loops are exercised."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@functools.cache  # the driver is asked once, not at every launch
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may use on a CUDA device."""
    return triton.runtime.driver.active.utils.get_device_properties(device.index or 0)["max_shared_mem"]
