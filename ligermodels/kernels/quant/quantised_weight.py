"""Frozen weights in few bits as operands of matrix products, and the linear of one as an autograd node.

A `QuantisedWeight` is one tensor of bytes and their layout. Ops with a frozen weight take it in the place of a tensor.
Its nodes dequantise it when they multiply, forward and again backward, and keep the bytes alone between the two:
    y = x Ŵᵀ + b    dx = dy Ŵ      Ŵ: W dequantised, in the layout's dtype
x [..., K], W [N, K], b [N] -> y [..., N] in Ŵ's dtype. The products are torch GEMMs. Dequantising writes and reads N K
elements, which is little beside a product of many rows; few_rows_linear.py multiplies few rows without writing them.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import ClassVar, NamedTuple, Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.kernels.dispatch import Node, autocast, check_dtypes, check_linear, shape_of
from ligermodels.kernels.launch import as_matrix, cdiv

ALIGNMENT = 16  # bytes; of each section of a weight's bytes


class WeightLayout(Protocol):
    """Which bytes of a quantised weight mean what. Equal layouts compare equal, and have equal hashes."""

    scheme: ClassVar[str]  # the name of the format

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the weight is used."""
        ...

    @property
    def nbytes(self) -> int: ...

    @property
    def parts(self) -> tuple[int, ...]:
        """Rows of each part that is quantised by itself; together they are all rows, in order."""
        ...

    def with_dtype(self, dtype: torch.dtype) -> Self: ...

    def quantize(self, weight: Tensor) -> Tensor:
        """A weight of this shape -> its bytes [nbytes]."""
        ...

    def dequantize(self, data: Tensor) -> Tensor:
        """Bytes [nbytes] -> the weight, of this shape and dtype."""
        ...

    def dequantize_experts(self, data: Tensor, index: Tensor) -> Tensor:
        """Dequantises the matrices `index` [n] of a weight [E, N, K] -> [n, N, K]. Kernels dequantise no other."""
        ...

    def pack(self, parts: Iterable[Mapping[str, Tensor]]) -> Tensor: ...

    def unpack(self, data: Tensor) -> list[dict[str, Tensor]]: ...

    def product(self, x: Tensor, data: Tensor, bias: Tensor | None) -> Tensor:
        """x [..., K], the bytes of a weight [N, K], bias [N] or None -> x Ŵᵀ + b [..., N]."""
        ...

    def input_gradient(self, dy: Tensor, data: Tensor) -> Tensor:
        """dy [M, N], the bytes of a weight [N, K] -> dy Ŵ [M, K]."""
        ...


class DenseProducts:
    """Products of layouts that dequantise a weight first."""

    def product(self: WeightLayout, x: Tensor, data: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, self.dequantize(data), bias)

    def input_gradient(self: WeightLayout, dy: Tensor, data: Tensor) -> Tensor:
        return torch.mm(dy, self.dequantize(data))


@dataclass(frozen=True)
class RowsLayout(DenseProducts):
    """What layouts of weights share whose rows are quantised by parts.

    shape: of the weight, [rows, columns] or [experts, rows, columns].
    parts: rows of each part that is quantised by itself; together they are all rows, in order.
    dtype: of the weight where it is used.
    """

    shape: tuple[int, ...]
    parts: tuple[int, ...]
    dtype: torch.dtype

    @property
    def rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def columns(self) -> int:
        return self.shape[-1]

    def with_dtype(self, dtype: torch.dtype) -> Self:
        return replace(self, dtype=dtype)


def starts_of(sizes: Iterable[int]) -> Iterator[int]:
    """Where sections of these numbers of bytes begin, each aligned, and where the last ends."""
    return accumulate((ALIGNMENT * cdiv(size, ALIGNMENT) for size in sizes), initial=0)


def section(data: Tensor, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A section of a weight's bytes as a tensor in the same memory."""
    return data[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


def aligned(data: Tensor) -> Tensor:
    """The bytes of a weight where a kernel can read the numbers of 4 bytes among them."""
    data = data.contiguous()
    return data.clone() if data.data_ptr() % ALIGNMENT else data


class QuantisedWeight(NamedTuple):
    data: Tensor  # uint8 [layout.nbytes]
    layout: WeightLayout

    @property
    def scheme(self) -> str:
        return self.layout.scheme

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.layout.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.layout.dtype

    @property
    def nbytes(self) -> int:
        return self.layout.nbytes

    @property
    def parts(self) -> tuple[int, ...]:
        return self.layout.parts

    @property
    def ndim(self) -> int:
        return len(self.layout.shape)

    @property
    def requires_grad(self) -> bool:
        return False

    def numel(self) -> int:
        return math.prod(self.layout.shape)

    def new_empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor on the weight's device, by default in its dtype."""
        return self.data.new_empty(shape, dtype=dtype or self.dtype)

    def quantize(self, weight: Tensor) -> Tensor:
        """A weight of this shape -> its bytes [nbytes]; this weight's own are not read."""
        return self.layout.quantize(weight)

    def pack(self, parts: Iterable[Mapping[str, Tensor]]) -> Tensor:
        """Parts, as those of `unpack` -> bytes [nbytes]; this weight's own are not read."""
        return self.layout.pack(parts)

    def unpack(self) -> list[dict[str, Tensor]]:
        """What each part of the weight is stored as, by name."""
        return self.layout.unpack(self.data)

    def dequantize(self) -> Tensor:
        return self.layout.dequantize(self.data)

    def under_autocast(self) -> Self:
        """The weight in the dtype of `torch.autocast`; see `dispatch.autocast`."""
        (like,) = autocast(self.new_empty(0))
        return self._replace(layout=self.layout.with_dtype(like.dtype))


Weight = Tensor | QuantisedWeight


def operand(weight: Weight) -> tuple[Tensor, WeightLayout | None]:
    """A weight as a node's arguments: autograd sees only those tensors that are arguments themselves."""
    return (weight, None) if isinstance(weight, Tensor) else (weight.data, weight.layout)


def dense(weight: Tensor, layout: WeightLayout | None) -> Tensor:
    """The operand to multiply with."""
    return weight if layout is None else layout.dequantize(weight)


def product(x: Tensor, weight: Tensor, layout: WeightLayout | None, bias: Tensor | None) -> Tensor:
    """x [..., K] and an operand [N, K] -> x Wᵀ + b [..., N]. Call it only where autograd does not record."""
    return F.linear(x, weight, bias) if layout is None else layout.product(x, weight, bias)


def product_gradient(dy: Tensor, weight: Tensor, layout: WeightLayout | None) -> Tensor:
    """The gradient [M, K] of the input of `product`, dy [M, N]."""
    return torch.mm(dy, weight) if layout is None else layout.input_gradient(dy, weight)


def dense_dtype(weight: Tensor, layout: WeightLayout | None) -> torch.dtype:
    return weight.dtype if layout is None else layout.dtype


class _FrozenLinear(Node):
    @staticmethod
    def forward(ctx, x, data, layout, bias):
        ctx.save_for_backward(data)
        ctx.layout = layout
        return layout.product(x, data, bias)

    @staticmethod
    def backward(ctx, dy):
        (data,) = ctx.saved_tensors
        needs_x, _, _, needs_bias = ctx.needs_input_grad
        dx = ctx.layout.input_gradient(as_matrix(dy), data) if needs_x else None
        return (
            dx if dx is None else dx.view(*dy.shape[:-1], dx.shape[1]),
            None,
            None,
            as_matrix(dy).sum(0) if needs_bias else None,
        )


def frozen_linear(x: Tensor, weight: QuantisedWeight, bias: Tensor | None = None) -> Tensor:
    """F.linear(x, weight, bias) with a quantised weight, which is dequantised again for backward.

    x [..., K] in the weight's dtype, weight [N, K], bias [N] or None -> [..., N]. Raises ValueError where shapes or
    dtypes disagree.
    """
    check_linear("frozen_linear", shape_of("frozen_linear", "x", x)[-1], weight, bias)
    x, weight, bias = autocast(x, weight, bias)
    check_dtypes("frozen_linear", x=x, weight=weight, bias=bias)
    data, layout = operand(weight)
    if torch._C._are_functorch_transforms_active():
        return F.linear(x, dense(data, layout), bias)
    return _FrozenLinear.apply(x, data, layout, bias)
