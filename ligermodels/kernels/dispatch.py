"""How an op is registered and dispatched. Knows torch; must not know any particular op.

Each call takes one of three paths:
- CPU tensors, and transforms of torch.func: the public function runs its `<op>_reference` in plain PyTorch
  (`runs_kernels` returns False).
- CUDA or ROCm tensors, or any tensor under `TRITON_INTERPRET=1`: the Triton kernels, inside an `autograd.Function`. The
  launcher is called directly, because the dispatcher costs several microseconds a call.
- During tracing (torch.compile, fake tensors, selective checkpointing, FLOP counters): the same launcher, called
  through the registered op `torch.ops.ligermodels.<name>`, which the tracer can see. Launchers only ever run on real
  tensors, so no Python float reaches Triton as fp64 through a compiler.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active, _len_torch_dispatch_stack
from torch.compiler import is_dynamo_compiling
from torch.utils._pytree import tree_map_only

from ligermodels.kernels import launch

LIBRARY = torch.library.Library("ligermodels", "DEF")
PLAIN = frozenset({Tensor, torch.nn.Parameter, int, float, bool, str, torch.dtype, type(None)})  # nothing to trace


def runs_kernels(x: Tensor) -> bool:
    """Whether ops on `x` run as Triton kernels rather than as their plain PyTorch reference.

    They do not under transforms of torch.func, which can take only the reference apart.
    """
    return (launch.interpreting or not x.is_cpu) and not _are_functorch_transforms_active()


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


def is_traced(args: tuple[Any, ...]) -> bool:
    """Whether a compiler, a dispatch mode or a tensor subclass must see the call as a registered op.

    args: those of the call, a tensor first.
    """
    if is_dynamo_compiling() or _len_torch_dispatch_stack():
        return True
    return args[0].is_meta or not PLAIN.issuperset(map(type, args))


def is_last_use(*tensors: Tensor) -> bool:
    """Whether a node's backward may write over what it saved: neither something that traces nor a backward to come, of
    a graph that is kept, reads it again. tensors: those that backward works on."""
    return not is_traced(tensors) and not torch._C._autograd._get_current_graph_task_keep_graph()


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
        return registered(*args) if is_traced(args) else launcher(*args)

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


def widen(x: Tensor) -> Tensor:
    """`x` in the dtype that references compute in: fp32 for the half precisions, else its own."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
