"""Features of images, as the decoder takes them: in place of the embeddings at some tokens.

What models and generation see of each other of images. Must not know what made the features, nor any family.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from ligermodels.generation.cross_features import CrossFeatures, CrossPrompt, cross_features_of_pieces


class SeenAhead(NamedTuple):
    """Tokens that see others behind them. places: int64 [M]. counts: int64 [M], how many each sees."""

    places: Tensor
    counts: Tensor

    def to_cpu(self) -> "SeenAhead":
        """The same on the CPU, by place."""
        order = self.places.argsort()
        return SeenAhead(self.places[order].cpu(), self.counts[order].cpu())


class ImageFeatures(NamedTuple):
    """values [N, H]: the features. places: int64 [N], of their tokens in the flattened batch, each once.

    deepstack: further features [N, H], the first of which are added behind the first block, and so on.
    ahead: which tokens of the flattened batch see others behind them; None for none.
    """

    values: Tensor
    places: Tensor
    deepstack: tuple[Tensor, ...] = ()
    ahead: SeenAhead | None = None

    def moved(self, new_places: Callable[[Tensor], Tensor]) -> "ImageFeatures":
        """The same for tokens that stand elsewhere."""
        ahead = self.ahead and self.ahead._replace(places=new_places(self.ahead.places))
        return self._replace(places=new_places(self.places), ahead=ahead)

    def insert(self, embeddings: Tensor) -> Tensor:
        """Embeddings [B, T, H] with the features at their places. The host does not wait for the device."""
        values = self.values.to(embeddings.dtype)
        return embeddings.flatten(0, 1).index_copy(0, self.places, values).unflatten(0, embeddings.shape[:2])

    def add(self, block: int, hidden: Tensor) -> Tensor:
        """The output [B, T, H] of a block, by its number, plus the features that are added behind it."""
        values = self.deepstack[block].to(hidden.dtype)
        return hidden.flatten(0, 1).index_add(0, self.places, values).unflatten(0, hidden.shape[:2])

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
    """The same for no token, which depends on the features all the same: their gradients are then zeros."""
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
