"""RMSNorm of the queries and keys of the packed projection, then RoPE: y = rotate(x rstd (w + offset)).

Each head is normed over its D dimensions (w [D]: Qwen3, Gemma 3), or all heads of a token as one row (w [H D]: OLMo 2).
Backward, with u = dy rotated back, g = u (w + offset) and n = x rstd:
    dx = rstd (g - n mean(g n)),    dw = Σ u n over the tokens, and over the heads that share w
B batch, T length, Hq query heads, Hkv key and value heads: qkv [B, T, (Hq + 2 Hkv) D] any float dtype, all query heads
first, then keys, then values; cos, sin fp32 [T, D/2] (the batch shares them) or [B T, D/2], half-split.
Computed in fp32, one rounding. Not in place: where w is near 0 the output does not tell the input, so qkv is kept for
backward, which makes rstd again. Values stay where they are; backward packs their gradient with the others.
Moves 2 B T (Hq + Hkv) D elements forward, B T (3 Hq + 5 Hkv) D backward: bound by memory bandwidth.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.op import as_rows, multiprocessors, register, runs_kernels
from ligermodels.kernels.rms_norm import rms_norm_reference
from ligermodels.kernels.rope import check_shapes, copy_heads, load_angles, rotate, rotate_reference, split_heads
from ligermodels.kernels.rope import unit_stride as with_unit_stride

TILE_PAIRS = 1024  # at a time, of heads that are normed alone; a row that is normed whole is one tile
PAIRS_PER_WARP = 256
WARPS_PER_MULTIPROCESSOR = 32  # in backward: as many as 64 registers a thread allow


def qk_norm_rope_reference(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor,
    num_heads: int, num_kv_heads: int, eps: float, offset: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    def norm(x: Tensor, weight: Tensor) -> Tensor:
        rows = x.unflatten(2, (-1, 1)) if len(weight) == x.shape[-1] else x.unsqueeze(2)
        return rms_norm_reference(rows.flatten(3), weight, eps, offset).view(x.shape)

    q, k, v = split_heads(qkv, num_heads, num_kv_heads)
    return rotate_reference(norm(q, q_weight), cos, sin), rotate_reference(norm(k, k_weight), cos, sin), v


@triton.jit
def _load_halves(x_ptr, half: tl.constexpr, mask):
    first = tl.load(x_ptr, mask, other=0.0).to(tl.float32)
    return first, tl.load(x_ptr + half, mask, other=0.0).to(tl.float32)


@triton.jit
def _store_halves(x_ptr, half: tl.constexpr, mask, first, second):
    tl.store(x_ptr, first, mask)
    tl.store(x_ptr + half, second, mask)


@triton.jit
def _mean(x, NUM_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, WHOLE_ROW: tl.constexpr):
    """Of each head, or of all of them."""
    total = tl.sum(x, 1, keep_dims=True)
    return tl.sum(total, 0, keep_dims=True) / (NUM_HEADS * HEAD_SIZE) if WHOLE_ROW else total / HEAD_SIZE


@triton.jit
def _norm_heads(
    x_ptr, weight_ptr, y_ptr, cos, sin, eps, offset,
    NUM_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, WHOLE_ROW: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Norms and rotates one token's heads, HEADS at a time."""
    half: tl.constexpr = HEAD_SIZE // 2
    column = tl.arange(0, PAIRS)[None, :]
    for start in range(0, NUM_HEADS, HEADS):
        head = start + tl.arange(0, HEADS)[:, None]
        mask = (head < NUM_HEADS) & (column < half)
        place = head * HEAD_SIZE + column
        x1, x2 = _load_halves(x_ptr + place, half, mask)
        w1, w2 = _load_halves(weight_ptr + (place if WHOLE_ROW else head * 0 + column), half, mask)
        rstd = tl.rsqrt(_mean(x1 * x1 + x2 * x2, NUM_HEADS, HEAD_SIZE, WHOLE_ROW) + eps)
        y1, y2 = rotate(x1 * rstd * (w1 + offset), x2 * rstd * (w2 + offset), cos, sin)
        _store_halves(y_ptr + place, half, mask, y1, y2)


@triton.jit
def _norm_heads_backward(
    dy_ptr, dy_stride, x_ptr, weight_ptr, dx_ptr, dweight1, dweight2, cos, sin, eps, offset, WEIGHT_GRAD: tl.constexpr,
    NUM_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, WHOLE_ROW: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Writes the gradient of one token's heads; returns the halves of the weight's, [HEADS, PAIRS], that much larger."""
    half: tl.constexpr = HEAD_SIZE // 2
    column = tl.arange(0, PAIRS)[None, :]
    for start in range(0, NUM_HEADS, HEADS):
        head = start + tl.arange(0, HEADS)[:, None]
        mask = (head < NUM_HEADS) & (column < half)
        place = head * HEAD_SIZE + column
        x1, x2 = _load_halves(x_ptr + place, half, mask)
        dy1, dy2 = _load_halves(dy_ptr + head.to(tl.int64) * dy_stride + column, half, mask)
        w1, w2 = _load_halves(weight_ptr + (place if WHOLE_ROW else head * 0 + column), half, mask)
        rstd = tl.rsqrt(_mean(x1 * x1 + x2 * x2, NUM_HEADS, HEAD_SIZE, WHOLE_ROW) + eps)
        u1, u2 = rotate(dy1, dy2, cos, -sin)
        n1 = x1 * rstd
        n2 = x2 * rstd
        g1 = u1 * (w1 + offset)
        g2 = u2 * (w2 + offset)
        mean = _mean(g1 * n1 + g2 * n2, NUM_HEADS, HEAD_SIZE, WHOLE_ROW)
        _store_halves(dx_ptr + place, half, mask, rstd * (g1 - n1 * mean), rstd * (g2 - n2 * mean))
        if WEIGHT_GRAD:
            dweight1 += u1 * n1
            dweight2 += u2 * n2
    return dweight1, dweight2


@triton.jit
def _store_weight_grad(
    dweight_ptr, dweight1, dweight2,
    NUM_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, WHOLE_ROW: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    half: tl.constexpr = HEAD_SIZE // 2
    column = tl.arange(0, PAIRS)[None, :]
    if WHOLE_ROW:
        head = tl.arange(0, HEADS)[:, None]
        mask = (head < NUM_HEADS) & (column < half)
        _store_halves(dweight_ptr + head * HEAD_SIZE + column, half, mask, dweight1, dweight2)
    else:
        first = tl.sum(dweight1, 0, keep_dims=True)
        second = tl.sum(dweight2, 0, keep_dims=True)
        _store_halves(dweight_ptr + column, half, column < half, first, second)


@triton.jit(do_not_specialize=["angle_rows"])
def _forward_kernel(
    qkv_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, qk_ptr, qkv_stride, angle_rows, eps, offset,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, WHOLE_ROW: tl.constexpr,
    Q_TILE: tl.constexpr, K_TILE: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """One program norms and rotates all query and key heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    cos, sin = load_angles(cos_ptr, sin_ptr, token % angle_rows, HEAD_SIZE, PAIRS)
    q_ptr = qkv_ptr + token * qkv_stride
    y_ptr = qk_ptr + token * ((NUM_HEADS + NUM_KV_HEADS) * HEAD_SIZE)
    q_size: tl.constexpr = NUM_HEADS * HEAD_SIZE
    _norm_heads(
        q_ptr, q_weight_ptr, y_ptr, cos, sin, eps, offset,
        NUM_HEADS, HEAD_SIZE, WHOLE_ROW, Q_TILE, PAIRS,
    )  # fmt: skip
    _norm_heads(
        q_ptr + q_size, k_weight_ptr, y_ptr + q_size, cos, sin, eps, offset,
        NUM_KV_HEADS, HEAD_SIZE, WHOLE_ROW, K_TILE, PAIRS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["angle_rows", "length", "tokens"])
def _backward_kernel(
    dq_ptr, dk_ptr, dv_ptr, qkv_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, dqkv_ptr, dweight_ptr,
    dq_batch, dq_token, dq_head, dk_batch, dk_token, dk_head, dv_batch, dv_token, dv_head,
    qkv_stride, angle_rows, length, tokens, eps, offset, WEIGHT_GRAD: tl.constexpr,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, WHOLE_ROW: tl.constexpr,
    Q_TILE: tl.constexpr, K_TILE: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """One of a few persistent programs: strides over tokens, keeps its share of the weights' gradients in registers."""
    q_size: tl.constexpr = NUM_HEADS * HEAD_SIZE
    k_size: tl.constexpr = NUM_KV_HEADS * HEAD_SIZE
    dwq1 = tl.zeros([Q_TILE, PAIRS], tl.float32)
    dwq2 = tl.zeros([Q_TILE, PAIRS], tl.float32)
    dwk1 = tl.zeros([K_TILE, PAIRS], tl.float32)
    dwk2 = tl.zeros([K_TILE, PAIRS], tl.float32)
    for token in range(tl.program_id(0).to(tl.int64), tokens, tl.num_programs(0)):
        batch, time = token // length, token % length
        cos, sin = load_angles(cos_ptr, sin_ptr, token % angle_rows, HEAD_SIZE, PAIRS)
        q_ptr = qkv_ptr + token * qkv_stride
        target_ptr = dqkv_ptr + token * (q_size + 2 * k_size)
        dwq1, dwq2 = _norm_heads_backward(
            dq_ptr + batch * dq_batch + time * dq_token, dq_head, q_ptr, q_weight_ptr, target_ptr,
            dwq1, dwq2, cos, sin, eps, offset, WEIGHT_GRAD, NUM_HEADS, HEAD_SIZE, WHOLE_ROW, Q_TILE, PAIRS,
        )  # fmt: skip
        dwk1, dwk2 = _norm_heads_backward(
            dk_ptr + batch * dk_batch + time * dk_token, dk_head, q_ptr + q_size, k_weight_ptr, target_ptr + q_size,
            dwk1, dwk2, cos, sin, eps, offset, WEIGHT_GRAD, NUM_KV_HEADS, HEAD_SIZE, WHOLE_ROW, K_TILE, PAIRS,
        )  # fmt: skip
        values_ptr = dv_ptr + batch * dv_batch + time * dv_token
        copy_heads(values_ptr, dv_head, target_ptr + (q_size + k_size), 0, NUM_KV_HEADS, HEAD_SIZE, K_TILE, 2 * PAIRS)
    if WEIGHT_GRAD:
        q_width: tl.constexpr = q_size if WHOLE_ROW else HEAD_SIZE
        k_width: tl.constexpr = k_size if WHOLE_ROW else HEAD_SIZE
        dweight_ptr += tl.program_id(0) * (q_width + k_width)
        _store_weight_grad(dweight_ptr, dwq1, dwq2, NUM_HEADS, HEAD_SIZE, WHOLE_ROW, Q_TILE, PAIRS)
        _store_weight_grad(dweight_ptr + q_width, dwk1, dwk2, NUM_KV_HEADS, HEAD_SIZE, WHOLE_ROW, K_TILE, PAIRS)


def layout_of(num_heads: int, num_kv_heads: int, head_size: int, whole_row: bool) -> dict[str, int]:
    """The constants that both kernels are built with."""
    pairs = triton.next_power_of_2(head_size // 2)
    q_tile, k_tile = (triton.next_power_of_2(heads) for heads in (num_heads, num_kv_heads))
    if not whole_row:
        q_tile, k_tile = (min(heads, max(1, TILE_PAIRS // pairs)) for heads in (q_tile, k_tile))
    return {
        "NUM_HEADS": num_heads, "NUM_KV_HEADS": num_kv_heads, "HEAD_SIZE": head_size, "WHOLE_ROW": whole_row,
        "Q_TILE": q_tile, "K_TILE": k_tile, "PAIRS": pairs,
        "num_warps": min(16, max(1, q_tile * pairs // PAIRS_PER_WARP)),
    }  # fmt: skip


def _launch_forward(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor,
    num_heads: int, num_kv_heads: int, eps: float, offset: float,
) -> Tensor:  # fmt: skip
    qk = _fake_forward(qkv, q_weight, k_weight, cos, sin, num_heads, num_kv_heads, eps, offset)
    rows, head_size = as_rows(qkv), qk.shape[-1]
    if len(rows):
        _forward_kernel[(len(rows),)](
            rows, q_weight, k_weight, cos, sin, qk, rows.stride(0), len(cos), eps, offset,
            **layout_of(num_heads, num_kv_heads, head_size, len(q_weight) > head_size),
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
    programs = min(len(rows), multiprocessors(qkv.device) * max(1, WARPS_PER_MULTIPROCESSOR // layout["num_warps"]))
    widths = len(q_weight), len(k_weight)
    partials = torch.empty(programs if weight_grad else 0, sum(widths), dtype=torch.float32, device=qkv.device)
    if len(rows):
        _backward_kernel[(programs,)](
            dq, dk, dv, rows, q_weight, k_weight, cos, sin, dqkv, partials,
            *dq.stride()[:3], *dk.stride()[:3], *dv.stride()[:3],
            rows.stride(0), len(cos), length, len(rows), eps, offset, WEIGHT_GRAD=weight_grad, **layout,
        )  # fmt: skip
    if not weight_grad:
        return dqkv, q_weight.new_empty(0), k_weight.new_empty(0)
    dq_weight, dk_weight = partials.sum(0).split(widths)
    return dqkv, dq_weight.to(q_weight.dtype, copy=True), dk_weight.to(k_weight.dtype, copy=True)


def _fake_forward(qkv, q_weight, k_weight, cos, sin, num_heads, num_kv_heads, eps, offset):
    heads = num_heads + num_kv_heads
    return qkv.new_empty(*qkv.shape[:2], heads, qkv.shape[2] // (heads + num_kv_heads))


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
        dqkv, dq_weight, dk_weight = qk_norm_rope_backward(
            dq, dk, dv, *ctx.saved_tensors, ctx.eps, ctx.offset, weight_grad
        )
        dweights = (dq_weight, dk_weight) if weight_grad else (None, None)
        return dqkv, *dweights, None, None, None, None, None, None


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
    check_shapes("qk_norm_rope", qkv, cos, sin, num_heads, num_kv_heads)
    head_size = qkv.shape[-1] // (num_heads + 2 * num_kv_heads)
    if 2 * cos.shape[1] != head_size:
        raise ValueError(f"qk_norm_rope: {2 * cos.shape[1]} of {head_size} dimensions would be rotated; all are needed")
    shapes = (len(q_weight), len(k_weight))
    if shapes not in ((head_size, head_size), (num_heads * head_size, num_kv_heads * head_size)):
        raise ValueError(
            f"qk_norm_rope: q_weight and k_weight have {shapes[0]} and {shapes[1]} elements; needed {head_size} each,"
            f" or {num_heads * head_size} and {num_kv_heads * head_size} to norm all heads together"
        )
    if not runs_kernels(qkv):
        return qk_norm_rope_reference(qkv, q_weight, k_weight, cos, sin, num_heads, num_kv_heads, eps, offset)
    return _QKNormRope.apply(qkv, q_weight, k_weight, cos, sin, num_heads, num_kv_heads, eps, offset)
