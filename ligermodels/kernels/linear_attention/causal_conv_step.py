"""One token of the causal convolution, for decoding: the states of many rows are shifted in place.

A state is the last n - 1 inputs of a row, oldest first, as `causal_conv_state` returns it. Formula in causal_conv.py.
"""

import torch
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.dispatch import register_op, runs_kernels, shape_of
from ligermodels.kernels.launch import as_rows_with_stride, cdiv, kernel
from ligermodels.kernels.linear_attention.causal_conv import (
    FORWARD_CHANNELS,
    WARPS,
    causal_conv_reference,
    check_weight,
    silu_and_slope,
)
from ligermodels.kernels.linear_attention.document_chunks import check_pool


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


def _fake_step(x, weight, bias, silu, pool, row):
    return x.new_empty(x.shape)


_conv_step = register_op(
    "causal_conv_step(Tensor x, Tensor weight, Tensor? bias, bool silu, Tensor(a!) pool, Tensor row) -> Tensor",
    _launch_step,
    _fake_step,
)


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
