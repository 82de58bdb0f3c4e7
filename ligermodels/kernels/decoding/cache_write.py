"""Writes of keys and values to a paged key-value cache, alone or with the rotation of a packed projection.

    write_cache                  keys[slot_t] = k_t, values[slot_t] = v_t, for each token t
    rope_write_cache_            `rope_`, and the write of the rotated keys and of the values
    qk_norm_rope_write_cache     `qk_norm_rope`, and the same write
k, v [B, T, Hkv, D] or qkv [B, T, (Hq + 2 Hkv) D] any float dtype; keys, values [slots, Hkv, D] in the same dtype; slots
[B T] int64. A slot holds one token; several tokens may have the same slot if nothing reads it (a scratch slot). One
launch each. Inference only. Bound by the launch for few tokens, otherwise by memory bandwidth: 4 B T Hkv D elements, or
what the rotation moves and 3 B T Hkv D.
"""

import functools
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.attention.qk_norm_rope import (
    check_norm_weights,
    heads_rstd,
    norm_heads,
    qk_norm_rope_reference,
)
from ligermodels.kernels.attention.qkv_heads import (
    copy_heads,
    empty_queries_and_keys,
    fit_head_tile,
    load_angles,
    load_heads,
    split_all_heads,
    split_heads,
    with_unit_stride,
)
from ligermodels.kernels.attention.rope import check_qkv_shapes, check_row_stride, rope_reference, rotate_heads
from ligermodels.kernels.dispatch import (
    check_dtypes,
    check_shape,
    refuse_gradients,
    register_op,
    runs_kernels,
    shape_of,
)
from ligermodels.kernels.launch import Launcher, as_rows_with_stride, cdiv, kernel
from ligermodels.kernels.pdl import pdl_constants, wait_for_previous_kernel

WRITE_PAIRS = 256  # of dimensions that one program writes: many small programs, because there are few tokens
WRITE_WARPS = 2


class CacheSlots(NamedTuple):
    """Where the keys and values of a call's tokens are written."""

    keys: Tensor  # [slots, Hkv, D], each slot contiguous
    values: Tensor  # the same
    slots: Tensor  # int64 [tokens], contiguous


def write_cache_reference(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    keys.index_copy_(0, slots, k.flatten(0, 1))
    values.index_copy_(0, slots, v.flatten(0, 1))


@kernel(do_not_specialize=["length"])
def _write_kernel(
    k_ptr, v_ptr, keys_ptr, values_ptr, slots_ptr, k_batch, k_token, k_head, v_batch, v_token, v_head, key_stride,
    value_stride, length, HEADS: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr, PAIRS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program copies TILE heads of one token's k or v."""
    wait_for_previous_kernel(PDL)
    tiles: tl.constexpr = (HEADS + TILE - 1) // TILE
    token, tile = tl.program_id(0) // (2 * tiles), tl.program_id(0) % (2 * tiles)
    batch, time = (token // length).to(tl.int64), (token % length).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if tile < tiles:
        source_ptr = k_ptr + batch * k_batch + time * k_token
        copy_heads(source_ptr, k_head, keys_ptr + slot * key_stride, tile * TILE, 0, HEADS, SIZE, TILE, 2 * PAIRS)
    else:
        source_ptr = v_ptr + batch * v_batch + time * v_token
        first = (tile - tiles) * TILE
        copy_heads(source_ptr, v_head, values_ptr + slot * value_stride, first, 0, HEADS, SIZE, TILE, 2 * PAIRS)


@functools.cache
def _write(heads: int, size: int, device: torch.device) -> tuple[Launcher, int]:
    """The launcher of the write, and how many programs a token takes."""
    tile = fit_head_tile(size, WRITE_PAIRS)
    launch = _write_kernel.bind(
        HEADS=heads, SIZE=size, **tile.constants(), num_warps=WRITE_WARPS, **pdl_constants(device)
    )  # fmt: skip
    return launch, 2 * cdiv(heads, tile.heads)


def _launch_write(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    batch, length, heads, size = k.shape
    (k, k_strides), (v, v_strides) = with_unit_stride(k), with_unit_stride(v)
    launch, programs = _write(heads, size, k.device)
    if tokens := batch * length:
        launch(
            tokens * programs, k, v, keys, values, slots, *k_strides, *v_strides, keys.stride(0), values.stride(0),
            length,
        )  # fmt: skip


_write_op = register_op("write_cache", _launch_write, writes=("keys", "values"))


def write_cache(k: Tensor, v: Tensor, cache: CacheSlots) -> None:
    """Writes k, v [B, T, Hkv, D] to the cache's slots: keys and values of attention without RoPE (NoPE).

    Raises ValueError if the cache does not fit, RuntimeError if a gradient is needed.
    """
    refuse_gradients("write_cache", k, v)
    check_shape("write_cache", "v", v, *shape_of("write_cache", "k", k, "B, T, Hkv, D"))
    check_dtypes("write_cache", k=k, v=v)
    check_cache("write_cache", k, cache)
    if runs_kernels(k):
        _write_op(k, v, *cache)
    else:
        write_cache_reference(k, v, *cache)


def check_cache(op: str, k: Tensor, cache: CacheSlots) -> None:
    keys, values, slots = cache
    batch, length, *head = k.shape
    if keys.shape[1:] != (*head,) or values.shape != keys.shape or slots.shape != (batch * length,):
        raise ValueError(
            f"{op}: the cache's keys have shape {list(keys.shape)}, values {list(values.shape)}, slots"
            f" {list(slots.shape)}; expected twice [slots, {', '.join(map(str, head))}] and [{batch * length}]"
        )
    if keys.stride()[1:] != (head[1], 1) or values.stride()[1:] != (head[1], 1) or not slots.is_contiguous():
        raise ValueError(
            f"{op}: the cache's keys have strides {keys.stride()}, values {values.stride()}, slots {slots.stride()};"
            " each slot of keys and values must be contiguous, and the slots too"
        )
    if (keys.dtype, values.dtype, slots.dtype) != (k.dtype, k.dtype, torch.int64):
        raise ValueError(
            f"{op}: the cache's keys are {keys.dtype}, values {values.dtype}, slots {slots.dtype};"
            f" expected twice {k.dtype}, and torch.int64"
        )


ROW_PAIRS, ROW_WARPS = 512, 4  # at a time, where a program normalizes all heads of a token together


@kernel(do_not_specialize=["angle_rows"])
def _rope_write_kernel(
    qkv_ptr, cos_ptr, sin_ptr, keys_ptr, values_ptr, slots_ptr, qkv_stride, key_stride, value_stride, angle_rows,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, SIZE: tl.constexpr, ROTATED: tl.constexpr,
    INTERLEAVED: tl.constexpr, TILE: tl.constexpr, PAIRS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program rotates TILE of one token's query or key heads in place, or copies TILE of its values."""
    wait_for_previous_kernel(PDL)
    q_tiles: tl.constexpr = (Q_HEADS + TILE - 1) // TILE
    k_tiles: tl.constexpr = (K_HEADS + TILE - 1) // TILE
    tiles: tl.constexpr = q_tiles + 2 * k_tiles
    token, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    angle_row = token % angle_rows
    q_ptr = qkv_ptr + token.to(tl.int64) * qkv_stride
    k_ptr = q_ptr + Q_HEADS * SIZE
    v_ptr = k_ptr + K_HEADS * SIZE
    slot = tl.load(slots_ptr + token)
    if tile < q_tiles:
        rotate_heads(
            q_ptr, SIZE, q_ptr, cos_ptr, sin_ptr, angle_row, 1.0, tile * TILE,
            Q_HEADS, SIZE, ROTATED, INTERLEAVED, TILE, PAIRS,
        )  # fmt: skip
    elif tile < q_tiles + k_tiles:
        first = (tile - q_tiles) * TILE
        slot_ptr = keys_ptr + slot * key_stride
        rotate_heads(  # to the cache first: then the projection still has what is rotated
            k_ptr, SIZE, slot_ptr, cos_ptr, sin_ptr, angle_row, 1.0, first,
            K_HEADS, SIZE, ROTATED, INTERLEAVED, TILE, PAIRS,
        )  # fmt: skip
        copy_heads(k_ptr, SIZE, slot_ptr, first, ROTATED, K_HEADS, SIZE, TILE, 2 * PAIRS)
        rotate_heads(
            k_ptr, SIZE, k_ptr, cos_ptr, sin_ptr, angle_row, 1.0, first,
            K_HEADS, SIZE, ROTATED, INTERLEAVED, TILE, PAIRS,
        )  # fmt: skip
    else:
        first = (tile - q_tiles - k_tiles) * TILE
        copy_heads(v_ptr, SIZE, values_ptr + slot * value_stride, first, 0, K_HEADS, SIZE, TILE, 2 * PAIRS)


@kernel(do_not_specialize=["angle_rows"])
def _qk_norm_rope_write_kernel(
    qkv_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, qk_ptr, keys_ptr, values_ptr, slots_ptr,
    qkv_stride, key_stride, value_stride, angle_rows, eps, offset,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, SIZE: tl.constexpr, Q_STRIDE: tl.constexpr, ROTATED: tl.constexpr,
    TILE: tl.constexpr, PAIRS: tl.constexpr, WHOLE_ROW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program normalizes and rotates TILE of one token's query or key heads, or with WHOLE_ROW all of them; or
    copies TILE of its values. Queries of the projection are Q_STRIDE elements apart."""
    wait_for_previous_kernel(PDL)
    q_tiles: tl.constexpr = (Q_HEADS + TILE - 1) // TILE
    k_tiles: tl.constexpr = (K_HEADS + TILE - 1) // TILE
    q_parts: tl.constexpr = 1 if WHOLE_ROW else q_tiles
    k_parts: tl.constexpr = 1 if WHOLE_ROW else k_tiles
    parts: tl.constexpr = q_parts + k_parts + k_tiles
    q_together: tl.constexpr = q_tiles if WHOLE_ROW else 1
    k_together: tl.constexpr = k_tiles if WHOLE_ROW else 1
    weight_stride: tl.constexpr = SIZE if WHOLE_ROW else 0
    token, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    q_ptr = qkv_ptr + token.to(tl.int64) * qkv_stride
    k_ptr = q_ptr + Q_HEADS * Q_STRIDE
    v_ptr = k_ptr + K_HEADS * SIZE
    q_out_ptr = qk_ptr + token.to(tl.int64) * ((Q_HEADS + K_HEADS) * SIZE)
    slot = tl.load(slots_ptr + token)
    if part < q_parts:
        first = part * TILE
        cos, sin = load_angles(cos_ptr, sin_ptr, token % angle_rows, ROTATED, TILE, PAIRS)
        q = load_heads(q_ptr, Q_STRIDE, first, Q_HEADS, SIZE, ROTATED, q_together, TILE, PAIRS)
        weight = load_heads(q_weight_ptr, weight_stride, 0, Q_HEADS, SIZE, ROTATED, q_together, TILE, PAIRS)
        rstd = heads_rstd(q, eps, Q_HEADS, SIZE, TILE, PAIRS, WHOLE_ROW)
        norm_heads(q, rstd, weight, q_out_ptr, cos, sin, offset, first, Q_HEADS, SIZE, ROTATED, q_together, TILE, PAIRS)
    elif part < q_parts + k_parts:
        first = (part - q_parts) * TILE
        cos, sin = load_angles(cos_ptr, sin_ptr, token % angle_rows, ROTATED, TILE, PAIRS)
        k = load_heads(k_ptr, SIZE, first, K_HEADS, SIZE, ROTATED, k_together, TILE, PAIRS)
        weight = load_heads(k_weight_ptr, weight_stride, 0, K_HEADS, SIZE, ROTATED, k_together, TILE, PAIRS)
        rstd = heads_rstd(k, eps, K_HEADS, SIZE, TILE, PAIRS, WHOLE_ROW)
        k_out_ptr = q_out_ptr + Q_HEADS * SIZE
        norm_heads(k, rstd, weight, k_out_ptr, cos, sin, offset, first, K_HEADS, SIZE, ROTATED, k_together, TILE, PAIRS)
        slot_ptr = keys_ptr + slot * key_stride
        norm_heads(k, rstd, weight, slot_ptr, cos, sin, offset, first, K_HEADS, SIZE, ROTATED, k_together, TILE, PAIRS)
    else:
        first = (part - q_parts - k_parts) * TILE
        copy_heads(v_ptr, SIZE, values_ptr + slot * value_stride, first, 0, K_HEADS, SIZE, TILE, 2 * PAIRS)


@functools.cache
def _rope_write(
    heads: int, kv_heads: int, size: int, rotated: int, interleaved: bool, device: torch.device
) -> tuple[Launcher, int]:
    """The launcher of RoPE and the write, and how many programs a token takes."""
    tile = fit_head_tile(rotated, WRITE_PAIRS)
    launch = _rope_write_kernel.bind(
        Q_HEADS=heads, K_HEADS=kv_heads, SIZE=size, ROTATED=rotated, INTERLEAVED=interleaved, **tile.constants(),
        num_warps=WRITE_WARPS, **pdl_constants(device),
    )  # fmt: skip
    return launch, cdiv(heads, tile.heads) + 2 * cdiv(kv_heads, tile.heads)


@functools.cache
def _qk_norm_rope_write(
    heads: int, kv_heads: int, size: int, rotated: int, whole_row: bool, gated: bool, device: torch.device
) -> tuple[Launcher, int]:
    """The launcher of QK-norm, RoPE and the write, and how many programs a token takes."""
    tile = fit_head_tile(size, ROW_PAIRS if whole_row else WRITE_PAIRS)
    launch = _qk_norm_rope_write_kernel.bind(
        Q_HEADS=heads, K_HEADS=kv_heads, SIZE=size, Q_STRIDE=(1 + gated) * size, ROTATED=rotated, WHOLE_ROW=whole_row,
        **tile.constants(), num_warps=ROW_WARPS if whole_row else WRITE_WARPS, **pdl_constants(device),
    )  # fmt: skip
    q_tiles, k_tiles = cdiv(heads, tile.heads), cdiv(kv_heads, tile.heads)
    return launch, k_tiles + (2 if whole_row else q_tiles + k_tiles)


def _launch_rope_write(
    qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int, interleaved: bool, keys: Tensor,
    values: Tensor, slots: Tensor,
) -> None:  # fmt: skip
    width = stride = qkv.shape[-1]
    if not qkv.is_contiguous():
        qkv = qkv.view(-1, width)  # a copy would lose the rotation
        stride = qkv.stride(0)
    angle_rows, pairs = cos.shape
    size = width // (num_heads + 2 * num_kv_heads)
    launch, programs = _rope_write(num_heads, num_kv_heads, size, 2 * pairs, interleaved, qkv.device)
    if tokens := qkv.numel() // width:
        launch(
            tokens * programs, qkv, cos, sin, keys, values, slots, stride, keys.stride(0), values.stride(0), angle_rows
        )


def _launch_qk_norm_rope_write(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int,
    eps: float, offset: float, gated: bool, keys: Tensor, values: Tensor, slots: Tensor,
) -> Tensor:  # fmt: skip
    qk = empty_queries_and_keys(qkv, num_heads, num_kv_heads, gated)
    batch, length, _, size = qk.shape
    tokens, (qkv, stride) = batch * length, as_rows_with_stride(qkv, qkv.shape[-1])
    whole_row = q_weight.shape[0] > size
    launch, programs = _qk_norm_rope_write(
        num_heads, num_kv_heads, size, 2 * cos.shape[1], whole_row, gated, qkv.device
    )
    if tokens:
        launch(
            tokens * programs, qkv, q_weight.contiguous(), k_weight.contiguous(), cos, sin, qk, keys, values, slots,
            stride, keys.stride(0), values.stride(0), cos.shape[0], eps, offset,
        )  # fmt: skip
    return qk


def _fake_qk_norm_rope_write(qkv, q_weight, k_weight, cos, sin, num_heads, num_kv_heads, eps, offset, gated, *cache):
    return empty_queries_and_keys(qkv, num_heads, num_kv_heads, gated)


_rope_write_op = register_op("rope_write_cache_", _launch_rope_write, writes=("qkv", "keys", "values"))
_qk_norm_rope_write_op = register_op(
    "qk_norm_rope_write_cache", _launch_qk_norm_rope_write, _fake_qk_norm_rope_write, writes=("keys", "values")
)


def rope_write_cache_(
    qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int, interleaved: bool, cache: CacheSlots
) -> tuple[Tensor, Tensor, Tensor]:
    """`rope_`, and the write of the rotated keys and of the values to the cache, in one launch.

    Arguments, results and errors as those of `rope_`; qkv is rotated in place while tracing too. Raises ValueError if
    the cache does not fit, RuntimeError if a gradient is needed.
    """
    refuse_gradients("rope_write_cache_", qkv)
    check_qkv_shapes("rope_write_cache_", qkv, cos, sin, num_heads, num_kv_heads)
    check_row_stride("rope_write_cache_", qkv)
    heads = num_heads, num_kv_heads
    q, k, v = split_heads(qkv, *heads)
    check_cache("rope_write_cache_", k, cache)
    if runs_kernels(qkv):
        _rope_write_op(qkv, cos, sin, *heads, interleaved, *cache)
    else:
        q, k, v = rope_reference(qkv, cos, sin, *heads, interleaved)
        write_cache_reference(k, v, *cache)
    return q, k, v


def qk_norm_rope_write_cache(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int,
    eps: float, offset: float, cache: CacheSlots, gated: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    """`qk_norm_rope`, and the write of its keys and of the values to the cache, in one launch.

    Arguments, results and errors as those of `qk_norm_rope`. Raises ValueError if the cache does not fit, RuntimeError
    if a gradient is needed.
    """
    op = "qk_norm_rope_write_cache"
    refuse_gradients(op, qkv, q_weight, k_weight)
    head_size = check_qkv_shapes(op, qkv, cos, sin, num_heads, num_kv_heads, gated)
    check_norm_weights(op, q_weight, k_weight, num_heads, num_kv_heads, head_size)
    _, k, *others = split_all_heads(qkv, num_heads, num_kv_heads, gated)
    check_cache(op, k, cache)
    options = q_weight, k_weight, cos, sin, num_heads, num_kv_heads, eps, offset, gated
    if not runs_kernels(qkv):
        q, k, *others = qk_norm_rope_reference(qkv, *options)
        write_cache_reference(k, others[0], *cache)
        return q, k, *others
    q, k = torch.split_with_sizes(_qk_norm_rope_write_op(qkv, *options, *cache), (num_heads, num_kv_heads), 2)
    return q, k, *others
