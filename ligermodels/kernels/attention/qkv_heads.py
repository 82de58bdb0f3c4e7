"""Access to the heads of a packed projection [B, T, (Hq + 2 Hkv) D], and their rotation: shared by the RoPE kernels.

B batch, T length, D head size, Hq query heads, Hkv key and value heads; all query heads come first, then keys, then
values. A gated projection has (2 Hq + 2 Hkv) D columns: behind each query head its gate. Angles are cos, sin
[rows, pairs] fp32: one row for each position if the batch shares positions, otherwise one for each token.
In kernels: HEADS heads of SIZE dimensions, the first ROTATED of which are rotated, TILE heads at a time; PAIRS is half
the dimensions that are held, padded to a power of two.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor


def split_heads(qkv: Tensor, num_heads: int, num_kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """[B, T, (Hq + 2 Hkv) D] as views q [B, T, Hq, D], k and v [B, T, Hkv, D]."""
    # Tensor.unflatten and Tensor.split do the same, microseconds slower.
    (batch, length, width), total = qkv.shape, num_heads + 2 * num_kv_heads
    heads = qkv.view(batch, length, total, width // total)
    q, k, v = torch.split_with_sizes(heads, (num_heads, num_kv_heads, num_kv_heads), 2)
    return q, k, v


def split_gated_heads(qkv: Tensor, num_heads: int, num_kv_heads: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gated [B, T, (2 Hq + 2 Hkv) D] as views q [B, T, Hq, D], k and v [B, T, Hkv, D], gate [B, T, Hq, D]."""
    queries, k, v = split_heads(qkv, 2 * num_heads, num_kv_heads)
    q, gate = queries.unflatten(2, (num_heads, 2)).unbind(3)
    return q, k, v, gate


def split_all_heads(qkv: Tensor, num_heads: int, num_kv_heads: int, gated: bool) -> tuple[Tensor, ...]:
    """Views q, k and v of the projection, and the gate if it has one."""
    split = split_gated_heads if gated else split_heads
    return split(qkv, num_heads, num_kv_heads)


def empty_queries_and_keys(qkv: Tensor, num_heads: int, num_kv_heads: int, gated: bool) -> Tensor:
    """Memory for queries and keys apart from the projection: [B, T, Hq + Hkv, D]."""
    heads = (1 + gated) * num_heads + 2 * num_kv_heads
    return qkv.new_empty(*qkv.shape[:2], num_heads + num_kv_heads, qkv.shape[2] // heads)


def with_unit_stride(x: Tensor) -> tuple[Tensor, tuple[int, int, int]]:
    """x [B, T, H, D] with unit stride along D, and its other strides; copies only if the stride along D is not 1."""
    batch, token, head, last = x.stride()
    if last != 1:
        x = x.contiguous()
        batch, token, head, _ = x.stride()
    return x, (batch, token, head)


@dataclass(frozen=True)
class HeadTile:
    """What one program holds at a time of a token: `heads` heads of `pairs` pairs each, padded to a power of two."""

    heads: int
    pairs: int

    def constants(self) -> dict[str, int]:
        return {"TILE": self.heads, "PAIRS": self.pairs}


def fit_head_tile(rotated: int, max_pairs: int) -> HeadTile:
    """The tile of at most `max_pairs` pairs, or of one head if that has more. rotated: dimensions of a head."""
    pairs = triton.next_power_of_2(rotated // 2)
    return HeadTile(max(1, max_pairs // pairs), pairs)


@triton.jit
def head_offsets(stride, first, HEADS: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr):
    """Offsets [TILE, WIDTH] of COLUMNS dimensions of TILE heads, and the mask of those that exist from head `first` on.

    The offsets are relative to head `first`: the caller adds that to the pointer, as one scalar instead of one value a
    thread.
    """
    head = tl.arange(0, TILE)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    return head.to(tl.int64) * stride + column, (head < HEADS - first) & (column < COLUMNS)


@triton.jit
def load_angles(cos_ptr, sin_ptr, row, ROTATED: tl.constexpr, TILE: tl.constexpr, PAIRS: tl.constexpr):
    """cos and sin [TILE, PAIRS], every row the same: in the layout of the heads, so threads exchange nothing. Pairs
    beyond those that are rotated have the angle zero."""
    offsets, mask = head_offsets(0, 0, TILE, ROTATED // 2, TILE, PAIRS)
    offsets += tl.cast(row, tl.int64) * (ROTATED // 2)
    return tl.load(cos_ptr + offsets, mask, other=1.0), tl.load(sin_ptr + offsets, mask, other=0.0)


@triton.jit
def pair_offsets(
    stride, first, HEADS: tl.constexpr, SIZE: tl.constexpr, ROTATED: tl.constexpr, TILE: tl.constexpr,
    PAIRS: tl.constexpr,
):  # fmt: skip
    """Offsets [TILE, PAIRS] of the first dimension of each pair, the distance of the second, and the mask of the pairs
    that exist; relative to head `first`, as those of `head_offsets`. The dimensions that are not rotated are held in
    pairs too, behind the others: each half of them in order."""
    offsets, mask = head_offsets(stride, first, HEADS, SIZE // 2, TILE, PAIRS)
    distance = SIZE // 2
    if ROTATED < SIZE:
        rotated = tl.arange(0, PAIRS)[None, :] < ROTATED // 2
        offsets = tl.where(rotated, offsets, offsets + ROTATED // 2)
        distance = tl.where(rotated, ROTATED // 2, (SIZE - ROTATED) // 2)
    return offsets, distance, mask


@triton.jit
def load_heads(
    x_ptr, stride, first, HEADS: tl.constexpr, SIZE: tl.constexpr, ROTATED: tl.constexpr, TILES: tl.constexpr,
    TILE: tl.constexpr, PAIRS: tl.constexpr, KEEP: tl.constexpr = False,
):  # fmt: skip
    """Both dimensions of each pair of TILES * TILE heads: a tuple of (x1, x2), each [TILE, PAIRS]. All loads are issued
    before any use.

    KEEP: keeps them in the cache for other programs.
    """
    policy: tl.constexpr = "evict_last" if KEEP else ""
    tiles = ()
    for index in tl.static_range(TILES):
        offsets, distance, mask = pair_offsets(stride, first + index * TILE, HEADS, SIZE, ROTATED, TILE, PAIRS)
        tile_ptr = x_ptr + tl.cast(first + index * TILE, tl.int64) * stride
        x1 = tl.load(tile_ptr + offsets, mask, other=0.0, eviction_policy=policy)
        x2 = tl.load(tile_ptr + offsets + distance, mask, other=0.0, eviction_policy=policy)
        tiles += ((x1, x2),)  # type: ignore[assignment]
    return tiles


@triton.jit
def store_heads(
    x_ptr, stride, x1, x2, first, HEADS: tl.constexpr, SIZE: tl.constexpr, ROTATED: tl.constexpr, TILE: tl.constexpr,
    PAIRS: tl.constexpr,
):  # fmt: skip
    """Stores both dimensions of each pair of TILE heads from `first` on."""
    offsets, distance, mask = pair_offsets(stride, first, HEADS, SIZE, ROTATED, TILE, PAIRS)
    x_ptr += first * stride
    tl.store(x_ptr + offsets, x1, mask)
    tl.store(x_ptr + offsets + distance, x2, mask)


@triton.jit
def rotate(x1, x2, cos, sin):
    """[x1, x2] rotated by the angle; by its negative if sin is negated."""
    return x1 * cos - x2 * sin, x2 * cos + x1 * sin


@triton.jit
def copy_heads(
    source_ptr, source_stride, target_ptr, first, LEFT: tl.constexpr,
    HEADS: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Copies the dimensions from LEFT on of TILE heads unchanged, WIDTH at a time."""
    source_ptr += tl.cast(first, tl.int64) * source_stride
    target_ptr += first * SIZE
    for left in tl.static_range(LEFT, SIZE, WIDTH):
        source, mask = head_offsets(source_stride, first, HEADS, SIZE - left, TILE, WIDTH)
        target, mask = head_offsets(SIZE, first, HEADS, SIZE - left, TILE, WIDTH)
        tl.store(target_ptr + left + target, tl.load(source_ptr + left + source, mask), mask)
