"""A linear for every group of rows: y_g = x_g W_gᵀ; backward dx_g = dy_g W_g and dW_g = dy_gᵀ x_g.

Rows are sorted by group. offsets int32 [E] holds the row at which each group ends (torch's convention), the last of
them R; a group may be empty, and its dW is then zero. x [R, K], W [E, N, K], y [R, N] in one float dtype; sums in fp32,
one rounding. Costs 2 R N K FLOP each way, whatever the groups; the host never learns the offsets.

Two engines: torch's grouped_mm where it has a kernel (bf16, Hopper and Blackwell data centre chips; elsewhere it loops
over the groups on the host), and Triton for every other dtype, device and shape. These are functions of tensors, not
autograd nodes: those are in the ops built on them.
"""

import functools
from itertools import pairwise

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ligermodels.kernels.dispatch import register, runs_kernels
from ligermodels.kernels.launch import cdiv, kernel

GROUPED_MM_CAPABILITIES = (9, 10)  # major; those for which torch has a grouped kernel
ALIGNMENT = 16  # bytes, of addresses and strides that the tensor memory accelerator reads
BAND = 8  # tiles down before the next one across, so that both operands' tiles stay in L2

# By element size: tile of (output rows, output columns, summed elements), warps, stages. The tiles of all stages stay
# below 99 KB, the shared memory of the smallest Ampere chips.
TILES = {2: (128, 128, 64, 8, 3), 4: (64, 64, 16, 4, 3)}
FEW_ROWS = 16  # of a tile where groups have no more on average. Two heights, so that two variants serve all batches
# By element size, tiles of summed elements in a strand. Where there are several, the sum starts anew with every strand
# and joins the total at its end: in fp32 one chain would err 4 times as much, which a half precision's rounding hides.
STRANDS = {2: 1, 4: 2}


def grouped_linear_reference(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    return torch.cat([F.linear(x[rows], w) for rows, w in zip(rows_of_groups(offsets), weight, strict=True)])


def rows_of_groups(offsets: Tensor) -> list[slice]:
    return [slice(start, end) for start, end in pairwise([0, *offsets.tolist()])]


@triton.jit
def _locate(offsets_ptr, tile, groups, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """The group whose rows the row tile covers, its first row, and the group's end; an empty range past the last."""
    index = tl.arange(0, GROUPS)
    end = tl.load(offsets_ptr + index, index < groups, other=0)
    start = tl.load(offsets_ptr + index - 1, (index > 0) & (index < groups), other=0)
    tiles = (end - start + ROWS - 1) // ROWS
    tiles_end = tl.cumsum(tiles, 0)
    group = tl.sum((tiles_end <= tile).to(tl.int32), 0)
    here = index == group
    first = tl.sum(tl.where(here, start + (tile - tiles_end + tiles) * ROWS, 0), 0)
    return group, first, tl.sum(tl.where(here, end, 0), 0)


@kernel(do_not_specialize=["row_tiles"])
def _rows_kernel(
    x_ptr, weight_ptr, offsets_ptr, y_ptr, groups, row_tiles, columns, depth, weight_column_stride, weight_depth_stride,
    GROUPS: tl.constexpr, BAND: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    STRAND: tl.constexpr,
):  # fmt: skip
    """One program computes a tile of y = x Wᵀ or, the strides of W exchanged, of dx = dy W."""
    column_tiles = tl.cdiv(columns, COLUMNS)
    program = tl.program_id(0)
    row_tile, column_tile = tl.swizzle2d(program // column_tiles, program % column_tiles, row_tiles, column_tiles, BAND)
    group, first, end = _locate(offsets_ptr, row_tile, groups, ROWS, GROUPS)
    if first >= end:
        return
    row = (first + tl.arange(0, ROWS)[:, None]).to(tl.int64)
    column = (column_tile * COLUMNS + tl.arange(0, COLUMNS)[None, :]).to(tl.int64)
    in_group, in_columns = row < end, column < columns
    x_ptr += row * depth
    weight_ptr += group.to(tl.int64) * columns * depth + column * weight_column_stride
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for step in range(tl.cdiv(depth, DEPTH * STRAND)):
        strand = tl.zeros([ROWS, COLUMNS], tl.float32) if STRAND > 1 else total
        for part in tl.static_range(STRAND):
            k = tl.arange(0, DEPTH).to(tl.int64) + (step * STRAND + part) * DEPTH
            x = tl.load(x_ptr + k[None, :], in_group & (k < depth)[None, :], other=0.0)
            weight = tl.load(
                weight_ptr + k[:, None] * weight_depth_stride, in_columns & (k < depth)[:, None], other=0.0
            )
            strand = tl.dot(x, weight, strand, input_precision="ieee")
        total = total + strand if STRAND > 1 else strand
    tl.store(y_ptr + row * columns + column, total.to(y_ptr.dtype.element_ty), in_group & in_columns)


@kernel()
def _weight_kernel(
    dy_ptr, x_ptr, offsets_ptr, dweight_ptr, rows, columns,
    BAND: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, STRAND: tl.constexpr,
):  # fmt: skip
    """One program computes a tile of one group's dW [rows, columns], a sum over the group's rows of dy and x."""
    row_tiles, column_tiles = tl.cdiv(rows, ROWS), tl.cdiv(columns, COLUMNS)
    group = tl.program_id(0) // (row_tiles * column_tiles)
    tile = tl.program_id(0) % (row_tiles * column_tiles)
    row_tile, column_tile = tl.swizzle2d(tile // column_tiles, tile % column_tiles, row_tiles, column_tiles, BAND)
    start = tl.load(offsets_ptr + group - 1, group > 0, other=0)
    end = tl.load(offsets_ptr + group)
    row = (row_tile * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
    column = (column_tile * COLUMNS + tl.arange(0, COLUMNS)[None, :]).to(tl.int64)
    in_rows, in_columns = row < rows, column < columns
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for step in range(tl.cdiv(end - start, DEPTH * STRAND)):
        strand = tl.zeros([ROWS, COLUMNS], tl.float32) if STRAND > 1 else total
        for part in tl.static_range(STRAND):
            k = (start + tl.arange(0, DEPTH)).to(tl.int64) + (step * STRAND + part) * DEPTH
            dy = tl.load(dy_ptr + k[None, :] * rows + row, in_rows & (k < end)[None, :], other=0.0)
            x = tl.load(x_ptr + k[:, None] * columns + column, in_columns & (k < end)[:, None], other=0.0)
            strand = tl.dot(dy, x, strand, input_precision="ieee")
        total = total + strand if STRAND > 1 else strand
    dweight_ptr += group.to(tl.int64) * rows * columns
    tl.store(dweight_ptr + row * columns + column, total.to(dweight_ptr.dtype.element_ty), in_rows & in_columns)


@functools.cache  # the driver is asked once, not at every product
def _major_capability(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0]


def uses_grouped_mm(left: Tensor, right: Tensor, width: int) -> bool:
    """Whether torch's grouped kernel takes these contiguous operands to a result so wide; elsewhere it synchronises."""
    if left.dtype != torch.bfloat16 or not left.is_cuda or torch.version.hip is not None:
        return False
    if _major_capability(left.device) not in GROUPED_MM_CAPABILITIES:
        return False
    return (left.data_ptr() | right.data_ptr() | 2 * (left.shape[-1] | right.shape[-1] | width)) % ALIGNMENT == 0


def rows_by_triton(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """x [R, K], weight [E, N, K], dense, either of its last dimensions with unit stride -> [R, N]."""
    groups, columns, depth = weight.shape
    rows = x.shape[0]
    y = x.new_empty(rows, columns)
    tallest, tile_columns, tile_depth, warps, stages = TILES[x.element_size()]
    tile_rows = tallest if rows > FEW_ROWS * groups else FEW_ROWS
    row_tiles = cdiv(rows, tile_rows) + groups  # at most: each group may leave one tile part empty
    launch = _rows_kernel.bind(
        GROUPS=triton.next_power_of_2(groups), BAND=BAND, ROWS=tile_rows, COLUMNS=tile_columns, DEPTH=tile_depth,
        STRAND=STRANDS[x.element_size()], num_warps=warps, num_stages=stages,
    )  # fmt: skip
    launch(
        row_tiles * cdiv(columns, tile_columns),
        x, weight, offsets, y, groups, row_tiles, columns, depth, weight.stride(1), weight.stride(2),
    )  # fmt: skip
    return y


def weight_by_triton(dy: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    """dy [R, N], x [R, K] -> [E, N, K]."""
    groups, rows, columns = offsets.shape[0], dy.shape[1], x.shape[1]
    dweight = x.new_empty(groups, rows, columns)
    tile_rows, tile_columns, tile_depth, warps, stages = TILES[x.element_size()]
    launch = _weight_kernel.bind(
        BAND=BAND, ROWS=tile_rows, COLUMNS=tile_columns, DEPTH=tile_depth, STRAND=STRANDS[x.element_size()],
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    programs = groups * cdiv(rows, tile_rows) * cdiv(columns, tile_columns)
    launch(programs, dy, x, offsets, dweight, rows, columns)
    return dweight


def _launch_forward(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    x, weight = x.contiguous(), weight.contiguous()
    if not x.shape[0]:
        return _fake_forward(x, weight, offsets)
    if uses_grouped_mm(x, weight, weight.shape[1]):
        return F.grouped_mm(x, weight.mT, offs=offsets)
    return rows_by_triton(x, weight, offsets)


def _launch_input_gradient(dy: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    dy, weight = dy.contiguous(), weight.contiguous()
    if not dy.shape[0]:
        return _fake_input_gradient(dy, weight, offsets)
    if uses_grouped_mm(dy, weight, weight.shape[2]):
        return F.grouped_mm(dy, weight, offs=offsets)
    return rows_by_triton(dy, weight.mT, offsets)


def _launch_weight_gradient(dy: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    dy, x = dy.contiguous(), x.contiguous()
    if not dy.shape[0]:
        return torch.zeros_like(_fake_weight_gradient(dy, x, offsets))
    if uses_grouped_mm(dy, x, x.shape[1]):
        return F.grouped_mm(dy.t(), x, offs=offsets)
    return weight_by_triton(dy, x, offsets)


def _fake_forward(x, weight, offsets):
    return x.new_empty(x.shape[0], weight.shape[1])


def _fake_input_gradient(dy, weight, offsets):
    return dy.new_empty(dy.shape[0], weight.shape[2])


def _fake_weight_gradient(dy, x, offsets):
    return x.new_empty(offsets.shape[0], dy.shape[1], x.shape[1])


_forward = register("grouped_linear(Tensor x, Tensor weight, Tensor offsets) -> Tensor", _launch_forward, _fake_forward)
_input_gradient = register(
    "grouped_linear_input_gradient(Tensor dy, Tensor weight, Tensor offsets) -> Tensor",
    _launch_input_gradient,
    _fake_input_gradient,
)
_weight_gradient = register(
    "grouped_linear_weight_gradient(Tensor dy, Tensor x, Tensor offsets) -> Tensor",
    _launch_weight_gradient,
    _fake_weight_gradient,
)


@register_flop_formula([torch.ops.ligermodels.grouped_linear, torch.ops.ligermodels.grouped_linear_input_gradient])
def _rows_flops(x, weight, offsets, **_) -> int:
    return 2 * x[0] * weight[1] * weight[2]


@register_flop_formula(torch.ops.ligermodels.grouped_linear_weight_gradient)
def _weight_flops(dy, x, offsets, **_) -> int:
    return 2 * x[0] * dy[1] * x[1]


def grouped_linear(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """x_g W_gᵀ for each group of rows.

    x [R, K], weight [E, N, K] in one float dtype, offsets int32 [E], each group's end, the last one R -> [R, N].
    Not differentiable; the gradients are `grouped_input_gradient` and `grouped_weight_gradient`.
    """
    return _forward(x, weight, offsets) if runs_kernels(x) else grouped_linear_reference(x, weight, offsets)


def grouped_input_gradient(dy: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """dy_g W_g for each group of rows: dy [R, N], weight [E, N, K], offsets int32 [E] -> [R, K]."""
    return (
        _input_gradient(dy, weight, offsets) if runs_kernels(dy) else grouped_linear_reference(dy, weight.mT, offsets)
    )


def grouped_weight_gradient(dy: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    """dy_gᵀ x_g for each group of rows, zero where it has none: dy [R, N], x [R, K], offsets [E] -> [E, N, K]."""
    if runs_kernels(dy):
        return _weight_gradient(dy, x, offsets)
    return torch.stack([dy[rows].t() @ x[rows] for rows in rows_of_groups(offsets)])
