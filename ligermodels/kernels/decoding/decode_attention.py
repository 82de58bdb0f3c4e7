"""Attention of one query per row against a paged key-value cache (flash-decoding): a step of generation.

out_b = softmax(scale * q_b K_bᵀ) V_b, with an optional softcap of the scores, and an optional sink, which is one more
score of each query head whose value is zero. K_b and V_b are the keys and values that row b sees: positions 0 to
length - 1, or the last `window` of them. The query is at position length - 1.
q [B, Hq, D]; keys, values [slots, Hkv, D], one float dtype; lengths [B]; out [B, Hq, D]. Query head h reads key-value
head h // (Hq / Hkv). A slot holds the key and the value of one token; a block is `page_size` consecutive slots. Row b
has position p in block `block_table[b, (p // page_size) % max_blocks]` at p % page_size. The modulo makes a table with
blocks for only a window a ring.
Of latent attention the values are the first columns of the keys: a key is read once, in two parts, and its first part
serves as the value too.

The keys of a row are divided between programs, so that a few long rows fill the GPU; a second kernel combines their
results in a fixed order (bit-identical from run to run). How many programs a row has depends on shapes alone, so that
a CUDA graph can be captured; what each of them reads depends on the row's actual length. Scores and sums are in fp32.
Moves 2 Hkv D elements for each key of each row, Hkv D of latent attention: bound by memory bandwidth. Forward only.
Source: Dao et al. 2023, https://pytorch.org/blog/flash-decoding/; sinks: gpt-oss, https://arxiv.org/abs/2508.10925.
"""

import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.dispatch import (
    INDICES,
    INT32,
    check_floats,
    check_one_of,
    check_shape,
    refuse_gradients,
    register_op,
    runs_kernels,
    shape_of,
    widen,
)
from ligermodels.kernels.launch import Launcher, as_rows, cdiv, kernel, multiprocessors
from ligermodels.kernels.losses.softmax_sweep import LOG2_E, apply_softcap
from ligermodels.kernels.pdl import launch_dependents, pdl_constants, wait_for_previous_kernel

TILE_BYTES = 16384  # of the keys that one step of a program reads; as many of values
WARPS, STAGES, COMBINE_WARPS = 4, 3, 8
ATTENTION_PROGRAMS_PER_MULTIPROCESSOR = 2  # at least, if there are enough keys
MIN_ROWS = 16  # of a tile of queries: the smallest height of tl.dot
LATENT_ROWS = 16  # at most, where all query heads share a wide key: the sums of more would not fit into registers
COMBINED_SPLITS = 64  # that the second kernel reads at a time


class VisibleKeys(NamedTuple):
    """The keys that each row sees, for the reference. A step needs it once for all layers of equal windows.

    slots: int64 [B S]; S is what the row with most of them sees. visible: bool [B, 1, 1, S], whether a row sees them;
    None if all do. empty: bool [B, 1, 1], the rows without keys; None if there are none.
    """

    slots: Tensor
    visible: Tensor | None
    empty: Tensor | None


def visible_keys(block_table: Tensor, lengths: Tensor, window: int | None, page_size: int) -> VisibleKeys:
    """Arguments as those of `decode_attention`. Reads the lengths on the host."""
    of_rows = lengths.tolist()
    longest, shortest = max(of_rows, default=0), min(of_rows, default=0)
    seen = longest if window is None else min(window, longest)
    position = lengths[:, None] + torch.arange(-seen, 0, device=lengths.device)
    exists = None
    if shortest < seen:
        exists, position = (position >= 0)[:, None, None], position.clamp_min(0)
    pages = block_table.gather(1, position // page_size % block_table.shape[1])
    slots = pages.long() * page_size + position % page_size
    return VisibleKeys(slots.flatten(), exists, None if shortest else lengths[:, None, None] == 0)


def attend_visible_reference(
    q: Tensor, keys: Tensor, values: Tensor, seen: VisibleKeys, *, scale: float, softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`decode_attention` over these keys. All rows take as many as the longest needs; the others mask some."""
    rows, heads, size = q.shape
    kv_heads, length = keys.shape[1], len(seen.slots) // max(rows, 1)
    k, v = (
        x.index_select(0, seen.slots).view(rows, length, kv_heads, x.shape[2]).transpose(1, 2) for x in (keys, values)
    )  # [B, Hkv, S, D]
    out = _attend(q.reshape(rows, kv_heads, heads // kv_heads, size), k, v, seen.visible, scale, softcap, sinks)
    out = out.reshape(rows, heads, values.shape[2])
    return out if seen.empty is None else out.masked_fill(seen.empty, 0.0)


def decode_attention_reference(
    q: Tensor, keys: Tensor, values: Tensor | None, block_table: Tensor, lengths: Tensor, *, scale: float,
    window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None, page_size: int,
    value_size: int | None = None,
) -> Tensor:  # fmt: skip
    seen = visible_keys(block_table, lengths, window, page_size)
    values = keys[..., :value_size] if values is None else values
    return attend_visible_reference(q, keys, values, seen, scale=scale, softcap=softcap, sinks=sinks)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """q [B, Hkv, Hq / Hkv, D] over k, v [B, Hkv, S, D]: the query heads of a head take the place of a sequence."""
    if softcap is None and sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale)
    scores = widen(q @ k.mT) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        column = sinks.to(scores.dtype).view(1, q.shape[1], -1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, column), -1)
    return scores.softmax(-1)[..., : k.shape[2]].to(q.dtype) @ v


@triton.jit
def _locate(lengths_ptr, row, splits, KEYS: tl.constexpr, WINDOW: tl.constexpr):
    """(length, first key, first tile, tiles, tiles of a split): what a row sees, in tiles of KEYS keys."""
    length = tl.load(lengths_ptr + row).to(tl.int32)
    first_key = 0 if WINDOW is None else tl.maximum(length - WINDOW, 0)
    first_tile = first_key // KEYS
    tiles = tl.cdiv(length, KEYS) - first_tile
    return length, first_key, first_tile, tiles, tl.maximum(tl.cdiv(tiles, splits), 1)


@kernel(do_not_specialize=["table_stride", "max_blocks", "splits"])
def _split_kernel(
    q_ptr, keys_ptr, values_ptr, table_ptr, lengths_ptr, sinks_ptr, out_ptr, lse_ptr,
    q_stride, key_stride, value_stride, table_stride, max_blocks, splits, scale, softcap,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, VALUES: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, SPLIT: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, REST_WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: ROWS query heads of one key-value head of one row, over one split of the row's keys.

    VALUES: columns of a value. REST_WIDTH: 0, or the values are the first columns of the keys, and this is a power of
    two that covers the others. SPLIT: writes the split's output and log-sum-exp (base 2) for `_combine_kernel`, or
    nothing if the split is empty.
    """
    wait_for_previous_kernel(PDL)
    launch_dependents(PDL)
    query_tiles: tl.constexpr = (GROUP + ROWS - 1) // ROWS
    head = tl.program_id(0) % (KV_HEADS * query_tiles) // query_tiles
    split = tl.program_id(0) // (KV_HEADS * query_tiles) % splits
    row = (tl.program_id(0) // (KV_HEADS * query_tiles) // splits).to(tl.int64)
    length, first_key, first_tile, tiles, share = _locate(lengths_ptr, row, splits, KEYS, WINDOW)
    if SPLIT:  # noqa: SIM102  a compile-time constant: without it the branch is not compiled
        if split * share >= tiles:
            return
    query = tl.program_id(0) % query_tiles * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    key = tl.arange(0, KEYS)
    q_mask = (query < GROUP)[:, None] & (column < VALUES)[None, :]
    q_head = head * GROUP + query
    q_ptr += row * q_stride
    q = tl.load(q_ptr + q_head[:, None] * SIZE + column[None, :], q_mask, other=0.0)
    if REST_WIDTH:
        rest = VALUES + tl.arange(0, REST_WIDTH)
        rest_mask = (query < GROUP)[:, None] & (rest < SIZE)[None, :]
        q_rest = tl.load(q_ptr + q_head[:, None] * SIZE + rest[None, :], rest_mask, other=0.0)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if SINKS:  # the sink is where the first split starts from: a score whose value is zero
        sink = tl.load(sinks_ptr + q_head, query < GROUP, other=0.0).to(tl.float32) * LOG2_E
        top = tl.where(split == 0, sink, top)
        total += tl.where(split == 0, 1.0, 0.0)
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    table_ptr += row * table_stride
    keys_ptr += head * SIZE
    values_ptr += head * VALUES
    first = first_tile + split * share
    # A block is looked up one tile ahead: loads that wait for it in the same step would not be pipelined.
    block = tl.load(table_ptr + first * KEYS // PAGE % max_blocks)
    for tile in range(first, tl.minimum(first + share, first_tile + tiles)):
        start = tile * KEYS
        slot = block.to(tl.int64) * PAGE + start % PAGE + key
        block = tl.load(table_ptr + (start + KEYS) // PAGE % max_blocks)
        visible = (start + key < length) & (start + key >= first_key)
        k_mask = visible[None, :] & (column < VALUES)[:, None]
        k = tl.load(keys_ptr + slot[None, :] * key_stride + column[:, None], k_mask, other=0.0)
        scores = tl.dot(q, k, input_precision="ieee")
        if REST_WIDTH:
            k_mask = visible[None, :] & (rest < SIZE)[:, None]
            k_rest = tl.load(keys_ptr + slot[None, :] * key_stride + rest[:, None], k_mask, other=0.0)
            scores = tl.dot(q_rest, k_rest, scores, input_precision="ieee")
        scores *= scale
        if SOFTCAP:
            scores = apply_softcap(scores, softcap, q_ptr.dtype.element_ty == tl.float32)
        scores = tl.where(visible[None, :], scores * LOG2_E, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))  # finite: every tile has a visible key
        weights = tl.exp2(scores - new_top[:, None])
        decay = tl.exp2(top - new_top)
        total = total * decay + tl.sum(weights, 1)
        # Memory that no token was written to may hold NaN, which a weight of zero does not remove.
        if REST_WIDTH:
            v = tl.trans(k)
        else:
            v_mask = visible[:, None] & (column < VALUES)[None, :]
            v = tl.load(values_ptr + slot[:, None] * value_stride + column[None, :], v_mask, other=0.0)
        acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
        top = new_top
    acc /= tl.maximum(total, 1.0)[:, None]  # the total is at least 1, but 0 without keys
    target = (row * KV_HEADS * GROUP + q_head) * (splits if SPLIT else 1) + (split if SPLIT else 0)
    tl.store(out_ptr + target[:, None] * VALUES + column[None, :], acc.to(out_ptr.dtype.element_ty), q_mask)
    if SPLIT:
        tl.store(lse_ptr + target, top + tl.log2(total), query < GROUP)


@kernel(do_not_specialize=["splits"])
def _combine_kernel(
    partial_ptr, lse_ptr, lengths_ptr, out_ptr, splits, HEADS: tl.constexpr, SIZE: tl.constexpr,
    WINDOW: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program combines the splits of one query head of one row, SPLITS at a time."""
    wait_for_previous_kernel(PDL)
    pair = tl.program_id(0).to(tl.int64)
    _, _, _, tiles, share = _locate(lengths_ptr, pair // HEADS, splits, KEYS, WINDOW)
    column = tl.arange(0, WIDTH)
    top = -float("inf")
    total = 0.0
    acc = tl.zeros([WIDTH], tl.float32)
    used = tl.cdiv(tiles, share)
    for start in range(0, used, SPLITS):
        split = start + tl.arange(0, SPLITS)
        lse = tl.load(lse_ptr + pair * splits + split, split < used, other=float("-inf"))
        mask = (split < used)[:, None] & (column < SIZE)[None, :]
        partial = tl.load(partial_ptr + (pair * splits + split)[:, None] * SIZE + column[None, :], mask, other=0.0)
        new_top = tl.maximum(top, tl.max(lse, 0))
        weights = tl.exp2(lse - new_top)
        decay = tl.exp2(top - new_top)
        total = total * decay + tl.sum(weights, 0)
        acc = acc * decay + tl.sum(partial * weights[:, None], 0)
        top = new_top
    acc /= tl.maximum(total, 1.0)
    tl.store(out_ptr + pair * SIZE + column, acc.to(out_ptr.dtype.element_ty), column < SIZE)


@functools.cache
def _launchers(
    heads: int, kv_heads: int, size: int, values: int, itemsize: int, page_size: int, window: int | None, softcap: bool,
    sinks: bool, split: bool, device: torch.device,
) -> tuple[Launcher, Launcher]:  # fmt: skip
    width, group, keys = tile_width(values), heads // kv_heads, keys_per_tile(values, itemsize, page_size)
    stages = STAGES if keys * width * itemsize <= TILE_BYTES else STAGES - 1
    pdl = pdl_constants(device)
    attend = _split_kernel.bind(
        KV_HEADS=kv_heads, GROUP=group, SIZE=size, VALUES=values, PAGE=page_size, WINDOW=window, SOFTCAP=softcap,
        SINKS=sinks, SPLIT=split, ROWS=query_rows(group, size, values), KEYS=keys, WIDTH=width,
        REST_WIDTH=tile_width(size - values) if size > values else 0, num_warps=WARPS,
        num_stages=stages, **pdl,
    )  # fmt: skip
    combine = _combine_kernel.bind(
        HEADS=heads, SIZE=values, WINDOW=window, KEYS=keys, SPLITS=COMBINED_SPLITS, WIDTH=width,
        num_warps=COMBINE_WARPS, **pdl,
    )  # fmt: skip
    return attend, combine


def query_rows(group: int, size: int, values: int) -> int:
    """Query heads of a tile, for `group` of them to each key-value head."""
    rows = max(MIN_ROWS, triton.next_power_of_2(group))
    return min(rows, LATENT_ROWS) if size > values else rows


def keys_per_tile(size: int, itemsize: int, page_size: int) -> int:
    """Keys that one step of a program reads, all of one block."""
    return min(page_size, max(16, TILE_BYTES // (tile_width(size) * itemsize)))


def tile_width(size: int) -> int:
    """Columns of a tile of queries, keys or values; tl.dot needs 16."""
    return max(16, triton.next_power_of_2(size))


def num_splits(groups: int, max_keys: int, keys: int, device: torch.device) -> int:
    """How many programs a row's keys are divided between.

    groups: pairs of a row and a key-value head. max_keys: that a row can see. keys: of a tile.
    """
    wanted = cdiv(ATTENTION_PROGRAMS_PER_MULTIPROCESSOR * multiprocessors(device), groups)
    return min(wanted, cdiv(max_keys, keys))


def _launch(
    q: Tensor, keys: Tensor, values: Tensor | None, block_table: Tensor, lengths: Tensor, sinks: Tensor | None,
    scale: float, window: int | None, softcap: float | None, page_size: int, value_size: int | None,
) -> Tensor:  # fmt: skip
    out = _fake(q, keys, values, block_table, lengths, sinks, scale, window, softcap, page_size, value_size)
    (rows, heads, size), kv_heads, max_blocks = q.shape, keys.shape[1], block_table.shape[1]
    if not rows:
        return out
    q, block_table, lengths = _with_dense_heads(q), as_rows(block_table), lengths.contiguous()
    capacity, columns = max_blocks * page_size, out.shape[2]
    values = keys if values is None else values
    programs = rows * kv_heads * cdiv(heads // kv_heads, query_rows(heads // kv_heads, size, columns))
    splits = num_splits(
        programs, capacity if window is None else min(window, capacity), keys_per_tile(columns, q.itemsize, page_size),
        q.device,
    )  # fmt: skip
    attend, combine = _launchers(
        heads, kv_heads, size, columns, q.itemsize, page_size, window, softcap is not None, sinks is not None,
        splits > 1, q.device,
    )  # fmt: skip
    partial = lse = out
    if splits > 1:
        partial = q.new_empty(rows, heads, splits, columns, dtype=torch.float32)
        lse = q.new_empty(rows, heads, splits, dtype=torch.float32)
    attend(
        programs * splits, q, keys, values, block_table, lengths, q if sinks is None else sinks.contiguous(), partial,
        lse, q.stride(0), keys.stride(0), values.stride(0), block_table.stride(0), max_blocks, splits,
        float(scale), float(softcap or 0.0),
    )  # fmt: skip
    if splits > 1:
        combine(rows * heads, partial, lse, lengths, out, splits)
    return out


def _with_dense_heads(x: Tensor) -> Tensor:
    """x [rows, heads, D] with each row contiguous and any stride between rows; a view where possible."""
    return x if x.stride(-1) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def _fake(q, keys, values, block_table, lengths, sinks, scale, window, softcap, page_size, value_size):
    return q.new_empty(*q.shape[:2], q.shape[2] if value_size is None else value_size)


_decode_attention = register_op(
    "decode_attention(Tensor q, Tensor keys, Tensor? values, Tensor block_table, Tensor lengths, Tensor? sinks,"
    " float scale, SymInt? window, float? softcap, SymInt page_size, SymInt? value_size) -> Tensor",
    _launch,
    _fake,
)


def decode_attention(
    q: Tensor, keys: Tensor, values: Tensor | None, block_table: Tensor, lengths: Tensor, *, scale: float,
    window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None, page_size: int,
    value_size: int | None = None,
) -> Tensor:  # fmt: skip
    """Attention of one query per row against a paged cache -> [B, Hq, D].

    q [B, Hq, D]; keys, values [slots, Hkv, D] in q's dtype, each slot contiguous, slots a multiple of page_size.
    block_table int32 [B, max_blocks]: row b has position p in slot
    block_table[b, (p // page_size) % max_blocks] * page_size + p % page_size.
    lengths int32 or int64 [B]: number of positions up to and including the query's own; 0 gives zeros.
    window: number of keys that a query sees, its own included; None for all. The table then needs room for the window
    only, cdiv(window - 1, page_size) + 1 blocks.
    softcap: bounds the scores to softcap * tanh(scores / softcap). sinks [Hq] any float dtype: one more score for each
    head, whose value is zero. page_size: 16 or more, a power of two.
    value_size: without values, the number of the keys' first columns that are the values; the result is then
    [B, Hq, value_size].
    Nothing is read where no position is; no value is read on the host. Raises ValueError where shapes or dtypes
    disagree, RuntimeError if a gradient is needed.
    """
    refuse_gradients("decode_attention", q, keys, values, sinks)
    _check(q, keys, values, block_table, lengths, sinks, page_size, value_size)
    if not runs_kernels(q):
        return decode_attention_reference(
            q, keys, values, block_table, lengths, scale=scale, window=window, softcap=softcap, sinks=sinks,
            page_size=page_size, value_size=value_size,
        )  # fmt: skip
    return _decode_attention(
        q, keys, values, block_table, lengths, sinks, scale, window, softcap, page_size, value_size
    )


def _check(
    q: Tensor, keys: Tensor, values: Tensor | None, block_table: Tensor, lengths: Tensor, sinks: Tensor | None,
    page_size: int, value_size: int | None,
) -> None:  # fmt: skip
    if page_size < 16 or page_size & (page_size - 1):
        raise ValueError(f"decode_attention: page_size is {page_size}; it must be a power of two, 16 or more")
    rows, heads, size = shape_of("decode_attention", "q", q, "B, Hq, D")
    slots, kv_heads, _ = shape_of("decode_attention", "keys", keys, "slots, Hkv, D")
    check_floats("decode_attention", q=q, sinks=sinks)
    check_one_of("decode_attention", INT32, block_table=block_table)
    check_one_of("decode_attention", INDICES, lengths=lengths)
    if (values is None) != (value_size is not None) or (value_size is not None and not 0 < value_size < size):
        raise ValueError(
            f"decode_attention: value_size is {value_size}; without values it must be 1 to {size - 1}, fewer than the"
            " columns of the keys, and beside them None"
        )
    values = keys if values is None else values
    if values.shape != keys.shape or keys.shape[2] != size or slots % page_size or heads % kv_heads:
        raise ValueError(
            f"decode_attention: q has shape {list(q.shape)}, keys {list(keys.shape)}, values {list(values.shape)};"
            " expected [B, Hq, D] and twice [slots, Hkv, D], Hq a multiple of Hkv, slots a multiple of page_size"
            f" {page_size}"
        )
    if block_table.ndim != 2 or len(block_table) != rows or lengths.shape != (rows,):
        raise ValueError(
            f"decode_attention: block_table has shape {list(block_table.shape)}, lengths {list(lengths.shape)};"
            f" expected [{rows}, max_blocks] and [{rows}]"
        )
    check_shape("decode_attention", "sinks", sinks, heads)
    for name, x in (("keys", keys), ("values", values)):
        if x.stride()[1:] != (size, 1):
            raise ValueError(f"decode_attention: {name} has strides {x.stride()}; each slot must be contiguous")
        if x.dtype != q.dtype:
            raise ValueError(f"decode_attention: {name} is {x.dtype}, q {q.dtype}; they must be equal")
