"""How an op is registered and dispatched. Knows torch.

Each call takes one of three paths:
- CPU tensors, and transforms of torch.func: the public function runs its `<op>_reference` in plain PyTorch
  (`runs_kernels` returns False).
- CUDA or ROCm tensors, or any tensor under `TRITON_INTERPRET=1`: the Triton kernels, inside an `autograd.Function`. The
  launcher is called directly, because the dispatcher costs several microseconds a call.
- During tracing (torch.compile, fake tensors, selective checkpointing, FLOP counters) and on DTensors: the same
  launcher, called through the registered op `torch.ops.ligermodels.<name>`, which the tracer can see. Launchers only
  ever run on real tensors, so no Python float reaches Triton as fp64 through a compiler.
"""

import functools
import inspect
import typing
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active, _len_torch_dispatch_stack
from torch.compiler import is_dynamo_compiling
from torch.utils._pytree import tree_map_only

from ligermodels.kernels import launch
from ligermodels.kernels.row_sharding import RowSharding, register_row_sharding

LIBRARY = torch.library.Library("ligermodels", "DEF")
INT32, INT64, INDICES = (torch.int32,), (torch.int64,), (torch.int32, torch.int64)  # of `check_one_of`
WIDE_FLOATS = torch.float32, torch.float64
SCHEMA_KINDS = {
    Tensor: "Tensor", int: "int", float: "float", bool: "bool", str: "str", torch.dtype: "ScalarType",
}  # fmt: skip
UNTRACED_TYPES = frozenset({Tensor, torch.nn.Parameter, int, float, bool, str, torch.dtype, type(None)})


def assume_constant_result(function: Callable[..., Any]) -> Callable[..., Any]:
    """Does what torch.compiler's does, which imports the compiler at once: a fifth of the time of a start."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def runs_kernels(x: Tensor) -> bool:
    """Whether ops on `x` run as Triton kernels rather than as their plain PyTorch reference.

    Under transforms of torch.func they run as the reference, which is all that those can transform, and on a GPU in
    float64 too: kernels multiply by tensor cores, and sum in float32.
    """
    compiled = not x.is_cpu and x.dtype != torch.float64
    return (launch.interpreting or compiled) and not _are_functorch_transforms_active()


def check_floats(op: str, **inputs: Tensor | None) -> None:
    """Raises ValueError for an input that is not floating point. Like the checks below it is called before an op
    chooses between kernels and reference, so that a CPU and a GPU refuse the same inputs; None is no input."""
    for name, x in inputs.items():
        if x is not None and not x.is_floating_point():
            raise ValueError(f"{op}: {name} is {x.dtype}; a floating-point tensor is needed")


def check_one_of(op: str, dtypes: tuple[torch.dtype, ...], **inputs: Tensor | None) -> None:
    """Raises ValueError for an input of another dtype than these."""
    for name, x in inputs.items():
        if x is not None and x.dtype not in dtypes:
            raise ValueError(f"{op}: {name} is {x.dtype}; needed {' or '.join(map(str, dtypes))}")


def check_dtypes(op: str, **operands: Any) -> None:
    """Raises ValueError unless the operands of a product have one floating-point dtype. operands: tensors or quantised
    weights, as autocast has left them."""
    dtypes = {x.dtype for x in operands.values() if x is not None}
    if len(dtypes) != 1 or not dtypes.pop().is_floating_point:
        found = ", ".join(f"{name} {x.dtype}" for name, x in operands.items() if x is not None)
        raise ValueError(f"{op}: operands are {found}; they must be equal, and floating-point")


def check_shape(op: str, name: str, x: Any, *needed: int) -> None:
    """Raises ValueError for an input, a tensor or a quantised weight, of another shape."""
    if x is not None and x.shape != needed:
        raise ValueError(f"{op}: {name} has shape {list(x.shape)}; needed {list(needed)}")


def shape_of(op: str, name: str, x: Any, axes: str = "..., N") -> torch.Size:
    """The shape of an input. Raises ValueError unless it has these axes; of "..., N" any that there are, and one."""
    shape = x.shape
    if len(shape) != axes.count(",") + 1 and not (axes.startswith("...") and shape):
        raise ValueError(f"{op}: {name} has shape {list(shape)}; needed [{axes}]")
    return shape


def check_linear(op: str, columns: int, weight: Any, bias: Tensor | None) -> None:
    """Raises ValueError unless a linear takes rows of so many columns, and its bias has an element for each output."""
    rows = shape_of(op, "weight", weight, "N, K")[0]
    check_shape(op, "weight", weight, rows, columns)
    check_shape(op, "bias", bias, rows)


def autocast(*operands: Any) -> tuple[Any, ...]:
    """Casts the operands of a matrix product to the dtype of `torch.autocast`.

    operands: tensors, quantised weights, tuples of tensors, or None. They are returned unchanged if autocast is off, or
    is on for another device, and if they are fp64 or integers. Gradients come back in each operand's own dtype.
    Ops that end in a matrix product call this; norms and losses keep their input's dtype.
    """
    if not torch._C._is_any_autocast_enabled():  # the common case costs one check
        return operands
    return tuple(map(_autocast, operands))


def _autocast(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x.under_autocast() if hasattr(x, "under_autocast") else tree_map_only(Tensor, _autocast, x)
    kind = x.device.type
    takes_part = torch.is_autocast_enabled(kind) and x.is_floating_point() and x.dtype != torch.float64
    return x.to(torch.get_autocast_dtype(kind)) if takes_part else x


def is_traced(args: tuple[Any, ...]) -> bool:
    """Whether the call is traced: a compiler, a dispatch mode or a tensor subclass must see it as a registered op.

    args: the arguments of the call, a tensor first.
    """
    if is_dynamo_compiling() or _len_torch_dispatch_stack():
        return True
    return args[0].is_meta or not UNTRACED_TYPES.issuperset(map(type, args))


def can_be_read(x: Tensor) -> bool:
    """Whether the host can read the values of x: also under a dispatch mode, unless it compiles or fakes them."""
    return not is_dynamo_compiling() and type(x) is Tensor and not x.is_meta


def is_last_use(*tensors: Tensor | None) -> bool:
    """Whether a node's backward may overwrite what it saved: nothing reads it again.

    A tracer might, and so might a second backward if the graph is retained. tensors: what backward works on.
    """
    return not is_traced(tensors) and not torch._C._autograd._get_current_graph_task_keep_graph()


def register_op(
    schema: str, launcher: Callable[..., Any], fake: Callable[..., Any] | None = None,
    sharding: RowSharding | None = None, *, outputs: Sequence[str] = (), writes: Sequence[str] = (),
) -> Callable[..., Any]:  # fmt: skip
    """Registers an op `ligermodels::<name>` and returns the function that calls it.

    schema: its name, where the launcher's annotations say its arguments and outputs; else all of it, as in
    native_functions.yaml. Keyword-only arguments are the launcher's own. outputs: their names, which a sharding needs.
    writes: the arguments that are written to.
    launcher: runs the kernels; its first argument is a tensor. If it has several outputs, those that the caller does
    not need may be None, which saves the allocation; the registered op returns an empty tensor instead.
    fake: computes the outputs' shapes, dtypes and strides from those of the inputs; None for an output like the first
    argument, or for none.
    sharding: how the op runs on DTensors; without it they are refused.
    """
    name = schema.partition("(")[0]
    if name == schema:
        schema += _signature(launcher, outputs, writes)
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, _none_to_empty(launcher), "CUDA")  # ROCm's dispatch key as well
    LIBRARY.impl(name, _none_to_empty(launcher), "CPU")  # reached under TRITON_INTERPRET=1 only
    registered = getattr(torch.ops.ligermodels, name).default
    fake = fake or (_fake_like_first if registered._schema.returns else _fake_without_outputs)
    torch.library.register_fake(f"ligermodels::{name}", _none_to_empty(fake), lib=LIBRARY)
    if sharding:
        register_row_sharding(registered, sharding)

    def call(*args: Any) -> Any:
        return registered(*args) if is_traced(args) else launcher(*args)

    return call


def _signature(launcher: Callable[..., Any], outputs: Sequence[str], writes: Sequence[str]) -> str:
    """The arguments and outputs of a launcher, by its annotations, as native_functions.yaml has them."""
    kinds = typing.get_type_hints(launcher)
    arguments: list[str] = []
    for name, parameter in inspect.signature(launcher).parameters.items():
        if parameter.kind is not parameter.KEYWORD_ONLY:
            (kind,) = (each for each in typing.get_args(kinds[name]) or (kinds[name],) if each is not type(None))
            written = f"({chr(ord('a') + len(arguments))}!)" if name in writes else ""
            optional = "" if kind is kinds[name] else "?"
            default = "" if parameter.default is parameter.empty else f"={parameter.default}"
            arguments.append(f"{SCHEMA_KINDS[kind]}{written}{optional} {name}{default}")
    returned = kinds["return"]
    count = 0 if returned is type(None) else len(typing.get_args(returned)) or 1
    results = [f"Tensor {name}" for name in outputs] or ["Tensor"] * count
    return f"({', '.join(arguments)}) -> ({', '.join(results)})"


def _fake_like_first(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


def _fake_without_outputs(*_: Any) -> None:
    pass


def _none_to_empty(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with each None of its output tuple replaced by an empty tensor, as a schema requires.

    It has as many dimensions as the first argument, so that DTensor may call any of them sharded.
    """

    def call(*args: Any) -> Any:
        outputs = function(*args)
        if type(outputs) is not tuple:
            return outputs
        return tuple(args[0].new_empty([0] * args[0].ndim) if x is None else x for x in outputs)

    return call


class Node(torch.autograd.Function):
    """An autograd.Function whose `apply` is microseconds faster and whose backward rejects double backward.

    Function.apply also supports `setup_context`, which no node here has, and transforms of torch.func, under which
    `runs_kernels` returns False. A node makes no view of a whole tensor, which costs the host microseconds, and
    allocates with `empty_like` or `new_empty(*shape)`, which torch parses fastest.
    """

    apply = torch._C._FunctionBase.__dict__["apply"]

    def __init_subclass__(cls) -> None:
        cls.backward = staticmethod(_forbid_double_backward(cls.backward))  # type: ignore[method-assign]


def _forbid_double_backward(backward: Callable[..., Any]) -> Callable[..., Any]:
    """`backward`, raising if autograd records it: the graph would lack what the kernels compute."""

    @functools.wraps(backward)
    def call(ctx: Any, *gradients: Tensor | None) -> Any:
        if torch.is_grad_enabled() and not is_dynamo_compiling():
            raise RuntimeError(
                "ligermodels: fused ops do not support double backward; call backward without create_graph=True, or"
                " use torch.func, which runs their plain PyTorch reference"
            )
        return backward(ctx, *gradients)

    return call


def refuse_gradients(op: str, *inputs: Tensor | None) -> None:
    """Raises RuntimeError if autograd would record an op that has no backward."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs):
        raise RuntimeError(f"{op}: has no backward; call it under torch.no_grad()")


def widen(x: Tensor) -> Tensor:
    """`x` in the dtype that references compute in: fp32 for half precision, otherwise its own dtype."""
    return x.float() if x.dtype.itemsize < 4 else x


def wide_dtype(x: Tensor) -> torch.dtype:
    """The dtype of widen(x)."""
    return x.dtype if x.dtype.itemsize >= 4 else torch.float32


def as_factor(x: Tensor, like: Tensor) -> Tensor:
    """x rounded to the dtype of `like`, as a factor of a reference's product with sums in fp32."""
    return widen(x.to(like.dtype))


def promoted_dtype(a: Tensor, b: Tensor) -> torch.dtype:
    """The dtype of a + b: under `torch.autocast` a branch is narrower than the residual stream that it joins."""
    return a.dtype if a.dtype == b.dtype else torch.promote_types(a.dtype, b.dtype)
