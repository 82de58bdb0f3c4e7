"""Log-probabilities of packed sequences for the tests, and the same as padded rows."""

from typing import NamedTuple

import torch
from torch import Tensor

LENGTHS = [3, 5, 4, 1, 2, 2, 6, 3]


class Sequences(NamedTuple):
    logprobs: Tensor  # [N], with three tokens of padding at the end
    reference: Tensor
    cu_seqlens: Tensor


def sequences(lengths=LENGTHS, dtype=torch.float64, scale=1.0, seed=0):
    torch.manual_seed(seed)
    count = sum(lengths) + 3
    logprobs, reference = -scale * torch.rand(2, count, dtype=torch.float64)
    offsets = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return Sequences(logprobs.to(dtype).requires_grad_(), reference.to(dtype), offsets)


def as_rows(values, cu_seqlens, order):
    """The sequences named by `order` as rows, padded with zeros on the right."""
    pieces = torch.split(values[: cu_seqlens[-1]], cu_seqlens.diff().tolist())
    return torch.nn.utils.rnn.pad_sequence([pieces[index] for index in order], batch_first=True)
