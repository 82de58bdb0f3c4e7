"""Write of keys and values to a paged key-value cache: keys[slot_t] = k_t, values[slot_t] = v_t, for each token t.

k, v [B, T, Hkv, D] any float dtype; keys, values [slots, Hkv, D] in the same dtype; slots [B T] int64. A slot holds one
token; several tokens may have the same slot if nothing reads it (a scratch slot). One launch. Inference only.
Bound by the launch for few tokens, otherwise by memory bandwidth: 4 B T Hkv D elements. Where keys are rotated, the
same kernel writes them: rope_cache_write.py.
"""

import functools
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.attention.qkv_heads import copy_heads, fit_head_tile, with_unit_stride
from ligermodels.kernels.dispatch import (
    check_dtypes,
    check_shape,
    fake_without_outputs,
    refuse_gradients,
    register_op,
    runs_kernels,
    shape_of,
)
from ligermodels.kernels.launch import Launcher, cdiv, kernel
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


CACHE_SCHEMA = "Tensor(b!) keys, Tensor(c!) values, Tensor slots"
_write_op = register_op(f"write_cache(Tensor k, Tensor v, {CACHE_SCHEMA}) -> ()", _launch_write, fake_without_outputs)


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
