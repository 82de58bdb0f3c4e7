"""Batches with padding, or with several documents in a row, rearranged so that attention needs no mask, and back.

Attention here is causal within a row or within a packed document. A mask or positions that restart are therefore turned
into packed documents before the decoder, exactly: every token meets the tokens of its own document alone. With a
key-value cache the rows stay rows, and padding moves to their end.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch._compile import _disable_dynamo  # torch.compiler.disable imports the compiler at once


@dataclass(frozen=True)
class PackedRows:
    """The tokens of a batch [B, T] as one row [1, N] of packed documents.

    indices: int64 [N], the places of the tokens in the flattened batch. shape: (B, T).
    cu_seqlens: int32 [documents + 1], offsets of the documents. max_seqlen: length of the longest.
    """

    indices: Tensor
    shape: tuple[int, int]
    cu_seqlens: Tensor
    max_seqlen: int

    def pack(self, rows: Tensor) -> Tensor:
        """[B or 1, T, ...] -> [1, N, ...]."""
        return rows.expand(*self.shape, *rows.shape[2:]).flatten(0, 1)[self.indices][None]

    def unpack(self, packed: Tensor) -> Tensor:
        """[1, N, ...] -> [B, T, ...], zero at padding."""
        rows = packed.new_zeros(self.shape[0] * self.shape[1], *packed.shape[2:])
        return rows.index_copy(0, self.indices, packed[0]).unflatten(0, self.shape)

    def new_places(self, places: Tensor) -> Tensor:
        """Places of tokens in the flattened batch, int64 [n] -> those in the flattened row."""
        inverse = places.new_zeros(self.shape[0] * self.shape[1])
        return inverse.index_copy(0, self.indices, torch.arange(len(self.indices), device=places.device))[places]


@dataclass(frozen=True)
class AlignedRows:
    """The tokens of a batch [B, T], each row's padding moved behind its tokens, where causal attention ignores it.

    order: int64 [B, T], the place in the original row of each place of the aligned row. padding: int64 [B], its length.
    """

    order: Tensor
    padding: Tensor
    cu_seqlens: None = None
    max_seqlen: None = None

    def pack(self, rows: Tensor) -> Tensor:
        """[B or 1, T, ...] -> [B, T, ...], tokens first."""
        rows = rows.expand(self.order.shape[0], *rows.shape[1:])
        return rows.gather(1, self.places(rows))

    def unpack(self, aligned: Tensor) -> Tensor:
        """[B, T, ...] -> [B, T, ...], in the original order."""
        return torch.empty_like(aligned).scatter(1, self.places(aligned), aligned)

    def new_places(self, places: Tensor) -> Tensor:
        """Places of tokens in the flattened batch, int64 [n] -> those in the flattened aligned rows."""
        columns = torch.arange(self.order.shape[1], device=places.device).expand_as(self.order)
        rows = torch.arange(self.order.numel(), device=places.device).view_as(self.order) - columns
        return torch.empty_like(self.order).scatter(1, self.order, rows + columns).flatten()[places]

    def places(self, rows: Tensor) -> Tensor:
        """`order`, with the shape of `rows`."""
        return self.order.reshape(*self.order.shape, *[1] * (rows.ndim - 2)).expand_as(rows)


def row_layout(
    shape: tuple[int, int], attention_mask: Tensor | None, position_ids: Tensor | None, cu_seqlens: Tensor | None, *,
    cached: bool,
) -> PackedRows | AlignedRows | None:  # fmt: skip
    """How the rows of a batch of this shape must be rearranged for the decoder; None if they can stay.

    cached: there is a key-value cache. Other arguments as those of a model's forward.
    """
    if attention_mask is not None and cu_seqlens is not None:
        raise ValueError("forward: pass either attention_mask or cu_seqlens; packed documents need no mask")
    if cached and attention_mask is not None:
        if position_ids is not None:
            raise ValueError("forward: with a cache pass either attention_mask, which gives positions, or position_ids")
        return align(attention_mask, shape)
    if cached:
        return None
    if attention_mask is not None:
        return unpad(attention_mask, shape)
    if position_ids is not None and cu_seqlens is None:
        return split_at_restarts(position_ids, shape)
    return None


@_disable_dynamo  # one break of a compiled graph, instead of one at each value that is read
def unpad(attention_mask: Tensor, shape: tuple[int, int]) -> PackedRows | None:
    """Every row's tokens as a document; None if there is no padding. Reads the mask on the host.

    attention_mask: [B, T], 1 for tokens and 0 for padding, which may be on either side of a row. Raises ValueError for
    any other shape or value, and for padding between tokens.
    """
    if tuple(attention_mask.shape) != shape:
        raise ValueError(
            f"attention_mask has shape {list(attention_mask.shape)}; must be that of the input, {list(shape)}"
        )
    mask = on_host(attention_mask, "attention_mask")
    if ((mask != 0) & (mask != 1)).any():
        raise ValueError("attention_mask: values must be 1 for tokens and 0 for padding")
    mask = mask.bool()
    if mask.all():
        return None
    if not mask.any():
        raise ValueError("attention_mask: the batch has only padding")
    if ((mask[:, 1:] & ~mask[:, :-1]).sum(1) + mask[:, :1].sum(1) > 1).any():
        raise ValueError(
            "attention_mask: a row has padding between tokens; padding must be before or after all of them"
        )
    lengths = mask.sum(1)
    return pack(mask.flatten().nonzero()[:, 0], lengths[lengths > 0], shape, attention_mask.device)


@_disable_dynamo
def split_at_restarts(position_ids: Tensor, shape: tuple[int, int]) -> PackedRows | None:
    """A document wherever positions do not continue; None if they continue in every row. Reads them on the host.

    position_ids: [B or 1, T] positions, as padding-free collators pass them. Raises ValueError for any other shape.
    """
    if position_ids.ndim != 2 or position_ids.shape[1] != shape[1] or position_ids.shape[0] not in (1, shape[0]):
        raise ValueError(
            f"position_ids have shape {list(position_ids.shape)}; must be [batch or 1, length] for input {list(shape)}"
        )
    positions = on_host(position_ids, "position_ids without cu_seqlens")
    starts = positions.diff(prepend=positions[:, :1]).ne(1)
    if not starts[:, 1:].any():
        return None
    first = starts.expand(shape).flatten().nonzero()[:, 0]  # each row's first token differs from its predecessor by 0
    total = shape[0] * shape[1]
    lengths = first.diff(append=torch.tensor([total]))
    return pack(torch.arange(total), lengths, shape, position_ids.device)


def on_host(values: Tensor, name: str) -> Tensor:
    """A copy on the CPU. Raises ValueError under torch.export, whose programs cannot depend on values."""
    if torch.compiler.is_exporting():
        raise ValueError(f"forward: {name} cannot be exported, because its values decide about the program")
    return values.cpu()


def pack(indices: Tensor, lengths: Tensor, shape: tuple[int, int], device: torch.device) -> PackedRows:
    """PackedRows on `device`, of tokens at `indices` and documents of `lengths`, both on the host."""
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int()
    return PackedRows(indices.to(device), shape, offsets.to(device), int(lengths.max()))


def align(attention_mask: Tensor, shape: tuple[int, int]) -> AlignedRows:
    """Moves padding to the end of the last T columns of a mask [B, S], for input of shape (B, T).

    Raises ValueError for any other shape. Values are not checked, so that the host does not wait for the device.
    """
    batch, length = shape
    if attention_mask.ndim != 2 or attention_mask.shape[0] != batch or attention_mask.shape[1] < length:
        raise ValueError(
            f"attention_mask has shape {list(attention_mask.shape)}; with a cache it must be [{batch}, S], with S the"
            f" tokens so far, at least {length}"
        )
    tokens = attention_mask[:, -length:].bool()
    return AlignedRows(torch.argsort(~tokens, dim=1, stable=True), (~tokens).sum(1))
