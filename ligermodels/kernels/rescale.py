"""A tensor times numbers on its device, one of them for each row perhaps: out = x * scale * other, rounded once.

`scaled` makes a tensor of another dtype (fp32 sums into gradients of half precision), `scaled_pair` two in one launch.
`rescale_` writes over x and leaves the rows whose number is 1 alone: how a gradient taken in the forward meets its
upstream gradient, which is 1 in most training loops, without asking the device for it.
Moves each element in and out once; `rescale_` by 1 moves nothing.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.dispatch import register, traced
from ligermodels.kernels.launch import Launcher, cdiv, kernel
from ligermodels.kernels.pdl import pdl_constants, wait_for_previous_kernel

# Elements of one step and of one program, and warps. In place most programs find a 1 and stop: let them be few.
OUT_OF_PLACE_TILE = 1024, 1024, 4
IN_PLACE_TILE = 8192, 2**18, 8


@triton.jit
def _scale_span(x_ptr, out_ptr, scale, first, columns, BLOCK: tl.constexpr, SPAN: tl.constexpr):
    for start in range(0, SPAN, BLOCK):
        column = first + start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + column, column < columns, eviction_policy="evict_first").to(tl.float32)
        tl.store(out_ptr + column, (x * scale).to(out_ptr.dtype.element_ty), column < columns)


@kernel(do_not_specialize=["scale_stride"])
def _kernel(
    x_ptr, scale_ptr, other_ptr, out_ptr, x_stride, out_stride, scale_stride, columns, factor,
    IN_PLACE: tl.constexpr, OTHER: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program scales SPAN columns of a row."""
    wait_for_previous_kernel(PDL)
    spans = tl.cdiv(columns, SPAN)
    row = (tl.program_id(0) // spans).to(tl.int64)
    scale = tl.load(scale_ptr + row * scale_stride).to(tl.float32) * factor
    if OTHER:
        scale *= tl.load(other_ptr)
    if IN_PLACE and scale == 1:
        return
    first = (tl.program_id(0) % spans).to(tl.int64) * SPAN
    _scale_span(x_ptr + row * x_stride, out_ptr + row * out_stride, scale, first, columns, BLOCK, SPAN)


@kernel(do_not_specialize=["x_rows", "y_rows"])
def _pair_kernel(
    x_ptr, y_ptr, scale_ptr, other_ptr, x_out_ptr, y_out_ptr, x_rows, y_rows, columns, factor,
    BLOCK: tl.constexpr, SPAN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program scales SPAN elements of x or, behind those, of y."""
    wait_for_previous_kernel(PDL)
    scale = tl.load(scale_ptr) * factor * tl.load(other_ptr)
    x_elements, y_elements = x_rows.to(tl.int64) * columns, y_rows.to(tl.int64) * columns
    x_spans = tl.cdiv(x_elements, SPAN)
    span = tl.program_id(0).to(tl.int64)
    if span < x_spans:
        _scale_span(x_ptr, x_out_ptr, scale, span * SPAN, x_elements, BLOCK, SPAN)
    else:
        _scale_span(y_ptr, y_out_ptr, scale, (span - x_spans) * SPAN, y_elements, BLOCK, SPAN)


@functools.cache
def _one(in_place: bool, other: bool, device: torch.device) -> tuple[Launcher, int]:
    """What scales one tensor, and the columns of a program."""
    block, span, warps = IN_PLACE_TILE if in_place else OUT_OF_PLACE_TILE
    launch = _kernel.bind(
        IN_PLACE=in_place, OTHER=other, BLOCK=block, SPAN=span, num_warps=warps, **pdl_constants(device)
    )
    return launch, span


@functools.cache
def _pair(device: torch.device) -> tuple[Launcher, int]:
    """What scales two, and the elements of a program."""
    block, span, warps = OUT_OF_PLACE_TILE
    return _pair_kernel.bind(BLOCK=block, SPAN=span, num_warps=warps, **pdl_constants(device)), span


def _launch(x: Tensor, scale: Tensor, other: Tensor | None, factor: float, out: Tensor, in_place: bool) -> None:
    """x and out [rows, N] with unit stride along N; scale of one element, or [rows] of any stride; other of one."""
    per_row = scale.numel() > 1
    # All of it as one row, unless its rows are no whole vectors: then their number would decide what is compiled.
    if not per_row and x.is_contiguous() and x.shape[1] % 16 == 0:
        rows, columns, x_stride, out_stride = 1, x.numel(), x.numel(), x.numel()
    else:
        (rows, columns), x_stride, out_stride = x.shape, x.stride(0), out.stride(0)
    if rows * columns:
        launch, span = _one(in_place, other is not None, x.device)
        launch(
            rows * cdiv(columns, span),
            x, scale, scale if other is None else other, out,
            x_stride, out_stride, scale.stride(0) if per_row else 0, columns, factor,
        )  # fmt: skip


def _launch_scaled(x: Tensor, scale: Tensor, other: Tensor | None, factor: float, dtype: torch.dtype) -> Tensor:
    out = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    _launch(x, scale, other, factor, out, False)
    return out


def _launch_scaled_pair(
    x: Tensor, y: Tensor, scale: Tensor, other: Tensor, factor: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    outputs = torch.empty_like(x, dtype=dtype), torch.empty_like(y, dtype=dtype)
    launch, span = _pair(x.device)
    if programs := cdiv(x.numel(), span) + cdiv(y.numel(), span):
        launch(programs, x, y, scale, other, *outputs, x.shape[0], y.shape[0], x.shape[1], factor)
    return outputs


def rescale_(x: Tensor, scale: Tensor) -> None:
    """Not registered: whoever traces gets `scaled`."""
    _launch(x, scale, None, 1.0, x, True)


# x [rows, N] with unit stride along N; scale fp32, one element or [rows] of any stride; other fp32, one element.
scaled = register(
    "scaled(Tensor x, Tensor scale, Tensor? other, float factor, ScalarType dtype) -> Tensor out",
    _launch_scaled,
    lambda x, scale, other, factor, dtype: x.new_empty(x.shape, dtype=dtype),
)

# x [rows, N], y [other rows, N], both contiguous; scale and other fp32, one element each.
scaled_pair = register(
    "scaled_pair(Tensor x, Tensor y, Tensor scale, Tensor other, float factor, ScalarType dtype)"
    " -> (Tensor x_out, Tensor y_out)",
    _launch_scaled_pair,
    lambda x, y, scale, other, factor, dtype: tuple(z.new_empty(z.shape, dtype=dtype) for z in (x, y)),
)


def multiply_(gradient: Tensor, upstream: Tensor) -> Tensor:
    """gradient * upstream in gradient's own memory, or in new memory while something traces."""
    if traced((gradient,)):
        return scaled(gradient, upstream, None, 1.0, gradient.dtype)
    rescale_(gradient, upstream)
    torch.autograd.graph.increment_version(gradient)  # a second backward is told that what it needs was written to
    return gradient.detach()
