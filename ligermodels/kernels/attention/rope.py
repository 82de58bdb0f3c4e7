"""Rotary position embedding (RoPE), in place on the packed projection: y = [x₁ cos - x₂ sin, x₂ cos + x₁ sin].

x₁ and x₂ are the halves of a head's first R dimensions (half-split), or the even and the odd ones (interleaved); the
other dimensions are unchanged. Backward is the inverse rotation, with sin negated. It reads dq, dk and dv in any layout
and writes them packed, so that they need no separate concatenation.
B batch, T length, D head size, Hq query heads, Hkv key and value heads: qkv [B, T, (Hq + 2 Hkv) D] any float dtype, all
query heads first, then keys, then values; cos, sin [T, R/2] fp32 (shared by the batch) or [B T, R/2].
Computed in fp32, one rounding. Moves 2 B T (Hq + Hkv) R elements forward, 2 B T (Hq + 2 Hkv) D backward: bound by
memory bandwidth.
Maths: Su et al. 2021, https://arxiv.org/abs/2104.09864.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.attention.qkv_heads import (
    copy_heads,
    fit_head_tile,
    head_offsets,
    load_angles,
    rotate,
    split_heads,
    with_unit_stride,
)
from ligermodels.kernels.dispatch import (
    WIDE_FLOATS,
    Node,
    check_floats,
    check_one_of,
    is_traced,
    register_op,
    runs_kernels,
    shape_of,
    widen,
)
from ligermodels.kernels.launch import Launcher, cdiv, kernel
from ligermodels.kernels.pdl import pdl_constants, wait_for_previous_kernel

ROPE_FORWARD_PAIRS, ROPE_BACKWARD_PAIRS = 512, 1024  # rotated by one program of four warps, at most


def rotate_reference(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """x [B, T, H, D] with the first 2 cos.shape[1] dimensions of each head rotated."""
    c, s = (table.view(-1, x.shape[1], 1, table.shape[-1]) for table in (cos, sin))
    wide, half = widen(x), cos.shape[1]
    unchanged = x.shape[-1] - 2 * half
    if interleaved:
        rotated, rest = torch.split_with_sizes(wide, (2 * half, unchanged), -1)
        first, second = rotated[..., ::2], rotated[..., 1::2]
    else:
        first, second, rest = torch.split_with_sizes(wide, (half, half, unchanged), -1)
    pair = first * c - second * s, second * c + first * s
    parts = [torch.stack(pair, -1).flatten(-2)] if interleaved else pair
    return torch.cat((*parts, rest), -1).to(x.dtype)


def rope_reference(
    qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int, interleaved: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    heads = qkv.unflatten(-1, (num_heads + 2 * num_kv_heads, -1))
    qk, v = torch.split_with_sizes(heads, (num_heads + num_kv_heads, num_kv_heads), 2)
    q, k = torch.split_with_sizes(rotate_reference(qk, cos, sin, interleaved), (num_heads, num_kv_heads), 2)
    return q, k, v


@triton.jit
def rotate_heads(
    source_ptr, source_stride, target_ptr, cos_ptr, sin_ptr, angle_row, sign, first, HEADS: tl.constexpr,
    SIZE: tl.constexpr, ROTATED: tl.constexpr, INTERLEAVED: tl.constexpr, TILE: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Reads TILE heads of one token, rotates their ROTATED dimensions by its angles times sign, and writes those."""
    half: tl.constexpr = ROTATED // 2
    cos, sin = load_angles(cos_ptr, sin_ptr, angle_row, ROTATED, TILE, PAIRS)
    # Interleaved pairs are loaded together and split in registers: strided loads would fetch every sector twice.
    columns: tl.constexpr = ROTATED if INTERLEAVED else half
    width: tl.constexpr = 2 * PAIRS if INTERLEAVED else PAIRS
    source, mask = head_offsets(source_stride, first, HEADS, columns, TILE, width)
    target, mask = head_offsets(SIZE, first, HEADS, columns, TILE, width)
    source_ptr += tl.cast(first, tl.int64) * source_stride
    target_ptr += first * SIZE
    if INTERLEAVED:
        x1, x2 = tl.split(tl.reshape(tl.load(source_ptr + source, mask), [TILE, PAIRS, 2]))
    else:
        x1 = tl.load(source_ptr + source, mask)
        x2 = tl.load(source_ptr + source + half, mask)
    x1, x2 = rotate(x1.to(tl.float32), x2.to(tl.float32), cos, sign * sin)
    if INTERLEAVED:
        tl.store(target_ptr + target, tl.interleave(x1, x2), mask)  # rounds to the target's dtype
    else:
        tl.store(target_ptr + target, x1, mask)
        tl.store(target_ptr + target + half, x2, mask)


@kernel(do_not_specialize=["angle_rows"])
def _forward_kernel(
    qkv_ptr, cos_ptr, sin_ptr, qkv_stride, angle_rows, HEADS: tl.constexpr,
    SIZE: tl.constexpr, ROTATED: tl.constexpr, INTERLEAVED: tl.constexpr, TILE: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """One program rotates TILE of one token's query and key heads."""
    tiles: tl.constexpr = (HEADS + TILE - 1) // TILE
    token = tl.program_id(0) // tiles
    first = tl.program_id(0) % tiles * TILE
    x_ptr = qkv_ptr + token.to(tl.int64) * qkv_stride
    rotate_heads(
        x_ptr, SIZE, x_ptr, cos_ptr, sin_ptr, token % angle_rows, 1.0, first,
        HEADS, SIZE, ROTATED, INTERLEAVED, TILE, PAIRS,
    )  # fmt: skip


@triton.jit
def _rotate_heads_back(
    dy_ptr, dy_head, dx_ptr, cos_ptr, sin_ptr, angle_row, first, HEADS: tl.constexpr, SIZE: tl.constexpr,
    ROTATED: tl.constexpr, INTERLEAVED: tl.constexpr, TILE: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Writes the gradient of TILE heads of one token: ROTATED dimensions rotated back, the others copied."""
    rotate_heads(
        dy_ptr, dy_head, dx_ptr, cos_ptr, sin_ptr, angle_row, -1.0, first,
        HEADS, SIZE, ROTATED, INTERLEAVED, TILE, PAIRS,
    )  # fmt: skip
    copy_heads(dy_ptr, dy_head, dx_ptr, first, ROTATED, HEADS, SIZE, TILE, 2 * PAIRS)


@kernel(do_not_specialize=["angle_rows", "length"])
def _backward_kernel(
    dq_ptr, dk_ptr, dv_ptr, cos_ptr, sin_ptr, dqkv_ptr,
    dq_batch, dq_token, dq_head, dk_batch, dk_token, dk_head, dv_batch, dv_token, dv_head, angle_rows, length,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, SIZE: tl.constexpr, ROTATED: tl.constexpr,
    INTERLEAVED: tl.constexpr, TILE: tl.constexpr, PAIRS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program gathers TILE heads of one token's dq, dk or dv and writes them packed; dq and dk are rotated back."""
    wait_for_previous_kernel(PDL)
    q_tiles: tl.constexpr = (Q_HEADS + TILE - 1) // TILE
    k_tiles: tl.constexpr = (K_HEADS + TILE - 1) // TILE
    tiles: tl.constexpr = q_tiles + 2 * k_tiles
    token, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    batch, time = (token // length).to(tl.int64), (token % length).to(tl.int64)
    angle_row = token % angle_rows
    q_ptr = dqkv_ptr + token.to(tl.int64) * ((Q_HEADS + 2 * K_HEADS) * SIZE)
    k_ptr = q_ptr + Q_HEADS * SIZE
    v_ptr = k_ptr + K_HEADS * SIZE
    if tile < q_tiles:
        dq_ptr += batch * dq_batch + time * dq_token
        first = tile * TILE
        _rotate_heads_back(
            dq_ptr, dq_head, q_ptr, cos_ptr, sin_ptr, angle_row, first, Q_HEADS, SIZE, ROTATED, INTERLEAVED, TILE, PAIRS
        )
    elif tile < q_tiles + k_tiles:
        dk_ptr += batch * dk_batch + time * dk_token
        first = (tile - q_tiles) * TILE
        _rotate_heads_back(
            dk_ptr, dk_head, k_ptr, cos_ptr, sin_ptr, angle_row, first, K_HEADS, SIZE, ROTATED, INTERLEAVED, TILE, PAIRS
        )
    else:
        dv_ptr += batch * dv_batch + time * dv_token
        first = (tile - q_tiles - k_tiles) * TILE
        copy_heads(dv_ptr, dv_head, v_ptr, first, 0, K_HEADS, SIZE, TILE, 2 * PAIRS)


@functools.cache
def _forward(width: int, heads: int, value_heads: int, rotated: int, interleaved: bool) -> tuple[Launcher, int]:
    """The launcher of forward, and how many programs a token takes.

    width: of a token's row, which has `heads` query and key heads and, behind them, `value_heads` more.
    """
    tile = fit_head_tile(rotated, ROPE_FORWARD_PAIRS)
    size = width // (heads + value_heads)
    launch = _forward_kernel.bind(HEADS=heads, SIZE=size, ROTATED=rotated, INTERLEAVED=interleaved, **tile.constants())
    return launch, cdiv(heads, tile.heads)


def _launch_forward_(
    qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int, interleaved: bool
) -> None:
    width = stride = qkv.shape[-1]
    if not qkv.is_contiguous():
        qkv = qkv.view(-1, width)  # a copy would lose the rotation
        stride = qkv.stride(0)
    angle_rows, pairs = cos.shape
    launch, programs = _forward(width, num_heads + num_kv_heads, num_kv_heads, 2 * pairs, interleaved)
    if tokens := qkv.numel() // width:
        launch(tokens * programs, qkv, cos, sin, stride, angle_rows)


def _launch_forward(
    qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int, interleaved: bool
) -> Tensor:
    qkv = qkv.clone(memory_format=torch.contiguous_format)
    _launch_forward_(qkv, cos, sin, num_heads, num_kv_heads, interleaved)
    return qkv


@functools.cache
def _backward(
    heads: int, kv_heads: int, size: int, rotated: int, interleaved: bool, device: torch.device
) -> tuple[Launcher, int]:
    """The launcher of backward, and how many programs a token takes."""
    tile = fit_head_tile(rotated, ROPE_BACKWARD_PAIRS)
    launch = _backward_kernel.bind(
        Q_HEADS=heads, K_HEADS=kv_heads, SIZE=size, ROTATED=rotated, INTERLEAVED=interleaved, **tile.constants(),
        **pdl_constants(device),
    )  # fmt: skip
    return launch, cdiv(heads, tile.heads) + 2 * cdiv(kv_heads, tile.heads)


def _launch_backward(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    batch, length, heads, size = dq.shape
    kv_heads, (angle_rows, pairs) = dk.shape[2], cos.shape
    dqkv = dq.new_empty(batch, length, (heads + 2 * kv_heads) * size)
    (dq, dq_strides), (dk, dk_strides), (dv, dv_strides) = map(with_unit_stride, (dq, dk, dv))
    launch, programs = _backward(heads, kv_heads, size, 2 * pairs, interleaved, dq.device)
    if tokens := batch * length:
        launch(tokens * programs, dq, dk, dv, cos, sin, dqkv, *dq_strides, *dk_strides, *dv_strides, angle_rows, length)
    return dqkv


def _fake_backward(dq, dk, dv, cos, sin, interleaved):
    batch, length, num_heads, head_size = dq.shape
    return dq.new_empty(batch, length, (num_heads + 2 * dk.shape[2]) * head_size)


rope_forward = register_op("rope", _launch_forward)
rope_backward = register_op("rope_backward", _launch_backward, _fake_backward)


class _Rope(Node):
    @staticmethod
    def forward(ctx, qkv, cos, sin, num_heads, num_kv_heads, interleaved):
        ctx.interleaved = interleaved
        ctx.save_for_backward(cos, sin)
        # A tracer may save the projection or the op's output and replay one without the other, as selective
        # checkpointing does: while tracing, nothing is written in place. In eager mode the rotation is written into the
        # projection, which no linear saves for backward. To autograd, views of a detached alias are new outputs.
        if is_traced((qkv,)):
            qkv = rope_forward(qkv, cos, sin, num_heads, num_kv_heads, interleaved)
        else:
            qkv = qkv.detach()
            _launch_forward_(qkv, cos, sin, num_heads, num_kv_heads, interleaved)
            torch.autograd.graph.increment_version(qkv)  # autograd raises if an op did save it for backward
        return split_heads(qkv, num_heads, num_kv_heads)

    @staticmethod
    def backward(ctx, dq, dk, dv):
        dqkv = rope_backward(dq, dk, dv, *ctx.saved_tensors, ctx.interleaved)
        return dqkv, None, None, None, None, None


def check_qkv_shapes(
    op: str, qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int, gated: bool = False
) -> int:
    """Returns the head size. Raises ValueError if shapes or dtypes do not match, or the angles are not contiguous."""
    batch, length, width = shape_of(op, "qkv", qkv, "B, T, columns")
    heads = (1 + gated) * num_heads + 2 * num_kv_heads
    head_size = width // heads
    if heads * head_size != width:
        raise ValueError(f"{op}: the width of qkv, {width}, is not a multiple of {heads} heads")
    rows, pairs = shape = shape_of(op, "cos", cos, "T, pairs")
    fits = 0 < 2 * pairs <= head_size
    if shape != sin.shape or rows not in (length, batch * length) or not fits:
        raise ValueError(
            f"{op}: cos has shape {list(cos.shape)}, sin {list(sin.shape)}; both must be [{length}, pairs], or"
            f" [{batch * length}, pairs] if each row of the batch has its own positions, with 1 to {head_size // 2}"
            " pairs"
        )
    check_floats(op, qkv=qkv)
    check_one_of(op, WIDE_FLOATS, cos=cos, sin=sin)
    if not (cos.is_contiguous() and sin.is_contiguous()):
        raise ValueError(f"{op}: cos has strides {cos.stride()}, sin {sin.stride()}; both must be contiguous")
    return head_size


def check_row_stride(op: str, qkv: Tensor) -> None:
    """Raises ValueError if the projection cannot be rotated in place."""
    if not qkv.is_contiguous() and qkv.stride(-1) != 1:
        raise ValueError(f"{op}: qkv has strides {qkv.stride()}; to rotate it in place the last must be 1")


def rope_(
    qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int, interleaved: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotates queries and keys in place in the packed projection. Do not use qkv afterwards, only what is returned.

    qkv [B, T, (num_heads + 2 num_kv_heads) D] float, with one stride between all rows; cos, sin fp32 contiguous
    [T, R/2], or [B T, R/2] if each row of the batch has its own positions -> (q [B, T, num_heads, D], k and v
    [B, T, num_kv_heads, D]), views of qkv.
    The first R <= D dimensions of a head are rotated, in pairs (j, j + R/2), or (2j, 2j + 1) if interleaved.
    On the CPU and while tracing, qkv is not changed. Raises ValueError if the widths do not match, if the stride along
    the last dimension of qkv is not 1, or if the angles are not contiguous.
    """
    check_qkv_shapes("rope_", qkv, cos, sin, num_heads, num_kv_heads)
    check_row_stride("rope_", qkv)
    if not runs_kernels(qkv):
        return rope_reference(qkv, cos, sin, num_heads, num_kv_heads, interleaved)
    return _Rope.apply(qkv, cos, sin, num_heads, num_kv_heads, interleaved)
