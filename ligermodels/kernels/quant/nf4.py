"""NF4: weights in 4 bits, a scale for each 64, and the scales in 8 bits (double quantisation). Bytes as bitsandbytes'.

    w = c[q] s           q in 0..15, c: the 16 quantiles of a normal distribution, s: one fp32 scale of 64 elements
    s = d[p] t + o       p in 0..255, d: the 256 values of an 8-bit dynamic float, t: one of 256 scales, o: their mean
Blocks run over the flattened rows of each Hub tensor, so that a weight that packs several is quantised by its parts.
A weight is one tensor of bytes, whose sections `Nf4` names: optimizers, dtype casts and sharding pass it on as it is.
W [rows, K] or [E, N, K], K a multiple of 64 -> 4.127 bits an element.
All in fp32 without fused multiply-add, in the order of bitsandbytes, then rounded once to W's dtype: bit-equal to it.
Dequantisation moves 33 bytes for 64 elements, and writes them: bound by memory bandwidth.
Dettmers et al. 2023, https://arxiv.org/abs/2305.14314; the dynamic float: Dettmers 2016, https://arxiv.org/abs/1511.04561.
"""

import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ligermodels.kernels.dispatch import check_floats, register_op, runs_kernels, shape_of
from ligermodels.kernels.launch import cdiv, kernel
from ligermodels.kernels.quant.quantised_weight import (
    ALIGNMENT,
    DenseProducts,
    QuantisedWeight,
    RowsLayout,
    aligned,
    section,
    starts_of,
)

NF4_BLOCK = 64  # elements that share a scale
NESTED_BLOCK = 256  # scales that share a scale
NF4_VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
LEAST_SCALE = 1e-38  # in divisions: a block of zeros stays one
PROGRAM_BLOCKS, ENCODED_BLOCKS = 64, 16  # of one program
CHUNK_ELEMENTS = 2**20  # that the reference quantises at a time: it needs many bytes for each
SMALLEST_EXPONENT, FRACTION_BITS = -6, 7  # of the dynamic float: its smallest power of ten; bits beside the sign
# In the kernels: where the sections of every weight begin, and the scales of a group.
NESTED_VALUES, SHIFT, NESTED_GROUP = tl.constexpr(64), tl.constexpr(64 + 1024), tl.constexpr(NESTED_BLOCK)


class Nf4Part(NamedTuple):
    """One Hub tensor in NF4, under the names that bitsandbytes has for its tensors. [B] scales, in ⌈B / 256⌉ groups."""

    codes: Tensor  # uint8 [rows, K / 2]: element 2 j in the high, 2 j + 1 in the low four bits
    absmax: Tensor  # uint8 [B]
    nested_absmax: Tensor  # fp32 [⌈B / 256⌉]
    nested_offset: Tensor  # fp32, one number
    quant_map: Tensor  # fp32 [16]
    nested_quant_map: Tensor  # fp32 [256]


class Sections(NamedTuple):
    """Where each section of a weight's bytes begins."""

    values: int  # fp32 [16]
    nested_values: int  # fp32 [256]
    shift: int  # int32 [rows]: what is added to the number of a scale to get its number within padded groups of 256
    nested_scale: int  # fp32, of each group
    nested_offset: int  # fp32, of each group
    scale: int  # uint8 [B]
    codes: int  # uint8 [rows, K / 2]
    end: int


def sections(rows: int, columns: int, groups: int) -> Sections:
    sizes = 4 * 16, 4 * 256, 4 * rows, 4 * groups, 4 * groups, rows * columns // NF4_BLOCK, rows * columns // 2
    return Sections(*starts_of(sizes))


@dataclass(frozen=True)
class Nf4(RowsLayout):
    """The layout of a weight in NF4. Raises ValueError if the weight cannot be quantised."""

    scheme: ClassVar = "nf4"

    def __post_init__(self) -> None:
        if self.columns % NF4_BLOCK or sum(self.parts) != self.rows:
            raise ValueError(f"nf4: {list(self.shape)} in parts of {self.parts} rows; columns in blocks of {NF4_BLOCK}")

    @property
    def groups_of_parts(self) -> tuple[int, ...]:
        """How many groups of scales each part has."""
        return tuple(cdiv(rows * self.columns // NF4_BLOCK, NESTED_BLOCK) for rows in self.parts)

    @property
    def groups(self) -> int:
        return sum(self.groups_of_parts)

    @property
    def nbytes(self) -> int:
        return sections(self.rows, self.columns, self.groups).end

    def view(self, data: Tensor) -> "Nf4Views":
        """The sections of a weight's bytes, as tensors in the same memory."""
        return views_of(data, self.rows, self.columns, self.groups)

    def pack(self, parts: Iterable[Mapping[str, Tensor]]) -> Tensor:
        """The parts of a weight, each with the fields of `Nf4Part` -> the weight's bytes [nbytes].

        Raises ValueError if parts differ in their maps.
        """
        read = [Nf4Part(**part) for part in parts]
        data = read[0].codes.new_zeros(self.nbytes)
        views = self.view(data)
        views.values.copy_(read[0].quant_map)
        views.nested_values.copy_(read[0].nested_quant_map)
        for part, (rows, scales, groups) in zip(read, self.places(), strict=True):
            maps = part.quant_map, part.nested_quant_map
            if not all(a is b or torch.equal(a, b) for a, b in zip(maps, read[0][-2:], strict=True)):
                raise ValueError("nf4: its parts have different values for the same codes")
            views.shift[rows] = NESTED_BLOCK * groups.start - scales.start
            views.nested_scale[groups] = part.nested_absmax
            views.nested_offset[groups] = part.nested_offset
            views.scale[scales] = part.absmax
            views.codes[rows] = part.codes
        return data

    def unpack(self, data: Tensor) -> list[dict[str, Tensor]]:
        """The parts of the weight's bytes, in the same memory: the fields of `Nf4Part`."""
        views = self.view(data)
        return [
            {
                "codes": views.codes[rows],
                "absmax": views.scale[scales],
                "nested_absmax": views.nested_scale[groups],
                "nested_offset": views.nested_offset[groups.start],
                "quant_map": views.values,
                "nested_quant_map": views.nested_values,
            }
            for rows, scales, groups in self.places()
        ]

    def places(self) -> Iterator[tuple[slice, slice, slice]]:
        """The rows, the scales and the groups of scales of each part."""
        per_row = self.columns // NF4_BLOCK
        row = group = 0
        for rows, groups in zip(self.parts, self.groups_of_parts, strict=True):
            scales = slice(row * per_row, (row + rows) * per_row)
            yield slice(row, row + rows), scales, slice(group, group + groups)
            row, group = row + rows, group + groups

    def quantize(self, weight: Tensor) -> Tensor:
        """The bytes [nbytes] of a weight of this shape, in any float dtype."""
        return self.pack(
            nf4_quantize(part)._asdict() for part in weight.reshape(self.rows, self.columns).split(self.parts)
        )

    def dequantize(self, data: Tensor) -> Tensor:
        """The weight's bytes [nbytes] -> the weight, in the layout's dtype."""
        if not runs_kernels(data):
            return nf4_dequantize_reference(data, self)
        return _dequantize(data, self.rows, self.columns, self.groups, self.dtype).view(self.shape)

    def dequantize_experts(self, data: Tensor, index: Tensor) -> Tensor:
        """Dequantises the matrices `index` [n] of a weight [E, N, K] -> [n, N, K]. Copies their codes and scales."""
        if not runs_kernels(data):
            return self.dequantize(data)[index]
        experts, height, columns = self.shape
        rows = len(index) * height
        chosen = data.new_empty(sections(rows, columns, self.groups).end)
        old, new = self.view(data), views_of(chosen, rows, columns, self.groups)
        moved = (index - torch.arange(len(index), device=data.device)) * (height * columns // NF4_BLOCK)
        new.shift.view(-1, height).copy_(old.shift.view(experts, height)[index] + moved[:, None])
        for name in ("values", "nested_values", "nested_scale", "nested_offset"):
            getattr(new, name).copy_(getattr(old, name))
        for target, source in ((new.scale, old.scale), (new.codes, old.codes)):
            target.view(len(index), -1).copy_(source.view(experts, -1)[index])
        return _dequantize(chosen, rows, columns, self.groups, self.dtype).view(len(index), height, columns)


class Nf4Views(NamedTuple):
    """The sections of a weight's bytes as tensors; see `Sections`."""

    values: Tensor
    nested_values: Tensor
    shift: Tensor
    nested_scale: Tensor
    nested_offset: Tensor
    scale: Tensor
    codes: Tensor


def views_of(data: Tensor, rows: int, columns: int, groups: int) -> Nf4Views:
    at = sections(rows, columns, groups)
    return Nf4Views(
        section(data, at.values, (16,), torch.float32), section(data, at.nested_values, (256,), torch.float32),
        section(data, at.shift, (rows,), torch.int32), section(data, at.nested_scale, (groups,), torch.float32),
        section(data, at.nested_offset, (groups,), torch.float32),
        section(data, at.scale, (rows * columns // NF4_BLOCK,), torch.uint8),
        section(data, at.codes, (rows, columns // 2), torch.uint8),
    )  # fmt: skip


def nf4_dequantize_reference(data: Tensor, layout: Nf4) -> Tensor:
    data = data.contiguous()
    views, per_row = layout.view(data), layout.columns // NF4_BLOCK
    number = torch.arange(views.scale.numel(), device=data.device) + views.shift.repeat_interleave(per_row)
    group = number // NESTED_BLOCK
    scale = views.nested_values[views.scale.int()] * views.nested_scale[group] + views.nested_offset[group]  # [B]
    pairs = torch.stack([views.values.repeat_interleave(16), views.values.repeat(16)], -1)  # of each byte
    values = pairs.index_select(0, views.codes.flatten().int()).view(-1, NF4_BLOCK)
    return (values * scale[:, None]).to(layout.dtype).view(layout.shape)


def nf4_encode_reference(weight: Tensor) -> tuple[Tensor, Tensor]:
    blocks = weight.float().reshape(-1, NF4_BLOCK)
    absmax = blocks.abs().amax(-1)
    scaled = (blocks * (1.0 / absmax.clamp(min=LEAST_SCALE))[:, None]).clamp(-1, 1)
    code = torch.bucketize(scaled, torch.tensor(NF4_BOUNDS.value, device=weight.device), out_int32=True).to(torch.uint8)
    high, low = code.view(len(weight), weight.shape[1] // 2, 2).unbind(-1)
    return high << 4 | low, absmax


def halfway(values: tuple[float, ...]) -> tuple[float, ...]:
    """The fp32 numbers halfway between neighbours."""
    exact = torch.tensor(values, dtype=torch.float32)
    return tuple(((exact[:-1] + exact[1:]) / 2).tolist())


NF4_BOUNDS = tl.constexpr(halfway(NF4_VALUES))


@functools.cache
def dynamic_values() -> tuple[float, ...]:
    """The 256 numbers of the 8-bit dynamic float: 0, 1, and of each power of ten ever more between 0.1 and 1 times it.

    Source: Dettmers 2016, section 1.
    """
    numbers = [0.0, 1.0]
    for bits in range(FRACTION_BITS):
        fractions = torch.linspace(0.1, 1, 2**bits + 1, dtype=torch.float32)
        power = 10 ** (SMALLEST_EXPONENT + bits)
        middles = power * ((fractions[:-1] + fractions[1:]) / 2.0)
        numbers += [*middles.tolist(), *(-middles).tolist()]
    return tuple(sorted(numbers))


@functools.cache
def tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """The values of NF4 and of the dynamic float, fp32."""
    values, nested = (torch.tensor(x, dtype=torch.float32, device=device) for x in (NF4_VALUES, dynamic_values()))
    return values, nested


def nf4_encode(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [rows, K] -> codes uint8 [rows, K / 2], and each block's largest absolute value, fp32 [rows K / 64]."""
    if runs_kernels(weight):
        return _encode(weight)
    chunks = map(nf4_encode_reference, weight.split(max(1, CHUNK_ELEMENTS // weight.shape[1])))
    codes, absmax = zip(*chunks, strict=True)
    return torch.cat(codes), torch.cat(absmax)


def nf4_weight(weight: Tensor) -> QuantisedWeight:
    """A weight [rows, K] or [E, rows, K] in NF4, to be used in its dtype; K is a multiple of 64. Raises ValueError."""
    shape = shape_of("nf4_weight", "weight", weight)
    check_floats("nf4_weight", weight=weight)
    if shape[-1] % NF4_BLOCK:
        raise ValueError(f"nf4_weight: weight has {shape[-1]} columns; a multiple of {NF4_BLOCK} is needed")
    layout = Nf4(tuple(shape), (shape[:-1].numel(),), weight.dtype)
    return QuantisedWeight(layout.quantize(weight), layout)


def nf4_quantize(weight: Tensor) -> Nf4Part:
    """A Hub tensor in NF4: weight [rows, K] float, K a multiple of 64. No gradient passes.

    A weight with a number that is not finite has an offset that is not. Raises ValueError for another shape.
    """
    if weight.ndim != 2 or weight.shape[1] % NF4_BLOCK:
        raise ValueError(
            f"nf4_quantize: weight is {list(weight.shape)}; expected [rows, K], K a multiple of {NF4_BLOCK}"
        )
    codes, absmax = nf4_encode(weight.detach())
    values, nested_values = tables(weight.device)
    offset = absmax.mean()
    groups = F.pad(absmax - offset, (0, -absmax.numel() % NESTED_BLOCK)).view(-1, NESTED_BLOCK)
    nested = groups.abs().amax(-1)
    scaled = (groups * (1.0 / nested.clamp(min=LEAST_SCALE))[:, None]).clamp(-1, 1)
    bounds = (nested_values[:-1] + nested_values[1:]) / 2
    scale = torch.bucketize(scaled.flatten()[: absmax.numel()], bounds, out_int32=True).to(torch.uint8)
    return Nf4Part(codes, scale, nested, offset, values, nested_values)


@kernel(do_not_specialize=["blocks"])
def _encode_kernel(weight_ptr, codes_ptr, absmax_ptr, blocks, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    """One program encodes BLOCKS blocks. A code is the number of bounds below the scaled element."""
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    mask = (block < blocks)[:, None]
    column = tl.arange(0, BLOCK)
    x = tl.load(weight_ptr + block[:, None] * BLOCK + column[None, :], mask, other=0.0).to(tl.float32)
    absmax = tl.max(tl.abs(x), 1)
    tl.store(absmax_ptr + block, absmax, block < blocks)
    one, least = tl.full([BLOCKS], 1.0, tl.float32), tl.full([BLOCKS], 1e-38, tl.float32)
    scaled = x * tl.div_rn(one, tl.maximum(absmax, least))[:, None]
    code = tl.zeros([BLOCKS, BLOCK], tl.int32)
    for bound in tl.static_range(15):
        code += (scaled > NF4_BOUNDS[bound]).to(tl.int32)
    high, low = tl.split(code.reshape(BLOCKS, BLOCK // 2, 2))
    pair = tl.arange(0, BLOCK // 2)
    tl.store(codes_ptr + block[:, None] * (BLOCK // 2) + pair[None, :], (high << 4 | low).to(tl.uint8), mask)


def _launch_encode(weight: Tensor) -> tuple[Tensor, Tensor]:
    codes, absmax = _fake_encode(weight)
    blocks = absmax.numel()
    if blocks:
        launch = _encode_kernel.bind(BLOCKS=ENCODED_BLOCKS, BLOCK=NF4_BLOCK, enable_fp_fusion=False)
        launch(cdiv(blocks, ENCODED_BLOCKS), weight.contiguous(), codes, absmax, blocks)
    return codes, absmax


def _fake_encode(weight: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = weight.shape
    codes = weight.new_empty(rows, columns // 2, dtype=torch.uint8)
    return codes, weight.new_empty(rows * columns // NF4_BLOCK, dtype=torch.float32)


_encode = register_op("nf4_encode", _launch_encode, _fake_encode)


@triton.jit
def nf4_scales(data_ptr, row, number, mask, nested_scale, nested_offset, scale):
    """The fp32 scales with these numbers, in these rows of the weight. The last arguments: where sections begin."""
    shift = tl.load((data_ptr + SHIFT).to(tl.pointer_type(tl.int32)) + row, mask, other=0)
    group = (number + shift) // NESTED_GROUP
    code = tl.load(data_ptr + scale + number, mask, other=0).to(tl.int32)
    value = tl.load((data_ptr + NESTED_VALUES).to(tl.pointer_type(tl.float32)) + code)
    nested = tl.load((data_ptr + nested_scale).to(tl.pointer_type(tl.float32)) + group, mask, other=0.0)
    offset = tl.load((data_ptr + nested_offset).to(tl.pointer_type(tl.float32)) + group, mask, other=0.0)
    return value * nested + offset


@triton.jit
def nf4_values(data_ptr, pair):
    """Bytes [A, B] of codes -> their values [A, 2 B] in fp32, not yet scaled."""
    values_ptr = data_ptr.to(tl.pointer_type(tl.float32))
    high, low = tl.load(values_ptr + (pair >> 4).to(tl.int32)), tl.load(values_ptr + (pair & 15).to(tl.int32))
    return tl.interleave(high, low)


@kernel()
def _dequantize_kernel(
    data_ptr, weight_ptr, scales, scales_per_row, nested_scale, nested_offset, scale, codes, BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program dequantises BLOCKS blocks."""
    number = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    mask = number < scales
    factor = nf4_scales(data_ptr, number // scales_per_row, number, mask, nested_scale, nested_offset, scale)
    pair = number[:, None] * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
    weight = nf4_values(data_ptr, tl.load(data_ptr + codes + pair, mask[:, None], other=0)) * factor[:, None]
    element = number[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(weight_ptr + element, weight.to(weight_ptr.dtype.element_ty), mask[:, None])


def _launch_dequantize(data: Tensor, rows: int, columns: int, groups: int, dtype: torch.dtype) -> Tensor:
    weight = _fake_dequantize(data, rows, columns, groups, dtype)
    at, scales = sections(rows, columns, groups), rows * columns // NF4_BLOCK
    launch = _dequantize_kernel.bind(BLOCKS=PROGRAM_BLOCKS, BLOCK=NF4_BLOCK, enable_fp_fusion=False)
    launch(
        cdiv(scales, PROGRAM_BLOCKS), aligned(data), weight, scales, columns // NF4_BLOCK, at.nested_scale,
        at.nested_offset, at.scale, at.codes,
    )  # fmt: skip
    return weight


def _fake_dequantize(data: Tensor, rows: int, columns: int, groups: int, dtype: torch.dtype) -> Tensor:
    return data.new_empty(rows, columns, dtype=dtype)


_dequantize = register_op("nf4_dequantize", _launch_dequantize, _fake_dequantize)


@dataclass(frozen=True)
class DensePart(RowsLayout):
    """A Hub tensor [rows, K] as a checkpoint stores it, in the dtype `stored`."""

    stored: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.rows * self.columns * self.stored.itemsize

    def quantize(self, weight: Tensor) -> Tensor:
        return weight.to(self.stored).flatten().view(torch.uint8)

    def dequantize(self, data: Tensor) -> Tensor:
        return section(data, 0, self.shape, self.stored).to(self.dtype)

    def pack(self, parts: Iterable[Mapping[str, Tensor]]) -> Tensor:
        (part,) = parts
        return self.quantize(part["values"])

    def unpack(self, data: Tensor) -> list[dict[str, Tensor]]:
        return [{"values": section(data, 0, self.shape, self.stored)}]


@dataclass(frozen=True)
class PartlyNf4(DenseProducts):
    """The layout of a weight of which some of the Hub's tensors are not quantised, such as the queries beside keys and
    values. W [rows, K], dequantised part by part.

    layouts: of its parts, each of which is one Hub tensor; the bytes of each follow those of the part before it.
    """

    layouts: tuple[Nf4 | DensePart, ...]
    scheme: ClassVar = "nf4"

    @property
    def parts(self) -> tuple[int, ...]:
        return tuple(layout.rows for layout in self.layouts)

    @property
    def shape(self) -> tuple[int, ...]:
        return sum(self.parts), self.layouts[0].columns

    @property
    def dtype(self) -> torch.dtype:
        return self.layouts[0].dtype

    @property
    def nbytes(self) -> int:
        *_, end = starts_of(layout.nbytes for layout in self.layouts)
        return end

    def with_dtype(self, dtype: torch.dtype) -> "PartlyNf4":
        return PartlyNf4(tuple(layout.with_dtype(dtype) for layout in self.layouts))

    def split(self, data: Tensor) -> list[Tensor]:
        """The bytes of each part, in the same memory."""
        starts = starts_of(layout.nbytes for layout in self.layouts)
        return [data[start : start + layout.nbytes] for start, layout in zip(starts, self.layouts, strict=False)]

    def quantize(self, weight: Tensor) -> Tensor:
        rows = zip(self.layouts, weight.split(self.parts), strict=True)
        return in_sequence(layout.quantize(part) for layout, part in rows)

    def pack(self, parts: Iterable[Mapping[str, Tensor]]) -> Tensor:
        """The parts of a weight, with the fields of `Nf4Part` or their `values` -> the weight's bytes [nbytes]."""
        return in_sequence(layout.pack([part]) for layout, part in zip(self.layouts, parts, strict=True))

    def unpack(self, data: Tensor) -> list[dict[str, Tensor]]:
        parts = zip(self.layouts, self.split(data), strict=True)
        return [fields for layout, part in parts for fields in layout.unpack(part)]

    def dequantize(self, data: Tensor) -> Tensor:
        parts = zip(self.layouts, self.split(data), strict=True)
        return torch.cat([layout.dequantize(part) for layout, part in parts])

    def dequantize_experts(self, data: Tensor, index: Tensor) -> Tensor:
        raise NotImplementedError("experts are quantised as a whole")


def in_sequence(parts: Iterable[Tensor]) -> Tensor:
    return torch.cat([F.pad(part, (0, -len(part) % ALIGNMENT)) for part in parts])
