"""A weight in NF4 of which some of the Hub's tensors are not quantised, such as the queries beside keys and values.

Each part has a layout of its own, `Nf4` or `DensePart`, and its bytes follow those of the parts before it.
W [rows, K], dequantised part by part.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.kernels.quant.nf4 import Nf4
from ligermodels.kernels.quant.quantised_weight import ALIGNMENT, DenseProducts, RowsLayout, section, starts_of


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
    """The layout of such a weight. layouts: of its parts, each of which is one Hub tensor."""

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
