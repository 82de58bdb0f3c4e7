"""Context parallelism: ranks share a row of tokens, each a part of it, and exchange heads for tokens around attention.

A rank computes its T / R of the row's tokens everywhere but where tokens meet. There it has all T tokens of its heads:
    all-to-all    q, k, v [T / R, heads, D] of this rank's tokens -> [T, heads / R, D] of this rank's heads
    attention     as on one rank: windows, softcaps, sinks, packed documents with the offsets of the whole row
    all-to-all    output [T, Hq / R, D] -> [T / R, Hq, D]
Linear attention does the same, so that no rank waits for the state of another; a convolution needs a few tokens of the
previous rank alone. Of R ranks and H heads each head has R / gcd(H, R) copies, so that every rank gets equally many:
key-value heads beside the query heads that read them, and query heads that R does not divide, which are computed so
often. Source: Jacobs et al. 2023, DeepSpeed Ulysses, https://arxiv.org/abs/2309.14509.
"""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ligermodels.kernels.collectives import all_to_all, mean_over_ranks


class ContextGroup:
    """The R ranks that share a row of tokens; rank i has the i-th of R equal parts."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def part(self, row: Tensor, dim: int = 1) -> Tensor:
        """What this rank has of a row: [1, T, ...] -> [1, T / R, ...], contiguous. dim: that of the tokens."""
        return row.chunk(self.size, dim)[self.rank].contiguous()

    def check(self, input_ids: Tensor | None) -> None:
        """Raises ValueError for a batch that is not one row, or cannot be divided."""
        if input_ids is None or input_ids.shape[0] != 1:
            raise ValueError("forward: context needs the input_ids of one row; pack the documents, and pass cu_seqlens")
        if input_ids.shape[1] % self.size:
            raise ValueError(f"forward: {self.size} ranks cannot share a row of {input_ids.shape[1]} tokens equally")

    def sum(self, x: Tensor) -> Tensor:
        """The sum of x over the ranks."""
        return self.mean(x) * self.size

    def mean(self, x: Tensor) -> Tensor:
        """The mean of x over the ranks: over the row's tokens, where x is one over those of a rank."""
        return mean_over_ranks(x, self.group)

    def pack_heads(self, *heads: Tensor) -> Tensor:
        """[1, T / R, H, D] of this rank's tokens -> [1, T, columns], side by side, of this rank's heads.

        H and D may differ from one to the next; the dtype may not.
        """
        by_rank = [copied(x, 2, self.size)[0].unflatten(1, (self.size, -1)).transpose(0, 1).flatten(2) for x in heads]
        return all_to_all(torch.cat(by_rank, -1), self.group).flatten(0, 1)[None]

    def take_heads(self, *heads: Tensor) -> list[Tensor]:
        """The same, each apart: [1, T / R, H, D] -> [1, T, heads of a rank, D]."""
        sizes = [(heads_of_rank(x.shape[2], self.size), x.shape[3]) for x in heads]
        columns = self.pack_heads(*heads).split([count * size for count, size in sizes], -1)
        return [x.unflatten(-1, size) for x, size in zip(columns, sizes, strict=True)]

    def of_own_heads(self, x: Tensor) -> Tensor:
        """What this rank's heads have of x [H]."""
        return copied(x, 0, self.size).chunk(self.size)[self.rank]

    def take_tokens(self, out: Tensor, heads: int) -> Tensor:
        """[1, T, heads of a rank, D] of this rank's heads -> [1, T / R, H, D] of this rank's tokens. heads: H."""
        rows = all_to_all(out[0].unflatten(0, (self.size, -1)), self.group)  # [R, T / R, heads of a rank, D]
        return rows.transpose(0, 1).flatten(1, 2)[None, :, :: copies_of_heads(heads, self.size)]

    def gather(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """x [n] of this rank -> [Σ counts], those of all ranks in their order; counts: how many each rank has.

        Its gradient is the sum of those on all ranks.
        """
        return all_to_all(x.repeat(self.size), self.group, [len(x)] * self.size, list(counts))

    def from_previous_rank(self, rows: Tensor) -> Tensor:
        """rows [n, ...] of the previous rank; on the first those of the last."""
        following, previous = ((self.rank + step) % self.size for step in (1, -1))
        sent, received = ([len(rows) * (rank == other) for rank in range(self.size)] for other in (following, previous))
        return all_to_all(rows, self.group, sent, received)


def copied(x: Tensor, dim: int, ranks: int) -> Tensor:
    """x, whose dimension `dim` are heads, with the copies of each head side by side."""
    copies = copies_of_heads(x.shape[dim], ranks)
    return x if copies == 1 else x.repeat_interleave(copies, dim)


def copies_of_heads(heads: int, ranks: int) -> int:
    """How many ranks have a copy of each head."""
    return ranks // math.gcd(heads, ranks)


def heads_of_rank(heads: int, ranks: int) -> int:
    """How many heads, or copies of them, each rank has."""
    return heads // math.gcd(heads, ranks)
