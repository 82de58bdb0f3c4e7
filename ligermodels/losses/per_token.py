"""A value of each sequence at all of the sequence's tokens: the way back from `segments`."""

from typing import Any

import torch
from torch import Tensor

from ligermodels.losses.segments import segment_sums


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
