"""Context parallelism: ranks share a row of tokens, each a part of it, and exchange heads for tokens around attention.

A rank computes its T / R of the row's tokens everywhere but in attention. There it has all T tokens of Hq / R query
heads, with the key-value heads that they read:
    all-to-all    q, k, v [T / R, heads, D] of this rank's tokens -> [T, heads / R, D] of this rank's heads
    attention     as on one rank: windows, softcaps, sinks, packed documents with the offsets of the whole row
    all-to-all    output [T, Hq / R, D] -> [T / R, Hq, D]
Of R ranks and Hkv key-value heads, each head has R / gcd(Hkv, R) copies, so that every rank gets equally many.
Source: Jacobs et al. 2023, DeepSpeed Ulysses, https://arxiv.org/abs/2309.14509.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ligermodels.kernels.collectives import all_to_all, mean_over_ranks


class ContextGroup:
    """The R ranks that share a row of tokens; rank i has the i-th of R equal parts."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def part(self, row: Tensor) -> Tensor:
        """What this rank has of a row: [1, T, ...] -> [1, T / R, ...], contiguous."""
        return row.chunk(self.size, 1)[self.rank].contiguous()

    def check(self, input_ids: Tensor | None) -> None:
        """Raises ValueError for a batch that is not one row, or cannot be divided."""
        if input_ids is None or input_ids.shape[0] != 1:
            raise ValueError("forward: context needs the input_ids of one row; pack the documents, and pass cu_seqlens")
        if input_ids.shape[1] % self.size:
            raise ValueError(f"forward: {self.size} ranks cannot share a row of {input_ids.shape[1]} tokens equally")

    def mean(self, x: Tensor) -> Tensor:
        """The mean of x over the ranks: over the row's tokens, where x is one over those of a rank."""
        return mean_over_ranks(x, self.group)

    def attend(
        self, attention: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, **options: Any
    ) -> Tensor:
        """`attention` over the whole row, of this rank's tokens: q [1, T / R, Hq, D], k and v likewise -> as q.

        sinks: [Hq], or None. options: other arguments of `attention`.
        """
        copies = copies_of_keys(k.shape[2], self.size)
        if copies > 1:
            k, v = (x.repeat_interleave(copies, 2) for x in (k, v))
        if sinks is not None:
            options["sinks"] = sinks.chunk(self.size)[self.rank]
        return self.take_tokens(attention(*self.take_heads(q, k, v), **options))

    def take_heads(self, *heads: Tensor) -> list[Tensor]:
        """[1, T / R, heads, D] of this rank's tokens -> [1, T, heads / R, D] of this rank's heads; D may differ."""
        by_rank = [x[0].unflatten(1, (self.size, -1)).transpose(0, 1) for x in heads]  # [R, T / R, heads / R, D]
        rows = all_to_all(torch.cat([x.flatten(2) for x in by_rank], -1), self.group)  # [R, T / R, columns]
        columns = rows.flatten(0, 1)[None].split([x.shape[2] * x.shape[3] for x in by_rank], -1)
        return [x.unflatten(-1, y.shape[2:]) for x, y in zip(columns, by_rank, strict=True)]

    def take_tokens(self, out: Tensor) -> Tensor:
        """[1, T, heads / R, D] of this rank's heads -> [1, T / R, heads, D] of this rank's tokens."""
        rows = all_to_all(out[0].unflatten(0, (self.size, -1)), self.group)  # [R, T / R, heads / R, D]
        return rows.transpose(0, 1).flatten(1, 2)[None]


def copies_of_keys(key_value_heads: int, ranks: int) -> int:
    """How many ranks have a copy of each key-value head."""
    return ranks // math.gcd(key_value_heads, ranks)


def can_share_heads(heads: int, key_value_heads: int, ranks: int) -> bool:
    """Whether ranks can have equally many query heads, in whole groups of those that read a key-value head's copy."""
    return heads % (key_value_heads * copies_of_keys(key_value_heads, ranks)) == 0
