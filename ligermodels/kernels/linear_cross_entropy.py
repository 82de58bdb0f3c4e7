"""Linear layer and cross-entropy in one: the loss of logits = hidden @ weightᵀ, a chunk of rows at a time.

hidden [T, H] and weight [V, H] of one float dtype, targets [T] int64; loss fp32. Of many rows no more than one chunk of
logits ever exists, in the inputs' dtype; its gradient overwrites it, and then

    dhidden = dlogits @ weight        dweight = Σ_chunks dlogitsᵀ @ hidden, summed in fp32

so that the chunk size changes the order of dweight's fp32 sums (a relative 1e-6) and nothing else.
"mean" and "sum" take both in the forward, in fp32: 6 T H V FLOP; backward only multiplies by the upstream gradient and
rounds. "none" keeps the rows' log-sum-exp and recomputes the logits: 8 T H V FLOP.

Few rows have fewer logits than both gradients have fp32 sums, 2 T V bytes of half precision or 4 H (T + V): about up to
T = 2 H. Then those are what waits for backward, which writes their gradient over them and takes dhidden and dweight in
one matrix product each: no sums, and no more memory at the peak, at T = H half of it.

lean needs 64 MiB beyond the gradients and takes them in two passes: one over chunks of rows, whose logits lie in
dweight's own memory, for the log-sum-exps and dhidden; one over chunks of the vocabulary, which computes their logits
again and each row of dweight in one matrix product, summed in fp32 inside it and rounded once: 8 T H V FLOP. Logits of
few rows, which fit the 64 MiB, are not computed again: 6.

Little between the two pays. Sums over chunks of c rows for a share g of the vocabulary, and logits computed again for
the rest, cost 2 (4 - g) T H V FLOP and 8 g H V T / c bytes of traffic, in 4 g H V + 2 c V bytes. Beside the products
alone on an H200, 1.2 GiB beyond gradients of half precision give at best 1.10 times their time at 16384×4096×128256
(g 0.86, c 2048; 1.23 with g 1, c 896) and 1.26 at 16384×2304×256000 (g 0.60, c 2048), where 2.2 and 2.3 GiB give 1.03
and 1.10; 64 MiB give 1.29 and 1.44 (g 0.25, c 2048; g 0.10, c 1792), lean 1.35 and 1.51. Sums that wait in 24 bits, in
dweight and a byte beside it, take a product of our own, 8 to 17 % slower than cuBLAS's into fp32: 1.10 and 1.31. Sums
in half precision err 2.2 times as plain PyTorch with eight chunks, 2.9 times with 32.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ligermodels.kernels.cross_entropy import (
    OPTIONS,
    check_arguments,
    cross_entropy_of_temporary,
    cross_entropy_reference,
    mean_factor,
    reduce,
    reduce_losses,
    sweep,
)
from ligermodels.kernels.dispatch import Node, autocast, is_traced, register, runs_kernels
from ligermodels.kernels.launch import as_matrix, cdiv
from ligermodels.kernels.rescale import rescale, rescale_pair, scale_gradient_

GRADIENT_SCALE = 2.0**10  # of dlogits in the forward: out of fp16's subnormals, and exact
LOGITS_BYTES = 2**30
BEYOND_BYTES = 6 * 2**30 // 5  # of logits and of what fp32 sums take beyond the gradients, where MANY_ROWS fit
LEAN_BYTES = 2**26  # of logits at most, where memory is short, and an eighth of the weight at most
FEWEST_ROWS, MOST_ROWS = 1024, 8192  # below, adding to dweight in fp32 costs more than the matrix products
MANY_ROWS = 3072  # not given up for memory: chunks of 2048 take four hundredths more time
ALIGNMENT = 128  # rows of a chunk, and the elements from one row of logits to the next: tiles of a matrix product


def linear_cross_entropy_reference(hidden: Tensor, weight: Tensor, targets: Tensor, **options) -> Tensor:
    """Options as in `cross_entropy_reference`."""
    return cross_entropy_reference(hidden @ weight.T, targets, **options)


def chunk_rows(rows: int, vocab: int, sums: int, dtype: torch.dtype) -> int:
    """Rows of one chunk, beside so many fp32 sums: what the memory holds, spread evenly over the fewest chunks."""
    row = round_up(vocab) * dtype.itemsize
    beside = (BEYOND_BYTES - sums * (torch.float32.itemsize - dtype.itemsize)) // row
    limit = min(LOGITS_BYTES // row, beside if beside >= MANY_ROWS else MOST_ROWS)
    limit = min(max(limit, FEWEST_ROWS), MOST_ROWS) // ALIGNMENT * ALIGNMENT
    chunks = max(1, cdiv(rows, limit))
    return round_up(cdiv(rows, chunks))


def keeps_logits(rows: int, columns: int, vocab: int, dtype: torch.dtype, hidden_grad: bool, weight_grad: bool) -> bool:
    """Whether all logits take no more memory, until backward, than fp32 sums of the gradients that are wanted."""
    sums = columns * (rows * hidden_grad + vocab * weight_grad)
    # In fp16 a mean's gradient might underflow; rows of logits begin at vectors or a matrix product takes long.
    return dtype != torch.float16 and vocab % 16 == 0 and rows * vocab * dtype.itemsize <= sums * 4


def round_up(size: int) -> int:
    return cdiv(size, ALIGNMENT) * ALIGNMENT


def aligned(size: int) -> int:
    """The most that `size` holds of whole tiles, or of 16 elements, or `size` where it holds none."""
    return size // ALIGNMENT * ALIGNMENT or size // 16 * 16 or max(size, 1)


def rows_in(piece: slice, x: Tensor) -> Tensor:
    """x[piece], without the microseconds of a view where that is all of x."""
    return x if piece.stop - piece.start == x.shape[0] else x[piece]


def _chunks_of_logits(
    hidden: Tensor, weight: Tensor, sums: int = 0, buffer: Tensor | None = None
) -> Iterator[tuple[slice, Tensor]]:
    """(rows, their logits) of each chunk, all in the same memory: `buffer`'s, where one of enough elements is given."""
    rows, vocab = hidden.shape[0], weight.shape[0]
    width = round_up(vocab)
    if buffer is None:
        chunk = min(chunk_rows(rows, vocab, sums, hidden.dtype), rows)
        buffer = torch.empty(chunk, width, dtype=hidden.dtype, device=hidden.device)
    else:
        chunk = aligned(buffer.numel() // width)
        buffer = buffer[: chunk * width].view(chunk, width)
    buffer = buffer if width == vocab else buffer[:, :vocab]
    for start in range(0, rows, max(chunk, 1)):
        piece = slice(start, min(start + chunk, rows))
        logits = rows_in(slice(0, piece.stop - start), buffer)
        yield piece, torch.mm(rows_in(piece, hidden), weight.T, out=logits)


def _accumulate_(total: Tensor, a: Tensor, b: Tensor, beta: int) -> None:
    """total = beta * total + a @ b in total's fp32, whatever the dtype of a and b; beta 0 ignores what total holds."""
    if total.is_cuda:
        torch.addmm(total, a, b, total.dtype, beta=beta, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype), beta=beta)


def _gradients(hidden: Tensor, weight: Tensor, hidden_grad: bool, weight_grad: bool) -> tuple[Tensor, Tensor]:
    """Room for both, in fp32 as the upstream gradient is yet to come; of no elements where they are not wanted."""
    dhidden = hidden.new_empty(*hidden.shape if hidden_grad else (0,), dtype=torch.float32)
    make = weight.new_empty if hidden.shape[0] else weight.new_zeros
    return dhidden, make(*weight.shape if weight_grad else (0,), dtype=torch.float32)


def _accumulate_gradients_(
    dhidden: Tensor, dweight: Tensor, dlogits: Tensor, hidden: Tensor, weight: Tensor, piece: slice
) -> None:
    if dhidden.numel():
        _accumulate_(rows_in(piece, dhidden), dlogits, weight, beta=0)
    if dweight.numel():
        _accumulate_(dweight, dlogits.T, rows_in(piece, hidden), beta=int(piece.start > 0))


def _launch_forward(
    hidden: Tensor, weight: Tensor, targets: Tensor, hidden_grad: bool, weight_grad: bool, *options
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    loss = hidden.new_empty(hidden.shape[0], dtype=torch.float32)
    lse = torch.empty_like(loss)
    dhidden, dweight = _gradients(hidden, weight, hidden_grad, weight_grad)
    for piece, logits in _chunks_of_logits(hidden, weight, dhidden.numel() + dweight.numel()):
        dlogits = logits if hidden_grad or weight_grad else None
        of_piece = rows_in(piece, targets), rows_in(piece, loss), rows_in(piece, lse)
        sweep(logits, *of_piece, GRADIENT_SCALE, dlogits, *options)
        _accumulate_gradients_(dhidden, dweight, logits, hidden, weight, piece)
    return loss, lse, dhidden, dweight


def _launch_backward(
    hidden: Tensor, weight: Tensor, targets: Tensor, lse: Tensor, scale: Tensor,
    hidden_grad: bool, weight_grad: bool, *options,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    dhidden, dweight = _gradients(hidden, weight, hidden_grad, weight_grad)
    for piece, logits in _chunks_of_logits(hidden, weight, dhidden.numel() + dweight.numel()):
        of_piece = rows_in(piece, targets), None, rows_in(piece, lse), rows_in(piece, scale)
        sweep(logits, *of_piece, logits, *options)
        _accumulate_gradients_(dhidden, dweight, logits, hidden, weight, piece)
    return dhidden, dweight


def lean_room(hidden: Tensor, weight: Tensor) -> tuple[int, bool]:
    """Elements of the buffer of logits, at least a row of them and 16 columns, and whether it holds all of them."""
    rows, row = hidden.shape[0], round_up(weight.shape[0])
    elements = max(min(LEAN_BYTES // hidden.element_size(), weight.numel() // 8), row, 16 * rows)
    return elements, rows <= aligned(elements // row)


def _launch_lean(
    hidden: Tensor, weight: Tensor, targets: Tensor, lse: Tensor | None, scale: Tensor,
    hidden_grad: bool, weight_grad: bool, *options,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Both gradients, of rows weighed by `scale`, in the inputs' dtype; loss and lse where lse is not given."""
    rows = hidden.shape[0]
    loss = torch.empty(rows if lse is None else 0, dtype=torch.float32, device=hidden.device)
    row_lse = torch.empty_like(loss) if lse is None else lse
    dhidden = torch.empty(hidden.shape if hidden_grad else 0, dtype=hidden.dtype, device=hidden.device)
    make = torch.empty if rows else torch.zeros
    dweight = make(weight.shape if weight_grad else 0, dtype=weight.dtype, device=weight.device)
    (elements, holds_all), by_rows = lean_room(hidden, weight), hidden_grad or lse is None
    buffer = torch.empty(elements, dtype=hidden.dtype, device=hidden.device)
    once = by_rows and weight_grad and holds_all  # no logits are computed again
    if by_rows:
        room = dweight.view(-1) if dweight.numel() > elements and not once else buffer
        for piece, logits in _chunks_of_logits(hidden, weight, buffer=room):
            dlogits = logits if hidden_grad or once else None
            piece_loss = rows_in(piece, loss) if lse is None else None
            of_piece = rows_in(piece, targets), piece_loss, rows_in(piece, row_lse), rows_in(piece, scale)
            sweep(logits, *of_piece, dlogits, *options)
            if hidden_grad:
                torch.mm(logits, weight, out=rows_in(piece, dhidden))
            if once:  # the one piece
                torch.mm(logits.T, hidden, out=dweight)
    if weight_grad and rows and not once:
        _take_dweight_(dweight, hidden, weight, targets, row_lse, scale, buffer, *options)
    return loss, row_lse if lse is None else torch.empty_like(loss), dhidden, dweight


def _take_dweight_(
    dweight: Tensor, hidden: Tensor, weight: Tensor, targets: Tensor, lse: Tensor, scale: Tensor, buffer: Tensor,
    *options,
) -> None:  # fmt: skip
    """A chunk of the vocabulary at a time, over all rows: each element of dweight is one sum, rounded once."""
    rows, vocab = hidden.shape[0], weight.shape[0]
    chunk = aligned(buffer.numel() // rows)
    for start in range(0, vocab, chunk):
        piece = slice(start, min(start + chunk, vocab))
        logits = buffer[: rows * (piece.stop - start)].view(rows, -1)
        torch.mm(hidden, weight[piece].T, out=logits)
        sweep(logits, targets, None, lse, scale, logits, *options, first=start, vocab=vocab)
        torch.mm(logits.T, hidden, out=dweight[piece])


def _fake_forward(hidden, weight, targets, hidden_grad, weight_grad, *options):
    loss = hidden.new_empty(hidden.shape[0], dtype=torch.float32)
    return loss, torch.empty_like(loss), *_fake_backward(hidden, weight, targets, loss, loss, hidden_grad, weight_grad)


def _fake_backward(hidden, weight, targets, lse, scale, hidden_grad, weight_grad, *options):
    dhidden = hidden.new_empty(hidden.shape if hidden_grad else 0, dtype=torch.float32)
    return dhidden, weight.new_empty(weight.shape if weight_grad else 0, dtype=torch.float32)


def _fake_lean(hidden, weight, targets, lse, scale, hidden_grad, weight_grad, *options):
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


linear_cross_entropy_lean = register(
    "linear_cross_entropy_lean(Tensor hidden, Tensor weight, Tensor targets, Tensor? lse, Tensor scale,"
    f" bool hidden_grad, bool weight_grad, {OPTIONS}) -> (Tensor loss, Tensor lse, Tensor dhidden, Tensor dweight)",
    _launch_lean,
    _fake_lean,
)


@register_flop_formula(torch.ops.ligermodels.linear_cross_entropy)
def _forward_flops(hidden, weight, targets, hidden_grad, weight_grad, *options, **_) -> int:
    return 2 * hidden[0] * hidden[1] * weight[0] * (1 + hidden_grad + weight_grad)


@register_flop_formula(torch.ops.ligermodels.linear_cross_entropy_backward)
def _backward_flops(hidden, weight, targets, lse, scale, hidden_grad, weight_grad, *options, **_) -> int:
    return 2 * hidden[0] * hidden[1] * weight[0] * (1 + hidden_grad + weight_grad)


@register_flop_formula(torch.ops.ligermodels.linear_cross_entropy_lean, get_raw=True)
def _lean_flops(hidden, weight, targets, lse, scale, hidden_grad, weight_grad, *options, **_) -> int:
    holds_all, by_rows = lean_room(hidden, weight)[1], hidden_grad or lse is None
    products = by_rows + hidden_grad + 2 * weight_grad - (by_rows and weight_grad and holds_all)
    return 2 * hidden.numel() * weight.shape[0] * products


class _ReducedLoss(Node):
    """The sum of the losses or their mean, with both gradients taken in the forward and scaled in the backward."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, mean, hidden_grad, weight_grad, *options):
        losses, _, dhidden, dweight = linear_cross_entropy_forward(
            hidden, weight, targets, hidden_grad, weight_grad, *options
        )
        loss, factor = reduce_losses(losses, targets, options[0], mean)
        ctx.save_for_backward(dhidden, dweight, factor)
        ctx.dtype, ctx.wanted = weight.dtype, (hidden_grad, weight_grad)
        return loss

    @staticmethod
    def backward(ctx, dloss):
        (dhidden, dweight, factor), (hidden_grad, weight_grad) = ctx.saved_tensors, ctx.wanted
        scale = dloss, factor, 1 / GRADIENT_SCALE, ctx.dtype
        if hidden_grad and weight_grad:
            return *rescale_pair(dhidden, dweight, *scale), *[None] * 9
        dhidden = rescale(dhidden, *scale) if hidden_grad else None
        dweight = rescale(dweight, *scale) if weight_grad else None
        return dhidden, dweight, *[None] * 9


class _LeanLoss(Node):
    """The sum of the losses or their mean, with both gradients taken in the forward in the inputs' dtype; backward
    multiplies in place where the upstream gradient is not 1."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, mean, hidden_grad, weight_grad, *options):
        scale = mean_factor(targets, options[0]) if mean else hidden.new_ones((), dtype=torch.float32)
        losses, _, *gradients = linear_cross_entropy_lean(
            hidden, weight, targets, None, scale.expand(targets.shape), hidden_grad, weight_grad, *options
        )
        loss, _ = reduce_losses(losses, targets, options[0], mean)
        ctx.save_for_backward(*gradients)
        ctx.wanted = hidden_grad, weight_grad
        return loss

    @staticmethod
    def backward(ctx, dloss):
        pairs = zip(ctx.saved_tensors, ctx.wanted, strict=True)
        return *[scale_gradient_(gradient, dloss) if wanted else None for gradient, wanted in pairs], *[None] * 9


class _RowLosses(Node):
    """The loss of each row; backward recomputes the logits."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, lean, *options):
        if lean:
            scale = hidden.new_empty(targets.shape, dtype=torch.float32)  # of no gradient
            loss, lse, *_ = linear_cross_entropy_lean(hidden, weight, targets, None, scale, False, False, *options)
        else:
            loss, lse, *_ = linear_cross_entropy_forward(hidden, weight, targets, False, False, *options)
        ctx.save_for_backward(hidden, weight, targets, lse)
        ctx.lean, ctx.options = lean, options
        return loss

    @staticmethod
    def backward(ctx, dloss):
        hidden_grad, weight_grad = ctx.needs_input_grad[:2]
        backward = linear_cross_entropy_lean if ctx.lean else linear_cross_entropy_backward
        hidden, weight, *rest = ctx.saved_tensors  # once: checkpointing refuses a second time
        *_, dhidden, dweight = backward(hidden, weight, *rest, dloss, hidden_grad, weight_grad, *ctx.options)
        dhidden = dhidden.to(hidden.dtype) if hidden_grad else None
        dweight = dweight.to(weight.dtype) if weight_grad else None
        return dhidden, dweight, *[None] * 7


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, ignore_index: int = -100, softcap: float | None = None,
    logit_scale: float = 1.0, z_loss: float = 0.0, label_smoothing: float = 0.0, reduction: str = "mean",
    lean: bool = False,
) -> Tensor:  # fmt: skip
    """Cross-entropy of hidden @ weightᵀ, whose logits are all in memory only where they are few.

    hidden [..., H] and weight [V, H] of one float dtype, targets [...] int64 in [0, V) or ignore_index; loss and
    options as in `cross_entropy`. lean: the least memory, 64 MiB beyond both gradients, for at least a third more time
    than the default takes, unless all logits fit them; an upstream gradient other than 1 then rounds them once more,
    and backward runs once. Raises ValueError where the shapes disagree.
    """
    check_arguments(hidden, targets, reduction)
    options = ignore_index, softcap, logit_scale, z_loss, label_smoothing
    hidden, weight = autocast(hidden, weight)
    if not runs_kernels(hidden):
        return linear_cross_entropy_reference(
            hidden, weight, targets, ignore_index=ignore_index, softcap=softcap, logit_scale=logit_scale,
            z_loss=z_loss, label_smoothing=label_smoothing, reduction=reduction,
        )  # fmt: skip
    rows = as_matrix(hidden)
    flat = targets.contiguous() if targets.ndim == 1 else targets.reshape(-1).contiguous()
    # Lean gradients wait for their upstream gradient in the inputs' dtype: in fp16 they might underflow before a loss
    # scale reaches them, and are taken in backward instead.
    if reduction == "none" or (lean and hidden.dtype == torch.float16):
        losses = _RowLosses.apply(rows, weight, flat, lean, *options)
        return reduce(losses.reshape(targets.shape), targets, ignore_index, reduction)
    wanted = [torch.is_grad_enabled() and x.requires_grad for x in (hidden, weight)]
    if lean:
        return _LeanLoss.apply(rows, weight, flat, reduction == "mean", *wanted, *options)
    size = rows.shape[0], rows.shape[1], weight.shape[0]
    if not is_traced((rows, weight, flat)) and keeps_logits(*size, rows.dtype, *wanted):
        return cross_entropy_of_temporary(torch.mm(rows, weight.T), flat, reduction, *options)
    return _ReducedLoss.apply(rows, weight, flat, reduction == "mean", *wanted, *options)


def token_log_probs(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, ignore_index: int = -100, softcap: float | None = None,
    logit_scale: float = 1.0,
) -> Tensor:  # fmt: skip
    """log p(target) of each token under the softmax of hidden @ weightᵀ; 0 where the target is ignored.

    Arguments as in `linear_cross_entropy` -> [...] fp32.
    """
    return -linear_cross_entropy(
        hidden, weight, targets, ignore_index=ignore_index, softcap=softcap, logit_scale=logit_scale, reduction="none"
    )
