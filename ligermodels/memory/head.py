"""The memory of the head and its loss, from the sizes that the ops choose for their chunks.

Bytes beside the weights, at the start of backward: gradients of the head's input [N, H] and of its weight [V, H], and
logits. An op has its name in `ligermodels.ops`.
"""

import torch

from ligermodels.kernels.losses.logits_chunks import (
    chunk_rows,
    keeps_logits,
    low_memory_buffer,
    piece_rows,
    round_up_to_tile,
    rows_of_pieces,
    vocabulary_buffer,
)
from ligermodels.kernels.losses.logprob_chunks import MAX_BACKWARD_ROWS

FP32 = torch.float32


def loss_bytes(
    op: str, tokens: int, hidden: int, vocab: int, dtype: torch.dtype, trained: bool, low_memory: bool = False
) -> int:
    """Bytes of `op`: "linear_cross_entropy", which alone can have low_memory, "linear_logprobs" or
    "linear_logprobs_loss".

    tokens: N, those that have a target. trained: whether the weight has a gradient. Raises ValueError for another op.
    For few tokens, all logits and, later, the weight's gradient. Otherwise, where the forward computes the gradients,
    both in fp32 and a chunk of logits or, later, the weight's gradient in `dtype`.
    """
    if op not in ("linear_cross_entropy", "linear_logprobs", "linear_logprobs_loss"):
        raise ValueError(f"loss_bytes: unknown op {op!r}")
    cross_entropy, gradient = op == "linear_cross_entropy", vocab * hidden * dtype.itemsize * trained
    logits = dtype if cross_entropy else FP32
    if cross_entropy and low_memory:
        return low_memory_bytes(tokens, hidden, vocab, dtype, trained)
    if op == "linear_logprobs" and not trained:  # the rows' gradient, which the forward computes in `dtype`
        return tokens * hidden * dtype.itemsize + multiplied_bytes(tokens, hidden, vocab)
    if keeps_logits(tokens, hidden, vocab, logits, True, trained):
        return tokens * vocab * logits.itemsize + gradient
    if op == "linear_logprobs":
        return recomputed_bytes(tokens, hidden, vocab, dtype)
    sums = (tokens + vocab * trained) * hidden
    if cross_entropy:
        chunk = logits_bytes(min(chunk_rows(tokens, vocab, sums, dtype), tokens), vocab, dtype)
    else:
        chunk = multiplied_bytes(tokens, hidden, vocab)
    return sums * FP32.itemsize + max(chunk, gradient)


def low_memory_bytes(tokens: int, hidden: int, vocab: int, dtype: torch.dtype, trained: bool) -> int:
    """Counts both gradients in `dtype` and a buffer of logits."""
    inputs, weight = (torch.empty(rows, hidden, dtype=dtype, device="meta") for rows in (tokens, vocab))
    return inputs.nbytes + weight.nbytes * trained + low_memory_buffer(inputs, weight)[0] * dtype.itemsize


def recomputed_bytes(tokens: int, hidden: int, vocab: int, dtype: torch.dtype) -> int:
    """Counts what log-probabilities take whose backward computes the logits again: both gradients in `dtype`, fp32 sums
    of the rows' and a part of the fp32 logits, or those of the forward."""
    rows, gradient = min(tokens, MAX_BACKWARD_ROWS), vocab * hidden * dtype.itemsize
    summed = vocab * hidden * FP32.itemsize if tokens > rows else gradient
    beside = (rows * hidden + vocabulary_buffer(rows, vocab, FP32)) * FP32.itemsize
    forward = logits_bytes(min(piece_rows(tokens, hidden, vocab, FP32), tokens), vocab, FP32)
    return max(forward, tokens * hidden * dtype.itemsize + summed + max(beside, gradient * (tokens > rows)))


def multiplied_bytes(tokens: int, hidden: int, vocab: int) -> int:
    """A chunk of fp32 logits whose gradient is multiplied with the weight."""
    rows = rows_of_pieces(piece_rows(tokens, hidden, vocab, FP32), vocab, FP32)
    return logits_bytes(min(rows, tokens), vocab, FP32)


def logits_bytes(rows: int, vocab: int, dtype: torch.dtype) -> int:
    return rows * round_up_to_tile(vocab) * dtype.itemsize
