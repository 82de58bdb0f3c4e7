"""A loss of log-probabilities that is a sum over units of rows, with its gradients computed in the forward.

    loss = Σ_units f(logprobs, entropies of its rows)      both with the bits of `linear_logprobs`

A unit is one row, as in GRPO, or the rows between two borders: in DPO those of a pair. Pieces of logits are projected
into a ring of memory that holds any unit as a whole. The caller's f is called for the units that are complete and
differentiated by autograd; the gradient of the logits overwrites them, and then makes room for the next pieces: no
logits are computed twice. hidden [N, H], weight [V, H]: 6 N H V FLOP instead of 8, 4 where the head is frozen.

The gradients are formed in the inputs' dtype, where dweight is rounded each time the ring is full; beyond MAX_ROUNDINGS
times dweight is an fp32 sum. In fp16 both are, because the upstream gradient is not known yet.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ligermodels.kernels.dispatch import Node, autocast, is_traced, runs_kernels
from ligermodels.kernels.launch import as_matrix
from ligermodels.kernels.losses.linear_logprobs import (
    LogProbs,
    as_logprobs,
    check_head,
    check_logprob_options,
    linear_logprobs,
)
from ligermodels.kernels.losses.logits_chunks import (
    GRADIENT_SCALE,
    Ring,
    accumulate_gradients_,
    empty_gradients,
    empty_logits,
    keeps_logits,
    project_pieces,
    ring_of,
    slice_rows,
)
from ligermodels.kernels.losses.logprob_chunks import logits_dtype, overwrite_with_gradient
from ligermodels.kernels.losses.logprob_rows import RowLogProbs, empty_logprobs, launch_logprobs
from ligermodels.kernels.losses.rescale import rescale, scale_gradient_

RowLoss = Callable[[Tensor, Tensor | None, slice], Tensor]


class LogProbsLoss(NamedTuple):
    loss: Tensor  # scalar, fp32
    logprobs: LogProbs  # of the rows, without gradient


class _KnownCoefficients(Node):
    """The loss, and the outputs of `linear_logprobs`. Only the loss has a gradient.

    needed: whether hidden and weight have one. flags: whether there are entropies, and further extras.
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets, row_loss, borders, ring, needed, entropy, flags, *options):
        rows, results = hidden.shape[0], empty_logprobs(targets, *flags)
        gradients = empty_gradients(hidden, weight, *needed, False, ring.sums_dtypes(rows, hidden.dtype))
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        dlogprobs, dentropies, scale = torch.empty_like(results.logprobs), None, _scale(hidden.dtype)
        buffer = empty_logits(min(ring.rows, rows), weight, logits_dtype(hidden))
        for filled, complete, finished in ring.sweeps(rows, borders):
            for part, place in ring.parts(filled):
                logits = slice_rows(buffer, place)
                project_pieces(slice_rows(hidden, part), weight, logits, ring.piece)
                launch_logprobs(logits, slice_rows(targets, part), results.slice(part), None, *options)
            share, of_logprobs, of_entropies = _coefficients(row_loss, results.slice(complete), entropy, complete)
            loss += share
            dlogprobs[complete] = scale * of_logprobs
            if of_entropies is not None:
                dentropies = torch.zeros_like(dlogprobs) if dentropies is None else dentropies
                dentropies[complete] = scale * of_entropies
            for part, place in ring.parts(finished) if any(needed) else ():
                dlogits = overwrite_with_gradient(
                    slice_rows(buffer, place), targets, results, dlogprobs, dentropies, hidden.dtype, part, *options
                )
                accumulate_gradients_(gradients, dlogits, hidden, weight, part)
        ctx.save_for_backward(*gradients[:2])
        ctx.dtype, ctx.needed = hidden.dtype, needed
        ctx.set_materialize_grads(False)
        return loss, *(x for x in (results.logprobs, results.entropy, results.extras) if x is not None)

    @staticmethod
    def backward(ctx, dloss, *_):
        gradients = zip(ctx.saved_tensors, ctx.needed, strict=True)
        return *[_scaled(x, dloss, ctx.dtype) if needed else None for x, needed in gradients], *[None] * 10


def _scaled(gradient: Tensor, dloss: Tensor, dtype: torch.dtype) -> Tensor:
    """A gradient of the forward times that of the loss, in the inputs' dtype."""
    if gradient.dtype == dtype:
        return scale_gradient_(gradient, dloss)
    return rescale(gradient, dloss, None, 1 / _scale(dtype), dtype)


def _scale(dtype: torch.dtype) -> float:
    """What the gradients of the forward are multiplied by: only fp16 has a narrow range."""
    return GRADIENT_SCALE if dtype == torch.float16 else 1.0


def _coefficients(
    row_loss: RowLoss, results: RowLogProbs, entropy: bool, rows: slice
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The loss of units, and its gradients with respect to log-probabilities and entropies."""
    logprobs = results.logprobs.detach().requires_grad_()
    entropies = None if results.entropy is None else results.entropy.detach().requires_grad_(entropy)
    inputs = [x for x in (logprobs, entropies) if x is not None and x.requires_grad]
    with torch.enable_grad():
        loss = row_loss(logprobs, entropies, rows)
        dlogprobs, *dentropies = torch.autograd.grad(loss, inputs, allow_unused=True)
    if dlogprobs is None:
        dlogprobs = torch.zeros_like(logprobs)
    return loss.detach(), dlogprobs, dentropies[0] if dentropies else None  # None too where the loss reads none


def loss_of_rows(found: LogProbs, row_loss: RowLoss) -> LogProbsLoss:
    """row_loss of log-probabilities that exist already, of all rows at once."""
    flat = found.map(torch.flatten)
    loss = row_loss(flat.logprobs, flat.entropy, slice(0, flat.logprobs.numel()))
    return LogProbsLoss(loss, found.map(torch.detach))


def check_borders(borders: Sequence[int], rows: int) -> None:
    """Raises ValueError unless they rise from 0 to the number of rows."""
    ends = borders[0] == 0 and borders[-1] == rows if borders else False
    if not ends or any(a > b for a, b in pairwise(borders)):
        raise ValueError(f"linear_logprobs_loss: borders must rise from 0 to the {rows} rows")


def linear_logprobs_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, row_loss: RowLoss, *, borders: Sequence[int] | None = None,
    temperature: float = 1.0, softcap: float | None = None, logit_scale: float = 1.0, entropy: bool = False,
    extras: Sequence[str] = (), low_memory: bool = False, ignore_index: int = -100,
) -> LogProbsLoss:  # fmt: skip
    """The sum over units of rows of a loss of their log-probabilities, three products with the head forward and
    backward.

    hidden, weight, targets and the options as those of `linear_logprobs`; [...] are N rows. borders: on the host, the
    ends of the units from 0 to N, as the offsets of pairs; None where each row is a unit. row_loss: called for some
    units at a time with the log-probabilities of their rows [c], their entropies [c] or None, and which of the N rows
    they are, as a slice; returns their share of the loss, a scalar. The share of a unit must depend on its own numbers
    alone; that of an ignored row is the caller's to leave out.
    With few rows, with units whose logits take more memory than fp32 sums of the gradients, with low_memory, on a CPU
    or while tracing it is `linear_logprobs` and one call of row_loss; also with borders where the head is frozen and
    the entropy has no gradient.
    Raises ValueError for borders that are not those of the rows, and the errors of `linear_logprobs`.
    """
    options: dict[str, Any] = {"temperature": temperature, "softcap": softcap, "logit_scale": logit_scale}
    cast = autocast(hidden, weight)
    check_head("linear_logprobs_loss", cast[0], cast[1], targets)
    check_logprob_options(extras, temperature)
    if borders is not None:
        check_borders(borders, targets.numel())
    needed = [torch.is_grad_enabled() and x.requires_grad for x in cast]
    ring = None if low_memory or is_traced(cast) else _ring(cast[0], cast[1], borders, needed, entropy)
    if ring is None:
        out = linear_logprobs(
            hidden, weight, targets, entropy=entropy, extras=extras, low_memory=low_memory, ignore_index=ignore_index,
            **options,
        )  # fmt: skip
        return loss_of_rows(out, row_loss)
    more = any(name != "entropy" for name in extras)
    flags = entropy or "entropy" in extras, more
    loss, *outputs = _KnownCoefficients.apply(
        as_matrix(cast[0]), cast[1], targets.reshape(-1).contiguous(), row_loss, borders, ring, needed, entropy, flags,
        ignore_index, None if softcap is None else softcap / temperature, logit_scale / temperature,
    )  # fmt: skip
    outputs = [x.detach().view(*x.shape[:-1], *targets.shape) for x in outputs]
    return LogProbsLoss(loss, as_logprobs(outputs, False, flags[0], more, extras))


def _ring(
    hidden: Tensor, weight: Tensor, borders: Sequence[int] | None, needed: Sequence[bool], entropy: bool
) -> Ring | None:
    """The logits that exist at a time; None where `linear_logprobs` takes their place."""
    columns, vocab, dtype = hidden.shape[-1], weight.shape[0], logits_dtype(hidden)
    rows = hidden.numel() // columns
    row_gradients = borders is not None and not needed[1] and not entropy
    if not runs_kernels(hidden) or row_gradients or keeps_logits(rows, columns, vocab, torch.float32, *needed):
        return None
    return ring_of(rows, columns, vocab, dtype, borders)
