"""Fused linear cross-entropy: the loss of logits = hidden @ weightᵀ, computed in chunks of rows.

hidden [T, H] and weight [V, H] of one float dtype, targets [T] int64; loss fp32. With many rows, only one chunk of
logits exists at a time, in the inputs' dtype. Its gradient overwrites it, and then

    dhidden = dlogits @ weight        dweight = Σ_chunks dlogitsᵀ @ hidden, summed in fp32

The chunk size changes the order of the fp32 sums of dweight (relative difference 1e-6) and nothing else.
"mean" and "sum" compute both gradients in the forward, in fp32: 6 T H V FLOP. Backward only multiplies them by the
upstream gradient and rounds. "none" saves the log-sum-exp of each row and recomputes the logits: 8 T H V FLOP.

Few rows. The logits take 2 T V bytes in half precision, fp32 sums of both gradients 4 H (T + V): up to about T = 2 H
the logits are smaller. They are then saved for backward, which overwrites them with their gradient and computes dhidden
and dweight in one GEMM each. There are no fp32 sums, and peak memory is no higher; at T = H it is half.

low_memory=True needs 64 MiB beyond the gradients and computes them in two passes. The first goes over chunks of rows,
whose logits are stored in dweight's own memory, and computes the log-sum-exps and dhidden. The second goes over chunks
of the vocabulary: it recomputes their logits and computes each row of dweight in one GEMM, summed in fp32 inside the
GEMM and rounded once: 8 T H V FLOP. If all logits fit the 64 MiB, they are not recomputed: 6 T H V FLOP.

Designs between the two do not pay off. Summing over chunks of c rows for a share g of the vocabulary and recomputing
the logits of the rest costs 2 (4 - g) T H V FLOP and 8 g H V T / c bytes of traffic, in 4 g H V + 2 c V bytes of
memory. Relative to the time of the GEMMs alone on an H200, 1.2 GiB beyond half-precision gradients give at best 1.10 at
16384×4096×128256 (g 0.86, c 2048; 1.23 with g 1, c 896) and 1.26 at 16384×2304×256000 (g 0.60, c 2048), where 2.2 and
2.3 GiB give 1.03 and 1.10. 64 MiB give 1.29 and 1.44 (g 0.25, c 2048; g 0.10, c 1792); low_memory takes 1.35 and 1.51.
Sums kept in 24 bits, in dweight and one more byte per element, need a GEMM of our own, 8 to 17 % slower than cuBLAS's
into fp32: 1.10 and 1.31. Sums in half precision have 2.2 times the error of plain PyTorch with eight chunks, 2.9 times
with 32.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ligermodels.kernels.cross_entropy import (
    OPTIONS,
    check_cross_entropy,
    cross_entropy_of_temporary,
    cross_entropy_reference,
    launch_cross_entropy,
    mean_factor,
    reduce_losses,
    reduce_rows,
)
from ligermodels.kernels.dispatch import Node, autocast, is_traced, register, runs_kernels
from ligermodels.kernels.launch import as_matrix, cdiv
from ligermodels.kernels.rescale import rescale, rescale_pair, scale_gradient_

GRADIENT_SCALE = 2.0**10  # of dlogits in the forward: keeps them out of fp16's subnormals; exact
MAX_LOGITS_BYTES = 2**30  # of one chunk
# Memory for logits and fp32 sums beyond the gradients, if chunks of PREFERRED_CHUNK_ROWS fit it.
EXTRA_BYTES = 6 * 2**30 // 5
LOW_MEMORY_BYTES = 2**26  # most logits at a time with low_memory; also at most an eighth of the weight
# Below the minimum, adding to dweight in fp32 takes longer than the GEMMs.
MIN_CHUNK_ROWS, MAX_CHUNK_ROWS = 1024, 8192
PREFERRED_CHUNK_ROWS = 3072  # not reduced to save memory: chunks of 2048 rows take 4 % more time
LOGITS_ALIGNMENT = 128  # a GEMM tile: rows of a chunk and the stride between rows of logits are multiples of it


def linear_cross_entropy_reference(hidden: Tensor, weight: Tensor, targets: Tensor, **options) -> Tensor:
    """Options as in `cross_entropy_reference`."""
    return cross_entropy_reference(hidden @ weight.T, targets, **options)


def chunk_rows(rows: int, vocab: int, sums: int, dtype: torch.dtype) -> int:
    """Rows of one chunk: the fewest chunks that fit the memory, of equal size. sums: elements of the fp32 gradients."""
    row_bytes = round_up_to_tile(vocab) * dtype.itemsize
    within_extra = (EXTRA_BYTES - sums * (torch.float32.itemsize - dtype.itemsize)) // row_bytes
    limit = min(MAX_LOGITS_BYTES // row_bytes, within_extra if within_extra >= PREFERRED_CHUNK_ROWS else MAX_CHUNK_ROWS)
    limit = min(max(limit, MIN_CHUNK_ROWS), MAX_CHUNK_ROWS) // LOGITS_ALIGNMENT * LOGITS_ALIGNMENT
    chunks = max(1, cdiv(rows, limit))
    return round_up_to_tile(cdiv(rows, chunks))


def keeps_logits(rows: int, columns: int, vocab: int, dtype: torch.dtype, hidden_grad: bool, weight_grad: bool) -> bool:
    """Whether to save all logits for backward: if they take no more memory than fp32 sums of the required gradients."""
    sums = columns * (rows * hidden_grad + vocab * weight_grad)
    # Not in fp16, where the gradient of a mean may underflow, nor if rows of logits are unaligned: GEMMs are then slow.
    return dtype != torch.float16 and vocab % 16 == 0 and rows * vocab * dtype.itemsize <= sums * 4


def round_up_to_tile(size: int) -> int:
    return cdiv(size, LOGITS_ALIGNMENT) * LOGITS_ALIGNMENT


def round_down_to_tile(size: int) -> int:
    """`size` rounded down to a multiple of LOGITS_ALIGNMENT; below that to a multiple of 16; below 16 max(size, 1)."""
    return size // LOGITS_ALIGNMENT * LOGITS_ALIGNMENT or size // 16 * 16 or max(size, 1)


def slice_rows(x: Tensor, rows: slice) -> Tensor:
    """x[rows]; x itself if that is all of it, because a view costs microseconds."""
    return x if rows.stop - rows.start == x.shape[0] else x[rows]


def _chunks_of_logits(
    hidden: Tensor, weight: Tensor, sums: int = 0, buffer: Tensor | None = None
) -> Iterator[tuple[slice, Tensor]]:
    """(rows, their logits) chunk by chunk, all in the same memory: that of `buffer` if it is given (1-D, large enough).

    sums: elements of the fp32 gradients, as in `chunk_rows`.
    """
    rows, vocab = hidden.shape[0], weight.shape[0]
    width = round_up_to_tile(vocab)
    if buffer is None:
        size = min(chunk_rows(rows, vocab, sums, hidden.dtype), rows)
        buffer = torch.empty(size, width, dtype=hidden.dtype, device=hidden.device)
    else:
        size = round_down_to_tile(buffer.numel() // width)
        buffer = buffer[: size * width].view(size, width)
    buffer = buffer if width == vocab else buffer[:, :vocab]
    for start in range(0, rows, max(size, 1)):
        chunk = slice(start, min(start + size, rows))
        logits = slice_rows(buffer, slice(0, chunk.stop - start))
        yield chunk, torch.mm(slice_rows(hidden, chunk), weight.T, out=logits)


def _accumulate_(total: Tensor, a: Tensor, b: Tensor, beta: int) -> None:
    """total = beta * total + a @ b, accumulated in fp32 (total's dtype) for any dtype of a and b. With beta 0, total
    may be uninitialised."""
    if total.is_cuda:
        torch.addmm(total, a, b, total.dtype, beta=beta, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype), beta=beta)


def _empty_gradients(hidden: Tensor, weight: Tensor, hidden_grad: bool, weight_grad: bool) -> tuple[Tensor, Tensor]:
    """Uninitialised dhidden and dweight, in fp32 because the upstream gradient is not known yet. A gradient that is not
    required has no elements."""
    dhidden = hidden.new_empty(*hidden.shape if hidden_grad else (0,), dtype=torch.float32)
    make = weight.new_empty if hidden.shape[0] else weight.new_zeros
    return dhidden, make(*weight.shape if weight_grad else (0,), dtype=torch.float32)


def _accumulate_gradients_(
    dhidden: Tensor, dweight: Tensor, dlogits: Tensor, hidden: Tensor, weight: Tensor, chunk: slice
) -> None:
    if dhidden.numel():
        _accumulate_(slice_rows(dhidden, chunk), dlogits, weight, beta=0)
    if dweight.numel():
        _accumulate_(dweight, dlogits.T, slice_rows(hidden, chunk), beta=int(chunk.start > 0))


def _launch_forward(
    hidden: Tensor, weight: Tensor, targets: Tensor, hidden_grad: bool, weight_grad: bool, *options
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    loss = hidden.new_empty(hidden.shape[0], dtype=torch.float32)
    lse = torch.empty_like(loss)
    dhidden, dweight = _empty_gradients(hidden, weight, hidden_grad, weight_grad)
    for chunk, logits in _chunks_of_logits(hidden, weight, dhidden.numel() + dweight.numel()):
        dlogits = logits if hidden_grad or weight_grad else None
        row_data = slice_rows(targets, chunk), slice_rows(loss, chunk), slice_rows(lse, chunk)
        launch_cross_entropy(logits, *row_data, GRADIENT_SCALE, dlogits, *options)
        _accumulate_gradients_(dhidden, dweight, logits, hidden, weight, chunk)
    return loss, lse, dhidden, dweight


def _launch_backward(
    hidden: Tensor, weight: Tensor, targets: Tensor, lse: Tensor, scale: Tensor,
    hidden_grad: bool, weight_grad: bool, *options,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    dhidden, dweight = _empty_gradients(hidden, weight, hidden_grad, weight_grad)
    for chunk, logits in _chunks_of_logits(hidden, weight, dhidden.numel() + dweight.numel()):
        row_data = slice_rows(targets, chunk), None, slice_rows(lse, chunk), slice_rows(scale, chunk)
        launch_cross_entropy(logits, *row_data, logits, *options)
        _accumulate_gradients_(dhidden, dweight, logits, hidden, weight, chunk)
    return dhidden, dweight


def low_memory_buffer(hidden: Tensor, weight: Tensor) -> tuple[int, bool]:
    """(elements of the buffer of logits, whether it holds all logits). It holds at least one row and 16 columns."""
    rows, row = hidden.shape[0], round_up_to_tile(weight.shape[0])
    elements = max(min(LOW_MEMORY_BYTES // hidden.element_size(), weight.numel() // 8), row, 16 * rows)
    return elements, rows <= round_down_to_tile(elements // row)


def _launch_low_memory(
    hidden: Tensor, weight: Tensor, targets: Tensor, lse: Tensor | None, scale: Tensor,
    hidden_grad: bool, weight_grad: bool, *options,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Both gradients of Σ scale * row loss, in the inputs' dtype; also loss and lse if lse is not given."""
    rows = hidden.shape[0]
    loss = torch.empty(rows if lse is None else 0, dtype=torch.float32, device=hidden.device)
    row_lse = torch.empty_like(loss) if lse is None else lse
    dhidden = torch.empty(hidden.shape if hidden_grad else 0, dtype=hidden.dtype, device=hidden.device)
    make = torch.empty if rows else torch.zeros
    dweight = make(weight.shape if weight_grad else 0, dtype=weight.dtype, device=weight.device)
    (elements, holds_all), row_pass = low_memory_buffer(hidden, weight), hidden_grad or lse is None
    buffer = torch.empty(elements, dtype=hidden.dtype, device=hidden.device)
    single_pass = row_pass and weight_grad and holds_all  # no logits are recomputed
    if row_pass:
        memory = dweight.view(-1) if dweight.numel() > elements and not single_pass else buffer
        for chunk, logits in _chunks_of_logits(hidden, weight, buffer=memory):
            dlogits = logits if hidden_grad or single_pass else None
            chunk_loss = slice_rows(loss, chunk) if lse is None else None
            row_data = slice_rows(targets, chunk), chunk_loss, slice_rows(row_lse, chunk), slice_rows(scale, chunk)
            launch_cross_entropy(logits, *row_data, dlogits, *options)
            if hidden_grad:
                torch.mm(logits, weight, out=slice_rows(dhidden, chunk))
            if single_pass:  # there is only one chunk
                torch.mm(logits.T, hidden, out=dweight)
    if weight_grad and rows and not single_pass:
        _compute_dweight_by_vocab_(dweight, hidden, weight, targets, row_lse, scale, buffer, *options)
    return loss, row_lse if lse is None else torch.empty_like(loss), dhidden, dweight


def _compute_dweight_by_vocab_(
    dweight: Tensor, hidden: Tensor, weight: Tensor, targets: Tensor, lse: Tensor, scale: Tensor, buffer: Tensor,
    *options,
) -> None:  # fmt: skip
    """All rows, one chunk of the vocabulary at a time: each element of dweight is one fp32 sum, rounded once."""
    rows, vocab = hidden.shape[0], weight.shape[0]
    size = round_down_to_tile(buffer.numel() // rows)
    for start in range(0, vocab, size):
        classes = slice(start, min(start + size, vocab))
        logits = buffer[: rows * (classes.stop - start)].view(rows, -1)
        torch.mm(hidden, weight[classes].T, out=logits)
        launch_cross_entropy(logits, targets, None, lse, scale, logits, *options, first_class=start, vocab=vocab)
        torch.mm(logits.T, hidden, out=dweight[classes])


def _fake_forward(hidden, weight, targets, hidden_grad, weight_grad, *options):
    loss = hidden.new_empty(hidden.shape[0], dtype=torch.float32)
    return loss, torch.empty_like(loss), *_fake_backward(hidden, weight, targets, loss, loss, hidden_grad, weight_grad)


def _fake_backward(hidden, weight, targets, lse, scale, hidden_grad, weight_grad, *options):
    dhidden = hidden.new_empty(hidden.shape if hidden_grad else 0, dtype=torch.float32)
    return dhidden, weight.new_empty(weight.shape if weight_grad else 0, dtype=torch.float32)


def _fake_low_memory(hidden, weight, targets, lse, scale, hidden_grad, weight_grad, *options):
    loss = hidden.new_empty(hidden.shape[0] if lse is None else 0, dtype=torch.float32)
    dhidden = hidden.new_empty(hidden.shape if hidden_grad else 0)
    return loss, torch.empty_like(loss), dhidden, weight.new_empty(weight.shape if weight_grad else 0)


linear_cross_entropy_forward = register(
    "linear_cross_entropy(Tensor hidden, Tensor weight, Tensor targets, bool hidden_grad,"
    f" bool weight_grad, {OPTIONS}) -> (Tensor loss, Tensor lse, Tensor dhidden, Tensor dweight)",
    _launch_forward,
    _fake_forward,
)
linear_cross_entropy_backward = register(
    "linear_cross_entropy_backward(Tensor hidden, Tensor weight, Tensor targets, Tensor lse, Tensor scale,"
    f" bool hidden_grad, bool weight_grad, {OPTIONS}) -> (Tensor dhidden, Tensor dweight)",
    _launch_backward,
    _fake_backward,
)
linear_cross_entropy_low_memory = register(
    "linear_cross_entropy_low_memory(Tensor hidden, Tensor weight, Tensor targets, Tensor? lse, Tensor scale,"
    f" bool hidden_grad, bool weight_grad, {OPTIONS}) -> (Tensor loss, Tensor lse, Tensor dhidden, Tensor dweight)",
    _launch_low_memory,
    _fake_low_memory,
)


@register_flop_formula(torch.ops.ligermodels.linear_cross_entropy)
def _forward_flops(hidden, weight, targets, hidden_grad, weight_grad, *options, **_) -> int:
    return 2 * hidden[0] * hidden[1] * weight[0] * (1 + hidden_grad + weight_grad)


@register_flop_formula(torch.ops.ligermodels.linear_cross_entropy_backward)
def _backward_flops(hidden, weight, targets, lse, scale, hidden_grad, weight_grad, *options, **_) -> int:
    return 2 * hidden[0] * hidden[1] * weight[0] * (1 + hidden_grad + weight_grad)


@register_flop_formula(torch.ops.ligermodels.linear_cross_entropy_low_memory, get_raw=True)
def _low_memory_flops(hidden, weight, targets, lse, scale, hidden_grad, weight_grad, *options, **_) -> int:
    holds_all, row_pass = low_memory_buffer(hidden, weight)[1], hidden_grad or lse is None
    products = row_pass + hidden_grad + 2 * weight_grad - (row_pass and weight_grad and holds_all)
    return 2 * hidden.numel() * weight.shape[0] * products


class _ReducedLoss(Node):
    """Sum or mean of the losses. Forward computes both gradients in fp32; backward scales and rounds them."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, mean, hidden_grad, weight_grad, *options):
        losses, _, dhidden, dweight = linear_cross_entropy_forward(
            hidden, weight, targets, hidden_grad, weight_grad, *options
        )
        loss, factor = reduce_losses(losses, targets, options[0], mean)
        ctx.save_for_backward(dhidden, dweight, factor)
        ctx.dtype, ctx.needed = weight.dtype, (hidden_grad, weight_grad)
        return loss

    @staticmethod
    def backward(ctx, dloss):
        (dhidden, dweight, factor), (hidden_grad, weight_grad) = ctx.saved_tensors, ctx.needed
        scale = dloss, factor, 1 / GRADIENT_SCALE, ctx.dtype
        if hidden_grad and weight_grad:
            return *rescale_pair(dhidden, dweight, *scale), *[None] * 9
        dhidden = rescale(dhidden, *scale) if hidden_grad else None
        dweight = rescale(dweight, *scale) if weight_grad else None
        return dhidden, dweight, *[None] * 9


class _LowMemoryLoss(Node):
    """Sum or mean of the losses. Forward computes both gradients in the inputs' dtype; backward multiplies them in
    place if the upstream gradient is not 1."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, mean, hidden_grad, weight_grad, *options):
        scale = mean_factor(targets, options[0]) if mean else hidden.new_ones((), dtype=torch.float32)
        losses, _, *gradients = linear_cross_entropy_low_memory(
            hidden, weight, targets, None, scale.expand(targets.shape), hidden_grad, weight_grad, *options
        )
        loss, _ = reduce_losses(losses, targets, options[0], mean)
        ctx.save_for_backward(*gradients)
        ctx.needed = hidden_grad, weight_grad
        return loss

    @staticmethod
    def backward(ctx, dloss):
        pairs = zip(ctx.saved_tensors, ctx.needed, strict=True)
        return *[scale_gradient_(gradient, dloss) if needed else None for gradient, needed in pairs], *[None] * 9


class _RowLosses(Node):
    """The loss of each row; backward recomputes the logits."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, low_memory, *options):
        if low_memory:
            scale = hidden.new_empty(targets.shape, dtype=torch.float32)  # not read without gradients
            loss, lse, *_ = linear_cross_entropy_low_memory(
                hidden, weight, targets, None, scale, False, False, *options
            )
        else:
            loss, lse, *_ = linear_cross_entropy_forward(hidden, weight, targets, False, False, *options)
        ctx.save_for_backward(hidden, weight, targets, lse)
        ctx.low_memory, ctx.options = low_memory, options
        return loss

    @staticmethod
    def backward(ctx, dloss):
        hidden_grad, weight_grad = ctx.needs_input_grad[:2]
        backward = linear_cross_entropy_low_memory if ctx.low_memory else linear_cross_entropy_backward
        hidden, weight, *rest = ctx.saved_tensors  # unpacked once: activation checkpointing raises on a second access
        *_, dhidden, dweight = backward(hidden, weight, *rest, dloss, hidden_grad, weight_grad, *ctx.options)
        dhidden = dhidden.to(hidden.dtype) if hidden_grad else None
        dweight = dweight.to(weight.dtype) if weight_grad else None
        return dhidden, dweight, *[None] * 7


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, ignore_index: int = -100, softcap: float | None = None,
    logit_scale: float = 1.0, z_loss: float = 0.0, label_smoothing: float = 0.0, reduction: str = "mean",
    low_memory: bool = False,
) -> Tensor:  # fmt: skip
    """Cross-entropy of the logits hidden @ weightᵀ, which are never all in memory unless they are few.

    hidden [..., H] and weight [V, H] of one float dtype, targets [...] int64 in [0, V) or ignore_index; loss and
    options as in `cross_entropy`.
    low_memory: only 64 MiB beyond both gradients. Takes at least a third more time than the default, unless all logits
    fit the 64 MiB. An upstream gradient other than 1 then rounds the gradients a second time, and backward can run only
    once.
    Raises ValueError if the shapes disagree.
    """
    check_cross_entropy(hidden, targets, reduction)
    options = ignore_index, softcap, logit_scale, z_loss, label_smoothing
    hidden, weight = autocast(hidden, weight)
    if not runs_kernels(hidden):
        return linear_cross_entropy_reference(
            hidden, weight, targets, ignore_index=ignore_index, softcap=softcap, logit_scale=logit_scale,
            z_loss=z_loss, label_smoothing=label_smoothing, reduction=reduction,
        )  # fmt: skip
    rows = as_matrix(hidden)
    flat = targets.contiguous() if targets.ndim == 1 else targets.reshape(-1).contiguous()
    # With low_memory, gradients are stored in the inputs' dtype before the upstream gradient is known. In fp16 they
    # could underflow before a loss scale reaches them; they are computed in backward instead.
    if reduction == "none" or (low_memory and hidden.dtype == torch.float16):
        losses = _RowLosses.apply(rows, weight, flat, low_memory, *options)
        return reduce_rows(losses.reshape(targets.shape), targets, ignore_index, reduction)
    needed = [torch.is_grad_enabled() and x.requires_grad for x in (hidden, weight)]
    if low_memory:
        return _LowMemoryLoss.apply(rows, weight, flat, reduction == "mean", *needed, *options)
    size = rows.shape[0], rows.shape[1], weight.shape[0]
    if not is_traced((rows, weight, flat)) and keeps_logits(*size, rows.dtype, *needed):
        return cross_entropy_of_temporary(torch.mm(rows, weight.T), flat, reduction, *options)
    return _ReducedLoss.apply(rows, weight, flat, reduction == "mean", *needed, *options)


def token_log_probs(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, ignore_index: int = -100, softcap: float | None = None,
    logit_scale: float = 1.0,
) -> Tensor:  # fmt: skip
    """log p(target) of each token under softmax(hidden @ weightᵀ); 0 for ignored targets.

    Arguments as in `linear_cross_entropy` -> [...] fp32.
    """
    return -linear_cross_entropy(
        hidden, weight, targets, ignore_index=ignore_index, softcap=softcap, logit_scale=logit_scale, reduction="none"
    )
