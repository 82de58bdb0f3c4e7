"""Products with a weight in FP8 in which both factors are FP8 (W8A8), by torch's scaled_mm.

    y = x̂ Ŵᵀ + b        dx = ĝ C        x̂, ĝ: x and g in e4m3, quantised just before the product
x [..., K], Ŵ [N, K] of codes C and scales, b [N] -> y [..., N], in bf16.
A weight has either a scale for each row, as most FP8 checkpoints have or as one number for all is: x̂ then has a scale
for each row, and g = dy ∘ s, s [N] the weight's. So have groups of rows with a weight each, as routed experts. Or it
has blocks of 128 x 128: x̂ and ĝ have a scale for each 128 elements of a row, g = dy, and C is in its blocks. Both
factors of a product on Hopper must be contiguous along what is summed, so that backward transposes C first.
Quantising reads 2 bytes an element and writes 1; transposing moves 2 bytes an element: bound by memory bandwidth.
Micikevicius et al. 2022, https://arxiv.org/abs/2209.05433; blocks: DeepSeek-AI 2024, https://arxiv.org/abs/2412.19437.
"""

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import ScalingType

from ligermodels.kernels.dispatch import register_op, runs_kernels
from ligermodels.kernels.launch import as_matrix, cdiv, kernel
from ligermodels.kernels.quant.fp8 import FP8_BLOCK, LARGEST, Float8, fp8_quantize, scaled_codes

FP8_SIZES = 16  # both sizes of a weight must be multiples of it
SCALES_MULTIPLE = 4  # cuBLAS reads scales of blocks so many at a time
TILE = 4096  # elements that a program quantises at a time
TRANSPOSED = 128  # rows and columns that a program transposes


@dataclass(frozen=True)
class MultipliedFloat8(Float8):
    """An FP8 weight [N, K] whose products are FP8. Where scaled_mm does not take its sizes or its dtype, it is
    dequantised, as any other."""

    @property
    def has_row_scales(self) -> bool:
        return self.scale_shape[1] == 1

    @property
    def is_multiplied(self) -> bool:
        """Whether scaled_mm, or scaled_grouped_mm of a stack, takes the weight."""
        fits = self.dtype == torch.bfloat16 and not any(size % FP8_SIZES for size in self.shape[-2:])
        whole_blocks = self.block == FP8_BLOCK and not any(rows % FP8_BLOCK[0] for rows in self.parts)
        return fits and (self.has_row_scales or (whole_blocks and len(self.shape) == 2))

    def product(self, x: Tensor, data: Tensor, bias: Tensor | None) -> Tensor:
        if not self.is_multiplied:
            return super().product(x, data, bias)
        scale, codes = self.factors(data)
        y = scaled_product(*quantize_rows(as_matrix(x), self.columns_of_scale), codes, scale, fast=True)
        y = y if bias is None else y.add_(bias)
        return y.view(*x.shape[:-1], self.rows)

    def input_gradient(self, dy: Tensor, data: Tensor) -> Tensor:
        if not self.is_multiplied:
            return super().input_gradient(dy, data)
        scale, codes = self.factors(data)
        if self.has_row_scales:
            quantised = quantize_rows(dy, self.rows, scale.t())
            scale = scale.new_ones(self.columns, 1)
        else:
            quantised, scale = quantize_rows(dy, FP8_BLOCK[1]), scale.mT
        return scaled_product(*quantised, transposed(codes), scale, fast=False)

    def grouped_product(self, x: Tensor, data: Tensor, offsets: Tensor) -> Tensor:
        """x [R, K], the bytes of a weight [E, N, K], offsets int32 [E] of the groups' ends -> x_g Ŵ_gᵀ [R, N]."""
        scale, codes = self.factors(data)
        weight = codes.view(self.shape), scale.view(self.shape[:2])
        return scaled_grouped_product(*quantize_rows(x, self.columns), *weight, offsets, fast=True)

    def grouped_input_gradient(self, dy: Tensor, data: Tensor, offsets: Tensor) -> Tensor:
        """dy [R, N] -> dy_g Ŵ_g [R, K]."""
        experts, rows, columns = self.shape
        scale, codes = self.factors(data)
        group = torch.searchsorted(offsets, torch.arange(len(dy), device=dy.device, dtype=offsets.dtype), right=True)
        quantised = quantize_rows(dy, rows, scale.view(experts, rows), group)
        ones = scale.new_ones(experts, columns)
        return scaled_grouped_product(*quantised, transposed(codes.view(self.shape)), ones, offsets, fast=False)

    def factors(self, data: Tensor) -> tuple[Tensor, Tensor]:
        """The scales, [rows, 1] or of the blocks, and the codes [rows, K] of a weight's bytes."""
        scale_row, scale, codes = self.view(data)
        return scale.index_select(0, scale_row) if self.has_row_scales else scale, codes

    @property
    def columns_of_scale(self) -> int:
        """How many elements of a row of x share a scale."""
        return self.columns if self.has_row_scales else FP8_BLOCK[1]


def scaled_product(x: Tensor, x_scale: Tensor, codes: Tensor, scale: Tensor, *, fast: bool) -> Tensor:
    """x [M, K], codes [N, K] e4m3, with scales [M, 1] and [N, 1] or [M, ⌈K / 128⌉] and [N / 128, ⌈K / 128⌉] fp32 -> the
    product of what they stand for, x Ŵᵀ [M, N] bf16. fast: sum with fewer bits, as torchao does in the forward pass."""
    if not x.is_cuda:
        return F.linear(dequantized(x, x_scale), dequantized(codes, scale)).bfloat16()
    if scale.shape[1] == 1:
        return F.scaled_mm(
            x, codes.t(), x_scale, ScalingType.RowWise, scale.t(), ScalingType.RowWise,
            output_dtype=torch.bfloat16, use_fast_accum=fast,
        )  # fmt: skip
    rows, scale = len(x), F.pad(scale, (0, -scale.shape[1] % SCALES_MULTIPLE))
    if missing := -rows % SCALES_MULTIPLE:
        x = F.pad(x.view(torch.uint8), (0, 0, 0, missing)).view(x.dtype)
        x_scale = F.pad(x_scale.t(), (0, missing)).t()
    return F.scaled_mm(
        x, codes.t(), x_scale, ScalingType.BlockWise1x128, scale.t(), ScalingType.BlockWise128x128,
        output_dtype=torch.bfloat16,
    )[:rows]  # fmt: skip


def scaled_grouped_product(
    x: Tensor, x_scale: Tensor, codes: Tensor, scale: Tensor, offsets: Tensor, *, fast: bool
) -> Tensor:
    """x [R, K], codes [E, N, K] e4m3, scales [R, 1] and [E, N] fp32, offsets int32 [E] -> x_g Ŵ_gᵀ [R, N] bf16."""
    if x.is_cuda:
        return F.scaled_grouped_mm(  # type: ignore[attr-defined]  # torch's stubs lack it
            x, codes.mT, x_scale.view(-1), ScalingType.RowWise, scale, ScalingType.RowWise, offs=offsets,
            output_dtype=torch.bfloat16, use_fast_accum=fast,
        )  # fmt: skip
    rows, ends = dequantized(x, x_scale), [0, *offsets.tolist()]
    weights = [dequantized(*pair) for pair in zip(codes, scale[..., None], strict=True)]
    parts = [F.linear(rows[a:b], w) for (a, b), w in zip(pairwise(ends), weights, strict=True)]
    return torch.cat(parts).bfloat16()


def dequantized(codes: Tensor, scale: Tensor) -> Tensor:
    """codes [M, K], scale of equal blocks of them -> fp32 [M, K]."""
    rows, columns = codes.shape
    of_row = scale.repeat_interleave(cdiv(rows, scale.shape[0]), 0)[:rows]
    return scaled_codes(codes, of_row, columns if scale.shape[1] == 1 else FP8_BLOCK[1])


def quantize_rows(
    x: Tensor, group: int, factors: Tensor | None = None, factor_of_row: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """x [M, K] of any float dtype, times its row of factors [n, K] fp32 -> codes e4m3 [M, K], and the scales fp32
    [M, ⌈K / group⌉] of so many elements of a row, one row after another in memory. A group of zeros has the scale 1.

    factor_of_row: int64 [M]; None where all rows have the first.
    """
    if runs_kernels(x):
        codes, scale = _quantize(x, factors, factor_of_row, group)
        return codes, scale.t()
    scaled = x.float()
    if factors is not None:
        scaled = scaled * (factors[:1] if factor_of_row is None else factors[factor_of_row])
    codes, scale = fp8_quantize(scaled, (1, group))
    return codes, scale.t().contiguous().t()


def transposed(codes: Tensor) -> Tensor:
    """codes [..., N, K] -> [..., K, N], contiguous."""
    data = codes.view(torch.uint8)
    return (_transpose(data) if runs_kernels(data) else data.mT.contiguous()).view(codes.dtype)


@kernel(do_not_specialize=("rows",))
def _quantize_kernel(
    x_ptr, factor_ptr, index_ptr, codes_ptr, scale_ptr, rows, columns, group, LARGEST: tl.constexpr,
    HAS_FACTOR: tl.constexpr, HAS_INDEX: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program quantises a group of ROWS rows, COLUMNS elements at a time, in two sweeps."""
    groups = tl.cdiv(columns, group)
    row = tl.program_id(0) // groups * ROWS + tl.arange(0, ROWS)
    start = tl.program_id(0) % groups * group
    end = tl.minimum(start + group, columns)
    if HAS_INDEX:
        factor_ptr += tl.load(index_ptr + row, row < rows, other=0)[:, None] * columns
    largest = tl.zeros([ROWS], tl.float32)
    for first in range(start, end, COLUMNS):
        x, _, _ = _load_scaled(x_ptr, factor_ptr, row, first, rows, columns, end, HAS_FACTOR, COLUMNS)
        largest = tl.maximum(largest, tl.max(tl.abs(x), 1))
    scale = tl.where(largest > 0, largest / LARGEST, 1.0)
    tl.store(scale_ptr + tl.program_id(0) % groups * rows + row, scale, row < rows)
    for first in range(start, end, COLUMNS):
        x, element, mask = _load_scaled(x_ptr, factor_ptr, row, first, rows, columns, end, HAS_FACTOR, COLUMNS)
        tl.store(codes_ptr + element, (x / scale[:, None]).to(codes_ptr.dtype.element_ty), mask)


@triton.jit
def _load_scaled(
    x_ptr, factor_ptr, row, first, rows, columns, end, HAS_FACTOR: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """COLUMNS elements of each row, fp32, times their factors; their places, and which there are."""
    column = first + tl.arange(0, COLUMNS)
    mask = (row < rows)[:, None] & (column < end)[None, :]
    element = row.to(tl.int64)[:, None] * columns + column[None, :]
    x = tl.load(x_ptr + element, mask, other=0.0).to(tl.float32)
    if HAS_FACTOR:
        x *= tl.load(factor_ptr + column[None, :], mask, other=0.0)
    return x, element, mask


def _launch_quantize(
    x: Tensor, factors: Tensor | None, factor_of_row: Tensor | None, group: int
) -> tuple[Tensor, Tensor]:
    x, factors = x.contiguous(), None if factors is None else factors.contiguous()
    codes, scale = _fake_quantize(x, factors, factor_of_row, group)
    rows, columns = x.shape
    width = min(triton.next_power_of_2(min(group, columns)), TILE)
    height = TILE // width
    launch = _quantize_kernel.bind(
        LARGEST=LARGEST, HAS_FACTOR=factors is not None, HAS_INDEX=factor_of_row is not None, ROWS=height,
        COLUMNS=width, num_warps=8,
    )  # fmt: skip
    launch(
        cdiv(rows, height) * cdiv(columns, group), x, x if factors is None else factors,
        x if factor_of_row is None else factor_of_row, codes, scale, rows, columns, group,
    )  # fmt: skip
    return codes, scale


def _fake_quantize(
    x: Tensor, factors: Tensor | None, factor_of_row: Tensor | None, group: int
) -> tuple[Tensor, Tensor]:
    rows, columns = x.shape
    codes = x.new_empty(rows, columns, dtype=torch.float8_e4m3fn)
    return codes, x.new_empty(cdiv(columns, group), rows, dtype=torch.float32)


_quantize = register_op(
    "fp8_quantize_rows(Tensor x, Tensor? factors, Tensor? factor_of_row, int group) -> (Tensor, Tensor)",
    _launch_quantize,
    _fake_quantize,
)


@kernel()
def _transpose_kernel(codes_ptr, result_ptr, rows, columns, SIZE: tl.constexpr):
    """One program transposes SIZE x SIZE bytes of a matrix."""
    row_tiles, column_tiles = tl.cdiv(rows, SIZE), tl.cdiv(columns, SIZE)
    matrix = tl.program_id(0) // (row_tiles * column_tiles)
    tile = tl.program_id(0) % (row_tiles * column_tiles)
    row = tile // column_tiles * SIZE + tl.arange(0, SIZE)
    column = tile % column_tiles * SIZE + tl.arange(0, SIZE)
    there = (row < rows)[:, None] & (column < columns)[None, :]
    start = matrix.to(tl.int64) * rows * columns
    codes = tl.load(codes_ptr + start + row.to(tl.int64)[:, None] * columns + column[None, :], there, other=0)
    places = start + column.to(tl.int64)[:, None] * rows + row[None, :]
    tl.store(result_ptr + places, tl.trans(codes), tl.trans(there))


def _launch_transpose(codes: Tensor) -> Tensor:
    result = _fake_transpose(codes)
    *matrices, rows, columns = codes.shape
    launch = _transpose_kernel.bind(SIZE=TRANSPOSED, num_warps=8)
    programs = math.prod(matrices) * cdiv(rows, TRANSPOSED) * cdiv(columns, TRANSPOSED)
    launch(programs, codes, result, rows, columns)
    return result


def _fake_transpose(codes: Tensor) -> Tensor:
    return codes.new_empty(*codes.shape[:-2], codes.shape[-1], codes.shape[-2])


_transpose = register_op("fp8_transpose(Tensor codes) -> Tensor", _launch_transpose, _fake_transpose)
