"""Checks of an op's arguments, which it calls before it chooses between kernels and reference, so that a CPU and a GPU
refuse the same inputs. Knows torch."""

from typing import Any

import torch
from torch import Tensor

INT32, INT64, INDICES = (torch.int32,), (torch.int64,), (torch.int32, torch.int64)  # of `check_one_of`
WIDE_FLOATS = torch.float32, torch.float64


def check_floats(op: str, **inputs: Tensor | None) -> None:
    """Raises ValueError for an input that is not floating point; None is no input, here and below."""
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


def refuse_gradients(op: str, *inputs: Tensor | None) -> None:
    """Raises RuntimeError if autograd would record an op that has no backward."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs):
        raise RuntimeError(f"{op}: has no backward; call it under torch.no_grad()")


def count_documents(op: str, batch: int, cu_seqlens: Tensor | None) -> int:
    """How many documents a batch of rows holds. Raises ValueError for offsets of several rows, or that are none."""
    if cu_seqlens is None:
        return batch
    if batch != 1:
        raise ValueError(f"{op}: cu_seqlens needs a batch of one row, but there are {batch} rows")
    check_one_of(op, INT32, cu_seqlens=cu_seqlens)
    return shape_of(op, "cu_seqlens", cu_seqlens, "N + 1")[0] - 1


def check_pool(op: str, pool: Tensor, row: Tensor, rows: int, dtype: torch.dtype, *state: int) -> None:
    """Raises ValueError unless a pool holds states of this dtype and shape, and each of the rows says which is its."""
    check_shape(op, "row", row, rows)
    check_one_of(op, INDICES, row=row)
    if pool.shape[1:] != state or pool.dtype != dtype or not pool.is_contiguous():
        needed = f"{dtype} [R, {', '.join(map(str, state))}]"
        raise ValueError(f"{op}: pool is {pool.dtype} {list(pool.shape)}; needed contiguous {needed}")
