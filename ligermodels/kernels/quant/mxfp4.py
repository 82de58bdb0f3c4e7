"""MXFP4: weights in 4 bits (e2m1), a power of two as scale for each 32, as the checkpoints of gpt-oss have them.

    w = c[q] 2^(e - 127)      q in 0..15, c: the values of e2m1, e in 0..255: one byte of 32 elements
W [rows, K] or [E, N, K], K a multiple of 32 -> 4.25 bits an element. Values are exact in bf16.
A weight is one tensor of bytes, which `Mxfp4Layout` divides; see nf4.py. Nothing is quantised, only kept as stored.
Dequantisation moves 17 bytes for 32 elements, and writes them: bound by memory bandwidth.
Open Compute Project 2023, OCP Microscaling Formats (MX) v1.0.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import ClassVar

import torch
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.dispatch import register_op, runs_kernels
from ligermodels.kernels.launch import cdiv, kernel
from ligermodels.kernels.quant.quantised_weight import RowsLayout, section, starts_of

MX_BLOCK = 32  # elements that share a scale
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
EXPONENT_BIAS = 127
PROGRAM_BLOCKS = 64  # of one program
VIEWS = "exponents", "codes"


@dataclass(frozen=True)
class Mxfp4Layout(RowsLayout):
    """The layout of a weight in MXFP4. Raises ValueError if rows are no whole blocks."""

    scheme: ClassVar = "mxfp4"

    def __post_init__(self) -> None:
        if self.columns % MX_BLOCK or sum(self.parts) != self.rows:
            found = f"{list(self.shape)} in parts of {self.parts} rows"
            raise ValueError(f"mxfp4: {found}; columns must be whole blocks of {MX_BLOCK}")

    @property
    def nbytes(self) -> int:
        return list(starts_of((self.rows * self.columns // MX_BLOCK, self.rows * self.columns // 2)))[-1]

    def dequantize_experts(self, data: Tensor, index: Tensor) -> Tensor:
        """Dequantises the matrices `index` [n] of a weight [E, N, K] -> [n, N, K]. Copies their bytes."""
        experts, height, columns = self.shape
        chosen = replace(self, shape=(len(index), height, columns), parts=(len(index) * height,))
        parts = {name: x.view(experts, -1)[index] for name, x in zip(VIEWS, self.view(data), strict=True)}
        rows = {name: x.view(len(index) * height, -1) for name, x in parts.items()}
        return chosen.dequantize(chosen.pack([rows]))

    def view(self, data: Tensor) -> tuple[Tensor, Tensor]:
        """The exponents [rows, K / 32] and the codes [rows, K / 2] of a weight's bytes, in the same memory."""
        _, codes, _ = starts_of((self.rows * self.columns // MX_BLOCK, self.rows * self.columns // 2))
        return (
            section(data, 0, (self.rows, self.columns // MX_BLOCK), torch.uint8),
            section(data, codes, (self.rows, self.columns // 2), torch.uint8),
        )

    def pack(self, parts: Iterable[Mapping[str, Tensor]]) -> Tensor:
        """The parts of a weight -> its bytes [nbytes]. Of each `exponents` [rows, K / 32] and `codes` [rows, K / 2]:
        element 2 j in the low, 2 j + 1 in the high four bits."""
        read = list(parts)
        data = read[0]["codes"].new_zeros(self.nbytes)
        for part, views in zip(read, self.unpack(data), strict=True):
            for name, view in views.items():
                view.copy_(part[name])
        return data

    def unpack(self, data: Tensor) -> list[dict[str, Tensor]]:
        """The parts of the weight's bytes, in the same memory; as `pack` takes them."""
        exponents, codes = self.view(data)
        spans = pairwise(accumulate(self.parts, initial=0))
        return [dict(zip(VIEWS, (exponents[a:b], codes[a:b]), strict=True)) for a, b in spans]

    def quantize(self, weight: Tensor) -> Tensor:
        raise ValueError("mxfp4: weights are read as they are stored, and not quantised")

    def dequantize(self, data: Tensor) -> Tensor:
        """The weight's bytes [nbytes] -> the weight, in the layout's dtype."""
        if not runs_kernels(data):
            exponents, codes = self.view(data.contiguous())
            return mxfp4_dequantize_reference(codes, exponents).to(self.dtype).view(self.shape)
        return _dequantize(data, self.rows, self.columns, self.dtype).view(self.shape)


def mxfp4_dequantize_reference(codes: Tensor, exponents: Tensor) -> Tensor:
    """codes uint8 with two elements a byte, exponents uint8 [..., blocks] -> bf16 [..., 32 blocks], exact."""
    scale = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents.int() - EXPONENT_BIAS).bfloat16()
    pairs = torch.tensor([(E2M1[byte & 15], E2M1[byte >> 4]) for byte in range(256)]).to(scale)
    decoded = pairs.index_select(0, codes.flatten().int()).view(*exponents.shape, MX_BLOCK)
    return decoded.mul_(scale[..., None]).flatten(-2)


@kernel()
def _dequantize_kernel(data_ptr, weight_ptr, blocks, codes, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    """One program dequantises BLOCKS blocks."""
    number = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    mask = number < blocks
    exponent = tl.load(data_ptr + number, mask, other=0).to(tl.int32)
    # As a number of fp32: the exponent alone, and of the smallest, 2^-127, half of the least normal one.
    scale = tl.where(exponent > 0, exponent << 23, 1 << 22).to(tl.float32, bitcast=True)
    byte = number[:, None] * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
    pair = tl.load(data_ptr + codes + byte, mask[:, None], other=0).to(tl.int32)
    code = tl.interleave(pair & 15, pair >> 4)
    # The values of e2m1, doubled: 0, 1, 2, 3, then with one more bit 4, 6, then 8, 12.
    mantissa, power = code & 1, (code >> 1) & 3
    doubled = tl.where(power == 0, mantissa, (2 + mantissa) << tl.maximum(power - 1, 0)).to(tl.float32)
    weight = tl.where(code >> 3 == 1, -0.5, 0.5) * doubled * scale[:, None]
    element = number[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(weight_ptr + element, weight.to(weight_ptr.dtype.element_ty), mask[:, None])


def _launch_dequantize(data: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    weight = _fake_dequantize(data, rows, columns, dtype)
    blocks = rows * columns // MX_BLOCK
    _, codes, _ = starts_of((blocks, rows * columns // 2))
    launch = _dequantize_kernel.bind(BLOCKS=PROGRAM_BLOCKS, BLOCK=MX_BLOCK)
    launch(cdiv(blocks, PROGRAM_BLOCKS), data.contiguous(), weight, blocks, codes)
    return weight


def _fake_dequantize(data: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return data.new_empty(rows, columns, dtype=dtype)


_dequantize = register_op("mxfp4_dequantize", _launch_dequantize, _fake_dequantize)
