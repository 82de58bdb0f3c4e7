"""Which keys a query of attention sees. Knows torch alone.

The last query of a document stands at the position of its last key. With T queries over S keys, query i is therefore at
position i + S - T. It sees the key at position j of its document if and only if -right <= i + S - T - j <= left.
Instead of `right`, each query may have a number of its own, `ahead`: tokens of an image see all of their image.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Mask(NamedTuple):
    """The positions that a query sees, relative to its own, and the documents packed into one row."""

    left: int | None = None  # how many positions back; None for no limit
    right: int | None = 0  # how many positions ahead: 0 in causal attention, None for no limit
    cu_seqlens: Tensor | None = None  # int32 [documents + 1], offsets of the queries
    cu_seqlens_k: Tensor | None = None  # of the keys; None for those of the queries
    longest: int = 0  # an upper bound of the queries in a document
    longest_k: int = 0  # of the keys
    ahead: Tensor | None = None  # int64 [B, T], of each query in place of `right`

    @property
    def offsets(self) -> tuple[Tensor | None, Tensor | None]:
        """The offsets of queries and keys."""
        return self.cu_seqlens, self.cu_seqlens if self.cu_seqlens_k is None else self.cu_seqlens_k


class Alignment(NamedTuple):
    """Where queries and keys stand."""

    shift: int | Tensor  # [T], what is added to the index of a query to count it as the keys are counted
    document: Tensor | None  # [T], index of the packed document
    document_k: Tensor | None  # [S]


def align_ends(queries: int, keys: int, device: torch.device, mask: Mask) -> Alignment:
    if mask.cu_seqlens is None:
        return Alignment(keys - queries, None, None)
    document = document_ids(torch.arange(queries, device=device), mask.cu_seqlens)
    if mask.cu_seqlens_k is None:
        return Alignment(0, document, document)
    ends = (mask.cu_seqlens_k - mask.cu_seqlens)[1:]  # the last query of a document stands at its last key
    document_k = document_ids(torch.arange(keys, device=device), mask.cu_seqlens_k)
    return Alignment(ends[document], document, document_k)


def dense_mask(queries: int, keys: int, device: torch.device, mask: Mask, position_ids: Tensor | None = None) -> Tensor:
    """bool [B or 1, T, S], true where the query sees the key. position_ids: [B, T], of the queries over a cache."""
    alignment = align_ends(queries, keys, device, mask)
    position = torch.arange(queries, device=device)[None] + alignment.shift if position_ids is None else position_ids
    distance = position[:, :, None] - torch.arange(keys, device=device)  # [B, T, S]
    seen = torch.ones_like(distance, dtype=torch.bool)
    # Not in place: selective checkpointing could not replay it.
    if mask.ahead is not None:
        seen = seen & (distance >= -mask.ahead[:, :, None])
    elif mask.right is not None:
        seen = seen & (distance >= -mask.right)
    if mask.left is not None:
        seen = seen & (distance <= mask.left)
    if alignment.document is not None:
        seen = seen & (alignment.document[:, None] == alignment.document_k)
    return seen


def document_ids(position: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Index of the packed document that each position of the row belongs to."""
    return torch.bucketize(position, cu_seqlens[1:], right=True)
