"""What tokens see of images by cross-attention: states of tiles, and spans of tokens that see the same tiles.

What models and generation see of each other of such images. Must not know what made the states, nor any family.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor


class TileSpan(NamedTuple):
    """Tokens from the place `first` up to the next span see these tiles; none for tokens before an image.

    is_blind: the tokens attend to these tiles, but count as seeing no image.
    """

    first: int
    tiles: tuple[int, ...]
    is_blind: bool = False


class EarlierImages(NamedTuple):
    """Keys and values [rows, S, Hkv, D] that each row saw last, and how many of them count, int64 [rows]."""

    keys: Tensor
    values: Tensor
    lengths: Tensor


class CrossFeatures(NamedTuple):
    """values [R, N, H]: states of R tiles. places: int64 [S], the first token of each span in the flattened batch.

    tiles: int64 [K], which tiles the spans see, one span after the other. key_offsets: int32 [S + 1], offsets of the
    spans in the K N states. longest, most_keys: upper bounds of a span's tokens and states.
    last: int64 [rows, most tiles], which tiles are seen behind each row or packed document; counts: int64 [rows], how
    many of them. sees: bool [S], which spans count as seeing an image.
    """

    values: Tensor
    places: Tensor
    tiles: Tensor
    key_offsets: Tensor
    longest: int
    most_keys: int
    last: Tensor
    counts: Tensor
    sees: Tensor

    def moved(self, new_places: Callable[[Tensor], Tensor]) -> "CrossFeatures":
        """The same for tokens that stand elsewhere."""
        return self._replace(places=new_places(self.places))

    def insert(self, embeddings: Tensor) -> Tensor:
        """The embeddings as they are: images enter by cross-attention."""
        return embeddings

    def query_offsets(self, tokens: int) -> Tensor:
        """Offsets of the spans in the flattened batch of so many tokens, int32 [S + 1]; padding counts anywhere."""
        ends = self.places.new_full((1,), tokens)
        return torch.cat([torch.zeros_like(ends), self.places[1:], ends]).int()

    def seen(self, shape: Sequence[int]) -> Tensor:
        """Which tokens of a batch of shape (B, T) see an image, bool [B, T]."""
        tokens = shape[0] * shape[1]
        lengths = self.query_offsets(tokens).diff()
        return self.sees.repeat_interleave(lengths, output_size=tokens).view(*shape)


def cross_features(
    values: Tensor, spans: Sequence[TileSpan], tokens: int, last: Sequence[Sequence[int]], device: torch.device
) -> CrossFeatures:
    """Of spans of a batch of so many tokens, in ascending order; last: the tiles seen behind each row or document."""
    per_tile = values.shape[1]
    keys = [len(span.tiles) * per_tile for span in spans]
    starts = [0, *(span.first for span in spans[1:]), tokens]
    longest = max(stop - start for start, stop in pairwise(starts))
    most = max(map(len, last))
    padded = [[*tiles, *[0] * (most - len(tiles))] for tiles in last]
    return CrossFeatures(
        values,
        torch.tensor([span.first for span in spans]).to(device),
        torch.tensor([tile for span in spans for tile in span.tiles], dtype=torch.int64).to(device),
        torch.tensor([0, *accumulate(keys)], dtype=torch.int32).to(device),
        longest,
        max(keys),
        torch.tensor(padded, dtype=torch.int64).to(device),
        torch.tensor([len(tiles) for tiles in last]).to(device),
        torch.tensor([bool(span.tiles) and not span.is_blind for span in spans]).to(device),
    )


class CrossPrompt(NamedTuple):
    """The images of one prompt: states [R, N, H] of its tiles on the model's device, and the spans of its tokens."""

    values: Tensor
    spans: Sequence[TileSpan]

    @property
    def rope_ids(self) -> None:
        """Positions for RoPE are those of the tokens."""
        return None

    @property
    def rope_offset(self) -> int:
        return 0

    def last_cut(self, start: int, stop: int) -> int:
        """The last place up to `stop` where the prompt can be cut: anywhere."""
        return stop


def cross_features_of_pieces(
    prompts: Sequence[CrossPrompt | None], pieces: Sequence[tuple[int, int]], device: torch.device
) -> CrossFeatures:
    """Those of a packed row of pieces of prompts, of which one or more have images; pieces: [start, stop) of each."""
    spans: list[TileSpan] = []
    values: list[Tensor] = []
    last: list[tuple[int, ...]] = []
    begin = tiles_before = 0
    for prompt, (start, stop) in zip(prompts, pieces, strict=True):
        tiles: tuple[int, ...] = ()
        inside = [TileSpan(begin, ())]
        for span in () if prompt is None else prompt.spans:
            tiles = tuple(tiles_before + tile for tile in span.tiles) if span.first < stop else tiles
            if span.first <= start:
                inside = [TileSpan(begin, tiles, span.is_blind)]
            elif span.first < stop:
                inside.append(TileSpan(span.first - start + begin, tiles, span.is_blind))
        spans += inside
        last.append(tiles)
        if prompt is not None:
            values.append(prompt.values)
            tiles_before += len(prompt.values)
        begin += stop - start
    return cross_features(torch.cat(values), spans, begin, last, device)
