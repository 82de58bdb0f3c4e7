"""Causal depthwise convolution with an optional SiLU: y_t = act(p_t), p_t = b + Σ_j w[c, j] x_{t-n+1+j}, j < n <= 4.

Before a document's first token x is its initial state, or zero. Backward, with dp = dy act'(p):
    dx_t = Σ_j w[c, j] dp_{t+n-1-j} inside the document;  dw[c, j] = Σ_t dp_t x_{t-n+1+j};  db[c] = Σ_t dp_t
x, y [B, T, C], as a projection leaves them, without a transpose; w [C, n], b [C]; sums in fp32, rounded once.
Backward computes p again. A program walks along SPAN tokens of a document, four at a time, and keeps the last inputs in
registers, so each is read once. Partial weight gradients, one row a chunk, are summed in a fixed order. Moves 2 T C
elements forward, 3 T C backward: bound by memory bandwidth.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import libdevice

from ligermodels.kernels.dispatch import Node, check_floats, check_shape, register_op, runs_kernels, shape_of, widen
from ligermodels.kernels.launch import PTX, Launcher, as_rows_with_stride, cdiv, empty_where, kernel
from ligermodels.kernels.linear_attention.document_chunks import (
    SPAN,
    check_pool,
    count_documents,
    locate_in_document,
    number_of_slots,
    row_offsets,
)
from ligermodels.kernels.norms.partial_sums import sum_partials

MAX_TAPS = 4
FORWARD_CHANNELS, BACKWARD_CHANNELS, WARPS = 512, 256, 4  # of a program


def causal_conv_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = "silu",
    initial_state: Tensor | None = None, cu_seqlens: Tensor | None = None,
) -> Tensor:  # fmt: skip
    if cu_seqlens is not None:
        lengths = cu_seqlens.diff().tolist()
        states = [None] * len(lengths) if initial_state is None else initial_state.split(1)
        rows = zip(x.split(lengths, 1), states, strict=True)
        return torch.cat([causal_conv_reference(r, weight, bias, activation, s) for r, s in rows], 1)
    taps = weight.shape[1]
    past = x.new_zeros(x.shape[0], taps - 1, x.shape[2]) if initial_state is None else initial_state.to(x.dtype)
    wide, wide_weight = widen(torch.cat([past, x], 1)), widen(weight)
    products = [wide_weight[:, j] * wide[:, j : j + x.shape[1]] for j in range(taps)]
    p = torch.stack(products).sum(0) if bias is None else torch.stack([*products, widen(bias).expand_as(x)]).sum(0)
    return (p if activation is None else p * p.sigmoid()).to(x.dtype)


@triton.jit
def _load_taps(weight_ptr, bias_ptr, channel, mask, TAPS: tl.constexpr, BIAS: tl.constexpr):
    """The weights of the last four inputs and the bias, fp32; zero for inputs that there is no tap for."""
    weight_ptr += channel * TAPS + TAPS - 1
    w3 = tl.load(weight_ptr, mask, other=0.0).to(tl.float32)
    w2 = tl.load(weight_ptr - 1, mask & (TAPS > 1), other=0.0).to(tl.float32)
    w1 = tl.load(weight_ptr - 2, mask & (TAPS > 2), other=0.0).to(tl.float32)
    w0 = tl.load(weight_ptr - 3, mask & (TAPS > 3), other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + channel, mask & BIAS, other=0.0).to(tl.float32)
    return w0, w1, w2, w3, bias


@triton.jit
def _load_before(
    x_ptr, initial_ptr, token, start, document, stride, channels, channel, mask, TAPS: tl.constexpr,
    INITIAL: tl.constexpr,
):  # fmt: skip
    """The input of a token before a program's first: of the document, or of its initial state, or zero."""
    x = tl.load(x_ptr + token * stride + channel, mask & (token >= start), other=0.0).to(tl.float32)
    if INITIAL:
        row = token - start + TAPS - 1
        in_state = mask & (token < start) & (row >= 0)
        state = tl.load(initial_ptr + (document * (TAPS - 1) + row) * channels + channel, in_state, other=0.0)
        x += state.to(x_ptr.dtype.element_ty).to(tl.float32)
    return x


@triton.jit
def silu_and_slope(p):
    """SiLU and its derivative, by the GPU's own exponential and reciprocal: those of the compiler take twice as many
    instructions, for subnormal numbers, and these kernels compute as long as they read."""
    if PTX:
        decay = libdevice.fast_expf(-tl.abs(p))
        head = libdevice.fast_dividef(1.0, 1.0 + decay)
    else:
        decay = tl.exp(-tl.abs(p))
        head = 1.0 / (1.0 + decay)
    tail = decay * head  # σ(-|p|), as in gated_activation.py
    sigmoid = tl.where(p >= 0.0, head, tail)
    return p * sigmoid, sigmoid + p * (head * tail)


@triton.jit
def _load_row(x_ptr, row, rows, stride, channel, mask):
    return tl.load(x_ptr + row * stride + channel, mask & (row < rows), other=0.0).to(tl.float32)


@triton.jit
def _store_output(
    y_ptr, row, rows, channels, channel, mask, x0, x1, x2, x3, w0, w1, w2, w3, bias, SILU: tl.constexpr
):  # fmt: skip
    p = bias + w0 * x0 + w1 * x1 + w2 * x2 + w3 * x3
    if SILU:
        p, _ = silu_and_slope(p)
    tl.store(y_ptr + row * channels + channel, p.to(y_ptr.dtype.element_ty), mask & (row < rows))


@triton.jit
def _gradient_before_activation(dy, x0, x1, x2, x3, w0, w1, w2, w3, bias, SILU: tl.constexpr):
    if SILU:
        _, slope = silu_and_slope(bias + w0 * x0 + w1 * x1 + w2 * x2 + w3 * x3)
        dy *= slope
    return dy


@triton.jit
def _store_input_gradient(
    dx_ptr, dinitial_ptr, row, steps, at_start, document, channels, channel, mask, d0, d1, d2, d3, w0, w1, w2, w3,
    TAPS: tl.constexpr, INPUT_GRAD: tl.constexpr, INITIAL_GRAD: tl.constexpr,
):  # fmt: skip
    """dx of the token three before `row`: of the chunk, of the one before it, or of the initial state."""
    dx = w0 * d3 + w1 * d2 + w2 * d1 + w3 * d0
    if INPUT_GRAD:
        inside = mask & (row >= 3) & (row < steps)
        tl.store(dx_ptr + (row - 3) * channels + channel, dx.to(dx_ptr.dtype.element_ty), inside)
    if INITIAL_GRAD:
        state_row = row - 3 + TAPS - 1
        in_state = mask & at_start & (row < 3) & (state_row >= 0)
        at = (document * (TAPS - 1) + state_row) * channels + channel
        tl.store(dinitial_ptr + at, dx.to(dinitial_ptr.dtype.element_ty), in_state)


@kernel(do_not_specialize=["documents"])
def _forward_kernel(
    x_ptr, weight_ptr, bias_ptr, initial_ptr, cu_seqlens_ptr, y_ptr, stride, channels, documents,
    TAPS: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr, INITIAL: tl.constexpr, CHANNELS: tl.constexpr,
    SPAN: tl.constexpr,
):  # fmt: skip
    """One program: one chunk of a document, CHANNELS channels."""
    tiles = tl.cdiv(channels, CHANNELS)
    channel = tl.program_id(0) % tiles * CHANNELS + tl.arange(0, CHANNELS)
    first, start, rows, document = locate_in_document(cu_seqlens_ptr, tl.program_id(0) // tiles, documents, SPAN)
    mask = channel < channels
    w0, w1, w2, w3, bias = _load_taps(weight_ptr, bias_ptr, channel, mask, TAPS, BIAS)
    mask &= rows > 0
    x0 = _load_before(x_ptr, initial_ptr, first - 3, start, document, stride, channels, channel, mask, TAPS, INITIAL)
    x1 = _load_before(x_ptr, initial_ptr, first - 2, start, document, stride, channels, channel, mask, TAPS, INITIAL)
    x2 = _load_before(x_ptr, initial_ptr, first - 1, start, document, stride, channels, channel, mask, TAPS, INITIAL)
    x_ptr += first * stride
    y_ptr += first * channels
    rows = tl.minimum(rows, SPAN)
    for row in range(0, rows, 4):
        x3 = _load_row(x_ptr, row, rows, stride, channel, mask)
        x4 = _load_row(x_ptr, row + 1, rows, stride, channel, mask)
        x5 = _load_row(x_ptr, row + 2, rows, stride, channel, mask)
        x6 = _load_row(x_ptr, row + 3, rows, stride, channel, mask)
        _store_output(y_ptr, row, rows, channels, channel, mask, x0, x1, x2, x3, w0, w1, w2, w3, bias, SILU)
        _store_output(y_ptr, row + 1, rows, channels, channel, mask, x1, x2, x3, x4, w0, w1, w2, w3, bias, SILU)
        _store_output(y_ptr, row + 2, rows, channels, channel, mask, x2, x3, x4, x5, w0, w1, w2, w3, bias, SILU)
        _store_output(y_ptr, row + 3, rows, channels, channel, mask, x3, x4, x5, x6, w0, w1, w2, w3, bias, SILU)
        x0, x1, x2 = x4, x5, x6


@kernel(do_not_specialize=["documents"])
def _backward_kernel(
    dy_ptr, x_ptr, weight_ptr, bias_ptr, initial_ptr, cu_seqlens_ptr, dx_ptr, dinitial_ptr, partials_ptr,
    dy_stride, stride, channels, documents,
    TAPS: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr, INITIAL: tl.constexpr, INPUT_GRAD: tl.constexpr,
    INITIAL_GRAD: tl.constexpr, WEIGHT_GRAD: tl.constexpr, CHANNELS: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """One program: dx of one chunk of a document, CHANNELS channels, and its share of dw and db.

    It walks three tokens further than its chunk, whose gradients reach back into it. The gradients of these inputs and
    of these weights belong to the next chunk. The walk of a document's first chunk has passed its initial state too.
    """
    tiles = tl.cdiv(channels, CHANNELS)
    channel = tl.program_id(0) % tiles * CHANNELS + tl.arange(0, CHANNELS)
    slot = (tl.program_id(0) // tiles).to(tl.int64)
    first, start, rows, document = locate_in_document(cu_seqlens_ptr, slot, documents, SPAN)
    in_channels = channel < channels
    w0, w1, w2, w3, bias = _load_taps(weight_ptr, bias_ptr, channel, in_channels, TAPS, BIAS)
    mask = in_channels & (rows > 0)
    x0 = _load_before(x_ptr, initial_ptr, first - 3, start, document, stride, channels, channel, mask, TAPS, INITIAL)
    x1 = _load_before(x_ptr, initial_ptr, first - 2, start, document, stride, channels, channel, mask, TAPS, INITIAL)
    x2 = _load_before(x_ptr, initial_ptr, first - 1, start, document, stride, channels, channel, mask, TAPS, INITIAL)
    x_ptr += first * stride
    dy_ptr += first * dy_stride
    dx_ptr += first * channels
    d0, d1, d2 = tl.zeros([CHANNELS], tl.float32), tl.zeros([CHANNELS], tl.float32), tl.zeros([CHANNELS], tl.float32)
    dw0, dw1, dw2 = tl.zeros([CHANNELS], tl.float32), tl.zeros([CHANNELS], tl.float32), tl.zeros([CHANNELS], tl.float32)
    dw3, dbias = tl.zeros([CHANNELS], tl.float32), tl.zeros([CHANNELS], tl.float32)
    steps = tl.where(rows > 0, tl.minimum(rows, SPAN) + 3, 0)
    for row in range(0, steps, 4):
        x3 = _load_row(x_ptr, row, rows, stride, channel, mask)
        x4 = _load_row(x_ptr, row + 1, rows, stride, channel, mask)
        x5 = _load_row(x_ptr, row + 2, rows, stride, channel, mask)
        x6 = _load_row(x_ptr, row + 3, rows, stride, channel, mask)
        d3 = _load_row(dy_ptr, row, rows, dy_stride, channel, mask)
        d4 = _load_row(dy_ptr, row + 1, rows, dy_stride, channel, mask)
        d5 = _load_row(dy_ptr, row + 2, rows, dy_stride, channel, mask)
        d6 = _load_row(dy_ptr, row + 3, rows, dy_stride, channel, mask)
        d3 = _gradient_before_activation(d3, x0, x1, x2, x3, w0, w1, w2, w3, bias, SILU)
        d4 = _gradient_before_activation(d4, x1, x2, x3, x4, w0, w1, w2, w3, bias, SILU)
        d5 = _gradient_before_activation(d5, x2, x3, x4, x5, w0, w1, w2, w3, bias, SILU)
        d6 = _gradient_before_activation(d6, x3, x4, x5, x6, w0, w1, w2, w3, bias, SILU)
        _store_input_gradient(
            dx_ptr, dinitial_ptr, row, steps, first == start, document, channels, channel, mask, d0, d1, d2, d3,
            w0, w1, w2, w3, TAPS, INPUT_GRAD, INITIAL_GRAD,
        )  # fmt: skip
        _store_input_gradient(
            dx_ptr, dinitial_ptr, row + 1, steps, first == start, document, channels, channel, mask, d1, d2, d3, d4,
            w0, w1, w2, w3, TAPS, INPUT_GRAD, INITIAL_GRAD,
        )  # fmt: skip
        _store_input_gradient(
            dx_ptr, dinitial_ptr, row + 2, steps, first == start, document, channels, channel, mask, d2, d3, d4, d5,
            w0, w1, w2, w3, TAPS, INPUT_GRAD, INITIAL_GRAD,
        )  # fmt: skip
        _store_input_gradient(
            dx_ptr, dinitial_ptr, row + 3, steps, first == start, document, channels, channel, mask, d3, d4, d5, d6,
            w0, w1, w2, w3, TAPS, INPUT_GRAD, INITIAL_GRAD,
        )  # fmt: skip
        if WEIGHT_GRAD and row < SPAN:  # four divides SPAN: the tokens behind it come in a step of their own
            dw0 = dw0 + d3 * x0 + d4 * x1 + d5 * x2 + d6 * x3
            dw1 = dw1 + d3 * x1 + d4 * x2 + d5 * x3 + d6 * x4
            dw2 = dw2 + d3 * x2 + d4 * x3 + d5 * x4 + d6 * x5
            dw3 = dw3 + d3 * x3 + d4 * x4 + d5 * x5 + d6 * x6
            dbias += (d3 + d4) + (d5 + d6)
        x0, x1, x2 = x4, x5, x6
        d0, d1, d2 = d4, d5, d6
    if WEIGHT_GRAD:
        partials_ptr += slot * (TAPS + BIAS) * channels
        at = channel * TAPS + TAPS - 1
        tl.store(partials_ptr + at, dw3, in_channels)
        tl.store(partials_ptr + at - 1, dw2, in_channels & (TAPS > 1))
        tl.store(partials_ptr + at - 2, dw1, in_channels & (TAPS > 2))
        tl.store(partials_ptr + at - 3, dw0, in_channels & (TAPS > 3))
        tl.store(partials_ptr + TAPS * channels + channel, dbias, in_channels & BIAS)


def _launch_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, initial_state: Tensor | None, cu_seqlens: Tensor | None
) -> Tensor:
    y, (channels, taps) = x.new_empty(x.shape), weight.shape
    if not y.numel():
        return y
    offsets = row_offsets(x) if cu_seqlens is None else cu_seqlens
    rows, stride = as_rows_with_stride(x, channels)
    launch = _forward(taps, bias is not None, silu, initial_state is not None)
    launch(
        number_of_slots(rows.numel() // channels, offsets) * cdiv(channels, FORWARD_CHANNELS),
        rows, weight.contiguous(), weight if bias is None else bias.contiguous(),
        rows if initial_state is None else initial_state.contiguous(), offsets, y,
        stride, channels, offsets.shape[0] - 1,
    )  # fmt: skip
    return y


def _launch_backward(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, initial_state: Tensor | None,
    cu_seqlens: Tensor | None, input_grad: bool, weight_grad: bool, bias_grad: bool, initial_grad: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """(dx, dweight, dbias, dinitial), each None where it is not needed."""
    needed = input_grad, weight_grad, bias_grad, initial_grad
    dx, dweight, dbias, dinitial = gradients = empty_where(needed, x, weight, bias, initial_state)
    channels, taps = weight.shape
    if not x.numel():
        for gradient in gradients[1:]:
            if gradient is not None:
                gradient.zero_()
        return gradients
    if dinitial is not None:
        dinitial.zero_()  # of documents without tokens
    offsets = row_offsets(x) if cu_seqlens is None else cu_seqlens
    (rows, stride), (dy, dy_stride) = as_rows_with_stride(x, channels), as_rows_with_stride(dy, channels)
    slots = number_of_slots(rows.numel() // channels, offsets)
    weights = weight_grad or bias_grad
    partials = (
        offsets.new_empty(slots, (taps + (bias is not None)) * channels, dtype=torch.float32) if weights else rows
    )
    launch = _backward(taps, bias is not None, silu, initial_state is not None, input_grad, initial_grad, weights)
    launch(
        slots * cdiv(channels, BACKWARD_CHANNELS),
        dy, rows, weight.contiguous(), weight if bias is None else bias.contiguous(),
        rows if initial_state is None else initial_state.contiguous(), offsets, rows if dx is None else dx,
        rows if dinitial is None else dinitial, partials,
        dy_stride, stride, channels, offsets.shape[0] - 1,
    )  # fmt: skip
    if weights:
        summed = weight.new_empty(weight.numel()) if dweight is None else dweight
        rest = [] if bias is None else [bias.new_empty(channels) if dbias is None else dbias]
        sum_partials(partials, summed, *rest)
    return gradients


@functools.cache
def _forward(taps: int, bias: bool, silu: bool, initial: bool) -> Launcher:
    return _forward_kernel.bind(
        TAPS=taps, BIAS=bias, SILU=silu, INITIAL=initial, CHANNELS=FORWARD_CHANNELS, SPAN=SPAN.value, num_warps=WARPS,
    )  # fmt: skip


@functools.cache
def _backward(
    taps: int, bias: bool, silu: bool, initial: bool, input_grad: bool, initial_grad: bool, weight_grad: bool
) -> Launcher:
    return _backward_kernel.bind(
        TAPS=taps, BIAS=bias, SILU=silu, INITIAL=initial, INPUT_GRAD=input_grad, INITIAL_GRAD=initial_grad,
        WEIGHT_GRAD=weight_grad, CHANNELS=BACKWARD_CHANNELS, SPAN=SPAN.value, num_warps=WARPS,
    )  # fmt: skip


def _fake_backward(dy, x, weight, bias, silu, initial_state, cu_seqlens, *needed):
    return empty_where(needed, x, weight, bias, initial_state)


_conv = register_op("causal_conv", _launch_forward)
_conv_backward = register_op("causal_conv_backward", _launch_backward, _fake_backward)


class _CausalConv(Node):
    @staticmethod
    def forward(ctx, x, weight, bias, silu, initial_state, cu_seqlens):
        y = _conv(x, weight, bias, silu, initial_state, cu_seqlens)
        ctx.save_for_backward(x, weight, bias, initial_state, cu_seqlens)
        ctx.silu = silu
        return y

    @staticmethod
    def backward(ctx, dy):
        x, weight, bias, initial_state, cu_seqlens = ctx.saved_tensors
        needed = *ctx.needs_input_grad[:3], ctx.needs_input_grad[4]
        gradients = _conv_backward(dy, x, weight, bias, ctx.silu, initial_state, cu_seqlens, *needed)
        dx, dweight, dbias, dinitial = (y if need else None for y, need in zip(gradients, needed, strict=True))
        return dx, dweight, dbias, None, dinitial, None


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = "silu",
    initial_state: Tensor | None = None, cu_seqlens: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Causal depthwise convolution over the tokens, then SiLU.

    x [B, T, C] float, unit stride along C, any stride between tokens: a slice of a packed projection is not copied.
    weight [C, n], n <= 4: `conv1d.weight` of a checkpoint without its middle dimension; bias [C] in the same dtype, or
    None. activation: "silu" or None. initial_state [N, n-1, C] float: the inputs before each document,
    oldest first, as `causal_conv_state` returns them; zeros if None. cu_seqlens int32 [N + 1]: offsets of the documents
    packed into one row (B = 1), the first 0, the last T; no document sees another. Without it each row is a document.
    -> y [B, T, C] in the dtype of x.
    Differentiable in x, weight, bias and initial_state. Raises ValueError where shapes or dtypes disagree.
    """
    check_weight("causal_conv", x, weight, bias, activation)
    check_documents("causal_conv", x, weight.shape[1], initial_state, cu_seqlens)
    if not runs_kernels(x):
        return causal_conv_reference(x, weight, bias, activation, initial_state, cu_seqlens)
    return _CausalConv.apply(x, weight, bias, activation == "silu", initial_state, cu_seqlens)


def causal_conv_state(
    x: Tensor, taps: int, initial_state: Tensor | None = None, cu_seqlens: Tensor | None = None
) -> Tensor:
    """The last taps - 1 inputs of each document, oldest first: the initial state of what follows.

    Arguments as in `causal_conv` -> [N, taps - 1, C]; of a document shorter than that the first come from
    initial_state, or are zero. Waits for nothing on the device. Differentiable. Raises ValueError as `causal_conv`.
    """
    check_documents("causal_conv_state", x, taps, initial_state, cu_seqlens)
    past = taps - 1
    starts, ends = (row_offsets(x) if cu_seqlens is None else cu_seqlens).long().unfold(0, 2, 1).unbind(1)
    token = ends[:, None] + torch.arange(-past, 0, device=x.device)
    inside = (token >= starts[:, None])[:, :, None]
    rows = x.flatten(0, 1)[token.clamp(0)] if x.shape[1] else x.new_zeros(*token.shape, x.shape[2])
    if initial_state is None:
        return rows.where(inside, 0)
    index = (token - starts[:, None] + past).clamp(0, past - 1)[:, :, None].expand(-1, -1, x.shape[2])
    return rows.where(inside, initial_state.gather(1, index))


def check_weight(op: str, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> None:
    """Raises ValueError if a kernel would read out of bounds, or does not know the activation."""
    if activation not in ("silu", None):
        raise ValueError(f'{op}: activation is {activation!r}; "silu" or None is needed')
    channels, taps = shape_of(op, "x", x)[-1], shape_of(op, "weight", weight, "C, taps")[1]
    check_shape(op, "weight", weight, channels, taps)
    check_shape(op, "bias", bias, channels)
    check_floats(op, x=x, weight=weight, bias=bias)
    if not 2 <= taps <= MAX_TAPS:
        raise ValueError(f"{op}: weight has {taps} taps; the kernels support 2 to {MAX_TAPS}")


def check_documents(op: str, x: Tensor, taps: int, initial_state: Tensor | None, cu_seqlens: Tensor | None) -> None:
    """Raises ValueError unless x [B, T, C] has the documents, and each of them an initial state."""
    batch, _, channels = shape_of(op, "x", x, "B, T, C")
    check_shape(op, "initial_state", initial_state, count_documents(op, batch, cu_seqlens), taps - 1, channels)
    check_floats(op, x=x, initial_state=initial_state)


@kernel()
def _step_kernel(
    x_ptr, weight_ptr, bias_ptr, row_ptr, pool_ptr, y_ptr, stride, channels,
    TAPS: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """One program: one token of one row, CHANNELS channels; shifts the row's state by one column."""
    tiles = tl.cdiv(channels, CHANNELS)
    channel = tl.program_id(0) % tiles * CHANNELS + tl.arange(0, CHANNELS)
    index, mask = (tl.program_id(0) // tiles).to(tl.int64), channel < channels
    x = tl.load(x_ptr + index * stride + channel, mask, other=0.0)
    pool_ptr += tl.load(row_ptr + index).to(tl.int64) * (TAPS - 1) * channels + channel
    p = tl.load(weight_ptr + channel * TAPS + TAPS - 1, mask, other=0.0).to(tl.float32) * x.to(tl.float32)
    if BIAS:
        p += tl.load(bias_ptr + channel, mask, other=0.0).to(tl.float32)
    for tap in tl.static_range(TAPS - 1):
        past = tl.load(pool_ptr + tap * channels, mask, other=0.0)
        p += tl.load(weight_ptr + channel * TAPS + tap, mask, other=0.0).to(tl.float32) * past.to(tl.float32)
        if tap > 0:
            tl.store(pool_ptr + (tap - 1) * channels, past, mask)
    if TAPS > 1:
        tl.store(pool_ptr + (TAPS - 2) * channels, x.to(pool_ptr.dtype.element_ty), mask)
    if SILU:
        p, _ = silu_and_slope(p)
    tl.store(y_ptr + index * channels + channel, p.to(y_ptr.dtype.element_ty), mask)


def _launch_step(x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, pool: Tensor, row: Tensor) -> Tensor:
    y, (channels, taps) = x.new_empty(x.shape), weight.shape
    if y.numel():
        x, stride = as_rows_with_stride(x, channels)
        launch = _step_kernel.bind(
            TAPS=taps, BIAS=bias is not None, SILU=silu, CHANNELS=FORWARD_CHANNELS, num_warps=WARPS
        )
        launch(
            x.shape[0] * cdiv(channels, FORWARD_CHANNELS),
            x, weight.contiguous(), weight if bias is None else bias.contiguous(),
            row.contiguous(), pool, y, stride, channels,
        )  # fmt: skip
    return y


_conv_step = register_op("causal_conv_step", _launch_step, writes=("pool",))


def causal_conv_step_reference(x, weight, bias, activation, pool, row):
    """The output, and the pool afterwards."""
    window = torch.cat([pool[row.long()], x[:, None].to(pool.dtype)], 1)
    y = causal_conv_reference(x[:, None], weight, bias, activation, window[:, :-1])[:, 0]
    return y, pool.index_copy(0, row.long(), window[:, 1:])


@torch.no_grad()
def causal_conv_step_(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, pool: Tensor, row: Tensor
) -> Tensor:
    """One token of each of B rows: `causal_conv` of a token after the state of its row, which it moves on in place.
    A state is the last n - 1 inputs of a row, oldest first, as `causal_conv_state` returns it.

    x [B, C]; weight, bias, activation as in `causal_conv`. pool [R, n-1, C] contiguous, in the dtype of x: the states.
    row int32 or int64 [B]: the state of each token, no two the same -> y [B, C]. Shapes are static and nothing waits
    for the device: a CUDA graph can hold it. Not differentiable. Raises ValueError where shapes or dtypes disagree.
    """
    check_weight("causal_conv_step_", x, weight, bias, activation)
    rows, channels = shape_of("causal_conv_step_", "x", x, "B, C")
    check_pool("causal_conv_step_", pool, row, rows, x.dtype, weight.shape[1] - 1, channels)
    if runs_kernels(x):
        return _conv_step(x, weight, bias, activation == "silu", pool, row)
    y, moved = causal_conv_step_reference(x, weight, bias, activation, pool, row)
    pool.copy_(moved)
    return y
