"""QK-norm and RoPE: RMSNorm of the queries and keys of the packed projection, then y = rotate(x rstd (w + offset)).

Each head is normalized over its D dimensions (w [D]: Qwen3, Gemma 3), or all heads of a token as one row (w [H D]:
OLMo 2). The angles may rotate only the first R dimensions of a head (Qwen3.5); the others are normalized alone.
Backward, with u = dy rotated back, g = u (w + offset) and n = x rstd:
    dx = rstd (g - n mean(g n)),    dw = Σ u n over the tokens, and over the heads that share w
B batch, T length, Hq query heads, Hkv key and value heads: qkv [B, T, (Hq + 2 Hkv) D] any float dtype, all query heads
first, then keys, then values; cos, sin fp32 [T, R/2] (shared by the batch) or [B T, R/2], half-split. Computed in
fp32, one rounding. Not in place: where w is near 0 the input cannot be recovered from the output, so qkv is saved for
backward, which recomputes rstd. Values stay where they are in forward; backward packs their gradients with the others.
A gated projection, qkv [B, T, (2 Hq + 2 Hkv) D], has behind each query head the head's gate, which is treated like the
values.
Moves 2 B T (Hq + Hkv) D elements forward, B T (3 Hq + 5 Hkv) D backward, with gates 2 B T Hq D more: bound by memory
bandwidth.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.attention.qkv_heads import (
    empty_queries_and_keys,
    fit_head_tile,
    load_angles,
    load_heads,
    rotate,
    split_all_heads,
    store_heads,
    with_unit_stride,
)
from ligermodels.kernels.attention.rope import check_qkv_shapes, rotate_reference
from ligermodels.kernels.dispatch import Node, check_floats, register_op, runs_kernels, shape_of
from ligermodels.kernels.launch import Launcher, as_rows_with_stride, cdiv, empty_where, kernel, multiprocessors
from ligermodels.kernels.norms.partial_sums import sum_partials
from ligermodels.kernels.norms.rms_norm import rms_norm_reference

WARPS_PER_MULTIPROCESSOR = 16  # of backward: so many fit with 128 registers a thread
QK_NORM_REGISTERS = {} if torch.version.hip else {"maxnreg": 128}  # a thread, in backward


def qk_norm_rope_reference(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor,
    num_heads: int, num_kv_heads: int, eps: float = 1e-6, offset: float = 0.0, gated: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm_reference(x if len(weight) == x.shape[-1] else x.flatten(2), weight, eps, offset).view(x.shape)

    q, k, *others = split_all_heads(qkv, num_heads, num_kv_heads, gated)
    return rotate_reference(norm(q, q_weight), cos, sin), rotate_reference(norm(k, k_weight), cos, sin), *others


@triton.jit
def heads_rstd(
    x, eps, HEADS: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr, PAIRS: tl.constexpr, WHOLE_ROW: tl.constexpr
):
    """1 / root mean square: of each head of the single tile in x [TILE, 1], or of all HEADS in the tiles x [1, 1]."""
    square = tl.zeros([TILE, PAIRS], tl.float32)
    for index in tl.static_range((HEADS + TILE - 1) // TILE if WHOLE_ROW else 1):
        x1, x2 = x[index]
        x1, x2 = x1.to(tl.float32), x2.to(tl.float32)
        square += x1 * x1 + x2 * x2
    square = tl.sum(square, 1, keep_dims=True)
    return tl.rsqrt((tl.sum(square, 0, keep_dims=True) / (HEADS * SIZE) if WHOLE_ROW else square / SIZE) + eps)


@triton.jit
def norm_heads(
    x, rstd, weight, y_ptr, cos, sin, offset, first, HEADS: tl.constexpr,
    SIZE: tl.constexpr, ROTATED: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Normalizes, rotates and writes TILES * TILE heads from `first` on, which are contiguous at y_ptr."""
    for index in tl.static_range(TILES):
        x1, x2 = x[index]
        w1, w2 = weight[index]
        x1 = x1.to(tl.float32) * rstd * (w1.to(tl.float32) + offset)
        x2 = x2.to(tl.float32) * rstd * (w2.to(tl.float32) + offset)
        y1, y2 = rotate(x1, x2, cos, sin)
        store_heads(y_ptr, SIZE, y1, y2, first + index * TILE, HEADS, SIZE, ROTATED, TILE, PAIRS)


@kernel(do_not_specialize=["angle_rows"])
def _forward_kernel(
    qkv_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, qk_ptr, qkv_stride, angle_rows, eps, offset,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, SIZE: tl.constexpr, Q_STRIDE: tl.constexpr, ROTATED: tl.constexpr,
    TILE: tl.constexpr, PAIRS: tl.constexpr, WHOLE_ROW: tl.constexpr,
):  # fmt: skip
    """One program normalizes and rotates TILE heads of one token, or with WHOLE_ROW all of them. Queries of the
    projection are Q_STRIDE elements apart."""
    q_tiles: tl.constexpr = (Q_HEADS + TILE - 1) // TILE
    k_tiles: tl.constexpr = (K_HEADS + TILE - 1) // TILE
    parts: tl.constexpr = 1 if WHOLE_ROW else q_tiles + k_tiles
    token, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    q_ptr = qkv_ptr + token.to(tl.int64) * qkv_stride
    k_ptr = q_ptr + Q_HEADS * Q_STRIDE
    q_out_ptr = qk_ptr + token.to(tl.int64) * ((Q_HEADS + K_HEADS) * SIZE)
    k_out_ptr = q_out_ptr + Q_HEADS * SIZE
    cos, sin = load_angles(cos_ptr, sin_ptr, token % angle_rows, ROTATED, TILE, PAIRS)
    if WHOLE_ROW:
        q = load_heads(q_ptr, Q_STRIDE, 0, Q_HEADS, SIZE, ROTATED, q_tiles, TILE, PAIRS)
        k = load_heads(k_ptr, SIZE, 0, K_HEADS, SIZE, ROTATED, k_tiles, TILE, PAIRS)
        q_rstd = heads_rstd(q, eps, Q_HEADS, SIZE, TILE, PAIRS, True)
        k_rstd = heads_rstd(k, eps, K_HEADS, SIZE, TILE, PAIRS, True)
        weight = load_heads(q_weight_ptr, SIZE, 0, Q_HEADS, SIZE, ROTATED, q_tiles, TILE, PAIRS, KEEP=True)
        norm_heads(q, q_rstd, weight, q_out_ptr, cos, sin, offset, 0, Q_HEADS, SIZE, ROTATED, q_tiles, TILE, PAIRS)
        weight = load_heads(k_weight_ptr, SIZE, 0, K_HEADS, SIZE, ROTATED, k_tiles, TILE, PAIRS, KEEP=True)
        norm_heads(k, k_rstd, weight, k_out_ptr, cos, sin, offset, 0, K_HEADS, SIZE, ROTATED, k_tiles, TILE, PAIRS)
    elif part < q_tiles:
        first = part * TILE
        q = load_heads(q_ptr, Q_STRIDE, first, Q_HEADS, SIZE, ROTATED, 1, TILE, PAIRS)
        weight = load_heads(q_weight_ptr, 0, 0, Q_HEADS, SIZE, ROTATED, 1, TILE, PAIRS)
        rstd = heads_rstd(q, eps, Q_HEADS, SIZE, TILE, PAIRS, False)
        norm_heads(q, rstd, weight, q_out_ptr, cos, sin, offset, first, Q_HEADS, SIZE, ROTATED, 1, TILE, PAIRS)
    else:
        first = (part - q_tiles) * TILE
        k = load_heads(k_ptr, SIZE, first, K_HEADS, SIZE, ROTATED, 1, TILE, PAIRS)
        weight = load_heads(k_weight_ptr, 0, 0, K_HEADS, SIZE, ROTATED, 1, TILE, PAIRS)
        rstd = heads_rstd(k, eps, K_HEADS, SIZE, TILE, PAIRS, False)
        norm_heads(k, rstd, weight, k_out_ptr, cos, sin, offset, first, K_HEADS, SIZE, ROTATED, 1, TILE, PAIRS)


@triton.jit
def _add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def _means(a, b, HEADS: tl.constexpr, SIZE: tl.constexpr, WHOLE_ROW: tl.constexpr):
    """Means of a and b over each head, or over all HEADS, given the sums of both halves [TILE, PAIRS]."""
    a, b = tl.reduce((a, b), 1, _add_pairs, keep_dims=True)
    if WHOLE_ROW:
        a, b = tl.reduce((a, b), 0, _add_pairs, keep_dims=True)
    count: tl.constexpr = HEADS * SIZE if WHOLE_ROW else SIZE
    return a / count, b / count


@triton.jit
def _load_item(
    item, dy_ptr, dy_batch, dy_token, dy_head, x_ptr, x_stride, cos_ptr, sin_ptr, angle_rows, length,
    HEADS: tl.constexpr, SIZE: tl.constexpr, STRIDE: tl.constexpr, ROTATED: tl.constexpr, TILE: tl.constexpr,
    PAIRS: tl.constexpr, WHOLE_ROW: tl.constexpr,
):  # fmt: skip
    """Loads x, dy, cos and sin of one item: TILE heads of one token, or with WHOLE_ROW all of them."""
    tiles: tl.constexpr = (HEADS + TILE - 1) // TILE if WHOLE_ROW else 1
    parts: tl.constexpr = 1 if WHOLE_ROW else (HEADS + TILE - 1) // TILE
    token, first = item // parts, item % parts * TILE
    x_ptr += tl.cast(token, tl.int64) * x_stride
    dy_ptr += tl.cast(token // length, tl.int64) * dy_batch + tl.cast(token % length, tl.int64) * dy_token
    x = load_heads(x_ptr, STRIDE, first, HEADS, SIZE, ROTATED, tiles, TILE, PAIRS)
    dy = load_heads(dy_ptr, dy_head, first, HEADS, SIZE, ROTATED, tiles, TILE, PAIRS)
    cos, sin = load_angles(cos_ptr, sin_ptr, token % angle_rows, ROTATED, TILE, PAIRS)
    return x, dy, cos, sin


@triton.jit
def _gradients(x, dy, weight, cos, sin, offset):
    """x, u and g of one tile in fp32, both halves of each."""
    x1, x2 = x
    dy1, dy2 = dy
    w1, w2 = weight
    u1, u2 = rotate(dy1.to(tl.float32), dy2.to(tl.float32), cos, -sin)
    g1, g2 = u1 * (w1.to(tl.float32) + offset), u2 * (w2.to(tl.float32) + offset)
    return x1.to(tl.float32), x2.to(tl.float32), u1, u2, g1, g2


@triton.jit
def _norm_heads_backward(
    dy_ptr, dy_batch, dy_token, dy_head, x_ptr, x_stride, weight_ptr, cos_ptr, sin_ptr, dx_ptr, dx_stride, dweight_ptr,
    angle_rows, length, tokens, eps, offset, INPUT_GRAD: tl.constexpr, WEIGHT_GRAD: tl.constexpr,
    HEADS: tl.constexpr, SIZE: tl.constexpr, STRIDE: tl.constexpr, ROTATED: tl.constexpr, TILE: tl.constexpr,
    PAIRS: tl.constexpr, WHOLE_ROW: tl.constexpr,
):  # fmt: skip
    """A persistent loop over all tokens' queries, or keys, TILE heads or a whole row at a time. Heads of x and dx are
    STRIDE elements apart.

    Sums the weight's gradient in registers.
    """
    tiles: tl.constexpr = (HEADS + TILE - 1) // TILE if WHOLE_ROW else 1
    parts: tl.constexpr = 1 if WHOLE_ROW else (HEADS + TILE - 1) // TILE
    shared_weight = load_heads(weight_ptr, 0, 0, HEADS, SIZE, ROTATED, 1, TILE, PAIRS)
    dweight = ()
    for _ in tl.static_range(tiles):
        dweight += ((tl.zeros([TILE, PAIRS], tl.float32), tl.zeros([TILE, PAIRS], tl.float32)),)  # type: ignore[assignment]
    items = tokens * parts
    prefetched = _load_item(
        tl.program_id(0), dy_ptr, dy_batch, dy_token, dy_head, x_ptr, x_stride, cos_ptr, sin_ptr, angle_rows, length,
        HEADS, SIZE, STRIDE, ROTATED, TILE, PAIRS, WHOLE_ROW,
    )  # fmt: skip
    for item in tl.range(tl.program_id(0), items, tl.num_programs(0), num_stages=1):
        x, dy, cos, sin = prefetched
        prefetched = _load_item(  # in flight while this item is computed; the last item is loaded twice
            tl.minimum(item + tl.num_programs(0), items - 1), dy_ptr, dy_batch, dy_token, dy_head, x_ptr, x_stride,
            cos_ptr, sin_ptr, angle_rows, length, HEADS, SIZE, STRIDE, ROTATED, TILE, PAIRS, WHOLE_ROW,
        )  # fmt: skip
        # The weights of a whole row do not fit into the registers: they are loaded from the L1 cache for each item.
        weight = shared_weight
        if WHOLE_ROW:
            weight = load_heads(weight_ptr, SIZE, 0, HEADS, SIZE, ROTATED, tiles, TILE, PAIRS)
        square, product = tl.zeros([TILE, PAIRS], tl.float32), tl.zeros([TILE, PAIRS], tl.float32)
        for index in tl.static_range(tiles):
            x1, x2, u1, u2, g1, g2 = _gradients(x[index], dy[index], weight[index], cos, sin, offset)
            square += x1 * x1 + x2 * x2
            product += g1 * x1 + g2 * x2
        square, product = _means(square, product, HEADS, SIZE, WHOLE_ROW)
        rstd = tl.rsqrt(square + eps)
        slope = rstd * rstd * product  # mean(g n) n = slope x
        first = item % parts * TILE
        target_ptr = dx_ptr + tl.cast(item // parts, tl.int64) * dx_stride
        updated = ()
        for index in tl.static_range(tiles):
            x1, x2, u1, u2, g1, g2 = _gradients(x[index], dy[index], weight[index], cos, sin, offset)
            dx1, dx2 = rstd * (g1 - slope * x1), rstd * (g2 - slope * x2)
            if INPUT_GRAD:  # without it the compiler removes what only dx needs
                store_heads(target_ptr, STRIDE, dx1, dx2, first + index * TILE, HEADS, SIZE, ROTATED, TILE, PAIRS)
            dw1, dw2 = dweight[index]  # type: ignore[var-annotated]
            updated += ((dw1 + u1 * (x1 * rstd), dw2 + u2 * (x2 * rstd)),)  # type: ignore[assignment]
        if WEIGHT_GRAD:
            dweight = updated
    if WEIGHT_GRAD:
        for index in tl.static_range(tiles):
            dw1, dw2 = dweight[index]
            if WHOLE_ROW:
                store_heads(dweight_ptr, SIZE, dw1, dw2, index * TILE, HEADS, SIZE, ROTATED, TILE, PAIRS)
            else:
                dw1, dw2 = tl.sum(dw1, 0)[None, :], tl.sum(dw2, 0)[None, :]
                store_heads(dweight_ptr, SIZE, dw1, dw2, 0, 1, SIZE, ROTATED, 1, PAIRS)


@triton.jit
def _copy_gradient(
    dy_ptr, dy_batch, dy_token, dy_head, dx_ptr, dx_stride, length, tokens,
    HEADS: tl.constexpr, SIZE: tl.constexpr, STRIDE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """A persistent loop that copies dy of all tokens' HEADS to dx, where they are STRIDE elements apart."""
    for start in tl.range(tl.program_id(0) * ROWS, tokens * HEADS, tl.num_programs(0) * ROWS, num_stages=1):
        row = tl.arange(0, ROWS)[:, None] + start
        column = tl.arange(0, WIDTH)[None, :]
        mask = (row < tokens * HEADS) & (column < SIZE)
        token, head = row // HEADS, (row % HEADS).to(tl.int64)
        source = (token // length).to(tl.int64) * dy_batch + (token % length).to(tl.int64) * dy_token + head * dy_head
        dy = tl.load(dy_ptr + source + column, mask)
        tl.store(dx_ptr + token.to(tl.int64) * dx_stride + head * STRIDE + column, dy, mask)


@kernel(do_not_specialize=["angle_rows", "length", "tokens"])
def _backward_kernel(
    dq_ptr, dk_ptr, dv_ptr, dgate_ptr, qkv_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, dqkv_ptr, dweight_ptr,
    dq_batch, dq_token, dq_head, dk_batch, dk_token, dk_head, dv_batch, dv_token, dv_head,
    dgate_batch, dgate_token, dgate_head, qkv_stride, angle_rows, length, tokens, eps, offset,
    INPUT_GRAD: tl.constexpr, Q_GRAD: tl.constexpr, K_GRAD: tl.constexpr,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, SIZE: tl.constexpr, Q_STRIDE: tl.constexpr, ROTATED: tl.constexpr,
    COPIED: tl.constexpr, TILE: tl.constexpr, PAIRS: tl.constexpr, WHOLE_ROW: tl.constexpr,
):  # fmt: skip
    """Persistent kernel: each program loops over the tokens' queries, then over their keys, then copies the gradients
    of values, and of gates, which are where queries leave room for them. COPIED: heads of one step of a copy."""
    q_width: tl.constexpr = (Q_HEADS * SIZE if WHOLE_ROW else SIZE) * Q_GRAD
    k_width: tl.constexpr = (K_HEADS * SIZE if WHOLE_ROW else SIZE) * K_GRAD
    stride: tl.constexpr = Q_HEADS * Q_STRIDE + 2 * K_HEADS * SIZE
    dweight_ptr += tl.program_id(0) * (q_width + k_width)
    _norm_heads_backward(
        dq_ptr, dq_batch, dq_token, dq_head, qkv_ptr, qkv_stride, q_weight_ptr, cos_ptr, sin_ptr, dqkv_ptr, stride,
        dweight_ptr, angle_rows, length, tokens, eps, offset, INPUT_GRAD, Q_GRAD, Q_HEADS, SIZE, Q_STRIDE, ROTATED,
        TILE, PAIRS, WHOLE_ROW,
    )  # fmt: skip
    if INPUT_GRAD and Q_STRIDE > SIZE:
        _copy_gradient(
            dgate_ptr, dgate_batch, dgate_token, dgate_head, dqkv_ptr + SIZE, stride, length, tokens,
            Q_HEADS, SIZE, Q_STRIDE, COPIED, 2 * PAIRS,
        )  # fmt: skip
    qkv_ptr += Q_HEADS * Q_STRIDE
    dqkv_ptr += Q_HEADS * Q_STRIDE
    _norm_heads_backward(
        dk_ptr, dk_batch, dk_token, dk_head, qkv_ptr, qkv_stride, k_weight_ptr, cos_ptr, sin_ptr, dqkv_ptr, stride,
        dweight_ptr + q_width, angle_rows, length, tokens, eps, offset, INPUT_GRAD, K_GRAD, K_HEADS, SIZE, SIZE,
        ROTATED, TILE, PAIRS, WHOLE_ROW,
    )  # fmt: skip
    if INPUT_GRAD:
        _copy_gradient(
            dv_ptr, dv_batch, dv_token, dv_head, dqkv_ptr + K_HEADS * SIZE, stride, length, tokens,
            K_HEADS, SIZE, SIZE, COPIED, 2 * PAIRS,
        )  # fmt: skip


@functools.cache
def _forward(
    num_heads: int, num_kv_heads: int, head_size: int, rotated: int, whole_row: bool, gated: bool
) -> tuple[Launcher, int]:
    """The launcher of forward, and how many programs a token takes. rotated: dimensions of a head."""
    max_pairs, warps = (512, 4) if whole_row else (1024, 2)
    tile = fit_head_tile(head_size, max_pairs)
    launch = _forward_kernel.bind(
        Q_HEADS=num_heads, K_HEADS=num_kv_heads, SIZE=head_size, Q_STRIDE=(1 + gated) * head_size, ROTATED=rotated,
        WHOLE_ROW=whole_row, **tile.constants(), num_warps=warps,
    )  # fmt: skip
    return launch, 1 if whole_row else cdiv(num_heads, tile.heads) + cdiv(num_kv_heads, tile.heads)


@functools.cache
def _backward(
    num_heads: int, num_kv_heads: int, head_size: int, rotated: int, whole_row: bool, gated: bool, itemsize: int,
    input_grad: bool, q_grad: bool, k_grad: bool,
) -> tuple[Launcher, int]:  # fmt: skip
    """The launcher of backward, and how many programs fit a multiprocessor. itemsize: bytes of an element of qkv."""
    max_pairs, warps = 256, 1
    if whole_row:  # sized so that the registers also hold the weights' gradients
        width = num_heads * head_size
        max_pairs, warps = 512 if width % 2048 else 1024, 8 if width * itemsize <= 10240 else 16
    tile = fit_head_tile(head_size, max_pairs)
    launch = _backward_kernel.bind(
        INPUT_GRAD=input_grad, Q_GRAD=q_grad, K_GRAD=k_grad, COPIED=max(1, 512 * warps // tile.pairs),
        Q_HEADS=num_heads, K_HEADS=num_kv_heads, SIZE=head_size, Q_STRIDE=(1 + gated) * head_size, ROTATED=rotated,
        WHOLE_ROW=whole_row, **tile.constants(), num_warps=warps, **QK_NORM_REGISTERS,
    )  # fmt: skip
    return launch, WARPS_PER_MULTIPROCESSOR // warps


def _launch_forward(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor,
    num_heads: int, num_kv_heads: int, eps: float, offset: float, gated: bool,
) -> Tensor:  # fmt: skip
    qk = empty_queries_and_keys(qkv, num_heads, num_kv_heads, gated)
    batch, length, _, head_size = qk.shape
    tokens, (qkv, stride) = batch * length, as_rows_with_stride(qkv, qkv.shape[-1])
    whole_row = q_weight.shape[0] > head_size
    launch, programs = _forward(num_heads, num_kv_heads, head_size, 2 * cos.shape[1], whole_row, gated)
    if tokens:
        launch(
            tokens * programs, qkv, q_weight.contiguous(), k_weight.contiguous(), cos, sin, qk,
            stride, cos.shape[0], eps, offset,
        )  # fmt: skip
    return qk


def _launch_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, dgate: Tensor | None, qkv: Tensor, q_weight: Tensor, k_weight: Tensor,
    cos: Tensor, sin: Tensor, eps: float, offset: float, input_grad: bool, q_grad: bool, k_grad: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """(dqkv, dq_weight, dk_weight), each None where it is not needed."""
    batch, length, num_heads, head_size = dq.shape
    tokens = batch * length
    dqkv, dwq, dwk = empty_where((input_grad, q_grad, k_grad), qkv, q_weight, k_weight)
    gated = dgate is not None
    gradients = dq, dk, dv, dv if dgate is None else dgate
    (dq, dq_strides), (dk, dk_strides), (dv, dv_strides), (dgate, dgate_strides) = map(with_unit_stride, gradients)
    qkv, stride = as_rows_with_stride(qkv, qkv.shape[-1])
    whole_row = q_weight.shape[0] > head_size
    shape = num_heads, dk.shape[2], head_size, 2 * cos.shape[1], whole_row, gated
    launch, programs = _backward(*shape, qkv.itemsize, input_grad, q_grad, k_grad)
    programs = min(tokens, programs * multiprocessors(qkv.device))
    partials = cos.new_empty(programs, q_grad * q_weight.shape[0] + k_grad * k_weight.shape[0])
    if tokens:
        launch(
            programs, dq, dk, dv, dgate, qkv, q_weight.contiguous(), k_weight.contiguous(), cos, sin,
            qkv if dqkv is None else dqkv, partials,
            *dq_strides, *dk_strides, *dv_strides, *dgate_strides, stride, cos.shape[0], length, tokens, eps, offset,
        )  # fmt: skip
    if summed := [gradient for gradient in (dwq, dwk) if gradient is not None]:
        sum_partials(partials, *summed)
    return dqkv, dwq, dwk


def _fake_forward(qkv, q_weight, k_weight, cos, sin, num_heads, num_kv_heads, eps, offset, gated):
    return empty_queries_and_keys(qkv, num_heads, num_kv_heads, gated)


def _fake_backward(dq, dk, dv, dgate, qkv, q_weight, k_weight, cos, sin, eps, offset, *needed):
    return empty_where(needed, qkv, q_weight, k_weight)


qk_norm_rope_forward = register_op("qk_norm_rope", _launch_forward, _fake_forward)
qk_norm_rope_backward = register_op("qk_norm_rope_backward", _launch_backward, _fake_backward)


class _QKNormRope(Node):
    @staticmethod
    def forward(ctx, qkv, q_weight, k_weight, cos, sin, num_heads, num_kv_heads, eps, offset, gated):
        ctx.save_for_backward(qkv, q_weight, k_weight, cos, sin)
        ctx.eps, ctx.offset = eps, offset
        qk = qk_norm_rope_forward(qkv, q_weight, k_weight, cos, sin, num_heads, num_kv_heads, eps, offset, gated)
        q, k = torch.split_with_sizes(qk, (num_heads, num_kv_heads), 2)
        # Detached: to autograd, v and the gate are new outputs.
        _, _, *others = split_all_heads(qkv.detach(), num_heads, num_kv_heads, gated)
        return q, k, *others

    @staticmethod
    def backward(ctx, dq, dk, dv, dgate=None):
        input_grad, q_grad, k_grad, *_ = ctx.needs_input_grad
        dqkv, dwq, dwk = qk_norm_rope_backward(
            dq, dk, dv, dgate, *ctx.saved_tensors, ctx.eps, ctx.offset, input_grad, q_grad, k_grad
        )
        return dqkv if input_grad else None, dwq if q_grad else None, dwk if k_grad else None, *[None] * 7


def check_norm_weights(
    op: str, q_weight: Tensor, k_weight: Tensor, num_heads: int, num_kv_heads: int, head_size: int
) -> None:
    """Raises ValueError if the weights are neither for each head nor for all heads of a token, or not floats."""
    whole_row = num_heads * head_size, num_kv_heads * head_size
    check_floats(op, q_weight=q_weight, k_weight=k_weight)
    (q_size,), (k_size,) = shape_of(op, "q_weight", q_weight, "N"), shape_of(op, "k_weight", k_weight, "N")
    if (q_size, k_size) not in ((head_size, head_size), whole_row):
        raise ValueError(
            f"{op}: q_weight has {q_size} elements, k_weight {k_size};"
            f" they must have {head_size} each, or {whole_row[0]} and {whole_row[1]}"
        )


def qk_norm_rope(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor,
    num_heads: int, num_kv_heads: int, eps: float = 1e-6, offset: float = 0.0, gated: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Applies RMSNorm and then RoPE to the queries and keys of the packed projection.

    qkv [B, T, (num_heads + 2 num_kv_heads) D] float; q_weight, k_weight [D] each, or [num_heads D] and
    [num_kv_heads D] to normalize all heads of a token together; cos, sin fp32 contiguous [T, R/2], or [B T, R/2] if
    each row of the batch has its own positions; eps > 0 -> (q [B, T, num_heads, D], k [B, T, num_kv_heads, D], views
    of one new tensor; v [B, T, num_kv_heads, D], a view of qkv). The first R <= D dimensions of a head are rotated, in
    pairs (j, j + R/2).
    gated: qkv [B, T, (2 num_heads + 2 num_kv_heads) D] has behind each query head the head's gate, and the results
    have the gates as a fourth: gate [B, T, num_heads, D], a view of qkv. Raises ValueError if the shapes do not match.
    """
    head_size = check_qkv_shapes("qk_norm_rope", qkv, cos, sin, num_heads, num_kv_heads, gated)
    check_norm_weights("qk_norm_rope", q_weight, k_weight, num_heads, num_kv_heads, head_size)
    if not runs_kernels(qkv):
        return qk_norm_rope_reference(qkv, q_weight, k_weight, cos, sin, num_heads, num_kv_heads, eps, offset, gated)
    return _QKNormRope.apply(qkv, q_weight, k_weight, cos, sin, num_heads, num_kv_heads, eps, offset, gated)
