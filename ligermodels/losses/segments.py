"""Sums and means over the sequences of a packed vector, and the way back: a value of each sequence at its tokens.

`cu_seqlens` has the offsets of S sequences in a vector of N values, int32 or int64 [S + 1]: sequence i has the values
`cu_seqlens[i]` to `cu_seqlens[i + 1] - 1`. Values after the last offset are padding: nothing reads them, and their
gradient is 0. The results do not depend on how many threads or blocks run, and no function waits for a GPU.
"""

from typing import Any

import torch
from torch import Tensor


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
