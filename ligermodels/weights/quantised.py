"""FP8 checkpoint tensors: value = fp32(w) * scale, rounded once to the dtype of the parameter.

    by tensor  X.weight float8_e4m3fn, X.weight_scale_inv one number
    by block   X.weight float8_e4m3fn [R, C], X.weight_scale_inv [⌈R / r⌉, ⌈C / c⌉] for blocks of r × c elements; the
               last blocks may be smaller
An X.activation_scale belongs to the tensor too; it has no effect on the weights. Must not know rules or models.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ligermodels.configs.quantisation import Fp8
from ligermodels.weights.files import Checkpoint, StoredTensor

FP8_DTYPE = torch.float8_e4m3fn
SCALE_DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Scale:
    """The scale of a stored tensor: values, fp32, and the rows and columns that share one, None for all."""

    values: Tensor
    block: tuple[int, int] | None

    def decode(self, stored: Tensor, box: tuple[slice, ...]) -> Tensor:
        """The stored elements of a box -> their values in fp32, on the same device."""
        scale = self.values.to(stored.device)
        if self.block is not None:
            for dim, (side, size) in enumerate(zip(box, self.block, strict=True)):
                numbers = torch.arange(side.start, side.stop, device=stored.device)
                scale = scale.index_select(dim, numbers // size)
        return stored.float() * scale


def is_fp8(stored: StoredTensor) -> bool:
    return stored.dtype == FP8_DTYPE


def quantised(tensors: Mapping[str, StoredTensor]) -> list[str]:
    """The names of those of these tensors that are quantised."""
    return [name for name, stored in tensors.items() if is_fp8(stored)]


def scale_name(tensor: str) -> str:
    return f"{tensor}_scale_inv"


def companions(tensor: str) -> tuple[str, str]:
    """The names of the tensors that belong to a quantised tensor, if the checkpoint has them."""
    return scale_name(tensor), f"{tensor.removesuffix('weight')}activation_scale"


def scale_fault(checkpoint: Checkpoint, tensor: str, scheme: Fp8) -> str | None:
    """What is wrong with the scale of a quantised tensor, as words behind its name; None if nothing is."""
    shape, scale = checkpoint.tensors[tensor].shape, checkpoint.tensors.get(scale_name(tensor))
    if scale is None:
        return f"{tensor} lacks {scale_name(tensor)}"
    if scale.dtype not in SCALE_DTYPES:
        return f"{scale_name(tensor)} is {scale.dtype}"
    if scheme.block is None:
        return None if scale.shape in ((), (1,)) else f"{scale_name(tensor)} is {list(scale.shape)} instead of []"
    if len(shape) != len(scheme.block):
        return f"{tensor} is {list(shape)}, no matrix"
    blocks = tuple(-(-size // block) for size, block in zip(shape, scheme.block, strict=True))
    return None if scale.shape == blocks else f"{scale_name(tensor)} is {list(scale.shape)} instead of {list(blocks)}"
