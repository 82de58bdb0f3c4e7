"""What models and generation see of each other of images.

Features stand in place of the embeddings at some tokens; or tokens see states of tiles by cross-attention, in spans of
tokens that see the same tiles.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
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
        """Moves the tokens to where they stand elsewhere."""
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
    """Builds the features of spans of a batch, in ascending order; last: the tiles seen behind each row or document."""
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
    """Builds the features of a packed row of pieces of prompts, some with images; pieces: [start, stop) of each."""
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


class SeenAhead(NamedTuple):
    """Tokens that see others behind them. places: int64 [M]. counts: int64 [M], how many each sees."""

    places: Tensor
    counts: Tensor

    def to_cpu(self) -> "SeenAhead":
        """Copies to the CPU, in the order of the places."""
        order = self.places.argsort()
        return SeenAhead(self.places[order].cpu(), self.counts[order].cpu())


class ImageFeatures(NamedTuple):
    """values [N, H]: the features. places: int64 [N], of their tokens in the flattened batch, each once.

    deepstack: further features [N, H], the first of which are added behind the first block, and so on.
    ahead: which tokens of the flattened batch see others behind them; None for none.
    is_part: whether some are of tokens elsewhere; their place is then the one behind the last token.
    """

    values: Tensor
    places: Tensor
    deepstack: tuple[Tensor, ...] = ()
    ahead: SeenAhead | None = None
    is_part: bool = False

    def part(self, first: int, tokens: int) -> "ImageFeatures":
        """Keeps the places of `tokens` tokens from `first` on."""
        places = self.places - first
        places = places.where((places >= 0) & (places < tokens), tokens)
        return self._replace(places=places, ahead=None, is_part=True)

    def moved(self, new_places: Callable[[Tensor], Tensor]) -> "ImageFeatures":
        """Moves the tokens to where they stand elsewhere."""
        ahead = self.ahead and self.ahead._replace(places=new_places(self.ahead.places))
        return self._replace(places=new_places(self.places), ahead=ahead)

    def insert(self, embeddings: Tensor) -> Tensor:
        """Embeddings [B, T, H] with the features at their places. The host does not wait for the device."""
        values = self.values.to(embeddings.dtype)
        return (
            self.rows(embeddings).index_copy(0, self.places, values)[: embeddings[..., 0].numel()].view_as(embeddings)
        )

    def add(self, block: int, hidden: Tensor) -> Tensor:
        """The output [B, T, H] of a block, by its number, plus the features that are added behind it."""
        values = self.deepstack[block].to(hidden.dtype)
        return self.rows(hidden).index_add(0, self.places, values)[: hidden[..., 0].numel()].view_as(hidden)

    def rows(self, x: Tensor) -> Tensor:
        """The tokens of x [B, T, H], and behind them, of a part, a row that nothing reads."""
        rows = x.flatten(0, 1)
        return F.pad(rows, (0, 0, 0, 1)) if self.is_part else rows

    def seen_ahead(self, shape: Sequence[int]) -> Tensor | None:
        """How many tokens behind it each token of a batch of shape (B, T) sees, int64; None if all see none."""
        if self.ahead is None or not len(self.ahead.places):
            return None
        none = self.places.new_zeros(shape[0] * shape[1])
        return none.index_copy(0, *self.ahead).view(*shape)


class PromptImages(NamedTuple):
    """The images of one prompt of T tokens.

    features [N, H], deepstack, ahead: see `ImageFeatures`. places: int64 [N], of their tokens in the prompt,
    ascending. rope_ids: int64 [3, T], None where positions for RoPE are those of the tokens. rope_offset: what
    positions behind the prompt are ahead of the number of tokens. Integers are on the CPU, features on the model's
    device.
    """

    features: Tensor
    places: Tensor
    rope_ids: Tensor | None = None
    rope_offset: int = 0
    deepstack: tuple[Tensor, ...] = ()
    ahead: SeenAhead | None = None

    def last_cut(self, start: int, stop: int) -> int:
        """The last place up to `stop` where the prompt can be cut: no token before it sees one behind it. The place
        after the image that the token `start` begins, if there is no such place behind `start`."""
        if self.ahead is None:
            return stop
        places, counts = self.ahead
        ends = places + counts + 1  # of what each of these tokens sees
        across = (places < stop) & (ends > stop)
        if not across.any():
            return stop
        cut = int(places[across].min())
        return cut if cut > start else int(ends[across].max())


def no_features(features: ImageFeatures) -> ImageFeatures:
    """Keeps no token, and depends on the features all the same: their gradients are then zeros."""
    places = torch.empty(0, dtype=torch.int64, device=features.values.device)
    return ImageFeatures(features.values[:0], places, tuple(values[:0] for values in features.deepstack))  # no `ahead`


def features_of_pieces(
    images: Sequence[PromptImages | CrossPrompt | None], spans: Sequence[tuple[int, int]], device: torch.device
) -> ImageFeatures | CrossFeatures:
    """The features of a packed row of pieces of prompts, of which one or more have images.

    images: of each piece's prompt. spans: the first and the last place of each piece in its prompt.
    """
    if any(isinstance(prompt, CrossPrompt) for prompt in images):
        return cross_features_of_pieces(cast(Sequence[CrossPrompt | None], images), spans, device)
    values, places, deepstack, begin = [], [], [], 0
    ahead: list[SeenAhead] = []
    for prompt, (start, stop) in zip(cast(Sequence[PromptImages | None], images), spans, strict=True):
        if prompt is not None:
            first, last = torch.searchsorted(prompt.places, torch.tensor([start, stop])).tolist()
            values.append(prompt.features[first:last])
            deepstack.append([features[first:last] for features in prompt.deepstack])
            places.append(prompt.places[first:last] - start + begin)
            if prompt.ahead is not None:
                first, last = torch.searchsorted(prompt.ahead.places, torch.tensor([start, stop])).tolist()
                ahead.append(
                    SeenAhead(prompt.ahead.places[first:last] - start + begin, prompt.ahead.counts[first:last])
                )
        begin += stop - start
    added = tuple(torch.cat(features) for features in zip(*deepstack, strict=True))
    seen = SeenAhead(*(torch.cat(parts).to(device) for parts in zip(*ahead, strict=True))) if ahead else None
    return ImageFeatures(torch.cat(values), torch.cat(places).to(device), added, seen)


def rope_of_pieces(
    images: Sequence[PromptImages | CrossPrompt | None], spans: Sequence[tuple[int, int]]
) -> Tensor | None:
    """The positions for RoPE of such a row, int64 [3, 1, N] on the CPU; None where they are those of the tokens."""
    given = [None if prompt is None else prompt.rope_ids for prompt in images]
    if all(rope_ids is None for rope_ids in given):
        return None
    pieces = (
        torch.arange(start, stop).expand(3, -1) if rope_ids is None else rope_ids[:, start:stop]
        for rope_ids, (start, stop) in zip(given, spans, strict=True)
    )
    return torch.cat(list(pieces), 1)[:, None]
