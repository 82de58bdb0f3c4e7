"""The chunks of `linear_divergence`: values of rows, and both gradients in one pass.

A chunk is projected in pieces, logits of both models in fp32. dlogits of its pieces, in the dtype of the hidden states,
are multiplied at once.

hidden [N, H] and weight [V, H] of one dtype; `linear_divergence.py` has the teachers, FLOP and bytes. weights fp32 [N]
multiply the gradients alone.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ligermodels.kernels.dispatch import register_op
from ligermodels.kernels.losses.divergence_rows import launch_divergence
from ligermodels.kernels.losses.logits_chunks import (
    GRADIENT_SCALE,
    LOGITS_ALIGNMENT,
    MAX_CHUNK_ROWS,
    accumulate_gradients_,
    empty_gradients,
    empty_logits,
    equal_rows,
    project,
    round_up_to_tile,
    slice_rows,
    slices,
)
from ligermodels.kernels.losses.top_k_divergence_rows import launch_top_k_divergence

# Half of it for the fp32 logits of a piece, both models' together, half for the gradients of a chunk. Smaller chunks
# take longer: each adds to the fp32 sums of dweight once.
MAX_CHUNK_BYTES = 2**31
MIN_PIECE_ROWS = 512


def rows_of_chunk(rows: int, vocab: int, models: int, dtype: torch.dtype) -> tuple[int, int]:
    """Rows of a piece and of a chunk: the fewest chunks that fit the memory, of equal size, and so their pieces.

    models: whose logits a piece has, 1 or 2. dtype: of dlogits.
    """
    width, half = round_up_to_tile(vocab), MAX_CHUNK_BYTES // 2
    piece = max(half // (4 * width * models) // LOGITS_ALIGNMENT * LOGITS_ALIGNMENT, MIN_PIECE_ROWS)
    pieces = max(1, half // (piece * width * dtype.itemsize))
    chunk = equal_rows(rows, min(piece * pieces, MAX_CHUNK_ROWS))
    return equal_rows(chunk, piece), chunk


def _empty_results(hidden: Tensor, cross_entropy: bool) -> tuple[Tensor, Tensor | None, Tensor]:
    """Uninitialised divergence, cross-entropy and entropy of rows."""
    values = hidden.new_empty(hidden.shape[0], dtype=torch.float32)
    return values, torch.empty_like(values) if cross_entropy else None, torch.empty_like(values)


def _launch_chunks(
    hidden: Tensor, weight: Tensor, teacher: tuple[Tensor, Tensor] | None, cross_entropy: bool,
    hidden_grad: bool, weight_grad: bool, launch_rows: Callable[..., None],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """(divergence, cross-entropy, entropy, dhidden, dweight).

    launch_rows(rows, student's logits, teacher's logits if `teacher` is given, results, dlogits) is called a piece.
    """
    rows, vocab = hidden.shape[0], weight.shape[0]
    models = [(hidden, weight)] if teacher is None else [(hidden, weight), teacher]
    results = _empty_results(hidden, cross_entropy)
    gradients = empty_gradients(hidden, weight, hidden_grad, weight_grad, False)
    piece, size = (min(x, rows) for x in rows_of_chunk(rows, vocab, len(models), hidden.dtype))
    logits = [empty_logits(piece, weight, torch.float32) for _ in models]
    buffer = empty_logits(size, weight, hidden.dtype) if hidden_grad or weight_grad else None
    for chunk in slices(rows, size):
        of_chunk = slice(0, chunk.stop - chunk.start)
        dlogits = None if buffer is None else slice_rows(buffer, of_chunk)
        for inside in slices(of_chunk.stop, piece):
            part = slice(chunk.start + inside.start, chunk.start + inside.stop)
            student, *teachers = (
                project(slice_rows(x, part), head, None, slice_rows(memory, slice(0, part.stop - part.start)))
                for (x, head), memory in zip(models, logits, strict=True)
            )
            of_part = tuple(None if x is None else slice_rows(x, part) for x in results)
            gradient = None if dlogits is None else slice_rows(dlogits, inside)
            launch_rows(part, student, teachers[0] if teachers else None, of_part, gradient)
        if dlogits is not None:
            accumulate_gradients_(gradients, dlogits, hidden, weight, chunk)
    return *results, *gradients[:2]


def _launch(
    hidden: Tensor, weight: Tensor, teacher: Tensor, teacher_weight: Tensor | None, weights: Tensor,
    targets: Tensor | None, hidden_grad: bool, weight_grad: bool, *options,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    def launch_rows(chunk, logits, teacher_logits, results, dlogits):
        teacher_logits = slice_rows(teacher, chunk) if teacher_logits is None else teacher_logits
        rows = slice_rows(weights, chunk), None if targets is None else slice_rows(targets, chunk)
        launch_divergence(logits, teacher_logits, *rows, results, dlogits, GRADIENT_SCALE, *options)

    model = None if teacher_weight is None else (teacher, teacher_weight)
    return _launch_chunks(hidden, weight, model, targets is not None, hidden_grad, weight_grad, launch_rows)


def _launch_top_k(
    hidden: Tensor, weight: Tensor, ids: Tensor, logprobs: Tensor, weights: Tensor, targets: Tensor | None,
    hidden_grad: bool, weight_grad: bool, *options,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    def launch_rows(chunk, logits, _, results, dlogits):
        rows = (None if x is None else slice_rows(x, chunk) for x in (ids, logprobs, weights, targets))
        launch_top_k_divergence(logits, *rows, results, dlogits, GRADIENT_SCALE, *options)

    return _launch_chunks(hidden, weight, None, targets is not None, hidden_grad, weight_grad, launch_rows)


def _fake(hidden, weight, first, second, weights, targets, hidden_grad, weight_grad, *options):
    dhidden = hidden.new_empty(hidden.shape if hidden_grad else 0, dtype=torch.float32)
    dweight = weight.new_empty(weight.shape if weight_grad else 0, dtype=torch.float32)
    return *_empty_results(hidden, targets is not None), dhidden, dweight


_ROWS = "Tensor weights, Tensor? targets, bool hidden_grad, bool weight_grad"
_RESULTS = "Tensor divergence, Tensor cross_entropy, Tensor entropy, Tensor dhidden, Tensor dweight"
linear_divergence_forward = register_op(
    f"linear_divergence(Tensor hidden, Tensor weight, Tensor teacher, Tensor? teacher_weight, {_ROWS}, str kind,"
    " float b, float temperature, float? softcap, float logit_scale, float? teacher_softcap, float teacher_logit_scale,"
    f" float ce_weight) -> ({_RESULTS})",
    _launch,
    _fake,
)
linear_top_k_divergence_forward = register_op(
    f"linear_top_k_divergence(Tensor hidden, Tensor weight, Tensor ids, Tensor logprobs, {_ROWS}, str kind, bool tail,"
    f" float temperature, float? softcap, float logit_scale, float ce_weight) -> ({_RESULTS})",
    _launch_top_k,
    _fake,
)


@register_flop_formula(torch.ops.ligermodels.linear_divergence)
def _flops(hidden, weight, teacher, teacher_weight, weights, targets, hidden_grad, weight_grad, *options, **_) -> int:
    students = _top_k_flops(hidden, weight, None, None, weights, targets, hidden_grad, weight_grad)
    return students + (0 if teacher_weight is None else 2 * teacher[0] * teacher[1] * teacher_weight[0])


@register_flop_formula(torch.ops.ligermodels.linear_top_k_divergence)
def _top_k_flops(hidden, weight, ids, logprobs, weights, targets, hidden_grad, weight_grad, *options, **_) -> int:
    return 2 * hidden[0] * hidden[1] * weight[0] * (1 + hidden_grad + weight_grad)
