"""FP8: weights in 8 bits (e4m3) with an fp32 scale for each block, as FP8 checkpoints have them: ŵ = q s.

Blocks are of 128 x 128 elements, or as large as a checkpoint has them. They begin anew in each matrix of the Hub; those
at its ends may be smaller. s is the block's largest absolute value / 448, the largest of e4m3.
A weight is one tensor of bytes, whose sections `Float8` names; see nf4.py.
W [rows, K] or [E, N, K] -> 8.002 bits an element, and 4 bytes a row.
The product is in fp32 and rounded once to W's dtype. Dequantisation reads one byte an element and writes W's dtype:
bound by memory bandwidth. The kernel decodes e4m3 from integers, so that it runs on GPUs without FP8.
Micikevicius et al. 2022, https://arxiv.org/abs/2209.05433; blocks: DeepSeek-AI 2024, https://arxiv.org/abs/2412.19437.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.dispatch import register_op, runs_kernels
from ligermodels.kernels.launch import cdiv, kernel
from ligermodels.kernels.quant.quantised_weight import RowsLayout, aligned, section, starts_of

FP8_BLOCK = 128, 128  # rows and columns that share a scale
LARGEST = 448.0  # of e4m3
CHUNK_ROWS = 1024  # blocks of rows are quantised so many at a time: each element needs a dozen bytes meanwhile
PROGRAM_ROWS, PROGRAM_COLUMNS = 4, 1024  # of one program


class Fp8Sections(NamedTuple):
    """Where each section of a weight's bytes begins."""

    scale_row: int  # int32 [rows]: the row of scales that each row of the weight has
    scale: int  # fp32 [scale rows, ⌈K / columns of a block⌉]
    codes: int  # e4m3 [rows, K]
    end: int


def fp8_sections(rows: int, columns: int, scale_rows: int, scale_columns: int) -> Fp8Sections:
    return Fp8Sections(*starts_of((4 * rows, 4 * scale_rows * scale_columns, rows * columns)))


@dataclass(frozen=True)
class Float8(RowsLayout):
    """The layout of a weight in FP8. block: rows and columns that share a scale.

    A part is one matrix [rows, K], or several of them, [E, N, K]: blocks do not cross from one into the next.
    """

    block: tuple[int, int] = FP8_BLOCK
    scheme: ClassVar = "fp8"

    def __post_init__(self) -> None:
        if sum(self.parts) != self.rows or any(rows % self.matrix_rows(rows) for rows in self.parts):
            raise ValueError(f"fp8: {list(self.shape)} in parts of {self.parts} rows")

    def matrix_rows(self, part: int) -> int:
        """Rows of each matrix of a part with `part` rows."""
        return min(part, self.shape[-2])

    def scale_rows_of(self, part: int) -> int:
        matrix = self.matrix_rows(part)
        return part // matrix * cdiv(matrix, self.block[0])

    @property
    def scale_shape(self) -> tuple[int, int]:
        return sum(map(self.scale_rows_of, self.parts)), cdiv(self.columns, self.block[1])

    @property
    def nbytes(self) -> int:
        return fp8_sections(self.rows, self.columns, *self.scale_shape).end

    def view(self, data: Tensor) -> tuple[Tensor, ...]:
        """The row of scales of each row, the scales and the codes of a weight's bytes, in the same memory."""
        return fp8_views(data, self.rows, self.columns, *self.scale_shape)

    def places(self) -> Iterator[tuple[slice, slice]]:
        """The rows and the rows of scales of each part."""
        row = scale = 0
        for rows in self.parts:
            scales = self.scale_rows_of(rows)
            yield slice(row, row + rows), slice(scale, scale + scales)
            row, scale = row + rows, scale + scales

    def pack(self, parts: Iterable[Mapping[str, Tensor]]) -> Tensor:
        """The parts of a weight -> its bytes [nbytes].

        Of each part `codes` e4m3 [rows, K] and `scale` fp32 [rows of scales, columns of scales], or one number for all.
        Raises ValueError for codes of NaN, which the kernel does not know.
        """
        read = list(parts)
        data = read[0]["codes"].new_zeros(self.nbytes, dtype=torch.uint8)
        scale_row, scale, codes = self.view(data)
        for part, (rows, scales) in zip(read, self.places(), strict=True):
            matrix = self.matrix_rows(rows.stop - rows.start)
            number = torch.arange(rows.stop - rows.start, device=data.device, dtype=torch.int32)
            blocks = cdiv(matrix, self.block[0])
            scale_row[rows] = scales.start + number // matrix * blocks + number % matrix // self.block[0]
            scale[scales] = part["scale"]
            codes[rows] = part["codes"]
        if (codes.view(torch.uint8) & 127 == 127).any():
            raise ValueError("fp8: codes that are not finite")
        return data

    def unpack(self, data: Tensor) -> list[dict[str, Tensor]]:
        """The parts of the weight's bytes, in the same memory; as `pack` takes them."""
        _, scale, codes = self.view(data)
        return [{"codes": codes[rows], "scale": scale[scales]} for rows, scales in self.places()]

    def quantize(self, weight: Tensor) -> Tensor:
        """The bytes [nbytes] of a weight of this shape, in any float dtype."""
        parts = weight.reshape(self.rows, self.columns).split(self.parts)
        return self.pack(self.quantize_part(part) for part in parts)

    def quantize_part(self, part: Tensor) -> dict[str, Tensor]:
        chunk = cdiv(CHUNK_ROWS, self.block[0]) * self.block[0]
        matrices = part.split(self.matrix_rows(len(part)))
        chunks = [fp8_quantize(rows, self.block) for matrix in matrices for rows in matrix.split(chunk)]
        codes, scale = (torch.cat(tensors) for tensors in zip(*chunks, strict=True))
        return {"codes": codes, "scale": scale}

    def dequantize(self, data: Tensor) -> Tensor:
        """The weight's bytes [nbytes] -> the weight, in the layout's dtype."""
        if not runs_kernels(data):
            return fp8_dequantize_reference(data, self)
        sizes = self.rows, self.columns, *self.scale_shape
        return _dequantize(data, *sizes, self.block[1], self.dtype).view(self.shape)

    def dequantize_experts(self, data: Tensor, index: Tensor) -> Tensor:
        """Dequantises the matrices `index` [n] of a weight [E, N, K] -> [n, N, K]. Copies their codes."""
        if not runs_kernels(data):
            return self.dequantize(data)[index]
        experts, height, columns = self.shape
        sizes = len(index) * height, columns, *self.scale_shape
        chosen = data.new_empty(fp8_sections(*sizes).end)
        (rows, scale, codes), (new_rows, new_scale, new_codes) = self.view(data), fp8_views(chosen, *sizes)
        new_scale.copy_(scale)
        new_rows.view(-1, height).copy_(rows.view(experts, height)[index])
        bits = codes.view(torch.uint8).view(experts, -1)
        new_codes.view(torch.uint8).view(len(index), -1).copy_(bits[index])
        return _dequantize(chosen, *sizes, self.block[1], self.dtype).view(len(index), height, columns)


def fp8_views(data: Tensor, rows: int, columns: int, scale_rows: int, scale_columns: int) -> tuple[Tensor, ...]:
    at = fp8_sections(rows, columns, scale_rows, scale_columns)
    return (
        section(data, at.scale_row, (rows,), torch.int32),
        section(data, at.scale, (scale_rows, scale_columns), torch.float32),
        section(data, at.codes, (rows, columns), torch.float8_e4m3fn),
    )


def fp8_quantize(matrix: Tensor, block: tuple[int, int] = FP8_BLOCK) -> tuple[Tensor, Tensor]:
    """A matrix [rows, K] of any float dtype -> codes e4m3 [rows, K], scales fp32 of its blocks. A block of zeros has
    the scale 1."""
    rows, columns = matrix.shape
    high, wide = block
    padded = F.pad(matrix.float(), (0, -columns % wide, 0, -rows % high))
    blocks = padded.view(cdiv(rows, high), high, cdiv(columns, wide), wide)
    largest = blocks.abs().amax((1, 3))
    scale = torch.where(largest > 0, largest / LARGEST, 1.0)
    scaled = (blocks / scale[:, None, :, None]).clamp(-LARGEST, LARGEST).view(padded.shape)
    return scaled[:rows, :columns].to(torch.float8_e4m3fn), scale


def fp8_dequantize_reference(data: Tensor, layout: Float8) -> Tensor:
    scale_row, scale, codes = layout.view(data.contiguous())
    return scaled_codes(codes, scale.index_select(0, scale_row), layout.block[1]).to(layout.dtype).view(layout.shape)


def scaled_codes(codes: Tensor, scale: Tensor, block: int) -> Tensor:
    """codes e4m3 [M, K], scale fp32 [M, ⌈K / block⌉] -> what they stand for, fp32 [M, K]."""
    return codes.float() * scale.repeat_interleave(block, 1)[:, : codes.shape[1]]


@kernel()
def _dequantize_kernel(
    data_ptr, weight_ptr, rows, columns, scale_columns, scale, codes, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program dequantises ROWS x COLUMNS elements. e4m3 is half precision with the exponent moved by 8."""
    tiles = tl.cdiv(columns, COLUMNS)
    row = tl.program_id(0) // tiles * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % tiles * COLUMNS + tl.arange(0, COLUMNS)
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    scale_row = tl.load(data_ptr.to(tl.pointer_type(tl.int32)) + row, row < rows, other=0)
    at = scale_row[:, None] * scale_columns + (column // BLOCK)[None, :]
    factor = tl.load((data_ptr + scale).to(tl.pointer_type(tl.float32)) + at, mask, other=0.0)
    element = row.to(tl.int64)[:, None] * columns + column[None, :]
    code = tl.load(data_ptr + codes + element, mask, other=0).to(tl.int16)
    half = ((code & 128) << 8 | (code & 127) << 7).to(tl.float16, bitcast=True)
    weight = half.to(tl.float32) * 256.0 * factor
    tl.store(weight_ptr + element, weight.to(weight_ptr.dtype.element_ty), mask)


def _launch_dequantize(
    data: Tensor, rows: int, columns: int, scale_rows: int, scale_columns: int, block: int, dtype: torch.dtype
) -> Tensor:
    weight = _fake_dequantize(data, rows, columns, scale_rows, scale_columns, block, dtype)
    at = fp8_sections(rows, columns, scale_rows, scale_columns)
    launch = _dequantize_kernel.bind(BLOCK=block, ROWS=PROGRAM_ROWS, COLUMNS=PROGRAM_COLUMNS)
    programs = cdiv(rows, PROGRAM_ROWS) * cdiv(columns, PROGRAM_COLUMNS)
    launch(programs, aligned(data), weight, rows, columns, scale_columns, at.scale, at.codes)
    return weight


def _fake_dequantize(
    data: Tensor, rows: int, columns: int, scale_rows: int, scale_columns: int, block: int, dtype: torch.dtype
) -> Tensor:
    return data.new_empty(rows, columns, dtype=dtype)


_dequantize = register_op("fp8_dequantize", _launch_dequantize, _fake_dequantize)
