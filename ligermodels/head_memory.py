"""The memory of the head and its loss, from the sizes that the ops choose for their chunks.

Bytes beside the weights, at the start of backward: gradients of the head's input [N, H] and of its weight [V, H], and
logits. An op has its name in `ligermodels.ops`. Must not know any model.
"""

import torch

from ligermodels.kernels.logits_chunks import (
    chunk_rows,
    keeps_logits,
    low_memory_buffer,
    piece_rows,
    round_up_to_tile,
    rows_of_pieces,
    vocabulary_buffer,
)
from ligermodels.kernels.logprob_chunks import MAX_BACKWARD_ROWS

FP32 = torch.float32


def loss_bytes(
    op: str, tokens: int, hidden: int, vocab: int, dtype: torch.dtype, trained: bool, low_memory: bool = False
) -> int:
    """Bytes of `op`: "linear_cross_entropy", which alone can have low_memory, "linear_logprobs" or
    "linear_logprobs_loss".

    tokens: N, those that have a target. trained: whether the weight has a gradient. Raises ValueError for another op.
    """
    size = tokens, hidden, vocab
    if op == "linear_cross_entropy":
        return low_memory_bytes(*size, dtype, trained) if low_memory else cross_entropy_bytes(*size, dtype, trained)
    if op == "linear_logprobs":
        return logprobs_bytes(*size, dtype, trained)
    if op == "linear_logprobs_loss":
        return logprobs_loss_bytes(*size, dtype, trained)
    raise ValueError(f"loss_bytes: unknown op {op!r}")


def low_memory_bytes(tokens: int, hidden: int, vocab: int, dtype: torch.dtype, trained: bool) -> int:
    """Both gradients in `dtype` and a buffer of logits."""
    inputs, weight = (torch.empty(rows, hidden, dtype=dtype, device="meta") for rows in (tokens, vocab))
    return inputs.nbytes + weight.nbytes * trained + low_memory_buffer(inputs, weight)[0] * dtype.itemsize


def cross_entropy_bytes(tokens: int, hidden: int, vocab: int, dtype: torch.dtype, trained: bool) -> int:
    """Both gradients in fp32 and a chunk of logits or, later, the weight's gradient in `dtype`. For few tokens all
    logits and, later, that gradient."""
    gradient = vocab * hidden * dtype.itemsize * trained
    if keeps_logits(tokens, hidden, vocab, dtype, True, trained):
        return tokens * vocab * dtype.itemsize + gradient
    sums = (tokens + vocab * trained) * hidden
    chunk = logits_bytes(min(chunk_rows(tokens, vocab, sums, dtype), tokens), vocab, dtype)
    return sums * FP32.itemsize + max(chunk, gradient)


def logprobs_loss_bytes(tokens: int, hidden: int, vocab: int, dtype: torch.dtype, trained: bool) -> int:
    """The same with fp32 logits."""
    gradient = vocab * hidden * dtype.itemsize * trained
    if keeps_logits(tokens, hidden, vocab, FP32, True, trained):
        return tokens * vocab * FP32.itemsize + gradient
    sums = (tokens + vocab * trained) * hidden
    return sums * FP32.itemsize + max(multiplied_bytes(tokens, hidden, vocab), gradient)


def logprobs_bytes(tokens: int, hidden: int, vocab: int, dtype: torch.dtype, trained: bool) -> int:
    """Both gradients in `dtype`, fp32 sums of the smaller one and a part of the fp32 logits, or those of the forward.
    For few tokens all logits; with a frozen head the gradient of the rows, which the forward computes."""
    rows_gradient, gradient = tokens * hidden * dtype.itemsize, vocab * hidden * dtype.itemsize
    if not trained:
        return rows_gradient + multiplied_bytes(tokens, hidden, vocab)
    if keeps_logits(tokens, hidden, vocab, FP32, True, trained):
        return tokens * vocab * FP32.itemsize + gradient
    rows = min(tokens, MAX_BACKWARD_ROWS)
    summed = vocab * hidden * FP32.itemsize if tokens > rows else gradient
    beside = (rows * hidden + vocabulary_buffer(rows, vocab, FP32)) * FP32.itemsize
    forward = logits_bytes(min(piece_rows(tokens, hidden, vocab, FP32), tokens), vocab, FP32)
    return max(forward, rows_gradient + summed + max(beside, gradient * (tokens > rows)))


def multiplied_bytes(tokens: int, hidden: int, vocab: int) -> int:
    """A chunk of fp32 logits whose gradient is multiplied with the weight."""
    rows = rows_of_pieces(piece_rows(tokens, hidden, vocab, FP32), vocab, FP32)
    return logits_bytes(min(rows, tokens), vocab, FP32)


def logits_bytes(rows: int, vocab: int, dtype: torch.dtype) -> int:
    return rows * round_up_to_tile(vocab) * dtype.itemsize
