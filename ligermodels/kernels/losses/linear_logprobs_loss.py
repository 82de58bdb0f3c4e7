"""A loss of log-probabilities that is a sum over rows, with its gradients computed in the forward.

    loss = Σ_rows f(logprob, entropy)      logprob and entropy of `linear_logprobs`

A chunk of logits is swept, the caller's f is called on its numbers and differentiated by autograd, and the gradient of
the logits overwrites them: no logits are computed twice. hidden [N, H], weight [V, H]: 6 N H V FLOP instead of 8, 4
where the head is frozen. Both gradients are fp32 sums until backward, which scales and rounds them.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ligermodels.kernels.dispatch import Node, autocast, is_traced, runs_kernels
from ligermodels.kernels.launch import as_matrix
from ligermodels.kernels.losses.linear_logprobs import LogProbs, check_head, linear_logprobs
from ligermodels.kernels.losses.logits_chunks import (
    GRADIENT_SCALE,
    accumulate_gradients_,
    chunks_of_pieces,
    empty_gradients,
    keeps_logits,
    slice_rows,
)
from ligermodels.kernels.losses.logprob_chunks import logits_dtype, overwrite_with_gradient
from ligermodels.kernels.losses.logprob_rows import RowLogProbs, empty_logprobs, launch_logprobs
from ligermodels.kernels.losses.rescale import rescale

RowLoss = Callable[[Tensor, Tensor | None, slice], Tensor]


class LogProbsLoss(NamedTuple):
    loss: Tensor  # scalar, fp32
    logprobs: LogProbs  # of the rows, without gradient


class _KnownCoefficients(Node):
    """The loss, the log-probabilities and, if `entropy`, the entropies. Only the loss has a gradient."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, row_loss, entropy, hidden_grad, weight_grad, *options):
        results, dtype = empty_logprobs(targets, entropy, False), logits_dtype(hidden)
        gradients = empty_gradients(hidden, weight, hidden_grad, weight_grad, False)
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for chunk, logits in chunks_of_pieces(hidden, weight, dtype, multiply=True):
            part = results.slice(chunk)
            launch_logprobs(logits, slice_rows(targets, chunk), part, None, *options)
            share, coefficients = _coefficients(row_loss, part, chunk)
            loss += share
            if hidden_grad or weight_grad:
                dlogits = overwrite_with_gradient(
                    logits, targets, results, *coefficients, hidden.dtype, chunk, *options
                )
                accumulate_gradients_(gradients, dlogits, hidden, weight, chunk)
        ctx.save_for_backward(*gradients[:2])
        ctx.dtype, ctx.needed = hidden.dtype, (hidden_grad, weight_grad)
        ctx.set_materialize_grads(False)
        return (loss, results.logprobs, results.entropy) if entropy else (loss, results.logprobs)

    @staticmethod
    def backward(ctx, dloss, *_):
        scale = dloss, None, 1 / GRADIENT_SCALE, ctx.dtype
        gradients = zip(ctx.saved_tensors, ctx.needed, strict=True)
        return *[rescale(x, *scale) if needed else None for x, needed in gradients], *[None] * 8


def _coefficients(row_loss: RowLoss, results: RowLogProbs, rows: slice) -> tuple[Tensor, tuple[Tensor, Tensor | None]]:
    """The loss of a chunk, and its gradients with respect to log-probabilities and entropies, times GRADIENT_SCALE."""
    inputs = [x.detach().requires_grad_() for x in (results.logprobs, results.entropy) if x is not None]
    with torch.enable_grad():
        loss = row_loss(inputs[0], inputs[1] if len(inputs) > 1 else None, rows)
        dlogprobs, *dentropies = torch.autograd.grad(loss * GRADIENT_SCALE, inputs, allow_unused=True)
    if dlogprobs is None:
        dlogprobs = torch.zeros_like(inputs[0])
    return loss.detach(), (dlogprobs, dentropies[0] if dentropies else None)  # None too where the loss reads none


def loss_of_rows(found: LogProbs, row_loss: RowLoss) -> LogProbsLoss:
    """row_loss of log-probabilities that exist already, of all rows at once."""
    flat = found.map(torch.flatten)
    loss = row_loss(flat.logprobs, flat.entropy, slice(0, flat.logprobs.numel()))
    return LogProbsLoss(loss, found.map(torch.detach))


def linear_logprobs_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, row_loss: RowLoss, *, temperature: float = 1.0,
    softcap: float | None = None, logit_scale: float = 1.0, entropy: bool = False, low_memory: bool = False,
    ignore_index: int = -100,
) -> LogProbsLoss:  # fmt: skip
    """The sum over rows of a loss of their log-probabilities, three products with the head forward and backward.

    hidden, weight, targets and the options as those of `linear_logprobs`; [...] are N rows. row_loss: called for chunks
    of rows with their log-probabilities [c], their entropies [c] or None, and which of the N rows they are, as a slice;
    returns their share of the loss, a scalar. Each row's share must depend on its own numbers alone, as in GRPO or SFT:
    sums over sequences that are not linear, as in DPO, need `linear_logprobs`. The share of an ignored row is the
    caller's to leave out.
    With few rows, low_memory, on a CPU or while tracing it is `linear_logprobs` and one call of row_loss.
    Raises the errors of `linear_logprobs`.
    """
    options: dict[str, Any] = {"temperature": temperature, "softcap": softcap, "logit_scale": logit_scale}
    cast = autocast(hidden, weight)
    check_head("linear_logprobs_loss", cast[0], cast[1], targets)
    needed = [torch.is_grad_enabled() and x.requires_grad for x in cast]
    size = targets.numel(), hidden.shape[-1], weight.shape[0]
    keeps = keeps_logits(*size, torch.float32, *needed)
    if not runs_kernels(hidden) or low_memory or keeps or is_traced(cast):
        out = linear_logprobs(
            hidden, weight, targets, entropy=entropy, low_memory=low_memory, ignore_index=ignore_index, **options
        )
        return loss_of_rows(out, row_loss)
    outputs = _KnownCoefficients.apply(
        as_matrix(cast[0]), cast[1], targets.reshape(-1).contiguous(), row_loss, entropy, *needed,
        ignore_index, None if softcap is None else softcap / temperature, logit_scale / temperature,
    )  # fmt: skip
    return LogProbsLoss(outputs[0], LogProbs(*(x.detach().view(targets.shape) for x in outputs[1:])))
