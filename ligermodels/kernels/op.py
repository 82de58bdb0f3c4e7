"""How an op is registered and dispatched. Knows torch and triton; must not know any particular op.

Three paths, chosen per call:
- CPU tensors, and transforms of torch.func: the public function runs its `<op>_reference` in plain PyTorch
  (`runs_kernels` says no).
- CUDA or ROCm tensors, or any tensor under `TRITON_INTERPRET=1`: the Triton kernels, inside an `autograd.Function`. The
  launcher is called directly, because the dispatcher costs several microseconds a call.
- While something traces (torch.compile, fake tensors, selective checkpointing, FLOP counters): the same launcher
  through the registered op `torch.ops.ligermodels.<name>`, which the tracer can see. As launchers only ever run on real
  tensors, no Python float reaches Triton as fp64 by way of a compiler.
"""

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from torch._C import _are_functorch_transforms_active, _len_torch_dispatch_stack
from torch.compiler import is_dynamo_compiling
from torch.utils._pytree import tree_map_only

LIBRARY = torch.library.Library("ligermodels", "DEF")
PLAIN = frozenset({Tensor, torch.nn.Parameter, int, float, bool, str, torch.dtype, type(None)})  # nothing to trace

# Tests clear this to send CPU tensors to the reference although the kernels were built for the interpreter.
interpreting = os.environ.get("TRITON_INTERPRET") == "1"


def runs_kernels(x: Tensor) -> bool:
    """Whether ops on `x` run as Triton kernels rather than as their plain PyTorch reference.

    They do not under transforms of torch.func, which can take only the reference apart.
    """
    return (interpreting or not x.is_cpu) and not _are_functorch_transforms_active()


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
    """Whether a compiler, a dispatch mode or a tensor subclass must see the call as a registered op.

    args: those of the call, a tensor first.
    """
    if is_dynamo_compiling() or _len_torch_dispatch_stack():
        return True
    return args[0].is_meta or not PLAIN.issuperset(map(type, args))


def last_use(*tensors: Tensor) -> bool:
    """Whether a node's backward may write over what it saved: neither something that traces nor a backward to come, of
    a graph that is kept, reads it again. tensors: those that backward works on."""
    return not traced(tensors) and not torch._C._autograd._get_current_graph_task_keep_graph()


def register(schema: str, launcher: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """Registers `ligermodels::<schema>` and returns the function to call it by.

    schema: as in native_functions.yaml; an argument that is written to is declared, as `Tensor(a!)`.
    launcher: runs the kernels; its first argument is a tensor. Of several outputs, one that was not asked for may be
        None, which costs no allocation; to whoever traces, it is a tensor of no elements.
    fake: the outputs' shapes, dtypes and strides from the inputs' alone.
    """
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, _without_none(launcher), "CUDA")  # ROCm's dispatch key as well
    LIBRARY.impl(name, _without_none(launcher), "CPU")  # reached under TRITON_INTERPRET=1 only
    torch.library.register_fake(f"ligermodels::{name}", _without_none(fake), lib=LIBRARY)
    registered = getattr(torch.ops.ligermodels, name).default

    def call(*args: Any) -> Any:
        return registered(*args) if traced(args) else launcher(*args)

    return call


def _without_none(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        outputs = function(*args)
        return tuple(args[0].new_empty(0) if x is None else x for x in outputs) if type(outputs) is tuple else outputs

    return call


class Node(torch.autograd.Function):
    """An autograd.Function whose `apply` costs microseconds less, and whose backward is not to be differentiated.

    Function's own also serves nodes with a setup_context, which ours have not, and transforms of torch.func, under
    which `runs_kernels` says no.
    """

    apply = torch._C._FunctionBase.__dict__["apply"]

    def __init_subclass__(cls) -> None:
        cls.backward = staticmethod(_once(cls.backward))  # type: ignore[method-assign]


def _once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """`backward`, which raises where a graph of it is asked for: what goes through kernels would be missing in that."""

    @functools.wraps(backward)
    def call(ctx: Any, *gradients: Tensor | None) -> Any:
        if torch.is_grad_enabled() and not is_dynamo_compiling():
            raise RuntimeError(
                "ligermodels: fused ops have no second derivative; call backward without create_graph=True, or"
                " differentiate by torch.func, which runs them as plain PyTorch"
            )
        return backward(ctx, *gradients)

    return call


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


def widen(x: Tensor) -> Tensor:
    """`x` in the dtype that references compute in: fp32 for the half precisions, else its own."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def cdiv(a: int, b: int) -> int:
    """a / b rounded up; Triton's takes a microsecond."""
    return -(-a // b)


def matrix(x: Tensor) -> Tensor:
    """[..., N] as [rows, N], without the microseconds of a view, a node of the graph, where it is one."""
    return x if x.ndim == 2 else x.reshape(-1, x.shape[-1])


def as_rows(x: Tensor) -> Tensor:
    """[..., N] as [rows, N] with unit stride along N and any stride between rows; a view where possible."""
    x = matrix(x)
    return x if x.stride(-1) == 1 else x.contiguous()


def rows_of(x: Tensor, columns: int) -> tuple[Tensor, int]:
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
