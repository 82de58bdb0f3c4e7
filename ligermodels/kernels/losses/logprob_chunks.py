"""The ops behind `linear_logprobs`: results and gradients of rows, one chunk of fp32 logits at a time.

hidden [N, H] and weight [V, H] of one float dtype, targets [N] int64; upstream gradients fp32 [N] of any stride.
Gradients come back in the inputs' dtype.
"""

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ligermodels.kernels.dispatch import register_op
from ligermodels.kernels.losses.logits_chunks import (
    accumulate_,
    chunks_of_logits,
    chunks_of_pieces,
    chunks_of_vocabulary,
    low_memory_buffer,
    slice_rows,
    slices,
    vocabulary_buffer,
)
from ligermodels.kernels.losses.logprob_rows import RowLogProbs, empty_logprobs, gradient_memory, launch_logprobs

MAX_BACKWARD_ROWS = 32768  # whose gradients are summed in fp32 at a time


def logits_dtype(hidden: Tensor) -> torch.dtype:
    return torch.promote_types(hidden.dtype, torch.float32)


def _launch_forward(
    hidden: Tensor, weight: Tensor, targets: Tensor, entropy: bool, extras: bool, row_gradients: bool,
    low_memory: bool, *options,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Results of the rows; with row_gradients also the gradient of each row's log-probability [N, H]."""
    results, dtype = empty_logprobs(targets, entropy, extras), logits_dtype(hidden)
    dhidden = torch.empty_like(hidden, memory_format=torch.contiguous_format) if row_gradients else None
    if low_memory:
        buffer = torch.empty(low_memory_buffer(hidden, weight, dtype)[0], dtype=dtype, device=hidden.device)
        chunks = chunks_of_logits(hidden, weight, None, buffer=buffer)
    else:
        chunks = chunks_of_pieces(hidden, weight, dtype, multiply=row_gradients)
    for chunk, logits in chunks:
        part = slice_rows(targets, chunk), results.slice(chunk)
        if dhidden is None:
            launch_logprobs(logits, *part, None, *options)
        else:
            dlogits = gradient_memory(logits, hidden.dtype)
            launch_logprobs(logits, *part, dlogits, *options)
            torch.mm(dlogits, weight, out=slice_rows(dhidden, chunk))
    return *results, dhidden


def _launch_backward(
    hidden: Tensor, weight: Tensor, targets: Tensor, logprobs: Tensor, lse: Tensor, entropy: Tensor | None,
    dlogprobs: Tensor, dentropy: Tensor | None, hidden_grad: bool, weight_grad: bool, *options,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients in the inputs' dtype, from logits that are computed once more.

    A chunk has a part of the vocabulary and all rows, or MAX_BACKWARD_ROWS of them: the fp32 sums over chunks are then
    those of dhidden, which are small beside the head's.
    """
    (rows, columns), vocab, dtype = hidden.shape, weight.shape[0], logits_dtype(hidden)
    results, size = RowLogProbs(logprobs, lse, entropy), min(rows, MAX_BACKWARD_ROWS)
    buffer = torch.empty(vocabulary_buffer(size, vocab, dtype), dtype=dtype, device=hidden.device)
    sums = torch.empty(size if hidden_grad else 0, columns, dtype=dtype, device=hidden.device)
    dhidden = torch.empty_like(hidden, memory_format=torch.contiguous_format) if hidden_grad else None
    dweight = _empty_dweight(weight, rows, dtype) if weight_grad else None
    for part in slices(rows, size):
        inputs, of_part = slice_rows(hidden, part), slice(0, part.stop - part.start)
        for classes, logits in chunks_of_vocabulary(inputs, weight, None, buffer):
            dlogits = overwrite_with_gradient(
                logits, targets, results, dlogprobs, dentropy, hidden.dtype, part, *options,
                first_class=classes.start, vocab=vocab,
            )  # fmt: skip
            if hidden_grad:
                accumulate_(slice_rows(sums, of_part), dlogits, weight[classes], beta=int(classes.start > 0))
            if dweight is not None:
                accumulate_(dweight[classes], dlogits.T, inputs, beta=int(part.start > 0))
            del logits, dlogits  # behind the last chunk they would hold the buffer
        if dhidden is not None:
            slice_rows(dhidden, part).copy_(slice_rows(sums, of_part))
    del buffer, sums  # before dweight is rounded
    return dhidden, None if dweight is None else dweight.to(weight.dtype)


def _empty_dweight(weight: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """In `dtype` if it is a sum over several parts of the rows. Zeros without rows."""
    make = torch.empty_like if rows else torch.zeros_like
    summed = dtype if rows > MAX_BACKWARD_ROWS else weight.dtype
    return make(weight, dtype=summed, memory_format=torch.contiguous_format)


def _launch_low_memory(
    hidden: Tensor, weight: Tensor, targets: Tensor, logprobs: Tensor, lse: Tensor, entropy: Tensor | None,
    dlogprobs: Tensor, dentropy: Tensor | None, hidden_grad: bool, weight_grad: bool, *options,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Has 64 MiB of logits at a time: once by rows, in dweight's own memory, once by the vocabulary."""
    results, dtype, rows = RowLogProbs(logprobs, lse, entropy), logits_dtype(hidden), hidden.shape[0]
    elements, holds_all = low_memory_buffer(hidden, weight, dtype)
    buffer = torch.empty(elements, dtype=dtype, device=hidden.device)
    dhidden = torch.empty_like(hidden, memory_format=torch.contiguous_format) if hidden_grad else None
    dweight = _empty_dweight(weight, rows, weight.dtype) if weight_grad else None
    if dhidden is not None:
        own = buffer if dweight is None else _as_dtype(dweight.view(-1), dtype)
        memory = buffer if holds_all or own.numel() < elements else own
        for chunk, logits in chunks_of_logits(hidden, weight, None, buffer=memory):
            dlogits = overwrite_with_gradient(
                logits, targets, results, dlogprobs, dentropy, hidden.dtype, chunk, *options
            )
            torch.mm(dlogits, weight, out=slice_rows(dhidden, chunk))
            if dweight is not None and holds_all:  # there is only one chunk
                torch.mm(dlogits.T, hidden, out=dweight)
    if dweight is not None and rows and not (holds_all and hidden_grad):
        for classes, logits in chunks_of_vocabulary(hidden, weight, None, buffer):
            dlogits = overwrite_with_gradient(
                logits, targets, results, dlogprobs, dentropy, hidden.dtype, slice(0, rows), *options,
                first_class=classes.start, vocab=weight.shape[0],
            )  # fmt: skip
            torch.mm(dlogits.T, hidden, out=dweight[classes])
    return dhidden, dweight


def _as_dtype(memory: Tensor, dtype: torch.dtype) -> Tensor:
    """1-D memory as elements of a dtype that is as wide or wider; odd elements at its end are left out."""
    ratio = dtype.itemsize // memory.element_size()
    return memory[: memory.numel() // ratio * ratio].view(dtype)


def overwrite_with_gradient(
    logits: Tensor, targets: Tensor, results: RowLogProbs, dlogprobs: Tensor, dentropy: Tensor | None,
    dtype: torch.dtype, rows: slice, *options, first_class: int = 0, vocab: int | None = None,
) -> Tensor:  # fmt: skip
    """The gradient of a chunk of logits, in `dtype`, in their memory. The chunk: some rows, all classes or, of `vocab`,
    those from `first_class` on."""
    dlogits = gradient_memory(logits, dtype)
    launch_logprobs(
        logits, slice_rows(targets, rows), results.slice(rows), dlogits, *options, computed=True,
        dlogprobs=slice_rows(dlogprobs, rows), dentropy=None if dentropy is None else slice_rows(dentropy, rows),
        first_class=first_class, vocab=vocab,
    )  # fmt: skip
    return dlogits


def _fake_forward(hidden, weight, targets, entropy, extras, row_gradients, low_memory, *options):
    return *empty_logprobs(targets, entropy, extras), hidden.new_empty(hidden.shape) if row_gradients else None


def _fake_backward(
    hidden, weight, targets, logprobs, lse, entropy, dlogprobs, dentropy, hidden_grad, weight_grad, *options
):
    gradients = zip((hidden, weight), (hidden_grad, weight_grad), strict=True)
    return tuple(x.new_empty(x.shape) if needed else None for x, needed in gradients)


_OPTIONS = "int ignore_index, float? softcap, float logit_scale"
_BACKWARD = (
    "(Tensor hidden, Tensor weight, Tensor targets, Tensor logprobs, Tensor lse, Tensor? entropy, Tensor dlogprobs,"
    f" Tensor? dentropy, bool hidden_grad, bool weight_grad, {_OPTIONS}) -> (Tensor dhidden, Tensor dweight)"
)
linear_logprobs_forward = register_op(
    "linear_logprobs(Tensor hidden, Tensor weight, Tensor targets, bool entropy, bool extras, bool row_gradients,"
    f" bool low_memory, {_OPTIONS}) -> (Tensor logprobs, Tensor lse, Tensor entropies, Tensor more, Tensor dhidden)",
    _launch_forward,
    _fake_forward,
)
linear_logprobs_backward = register_op(f"linear_logprobs_backward{_BACKWARD}", _launch_backward, _fake_backward)
linear_logprobs_low_memory = register_op(f"linear_logprobs_low_memory{_BACKWARD}", _launch_low_memory, _fake_backward)


@register_flop_formula(torch.ops.ligermodels.linear_logprobs)
def _forward_flops(hidden, weight, targets, entropy, extras, row_gradients, *others, **_) -> int:
    return 2 * hidden[0] * hidden[1] * weight[0] * (1 + row_gradients)


@register_flop_formula(torch.ops.ligermodels.linear_logprobs_backward)
def _backward_flops(
    hidden, weight, targets, logprobs, lse, entropy, dlogprobs, dentropy, hidden_grad, weight_grad, *others, **_
) -> int:
    return 2 * hidden[0] * hidden[1] * weight[0] * (1 + hidden_grad + weight_grad)


@register_flop_formula(torch.ops.ligermodels.linear_logprobs_low_memory, get_raw=True)
def _low_memory_flops(
    hidden, weight, targets, logprobs, lse, entropy, dlogprobs, dentropy, hidden_grad, weight_grad, *others, **_
) -> int:
    holds_all = low_memory_buffer(hidden, weight, logits_dtype(hidden))[1]
    products = 2 * hidden_grad + 2 * weight_grad - (hidden_grad and weight_grad and holds_all)
    return 2 * hidden.numel() * weight.shape[0] * products
