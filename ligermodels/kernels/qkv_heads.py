"""How kernels address the heads of a packed projection [B, T, (Hq + 2 Hkv) D], and what their rotation takes.

B batch, T length, D head size, Hq query heads, Hkv key and value heads; all query heads come first, then keys, then
values. Angles are cos, sin [rows, pairs] fp32: a row for each position that the batch shares, or for each token.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


def split_heads(qkv: Tensor, num_heads: int, num_kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """[B, T, (Hq + 2 Hkv) D] as views q [B, T, Hq, D], k and v [B, T, Hkv, D]."""
    # Tensor.unflatten and Tensor.split take microseconds to come to this.
    (batch, length, width), total = qkv.shape, num_heads + 2 * num_kv_heads
    heads = qkv.view(batch, length, total, width // total)
    q, k, v = torch.split_with_sizes(heads, (num_heads, num_kv_heads, num_kv_heads), 2)
    return q, k, v


def check_shapes(
    op: str, qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int, *, partial: bool
) -> int:
    """The head size. Raises ValueError where qkv or the angles do not fit, or the angles are not contiguous.

    partial: angles for a part of a head will do.
    """
    batch, length, width = qkv.shape
    heads = num_heads + 2 * num_kv_heads
    head_size = width // heads
    if heads * head_size != width:
        raise ValueError(f"{op}: qkv is {width} wide, no multiple of {heads} heads")
    rows, pairs = shape = cos.shape
    fits = 0 < 2 * pairs <= head_size if partial else 2 * pairs == head_size
    if shape != sin.shape or rows not in (length, batch * length) or not fits:
        needed = f"1 to {head_size // 2}" if partial else f"{head_size / 2:g}"
        raise ValueError(
            f"{op}: cos {list(cos.shape)} and sin {list(sin.shape)}; needed [{length}, pairs], or"
            f" [{batch * length}, pairs] for positions of each row's own, and {needed} pairs"
        )
    if not (cos.is_contiguous() and sin.is_contiguous()):
        raise ValueError(f"{op}: cos of strides {cos.stride()} and sin of {sin.stride()}; needed contiguous ones")
    return head_size


def with_unit_stride(x: Tensor) -> tuple[Tensor, tuple[int, int, int]]:
    """x [B, T, H, D] with unit stride along D, and its other strides; a copy only where that must be."""
    batch, token, head, last = x.stride()
    if last != 1:
        x = x.contiguous()
        batch, token, head, _ = x.stride()
    return x, (batch, token, head)


@triton.jit
def places(stride, first, HEADS: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr):
    """Offsets of COLUMNS dimensions of TILE heads [TILE, WIDTH], and which there are where the first is head `first`.

    What `first` adds to the offsets is left to the pointers, where it is one number and not one a thread.
    """
    head = tl.arange(0, TILE)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    return head.to(tl.int64) * stride + column, (head < HEADS - first) & (column < COLUMNS)


@triton.jit
def load_angles(cos_ptr, sin_ptr, row, ROTATED: tl.constexpr, TILE: tl.constexpr, PAIRS: tl.constexpr):
    """cos and sin [TILE, PAIRS], every row the same: laid out as the heads are, they never travel between threads."""
    place, mask = places(0, 0, TILE, ROTATED // 2, TILE, PAIRS)
    place += tl.cast(row, tl.int64) * (ROTATED // 2)
    return tl.load(cos_ptr + place, mask, other=0.0), tl.load(sin_ptr + place, mask, other=0.0)


@triton.jit
def load_heads(
    x_ptr, stride, first, HEADS: tl.constexpr, SIZE: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr,
    PAIRS: tl.constexpr, KEEP: tl.constexpr = False,
):  # fmt: skip
    """Both halves of TILES * TILE heads: a tuple of (x1, x2), each [TILE, PAIRS]. All are read before one is used.

    KEEP: in the cache, for other programs.
    """
    policy: tl.constexpr = "evict_last" if KEEP else ""
    tiles = ()
    for index in tl.static_range(TILES):
        place, mask = places(stride, first + index * TILE, HEADS, SIZE // 2, TILE, PAIRS)
        tile_ptr = x_ptr + tl.cast(first + index * TILE, tl.int64) * stride
        first_half = tl.load(tile_ptr + place, mask, other=0.0, eviction_policy=policy)
        second_half = tl.load(tile_ptr + SIZE // 2 + place, mask, other=0.0, eviction_policy=policy)
        tiles += ((first_half, second_half),)  # type: ignore[assignment]
    return tiles


@triton.jit
def store_heads(x_ptr, x1, x2, first, HEADS: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr, PAIRS: tl.constexpr):
    place, mask = places(SIZE, first, HEADS, SIZE // 2, TILE, PAIRS)
    x_ptr += first * SIZE
    tl.store(x_ptr + place, x1, mask)
    tl.store(x_ptr + SIZE // 2 + place, x2, mask)


@triton.jit
def rotate(x1, x2, cos, sin):
    return x1 * cos - x2 * sin, x2 * cos + x1 * sin


@triton.jit
def copy_heads(
    source_ptr, source_stride, target_ptr, first, LEFT: tl.constexpr,
    HEADS: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Moves the dimensions from LEFT on of TILE heads as they are."""
    source_ptr += tl.cast(first, tl.int64) * source_stride
    target_ptr += first * SIZE
    for left in tl.static_range(LEFT, SIZE, WIDTH):
        source, mask = places(source_stride, first, HEADS, SIZE - left, TILE, WIDTH)
        target, mask = places(SIZE, first, HEADS, SIZE - left, TILE, WIDTH)
        tl.store(target_ptr + left + target, tl.load(source_ptr + left + source, mask), mask)
