"""Keys or values of documents that share a prefix: a gather before attention, and its gradient.

In a packed row of T tokens a token's key is read by its own document and by every document that has the token in its
prefix: token t has the copies offsets[t], …, offsets[t + 1] - 1, and copy c is row places[c] of K rows.
    forward    y[places[c]] = x[t]             for each copy c of token t
    backward   dx[t] = Σ_c dy[places[c]]       in fp32, in ascending order of c
x [1, T, Hkv, D] any float dtype -> y [1, K, Hkv, D]; offsets int32 [T + 1], places int32 [K].
Moves (T + K) Hkv D elements in each direction: a program handles one token, and so reads x, or writes dx, once. No
atomics: gradients are bit-identical from run to run. No host synchronisation: K is a shape.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.activations.gated_activation import split_row
from ligermodels.kernels.dispatch import (
    INT32,
    Node,
    check_floats,
    check_one_of,
    check_shape,
    register_op,
    runs_kernels,
    shape_of,
    widen,
)
from ligermodels.kernels.launch import Kernel, as_rows_with_stride, kernel


class SharedKeys(NamedTuple):
    """Which keys the documents of a packed row read, where several documents share a prefix.

    offsets: int32 [T + 1] and places: int32 [K], as above. cu_seqlens: int32 [documents + 1], offsets of the documents
    in the K gathered keys; a document's keys are those of its prefix, then its own. max_seqlen: the most keys of a
    document.
    """

    offsets: Tensor
    places: Tensor
    cu_seqlens: Tensor
    max_seqlen: int

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> "SharedKeys":
        offsets, places, cu_seqlens = map(function, (self.offsets, self.places, self.cu_seqlens))
        return SharedKeys(offsets, places, cu_seqlens, self.max_seqlen)


def gather_keys_reference(x: Tensor, offsets: Tensor, places: Tensor) -> Tensor:
    tokens = torch.arange(x.shape[1], device=x.device).repeat_interleave(offsets.diff(), output_size=len(places))
    index = torch.empty_like(tokens).scatter(0, places.long(), tokens)
    return widen(x)[:, index].to(x.dtype)


@triton.jit
def _locate_tile(columns, TILE: tl.constexpr):
    """Token and columns of this program. Consecutive programs share a token, for locality in memory."""
    tiles = tl.cdiv(columns, TILE)
    return (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles * TILE + tl.arange(0, TILE)


@kernel()
def _gather_kernel(x_ptr, offsets_ptr, places_ptr, y_ptr, stride, columns, TILE: tl.constexpr):
    """One program writes TILE columns of one token to all places."""
    token, column = _locate_tile(columns, TILE)
    mask = column < columns
    x = tl.load(x_ptr + token * stride + column, mask)
    for copy in range(tl.load(offsets_ptr + token), tl.load(offsets_ptr + token + 1)):
        place = tl.load(places_ptr + copy).to(tl.int64)
        tl.store(y_ptr + place * columns + column, x, mask)


@kernel()
def _sum_kernel(dy_ptr, offsets_ptr, places_ptr, dx_ptr, stride, columns, TILE: tl.constexpr):
    """One program sums TILE columns of the gradients of one token's copies."""
    token, column = _locate_tile(columns, TILE)
    mask = column < columns
    total = tl.zeros([TILE], tl.float32)
    for copy in range(tl.load(offsets_ptr + token), tl.load(offsets_ptr + token + 1)):
        place = tl.load(places_ptr + copy).to(tl.int64)
        total += tl.load(dy_ptr + place * stride + column, mask, other=0.0).to(tl.float32)
    tl.store(dx_ptr + token * columns + column, total.to(dx_ptr.dtype.element_ty), mask)


def _launch_gather(x: Tensor, offsets: Tensor, places: Tensor) -> Tensor:
    return _launch(_gather_kernel, x, offsets, places, _fake_gather(x, offsets, places))


def _launch_sum(dy: Tensor, offsets: Tensor, places: Tensor) -> Tensor:
    return _launch(_sum_kernel, dy, offsets, places, _fake_sum(dy, offsets, places))


def _launch(kernel: Kernel, read: Tensor, offsets: Tensor, places: Tensor, written: Tensor) -> Tensor:
    """One program for each token and tile of columns."""
    columns = read.shape[2] * read.shape[3]
    read, stride = as_rows_with_stride(read.flatten(2), columns)
    if tokens := len(offsets) - 1:
        tiles, tile = split_row(columns)
        launch = kernel.bind(TILE=tile)
        launch(tokens * tiles, read, offsets.contiguous(), places.contiguous(), written, stride, columns)
    return written


def _fake_gather(x, offsets, places):
    return x.new_empty(1, places.shape[0], *x.shape[2:])


def _fake_sum(dy, offsets, places):
    return dy.new_empty(1, offsets.shape[0] - 1, *dy.shape[2:])


gather = register_op("gather_keys", _launch_gather, _fake_gather)
sum_copies = register_op("gather_keys_backward", _launch_sum, _fake_sum)


class _GatherKeys(Node):
    @staticmethod
    def forward(ctx, x, offsets, places):
        ctx.save_for_backward(offsets, places)
        return gather(x, offsets, places)

    @staticmethod
    def backward(ctx, dy):
        return sum_copies(dy, *ctx.saved_tensors), None, None


def gather_keys(x: Tensor, offsets: Tensor, places: Tensor) -> Tensor:
    """Copies keys, or values, for every document that reads them; `SharedKeys` has the indices.

    x [1, T, Hkv, D] of any strides -> [1, K, Hkv, D], contiguous. offsets int32 [T + 1]: token t has the copies
    offsets[t] to offsets[t + 1] - 1. places int32 [K]: where each copy goes; each of 0, …, K - 1 once.
    Raises ValueError for a batch of several rows, and for offsets of another length.
    """
    rows, tokens, *_ = shape_of("gather_keys", "x", x, "1, T, Hkv, D")
    if rows != 1:
        raise ValueError(f"gather_keys: x is {list(x.shape)}; it must be one row of tokens")
    check_shape("gather_keys", "offsets", offsets, tokens + 1)
    shape_of("gather_keys", "places", places, "K")
    check_floats("gather_keys", x=x)
    check_one_of("gather_keys", INT32, offsets=offsets, places=places)
    if not runs_kernels(x):
        return gather_keys_reference(x, offsets, places)
    return _GatherKeys.apply(x, offsets, places)
