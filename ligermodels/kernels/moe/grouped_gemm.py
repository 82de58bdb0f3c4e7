"""Grouped GEMM: one matrix product per group of rows, y_g = x_g W_gᵀ. Gradients: dx_g = dy_g W_g, dW_g = dy_gᵀ x_g.

Rows are sorted by group. offsets int32 [E] holds the end row of each group (torch's convention); the last one is R. A
group may be empty; its dW is then zero. x [R, K], W [E, N, K], y [R, N] in one float dtype; sums in fp32, rounded once.
Each of the three products costs 2 R N K FLOP, however rows are grouped. The host never reads the offsets.

Two implementations: torch's grouped_mm where it has a kernel (bf16 on data-centre Hopper and Blackwell; elsewhere it
loops over the groups on the host), and Triton kernels for every other dtype, device and shape. These are plain
functions of tensors. The ops built on them define the autograd nodes.

A low-rank (LoRA) update per group: y_g = x_g W_gᵀ + s (x_g A_gᵀ) B_gᵀ, A [E, r, K], B [E, N, r]. With low = s x A_gᵀ:
    dlow = s dy B_g    dx = dy W_g + dlow A_g    dA_g = dlow_gᵀ x_g    dB_g = dy_gᵀ low_g
An update costs two more grouped GEMMs and one more read of y. It saves only low [R, r] for backward.
Hu et al. 2021, https://arxiv.org/abs/2106.09685.
"""

import functools
from itertools import pairwise
from typing import NamedTuple, TypeGuard

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ligermodels.kernels.dispatch import register_op, runs_kernels
from ligermodels.kernels.launch import cdiv, kernel
from ligermodels.kernels.quant.fp8_products import MultipliedFloat8
from ligermodels.kernels.quant.quantised_weight import Weight, WeightLayout, dense, operand

GROUPED_MM_CAPABILITIES = (9, 10)  # major compute capabilities for which torch has a grouped kernel
TMA_ALIGNMENT = 16  # bytes; the tensor memory accelerator (TMA) needs it of addresses and strides
SWIZZLE_ROWS = 8  # row tiles visited before the next column tile, so that the tiles of both operands stay in L2
SMALL_BLOCK_M = 16  # rows of a tile if groups average at most this many. Two heights: two variants serve all batches


class GemmTile(NamedTuple):
    """Output tile [block_m, block_n] of one program, which sums block_k products per step."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int  # of the software pipeline
    # Steps per partial accumulator. With more than one, each partial sum starts at zero and is added to the total at
    # its end: a single fp32 chain has 4 times the error. In half precision the output's rounding hides that error.
    partial_steps: int


# By element size in bytes. All stages together stay below 99 KB, the smallest shared memory among Ampere chips.
GEMM_TILES = {2: GemmTile(128, 128, 64, 8, 3, partial_steps=1), 4: GemmTile(64, 64, 16, 4, 3, partial_steps=2)}


def grouped_gemm_reference(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    return torch.cat([F.linear(x[rows], w) for rows, w in zip(group_slices(offsets), weight, strict=True)])


def group_slices(offsets: Tensor) -> list[slice]:
    """The rows of each group. Reads the offsets on the host."""
    return [slice(start, end) for start, end in pairwise([0, *offsets.tolist()])]


@triton.jit
def _locate_tile(offsets_ptr, tile, groups, BLOCK_M: tl.constexpr, GROUPS: tl.constexpr):
    """(group, first row, end row of the group) of a row tile. Tiles beyond the last group get an empty range."""
    index = tl.arange(0, GROUPS)
    end = tl.load(offsets_ptr + index, index < groups, other=0)
    start = tl.load(offsets_ptr + index - 1, (index > 0) & (index < groups), other=0)
    tiles = (end - start + BLOCK_M - 1) // BLOCK_M
    tiles_end = tl.cumsum(tiles, 0)
    group = tl.sum((tiles_end <= tile).to(tl.int32), 0)
    here = index == group
    first = tl.sum(tl.where(here, start + (tile - tiles_end + tiles) * BLOCK_M, 0), 0)
    return group, first, tl.sum(tl.where(here, end, 0), 0)


@kernel(do_not_specialize=["row_tiles"])
def _grouped_gemm_kernel(
    x_ptr, weight_ptr, offsets_ptr, y_ptr, groups, row_tiles, columns, depth, weight_column_stride, weight_depth_stride,
    GROUPS: tl.constexpr, SWIZZLE_ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, PARTIAL_STEPS: tl.constexpr,
):  # fmt: skip
    """One program computes one tile of y = x Wᵀ. With the strides of W exchanged, it computes dx = dy W."""
    column_tiles = tl.cdiv(columns, BLOCK_N)
    program = tl.program_id(0)
    row_tile, column_tile = tl.swizzle2d(
        program // column_tiles, program % column_tiles, row_tiles, column_tiles, SWIZZLE_ROWS
    )
    group, first, end = _locate_tile(offsets_ptr, row_tile, groups, BLOCK_M, GROUPS)
    if first >= end:
        return
    row = (first + tl.arange(0, BLOCK_M)[:, None]).to(tl.int64)
    column = (column_tile * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]).to(tl.int64)
    in_group, in_columns = row < end, column < columns
    x_ptr += row * depth
    weight_ptr += group.to(tl.int64) * columns * depth + column * weight_column_stride
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(tl.cdiv(depth, BLOCK_K * PARTIAL_STEPS)):
        partial = tl.zeros([BLOCK_M, BLOCK_N], tl.float32) if PARTIAL_STEPS > 1 else total
        for part in tl.static_range(PARTIAL_STEPS):
            k = tl.arange(0, BLOCK_K).to(tl.int64) + (step * PARTIAL_STEPS + part) * BLOCK_K
            x = tl.load(x_ptr + k[None, :], in_group & (k < depth)[None, :], other=0.0)
            weight = tl.load(
                weight_ptr + k[:, None] * weight_depth_stride, in_columns & (k < depth)[:, None], other=0.0
            )
            partial = tl.dot(x, weight, partial, input_precision="ieee")
        total = total + partial if PARTIAL_STEPS > 1 else partial
    tl.store(y_ptr + row * columns + column, total.to(y_ptr.dtype.element_ty), in_group & in_columns)


@kernel()
def _weight_gradient_kernel(
    dy_ptr, x_ptr, offsets_ptr, dweight_ptr, rows, columns,
    SWIZZLE_ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PARTIAL_STEPS: tl.constexpr,
):  # fmt: skip
    """One program computes one tile of one group's dW [rows, columns] = dy_gᵀ x_g, a sum over the group's rows."""
    row_tiles, column_tiles = tl.cdiv(rows, BLOCK_M), tl.cdiv(columns, BLOCK_N)
    group = tl.program_id(0) // (row_tiles * column_tiles)
    tile = tl.program_id(0) % (row_tiles * column_tiles)
    row_tile, column_tile = tl.swizzle2d(
        tile // column_tiles, tile % column_tiles, row_tiles, column_tiles, SWIZZLE_ROWS
    )
    start = tl.load(offsets_ptr + group - 1, group > 0, other=0)
    end = tl.load(offsets_ptr + group)
    row = (row_tile * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]).to(tl.int64)
    column = (column_tile * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]).to(tl.int64)
    in_rows, in_columns = row < rows, column < columns
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(tl.cdiv(end - start, BLOCK_K * PARTIAL_STEPS)):
        partial = tl.zeros([BLOCK_M, BLOCK_N], tl.float32) if PARTIAL_STEPS > 1 else total
        for part in tl.static_range(PARTIAL_STEPS):
            k = (start + tl.arange(0, BLOCK_K)).to(tl.int64) + (step * PARTIAL_STEPS + part) * BLOCK_K
            dy = tl.load(dy_ptr + k[None, :] * rows + row, in_rows & (k < end)[None, :], other=0.0)
            x = tl.load(x_ptr + k[:, None] * columns + column, in_columns & (k < end)[:, None], other=0.0)
            partial = tl.dot(dy, x, partial, input_precision="ieee")
        total = total + partial if PARTIAL_STEPS > 1 else partial
    dweight_ptr += group.to(tl.int64) * rows * columns
    tl.store(dweight_ptr + row * columns + column, total.to(dweight_ptr.dtype.element_ty), in_rows & in_columns)


@functools.cache  # one driver query per device, not one per product
def _major_capability(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0]


def uses_grouped_mm(left: Tensor, right: Tensor, width: int) -> bool:
    """Whether torch's grouped kernel supports these contiguous operands and a result of `width` columns.

    For operands it does not support, grouped_mm synchronises with the host.
    """
    if left.dtype != torch.bfloat16 or not left.is_cuda or torch.version.hip is not None:
        return False
    if _major_capability(left.device) not in GROUPED_MM_CAPABILITIES:
        return False
    return (left.data_ptr() | right.data_ptr() | 2 * (left.shape[-1] | right.shape[-1] | width)) % TMA_ALIGNMENT == 0


def triton_grouped_gemm(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """x [R, K], weight [E, N, K], dense, one of its last two dimensions with unit stride -> [R, N]."""
    groups, columns, depth = weight.shape
    rows = x.shape[0]
    y = x.new_empty(rows, columns)
    tile = GEMM_TILES[x.element_size()]
    block_m = tile.block_m if rows > SMALL_BLOCK_M * groups else SMALL_BLOCK_M
    row_tiles = cdiv(rows, block_m) + groups  # an upper bound: each group may leave one tile partly filled
    launch = _grouped_gemm_kernel.bind(
        GROUPS=triton.next_power_of_2(groups), SWIZZLE_ROWS=SWIZZLE_ROWS, BLOCK_M=block_m, BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k, PARTIAL_STEPS=tile.partial_steps, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    launch(
        row_tiles * cdiv(columns, tile.block_n),
        x, weight, offsets, y, groups, row_tiles, columns, depth, weight.stride(1), weight.stride(2),
    )  # fmt: skip
    return y


def triton_grouped_weight_gradient(dy: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    """dy [R, N], x [R, K] -> [E, N, K]."""
    groups, rows, columns = offsets.shape[0], dy.shape[1], x.shape[1]
    dweight = x.new_empty(groups, rows, columns)
    tile = GEMM_TILES[x.element_size()]
    launch = _weight_gradient_kernel.bind(
        SWIZZLE_ROWS=SWIZZLE_ROWS, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        PARTIAL_STEPS=tile.partial_steps, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    programs = groups * cdiv(rows, tile.block_m) * cdiv(columns, tile.block_n)
    launch(programs, dy, x, offsets, dweight, rows, columns)
    return dweight


def _launch_forward(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    x, weight = x.contiguous(), weight.contiguous()
    if not x.shape[0]:
        return _fake_forward(x, weight, offsets)
    if uses_grouped_mm(x, weight, weight.shape[1]):
        return F.grouped_mm(x, weight.mT, offs=offsets)
    return triton_grouped_gemm(x, weight, offsets)


def _launch_input_gradient(dy: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    dy, weight = dy.contiguous(), weight.contiguous()
    if not dy.shape[0]:
        return _fake_input_gradient(dy, weight, offsets)
    if uses_grouped_mm(dy, weight, weight.shape[2]):
        return F.grouped_mm(dy, weight, offs=offsets)
    return triton_grouped_gemm(dy, weight.mT, offsets)


def _launch_weight_gradient(dy: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    dy, x = dy.contiguous(), x.contiguous()
    if not dy.shape[0]:
        return torch.zeros_like(_fake_weight_gradient(dy, x, offsets))
    if uses_grouped_mm(dy, x, x.shape[1]):
        return F.grouped_mm(dy.t(), x, offs=offsets)
    return triton_grouped_weight_gradient(dy, x, offsets)


def _fake_forward(x, weight, offsets):
    return x.new_empty(x.shape[0], weight.shape[1])


def _fake_input_gradient(dy, weight, offsets):
    return dy.new_empty(dy.shape[0], weight.shape[2])


def _fake_weight_gradient(dy, x, offsets):
    return x.new_empty(offsets.shape[0], dy.shape[1], x.shape[1])


_forward = register_op("grouped_gemm", _launch_forward, _fake_forward)
_input_gradient = register_op("grouped_gemm_input_gradient", _launch_input_gradient, _fake_input_gradient)
_weight_gradient = register_op("grouped_gemm_weight_gradient", _launch_weight_gradient, _fake_weight_gradient)


@register_flop_formula([torch.ops.ligermodels.grouped_gemm, torch.ops.ligermodels.grouped_gemm_input_gradient])
def _gemm_flops(x, weight, offsets, **_) -> int:
    return 2 * x[0] * weight[1] * weight[2]


@register_flop_formula(torch.ops.ligermodels.grouped_gemm_weight_gradient)
def _weight_gradient_flops(dy, x, offsets, **_) -> int:
    return 2 * x[0] * dy[1] * x[1]


def grouped_gemm(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """x_g W_gᵀ for each group of rows.

    x [R, K], weight [E, N, K] in one float dtype, offsets int32 [E]: the end row of each group, the last one R
    -> [R, N]. Not differentiable: `grouped_input_gradient` and `grouped_weight_gradient` compute the gradients.
    """
    return _forward(x, weight, offsets) if runs_kernels(x) else grouped_gemm_reference(x, weight, offsets)


def grouped_input_gradient(dy: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """dx_g = dy_g W_g for each group of rows: dy [R, N], weight [E, N, K], offsets int32 [E] -> [R, K]."""
    return _input_gradient(dy, weight, offsets) if runs_kernels(dy) else grouped_gemm_reference(dy, weight.mT, offsets)


def grouped_weight_gradient(dy: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    """dW_g = dy_gᵀ x_g for each group of rows, zero for an empty one: dy [R, N], x [R, K], offsets [E] -> [E, N, K]."""
    if runs_kernels(dy):
        return _weight_gradient(dy, x, offsets)
    return torch.stack([dy[rows].t() @ x[rows] for rows in group_slices(offsets)])


class GroupedLowRank(NamedTuple):
    """Low-rank update of a stacked weight [E, N, K]."""

    a: Tensor  # [E, r, K]
    b: Tensor  # [E, N, r]
    scale: float


def group_linear_reference(
    x: Tensor, weight: Tensor, group: int, low_rank: GroupedLowRank | None, bias: Tensor | None = None
) -> Tensor:
    """The linear of one group with its update: x [R_g, K] -> [R_g, N]. bias: [E, N]."""
    y = F.linear(x, weight[group], None if bias is None else bias[group])
    if low_rank is None:
        return y
    a, b, scale = low_rank
    return y + scale * F.linear(F.linear(x, a[group]), b[group])


class Projection(NamedTuple):
    """A linear of all experts as the arguments of a node: autograd sees only those tensors that are arguments
    themselves. In a node the same fields say which of their gradients are needed."""

    weight: Tensor  # [E, N, K], or its bytes
    a: Tensor | None  # of the update, and b
    b: Tensor | None
    bias: Tensor | None  # [E, N]
    layout: WeightLayout | None  # of the bytes
    scale: float  # of the update

    @classmethod
    def of(cls, weight: Weight, update: GroupedLowRank | None, bias: Tensor | None) -> "Projection":
        (data, layout), (a, b, scale) = operand(weight), update or (None, None, 1.0)
        return cls(data, a, b, bias, layout, scale)


TENSORS = 4  # the first fields of a projection; the others are constants


def multiplies_in_fp8(layout: WeightLayout | None, x: Tensor) -> TypeGuard[MultipliedFloat8]:
    """Whether the products of experts in FP8 are FP8: torch has the kernel for Hopper alone."""
    if not isinstance(layout, MultipliedFloat8) or not layout.is_multiplied or not x.shape[0]:
        return False
    return not x.is_cuda or _major_capability(x.device) == 9


def low_rank_grouped_gemm(x: Tensor, offsets: Tensor, projection: Projection) -> tuple[Tensor, Tensor | None]:
    """y [R, N] without the bias, and low [R, r], which is None without an update."""
    if multiplies_in_fp8(projection.layout, x):
        y = projection.layout.grouped_product(x, projection.weight, offsets)
    else:
        y = grouped_gemm(x, dense(projection.weight, projection.layout), offsets)
    if projection.a is None or projection.b is None:
        return y, None
    low = projection.scale * grouped_gemm(x, projection.a, offsets)
    # Not in place: selective checkpointing may save the output of the grouped GEMM and would then add to it twice.
    return y + grouped_gemm(low, projection.b, offsets), low


def grouped_low_gradient(dy: Tensor, offsets: Tensor, projection: Projection) -> Tensor | None:
    """dlow [R, r]; None without an update."""
    return None if projection.b is None else projection.scale * grouped_input_gradient(dy, projection.b, offsets)


def low_rank_grouped_input_gradient(dy: Tensor, offsets: Tensor, dlow: Tensor | None, projection: Projection) -> Tensor:
    """dx [R, K], including the update's share if there is one."""
    if multiplies_in_fp8(projection.layout, dy):
        dx = projection.layout.grouped_input_gradient(dy, projection.weight, offsets)
    else:
        dx = grouped_input_gradient(dy, dense(projection.weight, projection.layout), offsets)
    return dx if dlow is None or projection.a is None else dx + grouped_input_gradient(dlow, projection.a, offsets)
