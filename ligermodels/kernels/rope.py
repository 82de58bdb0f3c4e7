"""Rotary position embedding, in place on the packed projection: [x₁, x₂]' = [x₁ cos - x₂ sin, x₂ cos + x₁ sin].

x₁ and x₂ are the halves of one head (the half-split layout). Backward is the inverse rotation, sin negated; it reads
dq, dk, dv in whatever layout attention left them and writes them packed: the concatenation costs nothing.
B batch, T length, D head size, Hq query heads, Hkv key and value heads: qkv [B, T, (Hq + 2 Hkv) D] any float dtype, all
query heads first, then keys, then values; cos, sin [R, D/2] fp32, where R is T (the batch shares them) or B T.
Computed in fp32, one rounding. Moves 2 B T (Hq + Hkv) D elements forward, 2 B T (Hq + 2 Hkv) D backward: bound by
memory bandwidth. Where the angles come from is not known here.
Maths: Su et al. 2021, https://arxiv.org/abs/2104.09864.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.op import register, runs_kernels, traced, widen

TILE_PAIRS = 1024  # rotated at a time by one program of four warps


def split_heads(qkv: Tensor, num_heads: int, num_kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """[B, T, (Hq + 2 Hkv) D] as views q [B, T, Hq, D], k and v [B, T, Hkv, D]."""
    heads = qkv.unflatten(-1, (num_heads + 2 * num_kv_heads, -1))
    q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=2)
    return q, k, v


def rope_reference(
    qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    def rotate(x: Tensor) -> Tensor:
        first, second = widen(x).chunk(2, -1)
        return torch.cat((first * c - second * s, second * c + first * s), -1).to(x.dtype)

    q, k, v = split_heads(qkv, num_heads, num_kv_heads)
    c, s = (table.view(-1, q.shape[1], 1, table.shape[-1]) for table in (cos, sin))
    return rotate(q), rotate(k), v


@triton.jit
def _move_heads(
    source_ptr, source_stride, target_ptr, cos, sin,
    ROTATE: tl.constexpr, NUM_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Moves one token's heads from source to target, HEADS at a time, rotated by cos and sin [1, PAIRS]."""
    half: tl.constexpr = HEAD_SIZE // 2
    column = tl.arange(0, PAIRS)[None, :]
    for start in range(0, NUM_HEADS, HEADS):
        head = start + tl.arange(0, HEADS)[:, None].to(tl.int64)
        mask = (head < NUM_HEADS) & (column < half)
        source = source_ptr + head * source_stride + column
        target = target_ptr + head * HEAD_SIZE + column
        first = tl.load(source, mask)
        second = tl.load(source + half, mask)
        if ROTATE:
            x1 = first.to(tl.float32)
            x2 = second.to(tl.float32)
            first = (x1 * cos - x2 * sin).to(target_ptr.dtype.element_ty)
            second = (x2 * cos + x1 * sin).to(target_ptr.dtype.element_ty)
        tl.store(target, first, mask)
        tl.store(target + half, second, mask)


@triton.jit
def _load_angles(cos_ptr, sin_ptr, row, HEAD_SIZE: tl.constexpr, PAIRS: tl.constexpr):
    column = tl.arange(0, PAIRS)[None, :]
    offset = row * (HEAD_SIZE // 2) + column
    in_head = column < HEAD_SIZE // 2
    return tl.load(cos_ptr + offset, in_head), tl.load(sin_ptr + offset, in_head)


@triton.jit(do_not_specialize=["angle_rows"])
def _forward_kernel(
    qkv_ptr, cos_ptr, sin_ptr, qkv_stride, angle_rows,
    ROTATED_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """One program rotates all query and key heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    cos, sin = _load_angles(cos_ptr, sin_ptr, token % angle_rows, HEAD_SIZE, PAIRS)
    heads_ptr = qkv_ptr + token * qkv_stride
    _move_heads(heads_ptr, HEAD_SIZE, heads_ptr, cos, sin, True, ROTATED_HEADS, HEAD_SIZE, HEADS, PAIRS)


@triton.jit(do_not_specialize=["angle_rows", "length"])
def _backward_kernel(
    dq_ptr, dk_ptr, dv_ptr, cos_ptr, sin_ptr, dqkv_ptr,
    dq_batch, dq_token, dq_head, dk_batch, dk_token, dk_head, dv_batch, dv_token, dv_head, angle_rows, length,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr,
    HEADS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """One program gathers one token's dq, dk and dv, rotates the first two back and writes them packed."""
    token = tl.program_id(0).to(tl.int64)
    batch, time = token // length, token % length
    cos, sin = _load_angles(cos_ptr, sin_ptr, token % angle_rows, HEAD_SIZE, PAIRS)
    dq_ptr += batch * dq_batch + time * dq_token
    dk_ptr += batch * dk_batch + time * dk_token
    dv_ptr += batch * dv_batch + time * dv_token
    q_ptr = dqkv_ptr + token * ((NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_SIZE)
    k_ptr = q_ptr + NUM_HEADS * HEAD_SIZE
    v_ptr = k_ptr + NUM_KV_HEADS * HEAD_SIZE
    _move_heads(dq_ptr, dq_head, q_ptr, cos, -sin, True, NUM_HEADS, HEAD_SIZE, HEADS, PAIRS)
    _move_heads(dk_ptr, dk_head, k_ptr, cos, -sin, True, NUM_KV_HEADS, HEAD_SIZE, HEADS, PAIRS)
    _move_heads(dv_ptr, dv_head, v_ptr, cos, -sin, False, NUM_KV_HEADS, HEAD_SIZE, HEADS, PAIRS)


def tile_of(head_size: int) -> tuple[int, int]:
    """(heads, pairs) that one program rotates at a time."""
    pairs = triton.next_power_of_2(head_size // 2)
    return max(1, TILE_PAIRS // pairs), pairs


def check_shapes(qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int) -> None:
    batch, length, width = qkv.shape
    heads = num_heads + 2 * num_kv_heads
    if width % (2 * heads):
        raise ValueError(f"rope_: qkv is {width} wide; {heads} heads of an even size are needed")
    half = width // heads // 2
    if cos.shape != sin.shape or cos.shape not in ((length, half), (batch * length, half)):
        raise ValueError(
            f"rope_: cos {list(cos.shape)} and sin {list(sin.shape)};"
            f" needed [{length}, {half}], or [{batch * length}, {half}] for positions of each row's own"
        )


def _launch_forward_(qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int) -> None:
    rows = qkv.view(-1, qkv.shape[-1])  # never a copy: the rotation would be lost
    head_size = 2 * cos.shape[1]
    heads, pairs = tile_of(head_size)
    if len(rows):
        _forward_kernel[(len(rows),)](
            rows, cos, sin, rows.stride(0), len(cos),
            ROTATED_HEADS=num_heads + num_kv_heads, HEAD_SIZE=head_size, HEADS=heads, PAIRS=pairs,
        )  # fmt: skip


def _launch_backward(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    dq, dk, dv = (x if x.stride(-1) == 1 else x.contiguous() for x in (dq, dk, dv))
    dqkv = _fake_backward(dq, dk, dv, cos, sin)
    batch, length, num_heads, head_size = dq.shape
    heads, pairs = tile_of(head_size)
    if dqkv.numel():
        _backward_kernel[(batch * length,)](
            dq, dk, dv, cos, sin, dqkv, *dq.stride()[:3], *dk.stride()[:3], *dv.stride()[:3], len(cos), length,
            NUM_HEADS=num_heads, NUM_KV_HEADS=dk.shape[2], HEAD_SIZE=head_size, HEADS=heads, PAIRS=pairs,
        )  # fmt: skip
    return dqkv


def _fake_forward_(qkv, cos, sin, num_heads, num_kv_heads):
    return None


def _fake_backward(dq, dk, dv, cos, sin):
    batch, length, num_heads, head_size = dq.shape
    return dq.new_empty(batch, length, (num_heads + 2 * dk.shape[2]) * head_size)


rope_forward_ = register(
    "rope_(Tensor(a!) qkv, Tensor cos, Tensor sin, int num_heads, int num_kv_heads) -> ()",
    _launch_forward_,
    _fake_forward_,
)
rope_backward = register(
    "rope_backward(Tensor dq, Tensor dk, Tensor dv, Tensor cos, Tensor sin) -> Tensor",
    _launch_backward,
    _fake_backward,
)


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv, cos, sin, num_heads, num_kv_heads):
        ctx.save_for_backward(cos, sin)
        # The Function returns views of what it wrote to, which autograd takes for fresh outputs when they come from a
        # detached alias. In eager mode that is the projection's own memory, which no linear saves. Whoever traces may
        # keep the projection's output (selective checkpointing replays it): then a copy is rotated.
        in_place = not traced((qkv,))
        qkv = qkv.detach() if in_place else qkv.clone()
        rope_forward_(qkv, cos, sin, num_heads, num_kv_heads)
        if in_place:
            torch.autograd.graph.increment_version(qkv)  # so that autograd objects if somebody did save it
        return split_heads(qkv, num_heads, num_kv_heads)

    @staticmethod
    def backward(ctx, dq, dk, dv):
        return rope_backward(dq, dk, dv, *ctx.saved_tensors), None, None, None, None


def rope_(qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rotates queries and keys in place in the packed projection; qkv is consumed, use what is returned.

    qkv [B, T, (num_heads + 2 num_kv_heads) D] contiguous float; cos, sin fp32 contiguous [T, D/2], or [B T, D/2] where
    each row of the batch has positions of its own -> (q [B, T, num_heads, D], k and v [B, T, num_kv_heads, D]), views
    of qkv. On the CPU, and while something traces, qkv itself is left alone. Raises ValueError where the widths do not
    fit or D is odd.
    """
    check_shapes(qkv, cos, sin, num_heads, num_kv_heads)
    if not runs_kernels(qkv):
        return rope_reference(qkv, cos, sin, num_heads, num_kv_heads)
    return _Rope.apply(qkv, cos, sin, num_heads, num_kv_heads)
