"""Quantised checkpoint tensors, FP8 and MXFP4: value = w * scale, rounded once to the dtype of the parameter.

    FP8 by tensor  X.weight float8_e4m3fn, X.weight_scale_inv one number
    FP8 by block   X.weight float8_e4m3fn [R, C], X.weight_scale_inv [⌈R / r⌉, ⌈C / c⌉] for blocks of r × c elements;
                   the last blocks may be smaller
    MXFP4          X_blocks uint8 [..., C / 32, 16], X_scales uint8 [..., C / 32]: byte j of a block holds element 2 j
                   in its low and 2 j + 1 in its high four bits, in e2m1; a block's scale is 2^(X_scales - 127)
An X.activation_scale belongs to an FP8 tensor too; it has no effect on the weights. MXFP4 values are exact in bf16.
Source of MXFP4: Open Compute Project 2023, OCP Microscaling Formats (MX) v1.0.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from ligermodels.configs.quantisation import Mxfp4, Scaled
from ligermodels.kernels.quant.mxfp4 import E2M1, EXPONENT_BIAS, MX_BLOCK, mxfp4_dequantize_reference
from ligermodels.weights.stored import FP4_DTYPE, StoredTensor

FP8_DTYPE = torch.float8_e4m3fn
SCALE_DTYPES = (torch.float32, torch.bfloat16)
BLOCKS, SCALES = "_blocks", "_scales"
MX_NAN = 255  # the exponent that stands for NaN


class Scale(Protocol):
    """The scale of a stored tensor."""

    def decode(self, stored: Tensor, box: tuple[slice, ...]) -> Tensor:
        """The stored elements of a box -> their values, on the same device."""
        ...

    def viewed(self, shape: tuple[int, ...]) -> Self:
        """The scale of the same tensor in another shape. Raises ValueError if it cannot be permuted."""
        ...

    def with_codes(self, codes: Tensor) -> dict[str, Tensor]:
        """The stored elements and the scale under the names that `StoredWeight.pack` has for them."""
        ...

    def largest(self, codes: Tensor) -> Tensor:
        """The largest absolute value that stored elements with this scale can have; NaN if one of them is NaN."""
        ...


@dataclass(frozen=True)
class Fp8Scale:
    """The scale of an FP8 tensor: values, fp32, and the rows and columns that share one, None for all."""

    values: Tensor
    block: tuple[int, int] | None

    def decode(self, stored: Tensor, box: tuple[slice, ...]) -> Tensor:
        """The values are in fp32."""
        scale = self.values.to(stored.device)
        if self.block is not None:
            for dim, (side, size) in enumerate(zip(box, self.block, strict=True)):
                numbers = torch.arange(side.start, side.stop, device=stored.device)
                scale = scale.index_select(dim, numbers // size)
        return stored.float() * scale

    def viewed(self, shape: tuple[int, ...]) -> "Fp8Scale":
        raise ValueError("a tensor in FP8 is permuted, which is not supported")

    def with_codes(self, codes: Tensor) -> dict[str, Tensor]:
        return {"codes": codes, "scale": self.values}

    def largest(self, codes: Tensor) -> Tensor:
        has_nan = (codes.view(torch.uint8) & 127 == 127).any()
        return torch.where(has_nan, torch.nan, self.values.abs().amax() * torch.finfo(FP8_DTYPE).max)


@dataclass(frozen=True)
class Mxfp4Scale:
    """The scale of an MXFP4 tensor: exponents uint8, one for each block of the last dimension."""

    exponents: Tensor

    def decode(self, stored: Tensor, box: tuple[slice, ...]) -> Tensor:
        """stored: bytes, half as many as elements in the last dimension. The values are in bf16, and exact."""
        *rows, columns = box
        if columns.start % MX_BLOCK or columns.stop % MX_BLOCK:
            raise ValueError(f"columns {columns.start} to {columns.stop} of an MXFP4 tensor are not whole blocks")
        blocks = slice(columns.start // MX_BLOCK, columns.stop // MX_BLOCK)
        return mxfp4_dequantize_reference(stored, self.exponents[(*rows, blocks)].to(stored.device))

    def viewed(self, shape: tuple[int, ...]) -> "Mxfp4Scale":
        return Mxfp4Scale(self.exponents.view(*shape[:-1], shape[-1] // MX_BLOCK))

    def with_codes(self, codes: Tensor) -> dict[str, Tensor]:
        return {"codes": codes.view(torch.uint8), "exponents": self.exponents}

    def largest(self, codes: Tensor) -> Tensor:
        return max(E2M1) * torch.exp2(self.exponents.amax().float() - EXPONENT_BIAS)


def is_mxfp4(name: str, stored: StoredTensor) -> bool:
    return name.endswith(BLOCKS) and stored.dtype in (torch.uint8, FP4_DTYPE)


def needs_scale(name: str, stored: StoredTensor) -> bool:
    """Whether a stored tensor is quantised."""
    return stored.dtype == FP8_DTYPE or is_mxfp4(name, stored)


def quantised(tensors: Mapping[str, StoredTensor]) -> list[str]:
    """The names of those of these tensors that are quantised."""
    return [name for name, stored in tensors.items() if needs_scale(name, stored)]


def by_element(tensors: Mapping[str, StoredTensor], scheme: Scaled | None) -> dict[str, StoredTensor]:
    """Returns the tensors, those in MXFP4 with the shape of their elements."""
    if not isinstance(scheme, Mxfp4):
        return dict(tensors)
    return {name: elements_of(stored) if is_mxfp4(name, stored) else stored for name, stored in tensors.items()}


def elements_of(stored: StoredTensor) -> StoredTensor:
    """An MXFP4 tensor with the shape of its elements; one that has not the shape of blocks as it is."""
    if len(stored.shape) < 2 or stored.shape[-1] != MX_BLOCK // 2:
        return stored
    *rows, blocks, _ = stored.shape
    return replace(stored, dtype=FP4_DTYPE, shape=(*rows, blocks * MX_BLOCK))


def scale_name(tensor: str) -> str:
    if tensor.endswith(BLOCKS):
        return tensor.removesuffix(BLOCKS) + SCALES
    return f"{tensor}_scale_inv"


def scale_of(values: Tensor, scheme: Scaled) -> Scale:
    return Mxfp4Scale(values) if isinstance(scheme, Mxfp4) else Fp8Scale(values.float(), scheme.block)


def companions(tensor: str) -> tuple[str, str]:
    """The names of the tensors that belong to a quantised tensor, if the checkpoint has them."""
    return scale_name(tensor), f"{tensor.removesuffix('weight')}activation_scale"


def scale_fault(tensors: Mapping[str, StoredTensor], tensor: str, scheme: Scaled) -> str | None:
    """What is wrong with the scale of a quantised tensor, as words behind its name; None if nothing is."""
    shape, scale = tensors[tensor].shape, tensors.get(scale_name(tensor))
    if scale is None:
        return f"{tensor} lacks {scale_name(tensor)}"
    if isinstance(scheme, Mxfp4):
        if tensors[tensor].dtype != FP4_DTYPE:
            return f"{tensor} is {list(shape)}, no blocks of {MX_BLOCK // 2} bytes"
        wanted = (*shape[:-1], shape[-1] // MX_BLOCK)
        fits = scale.dtype == torch.uint8 and scale.shape == wanted
        found = f"{scale.dtype} {list(scale.shape)}"
        return None if fits else f"{scale_name(tensor)} is {found} instead of torch.uint8 {list(wanted)}"
    if scale.dtype not in SCALE_DTYPES:
        return f"{scale_name(tensor)} is {scale.dtype}"
    if scheme.block is None:
        return None if scale.shape in ((), (1,)) else f"{scale_name(tensor)} is {list(scale.shape)} instead of []"
    if len(shape) != len(scheme.block):
        return f"{tensor} is {list(shape)}, no matrix"
    blocks = tuple(-(-size // block) for size, block in zip(shape, scheme.block, strict=True))
    return None if scale.shape == blocks else f"{scale_name(tensor)} is {list(scale.shape)} instead of {list(blocks)}"


def has_undefined_scale(values: Tensor, scheme: Scaled) -> bool:
    """Whether one of these stored scales is no finite number."""
    return bool((values == MX_NAN).any() if isinstance(scheme, Mxfp4) else not values.isfinite().all())


def fp8_tensors_of(name: str, part: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors by which a checkpoint stores a weight in FP8 by block. part: its `codes` and `scale`."""
    return {name: part["codes"], scale_name(name): part["scale"]}


def fp8_config(block: tuple[int, int], skipped: list[str]) -> dict[str, Any]:
    """The quantization_config of a config.json. skipped: the linears that are not quantised, by their Hub names."""
    return {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(block),
        "modules_to_not_convert": skipped,
    }  # fmt: skip
