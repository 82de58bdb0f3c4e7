"""Gradients of hidden, weight and bias, summed over chunks of logits in fp32 before the upstream gradient is known.

hidden [T, H], weight [V, H], bias [V] or None; dlogits [rows of a chunk, V].
"""

import torch
from torch import Tensor

from ligermodels.kernels.losses.logits_chunks import slice_rows

GRADIENT_SCALE = 2.0**10  # of dlogits in the forward: keeps them out of fp16's subnormals; exact


def accumulate_(total: Tensor, a: Tensor, b: Tensor, beta: int) -> None:
    """total = beta * total + a @ b, accumulated in fp32 and rounded to total's dtype, for any dtype of a and b. With
    beta 0, total may be uninitialised."""
    if total.is_cuda:
        torch.addmm(total, a, b, total.dtype, beta=beta, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype), beta=beta)


def empty_gradients(
    hidden: Tensor, weight: Tensor, hidden_grad: bool, weight_grad: bool, bias_grad: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Uninitialised dhidden and dweight, and zeros for dbias, in fp32 because the upstream gradient is not known yet. A
    gradient that is not required has no elements or is None."""
    dhidden = hidden.new_empty(*hidden.shape if hidden_grad else (0,), dtype=torch.float32)
    make = weight.new_empty if hidden.shape[0] else weight.new_zeros
    dweight = make(*weight.shape if weight_grad else (0,), dtype=torch.float32)
    return dhidden, dweight, weight.new_zeros(weight.shape[0], dtype=torch.float32) if bias_grad else None


def accumulate_gradients_(
    gradients: tuple[Tensor, Tensor, Tensor | None], dlogits: Tensor, hidden: Tensor, weight: Tensor, chunk: slice
) -> None:
    dhidden, dweight, dbias = gradients
    if dhidden.numel():
        accumulate_(slice_rows(dhidden, chunk), dlogits, weight, beta=0)
    if dweight.numel():
        accumulate_(dweight, dlogits.T, slice_rows(hidden, chunk), beta=int(chunk.start > 0))
    if dbias is not None:
        dbias += dlogits.sum(0, dtype=torch.float32)
