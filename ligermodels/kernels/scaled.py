"""A tensor times numbers on its device, one of them for each row perhaps: out = x * scale * other, rounded once.

`scaled` makes a tensor of another dtype (fp32 sums into gradients of half precision). `rescale_` writes over x, and
leaves the rows whose number is 1 alone: how a gradient that was taken in the forward meets its upstream gradient, which
is 1 in most training loops, without asking the device for it.
Moves each element in and out once; `rescale_` by 1 moves nothing.
"""

import torch
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.op import cdiv, kernel, register, traced

# Elements of one step and of one program, and warps. In place most programs find a 1 and stop: let them be few.
OUT_OF_PLACE_TILE = 1024, 1024, 4
IN_PLACE_TILE = 8192, 2**18, 8


@kernel(do_not_specialize=["scale_stride"])
def _kernel(
    x_ptr, scale_ptr, other_ptr, out_ptr, x_stride, out_stride, scale_stride, columns, factor,
    IN_PLACE: tl.constexpr, OTHER: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """One program scales SPAN columns of a row."""
    spans = tl.cdiv(columns, SPAN)
    row = (tl.program_id(0) // spans).to(tl.int64)
    scale = tl.load(scale_ptr + row * scale_stride).to(tl.float32) * factor
    if OTHER:
        scale *= tl.load(other_ptr)
    if IN_PLACE and scale == 1:
        return
    first = (tl.program_id(0) % spans).to(tl.int64) * SPAN
    for start in range(0, SPAN, BLOCK):
        column = first + start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * x_stride + column, column < columns, eviction_policy="evict_first").to(tl.float32)
        tl.store(out_ptr + row * out_stride + column, (x * scale).to(out_ptr.dtype.element_ty), column < columns)


def _launch(x: Tensor, scale: Tensor, other: Tensor | None, factor: float, out: Tensor, in_place: bool) -> None:
    """x and out [rows, N] with unit stride along N; scale of one element, or [rows] of any stride; other of one."""
    per_row = scale.numel() > 1
    # All of it as one row, unless its rows are no whole vectors: then their number would decide what is compiled.
    if not per_row and x.is_contiguous() and x.shape[1] % 16 == 0:
        rows, columns, x_stride, out_stride = 1, x.numel(), x.numel(), x.numel()
    else:
        (rows, columns), x_stride, out_stride = x.shape, x.stride(0), out.stride(0)
    block, span, warps = IN_PLACE_TILE if in_place else OUT_OF_PLACE_TILE
    if rows * columns:
        _kernel.bind(IN_PLACE=in_place, OTHER=other is not None, BLOCK=block, SPAN=span, num_warps=warps)(
            rows * cdiv(columns, span),
            x, scale, scale if other is None else other, out,
            x_stride, out_stride, scale.stride(0) if per_row else 0, columns, factor,
        )  # fmt: skip


def _launch_scaled(x: Tensor, scale: Tensor, other: Tensor | None, factor: float, dtype: torch.dtype) -> Tensor:
    out = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    _launch(x, scale, other, factor, out, False)
    return out


def rescale_(x: Tensor, scale: Tensor) -> None:
    """Not registered: whoever traces gets `scaled`."""
    _launch(x, scale, None, 1.0, x, True)


# x [rows, N] with unit stride along N; scale fp32, one element or [rows] of any stride; other fp32, one element.
scaled = register(
    "scaled(Tensor x, Tensor scale, Tensor? other, float factor, ScalarType dtype) -> Tensor out",
    _launch_scaled,
    lambda x, scale, other, factor, dtype: x.new_empty(x.shape, dtype=dtype),
)


def multiply_(gradient: Tensor, upstream: Tensor) -> Tensor:
    """gradient * upstream in gradient's own memory, or in new memory while something traces."""
    if traced((gradient,)):
        return scaled(gradient, upstream, None, 1.0, gradient.dtype)
    rescale_(gradient, upstream)
    torch.autograd.graph.increment_version(gradient)  # a second backward is told that what it needs was written to
    return gradient.detach()
