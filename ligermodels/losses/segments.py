"""Sequences of a packed vector: their sums and means, the way back to tokens, and the arguments that losses refuse.

`cu_seqlens` has the offsets of S sequences in a vector of N values, int32 or int64 [S + 1]: sequence i has the values
`cu_seqlens[i]` to `cu_seqlens[i + 1] - 1`. Values after the last offset are padding: nothing reads them, and their
gradient is 0. The results do not depend on how many threads or blocks run, and no function waits for a GPU:
no check reads the values of a tensor.
"""

import math
from typing import Any

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


def result_dtype(logprobs: Tensor) -> torch.dtype:
    """The dtype of the sums that a loss returns."""
    return torch.promote_types(logprobs.dtype, torch.float32)


def dtype_and_shape(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def segment_sums(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """The sum of each sequence, float64 [S]; 0 for an empty one. values: [N], of any floating dtype.

    float64, because losses read differences of such sums: two sums of some 10⁴ that differ by 0.01.
    """
    return torch.segment_reduce(values.double(), "sum", offsets=cu_seqlens, initial=0)


def segment_means(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """The mean of each sequence, float64 [S]; 0 for an empty one. values: [N], of any floating dtype."""
    return segment_sums(values, cu_seqlens) / cu_seqlens.diff().clamp(min=1)


def per_token(values: Tensor, cu_seqlens: Tensor, tokens: int) -> Tensor:
    """[N] of values [S], in their dtype: a sequence's value at each of its tokens, 0 at padding after the last offset.

    tokens: N, which the host knows. The gradient of a value is the sum over its sequence, without atomics.
    """
    return _PerToken.apply(values, cu_seqlens, tokens)


class _PerToken(torch.autograd.Function):
    """A node of its own: autograd's gradient of an indexed read adds in an order that changes from run to run."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, cu_seqlens: Tensor, tokens: int) -> Tensor:
        ctx.save_for_backward(cu_seqlens)
        lengths = torch.cat([cu_seqlens.diff(), tokens - cu_seqlens[-1:]])
        return torch.cat([values, values.new_zeros(1)]).repeat_interleave(lengths, output_size=tokens)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        return segment_sums(gradient, *ctx.saved_tensors).to(gradient.dtype), None, None
