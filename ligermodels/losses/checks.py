"""Arguments that losses refuse. No check reads the values of a tensor, which would wait for a GPU."""

import math

import torch
from torch import Tensor

from ligermodels.errors import InputError


def check_positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise InputError(f"{name} is {value}; it must be above 0")


def check_not_negative(name: str, value: float) -> None:
    if not 0 <= value < math.inf:
        raise InputError(f"{name} is {value}; it must be 0 or more")


def check_finite(name: str, value: float) -> None:
    if not math.isfinite(value):
        raise InputError(f"{name} is {value}; it must be a finite number")


def check_label_smoothing(value: float) -> None:
    """Half of the labels wrong would leave nothing to learn."""
    if not 0 <= value < 0.5:
        raise InputError(f"label_smoothing is {value}; it must be at least 0 and below 0.5")


def check_sequences(logprobs: Tensor, cu_seqlens: Tensor) -> None:
    """Token values [N] and the offsets [S + 1] of sequences in them."""
    if logprobs.dim() != 1 or not logprobs.is_floating_point():
        raise InputError(f"logprobs is {dtype_and_shape(logprobs)}; it must be a vector of one log-probability a token")
    if cu_seqlens.dim() != 1 or len(cu_seqlens) == 0 or cu_seqlens.dtype not in {torch.int32, torch.int64}:
        raise InputError(
            f"cu_seqlens is {dtype_and_shape(cu_seqlens)}; it must have the S + 1 int32 offsets of S sequences"
        )


def check_tokens(name: str, values: Tensor, logprobs: Tensor) -> None:
    if values.shape != logprobs.shape:
        raise InputError(
            f"{name} is {dtype_and_shape(values)}; it must have one value for each of {len(logprobs)} tokens"
        )


def check_pairs(logprobs: Tensor, cu_seqlens: Tensor) -> None:
    check_sequences(logprobs, cu_seqlens)
    if len(cu_seqlens) % 2 == 0:
        raise InputError(f"cu_seqlens has {len(cu_seqlens) - 1} sequences; pairs need chosen and rejected alternating")


def check_reference(ref_sums: Tensor, cu_seqlens: Tensor, remedy: str) -> None:
    if ref_sums.shape != (len(cu_seqlens) - 1,):
        raise InputError(
            f"ref_sums is {dtype_and_shape(ref_sums)}; it must have one value for each of {len(cu_seqlens) - 1} "
            f"sequences: pass {remedy}"
        )


def dtype_and_shape(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
