"""RMSNorm of the queries and keys of the packed projection, then RoPE: y = rotate(x rstd (w + offset)).

Each head is normed over its D dimensions (w [D]: Qwen3, Gemma 3), or all heads of a token as one row (w [H D]: OLMo 2).
Backward, with u = dy rotated back, g = u (w + offset) and n = x rstd:
    dx = rstd (g - n mean(g n)),    dw = Σ u n over the tokens, and over the heads that share w
B batch, T length, Hq query heads, Hkv key and value heads: qkv [B, T, (Hq + 2 Hkv) D] any float dtype, all query heads
first, then keys, then values; cos, sin fp32 [T, D/2] (the batch shares them) or [B T, D/2], half-split. Computed in
fp32, one rounding. Not in place: where w is near 0 the output does not tell the input, so qkv is kept for backward,
which makes rstd again and packs the gradients of values, which forward leaves where they are, with the others.
Moves 2 B T (Hq + Hkv) D elements forward, B T (3 Hq + 5 Hkv) D backward: bound by memory bandwidth.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.heads import (
    check_shapes,
    copy_heads,
    load_angles,
    load_heads,
    rotate,
    split_heads,
    store_heads,
    with_unit_stride,
)
from ligermodels.kernels.op import as_rows, multiprocessors, register, runs_kernels
from ligermodels.kernels.rms_norm import rms_norm_reference
from ligermodels.kernels.rope import rotate_reference

PAIRS_PER_WARP = 256
WARPS_PER_MULTIPROCESSOR = 16  # of backward: as many find room at
REGISTERS = {} if torch.version.hip else {"maxnreg": 128}  # a thread
PREFETCH_BYTES = 64 * 1024  # of shared memory, at most, for the tokens that a program of backward reads ahead


def qk_norm_rope_reference(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor,
    num_heads: int, num_kv_heads: int, eps: float, offset: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm_reference(x if len(weight) == x.shape[-1] else x.flatten(2), weight, eps, offset).view(x.shape)

    q, k, v = split_heads(qkv, num_heads, num_kv_heads)
    return rotate_reference(norm(q, q_weight), cos, sin), rotate_reference(norm(k, k_weight), cos, sin), v


@triton.jit
def _mean(x, HEADS: tl.constexpr, SIZE: tl.constexpr, WHOLE_ROW: tl.constexpr):
    """Of each head, or of all of them, from their halves' sum."""
    total = tl.sum(x, 1, keep_dims=True)
    return tl.sum(total, 0, keep_dims=True) / (HEADS * SIZE) if WHOLE_ROW else total / SIZE


@triton.jit
def _norm_heads(
    x_ptr, weight_ptr, y_ptr, cos, sin, eps, offset,
    HEADS: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr, PAIRS: tl.constexpr, WHOLE_ROW: tl.constexpr,
):  # fmt: skip
    """Norms and rotates one token's heads."""
    w1, w2 = load_heads(weight_ptr, SIZE if WHOLE_ROW else 0, HEADS, SIZE, TILE, PAIRS)
    x1, x2 = load_heads(x_ptr, SIZE, HEADS, SIZE, TILE, PAIRS)
    rstd = tl.rsqrt(_mean(x1 * x1 + x2 * x2, HEADS, SIZE, WHOLE_ROW) + eps)
    y1, y2 = rotate(x1 * rstd * (w1 + offset), x2 * rstd * (w2 + offset), cos, sin)
    store_heads(y_ptr, y1, y2, HEADS, SIZE, TILE, PAIRS)


@triton.jit
def _norm_heads_backward(
    dy_ptr, dy_stride, x_ptr, dx_ptr, w1, w2, dw1, dw2, cos, sin, eps, offset, WEIGHT_GRAD: tl.constexpr,
    HEADS: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr, PAIRS: tl.constexpr, WHOLE_ROW: tl.constexpr,
):  # fmt: skip
    """Writes the gradient of one token's heads; returns dw1 and dw2 [TILE, PAIRS] with that of the weight added."""
    x1, x2 = load_heads(x_ptr, SIZE, HEADS, SIZE, TILE, PAIRS)
    dy1, dy2 = load_heads(dy_ptr, dy_stride, HEADS, SIZE, TILE, PAIRS)
    rstd = tl.rsqrt(_mean(x1 * x1 + x2 * x2, HEADS, SIZE, WHOLE_ROW) + eps)
    u1, u2 = rotate(dy1, dy2, cos, -sin)
    n1, n2 = x1 * rstd, x2 * rstd
    g1, g2 = u1 * (w1 + offset), u2 * (w2 + offset)
    mean = _mean(g1 * n1 + g2 * n2, HEADS, SIZE, WHOLE_ROW)
    store_heads(dx_ptr, rstd * (g1 - n1 * mean), rstd * (g2 - n2 * mean), HEADS, SIZE, TILE, PAIRS)
    if WEIGHT_GRAD:
        dw1 += u1 * n1
        dw2 += u2 * n2
    return dw1, dw2


@triton.jit(do_not_specialize=["angle_rows"])
def _forward_kernel(
    qkv_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, qk_ptr, qkv_stride, angle_rows, eps, offset,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, SIZE: tl.constexpr,
    Q_TILE: tl.constexpr, K_TILE: tl.constexpr, PAIRS: tl.constexpr, WHOLE_ROW: tl.constexpr,
):  # fmt: skip
    """One program norms and rotates all query and key heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    cos, sin = load_angles(cos_ptr, sin_ptr, token % angle_rows, SIZE, PAIRS)
    x_ptr = qkv_ptr + token * qkv_stride
    y_ptr = qk_ptr + token * ((Q_HEADS + K_HEADS) * SIZE)
    _norm_heads(x_ptr, q_weight_ptr, y_ptr, cos, sin, eps, offset, Q_HEADS, SIZE, Q_TILE, PAIRS, WHOLE_ROW)
    x_ptr += Q_HEADS * SIZE
    y_ptr += Q_HEADS * SIZE
    _norm_heads(x_ptr, k_weight_ptr, y_ptr, cos, sin, eps, offset, K_HEADS, SIZE, K_TILE, PAIRS, WHOLE_ROW)


@triton.jit(do_not_specialize=["angle_rows", "length", "tokens"])
def _backward_kernel(
    dq_ptr, dk_ptr, dv_ptr, qkv_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, dqkv_ptr, dweight_ptr,
    dq_batch, dq_token, dq_head, dk_batch, dk_token, dk_head, dv_batch, dv_token, dv_head,
    qkv_stride, angle_rows, length, tokens, eps, offset, WEIGHT_GRAD: tl.constexpr, STAGES: tl.constexpr,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, SIZE: tl.constexpr,
    Q_TILE: tl.constexpr, K_TILE: tl.constexpr, PAIRS: tl.constexpr, WHOLE_ROW: tl.constexpr,
):  # fmt: skip
    """One of a few persistent programs: strides over tokens, keeps its share of the weights' gradients in registers."""
    weight_stride: tl.constexpr = SIZE if WHOLE_ROW else 0
    wq1, wq2 = load_heads(q_weight_ptr, weight_stride, Q_HEADS, SIZE, Q_TILE, PAIRS)
    wk1, wk2 = load_heads(k_weight_ptr, weight_stride, K_HEADS, SIZE, K_TILE, PAIRS)
    dwq1, dwq2 = tl.zeros([Q_TILE, PAIRS], tl.float32), tl.zeros([Q_TILE, PAIRS], tl.float32)
    dwk1, dwk2 = tl.zeros([K_TILE, PAIRS], tl.float32), tl.zeros([K_TILE, PAIRS], tl.float32)
    for token in tl.range(tl.program_id(0).to(tl.int64), tokens, tl.num_programs(0), num_stages=STAGES):
        batch, time = token // length, token % length
        cos, sin = load_angles(cos_ptr, sin_ptr, token % angle_rows, SIZE, PAIRS)
        x_ptr = qkv_ptr + token * qkv_stride
        dx_ptr = dqkv_ptr + token * ((Q_HEADS + 2 * K_HEADS) * SIZE)
        dwq1, dwq2 = _norm_heads_backward(
            dq_ptr + batch * dq_batch + time * dq_token, dq_head, x_ptr, dx_ptr,
            wq1, wq2, dwq1, dwq2, cos, sin, eps, offset, WEIGHT_GRAD, Q_HEADS, SIZE, Q_TILE, PAIRS, WHOLE_ROW,
        )  # fmt: skip
        dwk1, dwk2 = _norm_heads_backward(
            dk_ptr + batch * dk_batch + time * dk_token, dk_head, x_ptr + Q_HEADS * SIZE, dx_ptr + Q_HEADS * SIZE,
            wk1, wk2, dwk1, dwk2, cos, sin, eps, offset, WEIGHT_GRAD, K_HEADS, SIZE, K_TILE, PAIRS, WHOLE_ROW,
        )  # fmt: skip
        dx_ptr += (Q_HEADS + K_HEADS) * SIZE
        copy_heads(dv_ptr + batch * dv_batch + time * dv_token, dv_head, dx_ptr, 0, K_HEADS, SIZE, K_TILE, 2 * PAIRS)
    if WEIGHT_GRAD and WHOLE_ROW:
        dweight_ptr += tl.program_id(0) * ((Q_HEADS + K_HEADS) * SIZE)
        store_heads(dweight_ptr, dwq1, dwq2, Q_HEADS, SIZE, Q_TILE, PAIRS)
        store_heads(dweight_ptr + Q_HEADS * SIZE, dwk1, dwk2, K_HEADS, SIZE, K_TILE, PAIRS)
    elif WEIGHT_GRAD:
        dweight_ptr += tl.program_id(0) * (2 * SIZE)
        store_heads(dweight_ptr, tl.sum(dwq1, 0)[None, :], tl.sum(dwq2, 0)[None, :], 1, SIZE, 1, PAIRS)
        store_heads(dweight_ptr + SIZE, tl.sum(dwk1, 0)[None, :], tl.sum(dwk2, 0)[None, :], 1, SIZE, 1, PAIRS)


def layout_of(num_heads: int, num_kv_heads: int, head_size: int, whole_row: bool) -> dict[str, int]:
    """What both kernels are built with: a token's queries are one tile, its keys another."""
    q_tile, k_tile, pairs = map(triton.next_power_of_2, (num_heads, num_kv_heads, head_size // 2))
    warps = min(16, max(1, (q_tile + k_tile) * pairs // PAIRS_PER_WARP))
    return {
        "Q_HEADS": num_heads, "K_HEADS": num_kv_heads, "SIZE": head_size, "WHOLE_ROW": whole_row,
        "Q_TILE": q_tile, "K_TILE": k_tile, "PAIRS": pairs, "num_warps": 1 << (warps.bit_length() - 1),
    }  # fmt: skip


def _launch_forward(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor,
    num_heads: int, num_kv_heads: int, eps: float, offset: float,
) -> Tensor:  # fmt: skip
    qk = _fake_forward(qkv, q_weight, k_weight, cos, sin, num_heads, num_kv_heads, eps, offset)
    rows, head_size = as_rows(qkv), qk.shape[-1]
    layout = layout_of(num_heads, num_kv_heads, head_size, len(q_weight) > head_size)
    if len(rows):
        _forward_kernel[(len(rows),)](
            rows, q_weight, k_weight, cos, sin, qk, rows.stride(0), len(cos), eps, offset, **layout
        )  # fmt: skip
    return qk


def _launch_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, qkv: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor,
    eps: float, offset: float, weight_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dq, dk, dv = with_unit_stride(dq, dk, dv)
    rows, (_, length, num_heads, head_size) = as_rows(qkv), dq.shape
    dqkv = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
    layout = layout_of(num_heads, dk.shape[2], head_size, len(q_weight) > head_size)
    read_bytes = (2 * layout["Q_TILE"] + 3 * layout["K_TILE"]) * 2 * layout["PAIRS"] * qkv.itemsize  # a token
    programs = min(len(rows), WARPS_PER_MULTIPROCESSOR // layout["num_warps"] * multiprocessors(qkv.device))
    widths = (len(q_weight), len(k_weight)) if weight_grad else (0, 0)
    partials = torch.empty(programs, sum(widths), dtype=torch.float32, device=qkv.device)
    if len(rows):
        _backward_kernel[(programs,)](
            dq, dk, dv, rows, q_weight, k_weight, cos, sin, dqkv, partials, *dq.stride()[:3], *dk.stride()[:3],
            *dv.stride()[:3], rows.stride(0), len(cos), length, len(rows), eps, offset,
            WEIGHT_GRAD=weight_grad, STAGES=1 + min(2, PREFETCH_BYTES // read_bytes), **layout, **REGISTERS,
        )  # fmt: skip
    dwq, dwk = partials.sum(0).split(widths)
    return dqkv, dwq.to(q_weight.dtype, copy=True), dwk.to(k_weight.dtype, copy=True)


def _fake_forward(qkv, q_weight, k_weight, cos, sin, num_heads, num_kv_heads, eps, offset):
    return qkv.new_empty(*qkv.shape[:2], num_heads + num_kv_heads, qkv.shape[2] // (num_heads + 2 * num_kv_heads))


def _fake_backward(dq, dk, dv, qkv, q_weight, k_weight, cos, sin, eps, offset, weight_grad):
    dweights = (weight.new_empty(weight.shape if weight_grad else 0) for weight in (q_weight, k_weight))
    return qkv.new_empty(qkv.shape), *dweights


qk_norm_rope_forward = register(
    "qk_norm_rope(Tensor qkv, Tensor q_weight, Tensor k_weight, Tensor cos, Tensor sin, int num_heads,"
    " int num_kv_heads, float eps, float offset) -> Tensor",
    _launch_forward,
    _fake_forward,
)
qk_norm_rope_backward = register(
    "qk_norm_rope_backward(Tensor dq, Tensor dk, Tensor dv, Tensor qkv, Tensor q_weight, Tensor k_weight, Tensor cos,"
    " Tensor sin, float eps, float offset, bool weight_grad) -> (Tensor dqkv, Tensor dq_weight, Tensor dk_weight)",
    _launch_backward,
    _fake_backward,
)


class _QKNormRope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv, q_weight, k_weight, cos, sin, num_heads, num_kv_heads, eps, offset):
        ctx.save_for_backward(qkv, q_weight, k_weight, cos, sin)
        ctx.eps, ctx.offset = eps, offset
        qk = qk_norm_rope_forward(qkv, q_weight, k_weight, cos, sin, num_heads, num_kv_heads, eps, offset)
        q, k = qk.split((num_heads, num_kv_heads), 2)
        _, _, v = split_heads(qkv.detach(), num_heads, num_kv_heads)  # a view that autograd takes for a fresh output
        return q, k, v

    @staticmethod
    def backward(ctx, dq, dk, dv):
        weight_grad = any(ctx.needs_input_grad[1:3])
        dqkv, dwq, dwk = qk_norm_rope_backward(dq, dk, dv, *ctx.saved_tensors, ctx.eps, ctx.offset, weight_grad)
        return dqkv, dwq if weight_grad else None, dwk if weight_grad else None, *[None] * 6


def qk_norm_rope(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor,
    num_heads: int, num_kv_heads: int, eps: float, offset: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Norms, then rotates the queries and keys of the packed projection.

    qkv [B, T, (num_heads + 2 num_kv_heads) D] float; q_weight, k_weight [D] each, or [num_heads D] and
    [num_kv_heads D] to norm all heads of a token together; cos, sin fp32 contiguous [T, D/2], or [B T, D/2] where each
    row of the batch has positions of its own; eps > 0 -> (q [B, T, num_heads, D], k [B, T, num_kv_heads, D], views of
    one new tensor; v [B, T, num_kv_heads, D], a view of qkv). Raises ValueError where the widths do not fit.
    """
    head_size = check_shapes("qk_norm_rope", qkv, cos, sin, num_heads, num_kv_heads, partial=False)
    whole_row = num_heads * head_size, num_kv_heads * head_size
    if (len(q_weight), len(k_weight)) not in ((head_size, head_size), whole_row):
        found = f"q_weight has {len(q_weight)} elements, k_weight {len(k_weight)}"
        raise ValueError(f"qk_norm_rope: {found}; needed {head_size} each, or {whole_row[0]} and {whole_row[1]}")
    if not runs_kernels(qkv):
        return qk_norm_rope_reference(qkv, q_weight, k_weight, cos, sin, num_heads, num_kv_heads, eps, offset)
    return _QKNormRope.apply(qkv, q_weight, k_weight, cos, sin, num_heads, num_kv_heads, eps, offset)
