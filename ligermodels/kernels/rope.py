"""Rotary position embedding, in place on the packed projection: [x₁, x₂]' = [x₁ cos - x₂ sin, x₂ cos + x₁ sin].

x₁ and x₂ are the halves of a head's first R dimensions (half-split), or the even and the odd ones (interleaved); the
others pass. Backward is the inverse rotation, sin negated; it reads dq, dk, dv in whatever layout attention left them
and writes them packed: the concatenation costs nothing.
B batch, T length, D head size, Hq query heads, Hkv key and value heads: qkv [B, T, (Hq + 2 Hkv) D] any float dtype, all
query heads first, then keys, then values; cos, sin [T, R/2] fp32 (the batch shares them) or [B T, R/2].
Computed in fp32, one rounding. Moves 2 B T (Hq + Hkv) R elements forward, 2 B T (Hq + 2 Hkv) D backward: bound by
memory bandwidth. Where the angles come from is not known here.
Maths: Su et al. 2021, https://arxiv.org/abs/2104.09864.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.heads import check_shapes, copy_heads, load_angles, rotate, split_heads, with_unit_stride
from ligermodels.kernels.op import register, runs_kernels, traced, widen

TILE_PAIRS = 1024  # rotated at a time by one program of four warps


def rotate_reference(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """x [B, T, H, D], its first 2 cos.shape[1] dimensions rotated."""
    c, s = (table.view(-1, x.shape[1], 1, table.shape[-1]) for table in (cos, sin))
    rotated, rest = widen(x).tensor_split((2 * cos.shape[1],), -1)
    first, second = (rotated[..., ::2], rotated[..., 1::2]) if interleaved else rotated.chunk(2, -1)
    pair = first * c - second * s, second * c + first * s
    rotated = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat((rotated, rest), -1).to(x.dtype)


def rope_reference(
    qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int, interleaved: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = split_heads(qkv, num_heads, num_kv_heads)
    return rotate_reference(q, cos, sin, interleaved), rotate_reference(k, cos, sin, interleaved), v


@triton.jit
def _rotate_heads(
    source_ptr, source_stride, target_ptr, cos, sin, NUM_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr,
    ROTATED: tl.constexpr, INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Moves the ROTATED dimensions of one token's heads, HEADS at a time, rotated by cos and sin [1, PAIRS]."""
    half: tl.constexpr = ROTATED // 2
    # Neighbours are loaded together and told apart in registers: strided loads would fetch every sector twice.
    column = tl.arange(0, 2 * PAIRS if INTERLEAVED else PAIRS)[None, :]
    for start in range(0, NUM_HEADS, HEADS):
        head = start + tl.arange(0, HEADS)[:, None].to(tl.int64)
        mask = (head < NUM_HEADS) & (column < (ROTATED if INTERLEAVED else half))
        source = source_ptr + head * source_stride + column
        target = target_ptr + head * HEAD_SIZE + column
        if INTERLEAVED:
            first, second = tl.split(tl.reshape(tl.load(source, mask), [HEADS, PAIRS, 2]))
        else:
            first = tl.load(source, mask)
            second = tl.load(source + half, mask)
        first, second = rotate(first.to(tl.float32), second.to(tl.float32), cos, sin)
        if INTERLEAVED:
            tl.store(target, tl.interleave(first, second), mask)  # rounds to the target's dtype
        else:
            tl.store(target, first, mask)
            tl.store(target + half, second, mask)


@triton.jit(do_not_specialize=["angle_rows"])
def _forward_kernel(
    qkv_ptr, cos_ptr, sin_ptr, qkv_stride, angle_rows,
    NUM_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, ROTATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """One program rotates all query and key heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    cos, sin = load_angles(cos_ptr, sin_ptr, token % angle_rows, ROTATED, PAIRS)
    x_ptr = qkv_ptr + token * qkv_stride
    _rotate_heads(x_ptr, HEAD_SIZE, x_ptr, cos, sin, NUM_HEADS, HEAD_SIZE, ROTATED, INTERLEAVED, HEADS, PAIRS)


@triton.jit(do_not_specialize=["angle_rows", "length"])
def _backward_kernel(
    dq_ptr, dk_ptr, dv_ptr, cos_ptr, sin_ptr, dqkv_ptr,
    dq_batch, dq_token, dq_head, dk_batch, dk_token, dk_head, dv_batch, dv_token, dv_head, angle_rows, length,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr,
    ROTATED: tl.constexpr, INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """One program gathers one token's dq, dk and dv, rotates the first two back and writes them packed."""
    token = tl.program_id(0).to(tl.int64)
    batch, time = token // length, token % length
    cos, sin = load_angles(cos_ptr, sin_ptr, token % angle_rows, ROTATED, PAIRS)
    dq_ptr += batch * dq_batch + time * dq_token
    dk_ptr += batch * dk_batch + time * dk_token
    dv_ptr += batch * dv_batch + time * dv_token
    q_ptr = dqkv_ptr + token * ((NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_SIZE)
    k_ptr = q_ptr + NUM_HEADS * HEAD_SIZE
    v_ptr = k_ptr + NUM_KV_HEADS * HEAD_SIZE
    _rotate_heads(dq_ptr, dq_head, q_ptr, cos, -sin, NUM_HEADS, HEAD_SIZE, ROTATED, INTERLEAVED, HEADS, PAIRS)
    _rotate_heads(dk_ptr, dk_head, k_ptr, cos, -sin, NUM_KV_HEADS, HEAD_SIZE, ROTATED, INTERLEAVED, HEADS, PAIRS)
    if ROTATED < HEAD_SIZE:
        copy_heads(dq_ptr, dq_head, q_ptr, ROTATED, NUM_HEADS, HEAD_SIZE, HEADS, 2 * PAIRS)
        copy_heads(dk_ptr, dk_head, k_ptr, ROTATED, NUM_KV_HEADS, HEAD_SIZE, HEADS, 2 * PAIRS)
    copy_heads(dv_ptr, dv_head, v_ptr, 0, NUM_KV_HEADS, HEAD_SIZE, HEADS, 2 * PAIRS)


def tile_of(rotated: int) -> tuple[int, int]:
    """(heads, pairs) that one program rotates at a time."""
    pairs = triton.next_power_of_2(rotated // 2)
    return max(1, TILE_PAIRS // pairs), pairs


def _launch_forward_(
    qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int, interleaved: bool
) -> None:
    rows = qkv.view(-1, qkv.shape[-1])  # never a copy: the rotation would be lost
    rotated = 2 * cos.shape[1]
    heads, pairs = tile_of(rotated)
    if len(rows):
        _forward_kernel[(len(rows),)](
            rows, cos, sin, rows.stride(0), len(cos),
            NUM_HEADS=num_heads + num_kv_heads, HEAD_SIZE=rows.shape[1] // (num_heads + 2 * num_kv_heads),
            ROTATED=rotated, INTERLEAVED=interleaved, HEADS=heads, PAIRS=pairs,
        )  # fmt: skip


def _launch_backward(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    dq, dk, dv = with_unit_stride(dq, dk, dv)
    dqkv = _fake_backward(dq, dk, dv, cos, sin, interleaved)
    batch, length, num_heads, head_size = dq.shape
    rotated = 2 * cos.shape[1]
    heads, pairs = tile_of(rotated)
    if dqkv.numel():
        _backward_kernel[(batch * length,)](
            dq, dk, dv, cos, sin, dqkv, *dq.stride()[:3], *dk.stride()[:3], *dv.stride()[:3], len(cos), length,
            NUM_HEADS=num_heads, NUM_KV_HEADS=dk.shape[2], HEAD_SIZE=head_size,
            ROTATED=rotated, INTERLEAVED=interleaved, HEADS=heads, PAIRS=pairs,
        )  # fmt: skip
    return dqkv


def _fake_forward_(qkv, cos, sin, num_heads, num_kv_heads, interleaved):
    return None


def _fake_backward(dq, dk, dv, cos, sin, interleaved):
    batch, length, num_heads, head_size = dq.shape
    return dq.new_empty(batch, length, (num_heads + 2 * dk.shape[2]) * head_size)


rope_forward_ = register(
    "rope_(Tensor(a!) qkv, Tensor cos, Tensor sin, int num_heads, int num_kv_heads, bool interleaved) -> ()",
    _launch_forward_,
    _fake_forward_,
)
rope_backward = register(
    "rope_backward(Tensor dq, Tensor dk, Tensor dv, Tensor cos, Tensor sin, bool interleaved) -> Tensor",
    _launch_backward,
    _fake_backward,
)


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv, cos, sin, num_heads, num_kv_heads, interleaved):
        ctx.interleaved = interleaved
        ctx.save_for_backward(cos, sin)
        # The Function returns views of what it wrote to, which autograd takes for fresh outputs when they come from a
        # detached alias. In eager mode that is the projection's own memory, which no linear saves. Whoever traces may
        # keep the projection's output (selective checkpointing replays it): then a copy is rotated.
        in_place = not traced((qkv,))
        qkv = qkv.detach() if in_place else qkv.clone()
        rope_forward_(qkv, cos, sin, num_heads, num_kv_heads, interleaved)
        if in_place:
            torch.autograd.graph.increment_version(qkv)  # so that autograd objects if somebody did save it
        return split_heads(qkv, num_heads, num_kv_heads)

    @staticmethod
    def backward(ctx, dq, dk, dv):
        dqkv = rope_backward(dq, dk, dv, *ctx.saved_tensors, ctx.interleaved)
        return dqkv, None, None, None, None, None


def rope_(
    qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int, interleaved: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotates queries and keys in place in the packed projection; qkv is consumed, use what is returned.

    qkv [B, T, (num_heads + 2 num_kv_heads) D] contiguous float; cos, sin fp32 contiguous [T, R/2], or [B T, R/2] where
    each row of the batch has positions of its own -> (q [B, T, num_heads, D], k and v [B, T, num_kv_heads, D]), views
    of qkv. The first R <= D dimensions of a head are rotated, in pairs (j, j + R/2), or (2j, 2j + 1) if interleaved.
    On the CPU, and while something traces, qkv itself is left alone. Raises ValueError where the widths do not fit.
    """
    check_shapes("rope_", qkv, cos, sin, num_heads, num_kv_heads, partial=True)
    if not runs_kernels(qkv):
        return rope_reference(qkv, cos, sin, num_heads, num_kv_heads, interleaved)
    return _Rope.apply(qkv, cos, sin, num_heads, num_kv_heads, interleaved)
