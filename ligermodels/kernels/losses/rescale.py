"""Multiplies a tensor by scalars that live on the device: out = x * scale * other * factor, rounded once.

scale is one number for the whole tensor, or one for each row.
`rescale` writes a new tensor of another dtype (fp32 sums become half-precision gradients). `rescale_pair` does this for
two tensors in one launch. `rescale_` works in place and skips the rows whose scale is 1. `scale_gradient_` uses it to
multiply a gradient computed in the forward by its upstream gradient, which is 1 in most training loops: the host never
reads that number.
Reads and writes each element once; `rescale_` by 1 moves nothing: bound by memory bandwidth.
"""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.dispatch import is_traced, register_op
from ligermodels.kernels.launch import Launcher, cdiv, kernel
from ligermodels.kernels.pdl import pdl_constants, wait_for_previous_kernel


@dataclass(frozen=True)
class SpanTile:
    """What one program scales: `span` elements, `block` of them in one step."""

    block: int
    span: int
    warps: int


OUT_OF_PLACE_TILE = SpanTile(block=1024, span=1024, warps=4)
IN_PLACE_TILE = SpanTile(block=8192, span=2**18, warps=8)  # few programs: most of them find a scale of 1 and stop


@triton.jit
def _scale_span(x_ptr, out_ptr, scale, first, columns, BLOCK: tl.constexpr, SPAN: tl.constexpr):
    """Scales SPAN elements from `first` on, BLOCK at a time; elements from `columns` on are masked."""
    for start in range(0, SPAN, BLOCK):
        column = first + start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + column, column < columns, eviction_policy="evict_first").to(tl.float32)
        tl.store(out_ptr + column, (x * scale).to(out_ptr.dtype.element_ty), column < columns)


@kernel(do_not_specialize=["scale_stride"])
def _rescale_kernel(
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
def _rescale_pair_kernel(
    x_ptr, y_ptr, scale_ptr, other_ptr, x_out_ptr, y_out_ptr, x_rows, y_rows, columns, factor,
    BLOCK: tl.constexpr, SPAN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program scales SPAN elements of x or of y; the programs of y come after those of x."""
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
def _rescale_launcher(in_place: bool, has_other: bool, device: torch.device) -> tuple[Launcher, int]:
    """The launcher for one tensor, and how many columns a program scales."""
    tile = IN_PLACE_TILE if in_place else OUT_OF_PLACE_TILE
    launch = _rescale_kernel.bind(
        IN_PLACE=in_place, OTHER=has_other, BLOCK=tile.block, SPAN=tile.span, num_warps=tile.warps,
        **pdl_constants(device),
    )  # fmt: skip
    return launch, tile.span


@functools.cache
def _rescale_pair_launcher(device: torch.device) -> tuple[Launcher, int]:
    """The launcher for two tensors, and how many elements a program scales."""
    tile = OUT_OF_PLACE_TILE
    launch = _rescale_pair_kernel.bind(BLOCK=tile.block, SPAN=tile.span, num_warps=tile.warps, **pdl_constants(device))
    return launch, tile.span


def _launch(x: Tensor, scale: Tensor, other: Tensor | None, factor: float, out: Tensor, in_place: bool) -> None:
    """x, out [rows, N] with unit stride along N; scale has one element, or is [rows] of any stride; other has one."""
    per_row = scale.numel() > 1
    # A contiguous tensor is one long row. Rows that are not a multiple of 16 long stay rows: otherwise the number of
    # rows would decide whether the length is divisible by 16, which Triton specializes the kernel for.
    if not per_row and x.is_contiguous() and x.shape[1] % 16 == 0:
        rows, columns, x_stride, out_stride = 1, x.numel(), x.numel(), x.numel()
    else:
        (rows, columns), x_stride, out_stride = x.shape, x.stride(0), out.stride(0)
    if rows * columns:
        launch, span = _rescale_launcher(in_place, other is not None, x.device)
        launch(
            rows * cdiv(columns, span),
            x, scale, scale if other is None else other, out,
            x_stride, out_stride, scale.stride(0) if per_row else 0, columns, factor,
        )  # fmt: skip


def _launch_rescale(x: Tensor, scale: Tensor, other: Tensor | None, factor: float, dtype: torch.dtype) -> Tensor:
    out = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    _launch(x, scale, other, factor, out, False)
    return out


def _launch_rescale_pair(
    x: Tensor, y: Tensor, scale: Tensor, other: Tensor, factor: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    outputs = torch.empty_like(x, dtype=dtype), torch.empty_like(y, dtype=dtype)
    launch, span = _rescale_pair_launcher(x.device)
    if programs := cdiv(x.numel(), span) + cdiv(y.numel(), span):
        launch(programs, x, y, scale, other, *outputs, x.shape[0], y.shape[0], x.shape[1], factor)
    return outputs


def rescale_(x: Tensor, scale: Tensor) -> None:
    """x *= scale in place, shapes as in `rescale`. Not a registered op: tracing must call `rescale` instead."""
    _launch(x, scale, None, 1.0, x, True)


# x [rows, N] with unit stride along N; scale fp32, one element or [rows] of any stride; other fp32, one element
# -> out [rows, N] contiguous, of `dtype`.
rescale = register_op(
    "rescale", _launch_rescale, lambda x, scale, other, factor, dtype: x.new_empty(x.shape, dtype=dtype)
)

# x [rows of x, N], y [rows of y, N], both contiguous; scale and other fp32, one element each.
rescale_pair = register_op(
    "rescale_pair",
    _launch_rescale_pair,
    lambda x, y, scale, other, factor, dtype: tuple(z.new_empty(z.shape, dtype=dtype) for z in (x, y)),
)


def scale_gradient_(gradient: Tensor, upstream: Tensor) -> Tensor:
    """gradient * upstream, written into gradient's own memory, or into new memory while tracing.

    A second backward through the same graph raises, because the gradient that it needs was overwritten.
    """
    if is_traced((gradient,)):
        return rescale(gradient, upstream, None, 1.0, gradient.dtype)
    rescale_(gradient, upstream)
    torch.autograd.graph.increment_version(gradient)  # the kernel's write is invisible to autograd
    return gradient.detach()
